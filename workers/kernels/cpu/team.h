// One thread of a team that computes products and rows together, a barrier behind each.
#pragma once
#include "linear.h"
#ifdef HAS_PRODUCTS
#include <omp.h>

#include <atomic>
#include <memory>
#include <vector>

#include "barrier.h"

// What a thread keeps from one call to the next.
struct TeamScratch {
  std::vector<CacheLine> few;  // rows prepared for quantized weights
  LinearScratch sums;
};

// How many of a thread's tasks are taken, for each set of tasks and each thread.
class TaskCounters {
 public:
  void reset(long wanted) {
    if (count < wanted) counts.reset(new std::atomic<long>[count = wanted]);
    for (long i = 0; i < wanted; i++) counts[i].store(0, std::memory_order_relaxed);
  }
  std::atomic<long>* first() { return counts.get(); }

 private:
  std::unique_ptr<std::atomic<long>[]> counts;
  long count = 0;
};

class TeamThread {
 public:
  const long thread, team;

  // counters: `team` for each set of tasks, all 0. shared: room for all rows that are prepared for quantized weights.
  TeamThread(Barrier& together, std::atomic<long>* counters, CacheLine* shared, TeamScratch& mine)
      : thread(omp_get_thread_num()), team(omp_get_num_threads()), together(together), counters(counters), shared((char*)shared), mine(mine) {}

  void wait() { together.wait(); }
  template <class F> void each_row(long rows, F body) {
    for (long r = rows * thread / team, end = rows * (thread + 1) / team; r < end; r++) body(r);
    wait();
  }
  // Each thread has its own part of the tasks, in order, so that it reads one stream; then it helps the others.
  // body(task, room for its sums)
  template <class F> void each_task(long count, F body) {
    std::atomic<long>* taken = counters + team * phase++;
    for (long t = 0; t < team; t++) {
      const long owner = (thread + t) % team, first = count * owner / team, end = count * (owner + 1) / team;
      for (long i; (i = first + taken[owner].fetch_add(1, std::memory_order_relaxed)) < end;) body(i, mine.sums);
    }
    mine.sums.finish();
    wait();
  }
  // out (rows, width), of which this fills the first columns, = x (rows, w.k) * w.
  template <class Out> void linear(const PackedWeights& w, const bf16* x, long rows, Out* out, long width) {
    const LinearRows input = rows_for(w, x, rows);
    each_task(linear_tasks(w, rows), [&](long i, LinearScratch& sums) { linear_task(w, input, rows, i, sums, out, width); });
  }
  LinearRows rows_for(const PackedWeights& w, const bf16* x, long rows) {
    return {is_quantized(w) ? prepared(w, x, rows) : (const char*)x, input_bytes(w)};
  }

 private:
  Barrier& together;
  std::atomic<long>* counters;
  char* shared;
  TeamScratch& mine;
  long phase = 0;  // number of the next set of tasks; equal on all threads

  // Few rows are prepared by every thread for itself, which takes less time than to wait for another.
  const char* prepared(const PackedWeights& w, const bf16* x, long rows) {
    const size_t bytes = input_bytes(w);
    if (rows <= team) {
      if (const size_t wanted = prepared_lines(rows, bytes); mine.few.size() < wanted) mine.few.resize(wanted);
      for (long r = 0; r < rows; r++) prepare_row(w, x + r * w.k, (char*)mine.few.data(), size_t(r));
      return (const char*)mine.few.data();
    }
    each_row(rows, [&](long r) { prepare_row(w, x + r * w.k, shared, size_t(r)); });
    return shared;
  }
};
#endif
