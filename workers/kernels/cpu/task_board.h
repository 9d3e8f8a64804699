// Tasks that the ranks of one machine do for each other, in memory that all of them have mapped: the owner takes its
// tasks from the first on, ranks that have none of their own left take them from the last.
//
// Ranks open their boards equally often, in the same order, and meet between two openings: whoever finds a board opened
// as often as its own has the same tasks in mind as the owner. Memory full of zeros is a valid start.
#pragma once
#include <atomic>
#include <cstdint>

class alignas(64) TaskBoard {
 public:
  // By the owner, once all tasks of before are done.
  void open(uint32_t count) {
    done.store(0, std::memory_order_relaxed);
    left.store(uint64_t(count) << 32, std::memory_order_relaxed);
    opened.store(opened.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  uint32_t times_opened() const { return opened.load(std::memory_order_acquire); }
  // A task that from now on is the caller's; -1: none is left.
  long take_first() {
    return take([](uint32_t first, uint32_t) { return first; }, 1);
  }
  long take_last(int helper) {
    const long task = take([](uint32_t, uint32_t end) { return end - 1; }, -(uint64_t(1) << 32));
    if (task >= 0) last_helper.store(helper, std::memory_order_relaxed);
    return task;
  }
  void finish() { done.fetch_add(1, std::memory_order_release); }
  uint32_t num_done() const { return done.load(std::memory_order_acquire); }
  int helped_by() const { return last_helper.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint32_t> opened;
  std::atomic<int> last_helper;
  alignas(64) std::atomic<uint64_t> left;  // lower half: the first task that nobody has, upper half: where they end
  alignas(64) std::atomic<uint32_t> done;

  template <class Which> long take(Which which, uint64_t change) {
    uint64_t now = left.load(std::memory_order_relaxed);
    while (uint32_t(now) < uint32_t(now >> 32))
      if (left.compare_exchange_weak(now, now + change, std::memory_order_relaxed)) return which(uint32_t(now), uint32_t(now >> 32));
    return -1;
  }
};
