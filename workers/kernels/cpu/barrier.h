// A barrier for the threads inside one parallel region. It spins for some tens of microseconds, for the case that all
// threads have a core, then sleeps: a waiting thread must not keep its core from the one it waits for. (libgomp's own
// barrier spins for milliseconds; with other busy processes on the machine that made steps a hundred times slower.)
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

class Barrier {
 public:
  explicit Barrier(int team) : team(team) {}
  void wait() {
    const uint32_t seen = round.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(seen + 1, std::memory_order_seq_cst);
      if (sleeping.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (round.load(std::memory_order_acquire) != seen) return;
      __builtin_ia32_pause();
    }
    sleeping.fetch_add(1, std::memory_order_seq_cst);
    while (round.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    sleeping.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  static constexpr int SPINS = 2000;  // pauses of 15-50 ns
  const int team;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> round{0};  // also the futex word
  alignas(64) std::atomic<int> sleeping{0};
  void futex(int op, uint32_t value) { syscall(SYS_futex, &round, op, value, nullptr, nullptr, 0); }
};
