// Guesses by heads (workers/model/medusa.py) in one call: of each row the likeliest tokens of head after head, by one team.
#pragma once
#include "team.h"
#ifdef HAS_PRODUCTS
#include <memory>

#include "draw.h"
#include "region.h"
#include "rows.h"

constexpr long BRANCHES = 4;  // tokens that a head says after one

// Mirrored by workers/kernels/guesses.py.
struct GuessHead {
  PackedWeights state;  // hidden -> inner, float
  const bf16* tokens;   // (guessed tokens + 1, inner): what the token before adds to that; at last, any that is never guessed
  PackedWeights out;    // inner -> hidden, float
};
struct GuessHeads {
  long hidden, inner, num_heads, vocab_size;
  const GuessHead* heads;
  PackedWeights vocabulary;  // hidden -> guessed tokens, float
  const int32_t* places;     // (vocab_size): of each token among the guessed ones, or their number
};
struct GuessTask {
  long row;         // of the hidden states
  long token_id;    // that came after it
  long num_tokens;  // to guess: the next head is not asked when those before have said so many that are as likely
  long is_chain;    // only the best one of each head counts
};
struct GuessInput {
  const bf16* hidden;  // (rows, hidden)
  const GuessTask* tasks;
  long num_tasks;
  double least;     // log-probability, with all that it follows, of a token that the next head is asked what comes after
  int32_t* levels;  // (tasks): heads that were asked; NOT_FINITE: all of them are to be thrown away
  int32_t* found;   // (tasks, heads, BRANCHES): places among the guessed tokens, best first; -1 when there are fewer tokens
  float* scores;    // the same: log-probabilities
};
struct GuessScratch {
  struct Row {
    long task, place;  // of the token after its state
    float score;       // log-probability of that token and all that it follows
  };
  std::vector<Row> rows;  // those that are going on
  std::vector<bf16> states, bent;
  std::vector<float> wide, moved, logits, said;  // said: (tasks, heads * BRANCHES) log-probabilities with all before
  std::vector<CacheLine> prepared;
  std::vector<TeamScratch> threads;
  TaskCounters counters;

  void fit(const GuessHeads& m, long tasks, long team) {
    states.resize(tasks * m.hidden), bent.resize(tasks * m.inner), said.resize(tasks * m.num_heads * BRANCHES);
    wide.resize(tasks * m.inner), moved.resize(tasks * m.hidden), logits.resize(tasks * m.vocabulary.columns);
    size_t row_bytes = input_bytes(m.vocabulary);
    for (long h = 0; h < m.num_heads; h++) row_bytes = std::max({row_bytes, input_bytes(m.heads[h].state), input_bytes(m.heads[h].out)});
    prepared.resize(prepared_lines(tasks, row_bytes));
    if (long(threads.size()) < team) threads.resize(size_t(team));
    counters.reset(3 * m.num_heads * team);
  }
};

// The largest values of a row, best first, as log-probabilities; the first one of equals. False for a row with a NaN or an infinity.
inline bool best_guesses(const float* x, long n, int32_t* places, float* scores) {
  constexpr long BLOCK = 64;
  if (!is_finite_row(x, n)) return false;
  std::fill(places, places + BRANCHES, -1), std::fill(scores, scores + BRANCHES, -INFINITY);
  for (long first = 0; first < n; first += BLOCK) {
    const long end = std::min(first + BLOCK, n);
    if (row_max(x + first, end - first) <= scores[BRANCHES - 1]) continue;
    for (long i = first; i < end; i++) {
      long at = BRANCHES;
      for (; at && x[i] > scores[at - 1]; at--)
        if (at < BRANCHES) scores[at] = scores[at - 1], places[at] = places[at - 1];
      if (at < BRANCHES) scores[at] = x[i], places[at] = int32_t(i);
    }
  }
  const float most = scores[0], all = most + std::log(lane_sum(size_t(n), [&](size_t i) { return exp_(x[i] - most); }));
  for (long i = 0; i < BRANCHES; i++) scores[i] -= all;
  return true;
}

