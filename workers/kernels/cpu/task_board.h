// Tasks that the ranks of one machine do for each other, in memory that all of them have mapped: the owner's threads take
// runs of tasks from the first on, shorter ones towards the end; ranks that have none of their own left take them from the
// last, one by one.
//
// Ranks open their boards equally often, in the same order, and meet between two openings: whoever finds a board opened
// as often as its own has the same tasks in mind as the owner. Memory full of zeros is a valid start.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

class alignas(64) TaskBoard {
 public:
  struct Run {
    long first, end;
  };
  // By the owner, once all tasks of before are done.
  void open(uint32_t count, int owner) {
    done.store(0, std::memory_order_relaxed);
    last_taker.store(owner, std::memory_order_relaxed);
    left.store(uint64_t(count) << 32, std::memory_order_relaxed);
    opened.store(opened.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  uint32_t times_opened() const { return opened.load(std::memory_order_acquire); }
  // Tasks that from now on are the caller's, no more than one part of those left; empty: none is left.
  Run take_first(uint32_t parts) {
    return take([&](uint32_t first, uint32_t end) { return Run{first, first + std::max(1u, (end - first) / parts)}; });
  }
  Run take_last(int helper) {
    const Run run = take([](uint32_t, uint32_t end) { return Run{long(end) - 1, end}; });
    if (run.first < run.end) last_taker.store(helper, std::memory_order_relaxed);
    return run;
  }
  void finish() { done.fetch_add(1, std::memory_order_release); }
  uint32_t num_done() const { return done.load(std::memory_order_acquire); }
  // Who has taken a task last, as far as is known.
  int taken_by() const { return last_taker.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint32_t> opened;
  std::atomic<int> last_taker;
  alignas(64) std::atomic<uint64_t> left;  // lower half: the first task that nobody has, upper half: where they end
  alignas(64) std::atomic<uint32_t> done;

  // The run is at one end of what is left.
  template <class Choose> Run take(Choose choose) {
    uint64_t now = left.load(std::memory_order_relaxed);
    for (uint32_t first, end; (first = uint32_t(now)) < (end = uint32_t(now >> 32));) {
      const Run run = choose(first, end);
      const uint64_t rest = run.first == first ? uint64_t(end) << 32 | uint64_t(run.end) : uint64_t(run.first) << 32 | first;
      if (left.compare_exchange_weak(now, rest, std::memory_order_relaxed)) return run;
    }
    return {0, 0};
  }
};