class GuessWalk {
 public:
  GuessWalk(const GuessHeads& m, const GuessInput& in, GuessScratch& s, Barrier& together)
      : m(m), in(in), s(s), work(together, s.counters.first(), s.prepared.data(), s.threads[size_t(omp_get_thread_num())]) {}

  void run() {
    const long hidden = m.hidden, inner = m.inner, columns = m.vocabulary.columns;
    long rows = in.num_tasks;
    work.each_row(rows, [&](long r) { memcpy(s.states.data() + r * hidden, in.hidden + in.tasks[r].row * hidden, size_t(hidden) * 2); });
    for (long h = 0; h < m.num_heads && rows; h++) {
      const GuessHead& head = m.heads[h];
      work.linear(head.state, s.states.data(), rows, s.wide.data(), inner);
      work.each_row(rows, [&](long r) { bend(s.wide.data() + r * inner, head.tokens + s.rows[r].place * inner, s.bent.data() + r * inner); });
      work.linear(head.out, s.bent.data(), rows, s.moved.data(), hidden);
      work.each_row(rows, [&](long r) { move(s.states.data() + r * hidden, s.moved.data() + r * hidden); });
      work.linear(m.vocabulary, s.states.data(), rows, s.logits.data(), columns);
      work.each_row(rows, [&](long r) {
        const long task = s.rows[r].task, at = (task * m.num_heads + h) * BRANCHES;
        in.levels[task] = best_guesses(s.logits.data() + r * columns, columns, in.found + at, in.scores + at) ? int32_t(h + 1) : int32_t(NOT_FINITE);
      });
      if (work.thread == 0) go_on(h);
      work.wait();
      rows = long(s.rows.size());
    }
  }

 private:
  const GuessHeads& m;
  const GuessInput& in;
  GuessScratch& s;
  TeamThread work;

  void bend(const float* wide, const bf16* token, bf16* out) const {
    for (long i = 0; i < m.inner; i++) {
      const float x = wide[i] + widen(token[i]);
      out[i] = narrow(x * sigmoid(x));
    }
  }
  void move(bf16* state, const float* by) const {
    for (long i = 0; i < m.hidden; i++) state[i] = narrow(widen(state[i]) + by[i]);
  }
  // Leaves the rows after whose best token the next head is to be asked.
  void go_on(long head) {
    size_t kept = 0;
    for (size_t r = 0; r < s.rows.size(); r++) {
      const GuessScratch::Row row = s.rows[r];
      if (in.levels[row.task] == NOT_FINITE) continue;
      const GuessTask& task = in.tasks[row.task];
      const long at = (row.task * m.num_heads + head) * BRANCHES;
      float* said = s.said.data() + row.task * m.num_heads * BRANCHES;
      for (long i = 0; i < BRANCHES; i++) said[head * BRANCHES + i] = task.is_chain && i ? -INFINITY : row.score + in.scores[at + i];
      const float best = said[head * BRANCHES];
      if (best < in.least || std::count_if(said, said + (head + 1) * BRANCHES, [&](float score) { return score >= best; }) >= task.num_tokens) continue;
      memmove(s.states.data() + kept * size_t(m.hidden), s.states.data() + r * size_t(m.hidden), size_t(m.hidden) * 2);
      s.rows[kept++] = {row.task, in.found[at], best};
    }
    s.rows.resize(kept);
  }
};

// False for a token that is none: then nothing has been computed.
inline bool run_guess(const GuessHeads& m, const GuessInput& in, GuessScratch& s, int threads) {
  s.rows.clear();
  for (long t = 0; t < in.num_tasks; t++) {
    const long token_id = in.tasks[t].token_id;
    if (token_id < 0 || token_id >= m.vocab_size) return false;
    s.rows.push_back({t, m.places[token_id], 0.f});
  }
  s.fit(m, in.num_tasks, threads);
  std::unique_ptr<Barrier> together;
#pragma omp parallel num_threads(threads)
  {
    ComputeRegion region;
#pragma omp single
    together.reset(new Barrier(omp_get_num_threads()));
    GuessWalk(m, in, s, *together).run();
  }
  return true;
}
#endif
