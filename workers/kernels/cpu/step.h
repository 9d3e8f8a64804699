// A step in one call, from its message to logits and drawn ids: the operators of rows.h, linear.h, attend.h and draw.h
// by one team, a barrier between them; what several ranks add up goes through shared memory. For models with RMS norms
// and a gated SiLU MLP. Every intermediate is rounded to bf16 where the operators called one by one would round it, so
// both ways give the same bits.
#pragma once
#include "linear.h"
#ifdef HAS_PRODUCTS
#include <omp.h>

#include <memory>

#include "attend.h"
#include "best_rows.h"
#include "collective.h"
#include "draw.h"
#include "huge.h"
#include "layout.h"
#include "region.h"
#include "rows.h"
#include "step_model.h"
#include "team.h"

// What a thread keeps from step to step.
struct ThreadScratch {
  std::vector<float> row;
  std::vector<bf16> own_rows;  // residual and norms
  AttentionScratch attention;
  TeamScratch team;
  DrawScratch drawing;
  std::vector<BestRow> best;
  explicit ThreadScratch(const Model& m) : row(std::max(m.hidden, m.d)), attention(m.heads / m.kv_heads, m.d) {}
};

// Buffers that live as long as the model; they grow to the largest step.
struct StepScratch {
  StepLayout layout;
  std::vector<std::vector<AttentionTask>> tasks;  // of this rank, or of all that help each other
  HugeVector<bf16> residual, normed, qkv, attended, wide, mixed, kept;
  HugeVector<float> nodes;    // of this rank (nodes, rows, hidden)
  HugeVector<CacheLine> prepared;  // rows for quantized weights, of one linear at a time
  std::vector<std::unique_ptr<ThreadScratch>> threads;
  TaskCounters counters;
  void fit(const Model& m, long tokens, long team, bool shares) {
    auto grow = [](auto& v, size_t n) { if (v.size() < n) v.clear(), v.resize(n); };  // nobody needs what was in it
    grow(residual, tokens * m.hidden), grow(normed, tokens * m.hidden), grow(mixed, tokens * m.hidden), grow(kept, tokens * m.hidden);
    if (!shares) grow(qkv, tokens * (m.heads + 2 * m.kv_heads) * m.d), grow(attended, tokens * m.heads * m.d);
    grow(wide, tokens * 3 * m.inner);
    for (const PackedWeights& w : {m.layers[0].output, m.layers[0].down})
      if (m.collective) grow(nodes, w.order.nodes() * tokens * m.hidden);
    size_t row_bytes = 0;  // the most of any: layers may differ in their formats
    auto consider = [&](const PackedWeights& w) { if (is_quantized(w)) row_bytes = std::max(row_bytes, input_bytes(w)); };
    for (long l = 0; l < m.num_layers; l++) consider(m.layers[l].qkv), consider(m.layers[l].output), consider(m.layers[l].up), consider(m.layers[l].down);
    consider(m.head);
    grow(prepared, prepared_lines(tokens, row_bytes));
    while (long(threads.size()) < team) threads.push_back(std::make_unique<ThreadScratch>(m));
    counters.reset((m.num_layers + 1) * 5 * team);
  }
};

constexpr long FEW_ROWS_APART = 4;
constexpr long MIN_SHARE = 8;  // rows a rank, for which it is worth to meet once more

// Whether ranks do attention tasks for each other in this step; the same on all of them.
inline bool shares_attention(const Model& m, const StepInput& in, const StepLayout& at) {
  return m.parts && in.pool == m.parts[m.collective->rank].pool && std::max(at.tokens, at.num_logits) <= m.part_tokens;
}
inline bool leaves_logits_together(const Model& m, const StepLayout& at) { return at.num_logits && at.num_logits <= m.together.rows; }
template <class S> std::vector<AttentionTask> tasks_of(const Model& m, const StepLayout& at, long heads, long kv_heads) {
  return attention_tasks(Attention<bf16, S>{nullptr, 0, nullptr, {}, at.query_starts.data(), at.context_lens.data(), at.tables.data(), at.parents,
                                            at.num_sequences, at.table_width, heads, kv_heads, m.d, 0, 0.f});
}
inline void find_tasks(const Model& m, const StepInput& in, StepScratch& s, bool shares) {
  const auto add = [&](long heads, long kv_heads) {
    s.tasks.push_back(in.is_int8 ? tasks_of<int8_t>(m, s.layout, heads, kv_heads) : tasks_of<bf16>(m, s.layout, heads, kv_heads));
  };
  s.tasks.clear();
  if (!shares) return add(m.heads, m.kv_heads);
  for (int r = 0; r < m.collective->ranks; r++)
    if (r && m.parts[r].kv_heads == m.parts[r - 1].kv_heads) s.tasks.push_back(s.tasks.back());
    else add(m.parts[r].heads, m.parts[r].kv_heads);
}

// One thread's walk through the step, with pages of S. All threads of the team run it together.
template <class S> class StepWalk {
 public:
  StepWalk(const Model& m, const StepInput& in, StepScratch& s, Barrier& together, bool shares)
      : m(m), in(in), s(s), at(s.layout), mine(*s.threads[omp_get_thread_num()]), work(together, s.counters.first(), s.prepared.data(), mine.team),
        thread(work.thread), rows(at.tokens), most_rows(std::max(at.tokens, at.num_logits)), apart(most_rows <= FEW_ROWS_APART),
        shares(shares), in_shares(can_mix_shares()),
        own(shares ? m.parts[m.collective->rank] : AttentionPart{in.pool, s.qkv.data(), s.attended.data(), m.heads, m.kv_heads}) {}

  void run() {
    each_row([&](long r) { embed(s.residual.data() + r * m.hidden, r); });
    if (!add_up(s.residual.data())) return;
    residual = s.residual.data(), normed = s.normed.data();
    if (apart) take_apart();
    each_normed_row([&](long r) { norm(residual + r * m.hidden, m.layers[0].attention_norm, r); });
    for (long l = 0; l < m.num_layers; l++) {
      const LayerWeights& w = m.layers[l];
      linear(w.qkv, normed, own.qkv);
      each_row([&](long r) { turn_and_write(w, l, r); });
      attend_all(w, l);
      const bf16* attended = own.attended;
      if (l + 1 == m.num_layers) {  // only rows whose logits are wanted go on
        rows = at.num_logits;
        keep(attended);
        attended = own.qkv;
      }
      if (!mix_and_norm(w.output, attended, m.output_nodes, w.output_bias, w.mlp_norm)) return;
      bf16* gated = s.wide.data() + rows * 2 * m.inner;
      gate_up(w.up, gated);
      const bf16* following = l + 1 < m.num_layers ? m.layers[l + 1].attention_norm : m.final_norm;
      if (!mix_and_norm(w.down, gated, m.down_nodes, w.down_bias, following)) return;
    }
    if (thread == 0) memcpy(in.hidden, normed, size_t(rows * m.hidden) * 2);
    if (leaves_logits_together(m, at)) return draw_together();
    if (in.ids_only && in.draws && can_find_best(m.head) && all_best(in.draws, rows)) return find_best();
    linear(m.head, normed, in.logits);
    const long columns = m.head.columns;
    if (in.draws)
      each_row([&](long r) { in.ids[r] = draw_id(in.logits + r * columns, columns, in.draws[r], true, mine.drawing); });
  }

 private:
  const Model& m;
  const StepInput& in;
  StepScratch& s;
  const StepLayout& at;
  ThreadScratch& mine;
  TeamThread work;
  const long thread;
  long rows;
  const long most_rows;
  const bool apart;             // every thread has a residual and norms of its own
  bf16 *residual, *normed;      // (rows, hidden)
  const bool shares;            // ranks do attention tasks for each other
  const bool in_shares;         // ranks have a share of the rows each, between the products
  const AttentionPart own;

  long qkv_width() const { return (m.heads + 2 * m.kv_heads) * m.d; }
  template <class F> void each_row(F body) { work.each_row(rows, body); }
  // For what every thread makes for itself where rows are few: that takes less time than to wait for another.
  template <class F> void each_normed_row(F body) {
    if (!apart) return each_row(body);
    for (long r = 0; r < rows; r++) body(r);
  }
  void take_apart() {
    if (const size_t wanted = size_t(2 * most_rows * m.hidden); mine.own_rows.size() < wanted) mine.own_rows.resize(wanted);
    memcpy(mine.own_rows.data(), residual, size_t(rows * m.hidden) * 2);
    residual = mine.own_rows.data(), normed = residual + most_rows * m.hidden;
  }
  template <class Out> void linear(const PackedWeights& w, const bf16* x, Out* out) { linear(w, x, out, w.columns); }
  template <class Out> void linear(const PackedWeights& w, const bf16* x, Out* out, long width) { work.linear(w, x, rows, out, width); }
  // gated (rows, inner) = silu(gate) * up of normed * w.
  void gate_up(const PackedWeights& w, bf16* gated) {
    if (!gates_in_place(w)) {
      linear(w, normed, s.wide.data());
      return each_row([&](long r) {
        const bf16* gate = s.wide.data() + r * 2 * m.inner;
        silu_mul_row(gate, gate + m.inner, gated + r * m.inner, m.inner);
      });
    }
    const LinearRows input = work.rows_for(w, normed, rows);
    work.each_task(gated_tasks(w, rows), [&](long i, LinearScratch& sums) { gated_task(w, input, rows, i, sums, gated); });
  }
  // x * w of all ranks is added to the residual, whose norm follows. False as of add_up.
  bool mix_and_norm(const PackedWeights& w, const bf16* x, const NodeOrder& order, const float* bias, const bf16* weight) {
    if (in_shares) return mix_shares(w, x, order, bias, weight);
    if (!mix(w, x, order, bias)) return false;
    each_normed_row([&](long r) { add_norm(weight, r); });
    return true;
  }
  // Each rank makes rows of its own, and has no others in its residual.
  bool mix_shares(const PackedWeights& w, const bf16* x, const NodeOrder& order, const float* bias, const bf16* weight) {
    Collective& group = *m.collective;
    linear(w, x, s.nodes.data());
    if (thread == 0) group.join_share(s.nodes.data(), size_t(rows), size_t(m.hidden), order, bias, s.mixed.data());
    work.wait();
    if (group.failure()) return false;
    const Collective::Share share = group.share_of(group.rank, size_t(rows));
    const long first = long(share.first), count = long(share.end - share.first);
    for (long r = first + count * thread / work.team, end = first + count * (thread + 1) / work.team; r < end; r++) add_norm(weight, r);
    work.wait();
    if (thread == 0) group.gather_shares((char*)normed, size_t(rows), size_t(m.hidden) * 2);
    work.wait();
    return group.failure() == 0;
  }
  // Where every row goes on to the end, so that none moves to another rank, and all ranks walk like this one.
  bool can_mix_shares() const {
    if (!m.parts || !m.output_nodes.joins || !m.down_nodes.joins || rows < MIN_SHARE * m.collective->ranks || at.num_logits != rows)
      return false;
    for (long r = 0; r < rows; r++)
      if (at.logit_rows[r] != r) return false;
    const size_t columns = size_t(m.hidden);
    return m.collective->can_join_shares(columns, m.output_nodes) && m.collective->can_join_shares(columns, m.down_nodes);
  }
  // s.mixed (rows, hidden) = x * w, of all ranks. False as of add_up.
  bool mix(const PackedWeights& w, const bf16* x, const NodeOrder& order, const float* bias) {
    if (!m.collective || !order.joins) {
      linear(w, x, s.mixed.data());
      return add_up(s.mixed.data());
    }
    linear(w, x, s.nodes.data());
    if (thread == 0) m.collective->join(s.nodes.data(), size_t(rows), size_t(m.hidden), order, bias, s.mixed.data());
    work.wait();
    return m.collective->failure() == 0;
  }
  // x (rows, hidden) becomes the sum over the ranks. False on all threads when that failed: then the step has no result.
  bool add_up(bf16* x) {
    if (!m.collective) return true;
    if (thread == 0) m.collective->all_reduce(x, size_t(rows * m.hidden));
    work.wait();
    return m.collective->failure() == 0;
  }
  // An id of another rank gives zeros: the sum over the ranks hands its row to all.
  void embed(bf16* to, long r) const {
    const long id = at.token_ids[r] - m.first_id;
    if (id >= 0 && id < m.num_ids) memcpy(to, m.embedding + id * m.hidden, m.hidden * 2);
    else std::fill(to, to + m.hidden, bf16());
  }
  void norm(const bf16* x, const bf16* weight, long r) {
    rms_norm_row(x, weight, float(m.eps), normed + r * m.hidden, m.hidden, mine.row.data());
  }
  void add_norm(const bf16* weight, long r) {
    add_rms_norm_row(s.mixed.data() + r * m.hidden, residual + r * m.hidden, weight, float(m.eps), normed + r * m.hidden,
                     m.hidden, mine.row.data());
  }
  // Rows without logits end here.
  void keep(const bf16* attended) {
    const long width = m.heads * m.d;
    bf16* kept = apart ? normed : s.kept.data();
    each_normed_row([&](long r) { memcpy(kept + r * m.hidden, residual + at.logit_rows[r] * m.hidden, m.hidden * 2); });
    each_row([&](long r) { memcpy(own.qkv + r * width, attended + at.logit_rows[r] * width, width * 2); });
    if (apart) normed = residual;
    residual = kept;
  }
  Cache<S> cache(const AttentionPart& part, long layer) const {
    S* k = (S*)part.pool + layer * in.layer_stride;
    return {k, k + in.value_stride, in.head_stride * part.kv_heads, in.head_stride, in.block_size};
  }
  void turn_and_write(const LayerWeights& w, long layer, long r) {
    bf16* q = own.qkv + r * qkv_width();
    bf16* k = q + m.heads * m.d;
    const bf16* v = k + m.kv_heads * m.d;
    if (w.query_norm)
      for (long h = 0; h < m.heads + m.kv_heads; h++)
        rms_norm_row(q + h * m.d, h < m.heads ? w.query_norm : w.key_norm, float(m.eps), q + h * m.d, m.d, mine.row.data());
    const long turn = at.positions[r] * in.half;
    rotate_and_write(q, k, v, in.cos + turn, in.sin + turn, in.half, m.heads, m.kv_heads, m.d, at.slots[r], cache(own, layer),
                     (bf16*)mine.row.data());
  }
  Attention<bf16, S> attention_of(const AttentionPart& part, const LayerWeights& w, long layer) const {
    return {part.qkv, (part.heads + 2 * part.kv_heads) * m.d, part.attended, cache(part, layer), at.query_starts.data(), at.context_lens.data(),
            at.tables.data(), at.parents, at.num_sequences, at.table_width, part.heads, part.kv_heads, m.d, w.window, float(w.scale)};
  }
  void attend_all(const LayerWeights& w, long layer) {
    DenormalsAreZero during;
    if (shares) return attend_together(w, layer);
    const auto a = attention_of(own, w, layer);
    const auto& tasks = s.tasks[0];
    work.each_task(long(tasks.size()), [&](long i, LinearScratch&) { attend(a, tasks[i], after(tasks, i), mine.attention); });
  }
  // Ranks with less to do take over tasks of the others, which all of them would wait for.
  void attend_together(const LayerWeights& w, long layer) {
    Collective& group = *m.collective;
    const auto& tasks = s.tasks[group.rank];
    TaskBoard& board = group.board(group.rank);
    if (thread == 0) board.open(uint32_t(tasks.size()), group.rank);
    work.wait();
    const auto a = attention_of(own, w, layer);
    for (TaskBoard::Run run; (run = board.take_first(uint32_t(2 * work.team))).first < run.end;)
      for (long i = run.first; i < run.end; i++, board.finish()) attend(a, tasks[i], after(tasks, i), mine.attention);
    for (int next = 1; next < group.ranks; next++) help((group.rank + next) % group.ranks, w, layer);
    if (thread == 0) group.wait_done(uint32_t(tasks.size()));
    work.wait();
  }
  void help(int rank, const LayerWeights& w, long layer) {
    Collective& group = *m.collective;
    const auto& tasks = s.tasks[rank];
    if (tasks.size() > s.tasks[group.rank].size()) {  // it will be late at the sum: worth to wait for
      if (thread == 0) group.wait_opened(rank);
      work.wait();
    }
    if (!group.has_opened(rank)) return;
    TaskBoard& board = group.board(rank);
    const auto a = attention_of(m.parts[rank], w, layer);
    for (TaskBoard::Run run; (run = board.take_last(group.rank)).first < run.end; board.finish())
      attend(a, tasks[run.first], run.first ? &tasks[run.first - 1] : nullptr, mine.attention);
  }
  // The best ids without the logits: each thread knows the best of its columns.
  void find_best() {
    mine.best.assign(size_t(rows), BestRow());
    const LinearRows input = work.rows_for(m.head, normed, rows);
    work.each_task(linear_tasks(m.head, rows), [&](long i, LinearScratch& sums) { best_task(m.head, input, rows, i, sums, mine.best.data()); });
    each_row([&](long r) {
      BestRow all = mine.best[size_t(r)];
      for (long t = 0; t < work.team; t++) all.join(s.threads[size_t(t)]->best[size_t(r)]);
      in.ids[r] = all.id();
    });
  }
  // Each rank makes its columns of the logits; then all draw ids for rank 0, each from whole rows.
  void draw_together() {
    Collective& group = *m.collective;
    const LogitsPart& to = m.together;
    const bool leads = group.rank == 0;
    const uint32_t draws = leads && in.draws ? uint32_t(rows) : 0;
    linear(m.head, normed, to.logits + to.first_column, to.width);
    if (thread == 0) {
      std::copy(in.draws, in.draws + draws, to.draws);
      group.board(group.rank).open(draws, group.rank);
      group.meet();
    }
    work.wait();
    TaskBoard& board = group.board(0);
    const auto take = [&] { return leads ? board.take_first(uint32_t(2 * work.team)) : board.take_last(group.rank); };
    // Whoever returned here would leave the others at the barrier below: thread 0 may find the failure later than they.
    for (TaskBoard::Run run; !group.failure() && (run = take()).first < run.end;)
      for (long r = run.first; r < run.end; r++, board.finish())
        to.ids[r] = draw_id(to.logits + r * to.width, to.width, to.draws[r], true, mine.drawing);
    if (thread == 0 && group.wait_done(draws)) std::copy(to.ids, to.ids + draws, in.ids);
    work.wait();
  }
};

// False for a message that StepLayout refuses: then nothing has been computed.
inline bool run_step(const Model& m, const StepInput& in, const int32_t* message, long ints, StepScratch& s, int threads) {
  StepLayout& at = s.layout;
  if (!at.read(message, ints, {in.block_size, in.num_blocks, m.vocab_size, in.num_positions})) return false;
  const bool shares = shares_attention(m, in, at);
  s.fit(m, std::max(at.tokens, at.num_logits), threads, shares);
  find_tasks(m, in, s, shares);
  std::unique_ptr<Barrier> together;
#pragma omp parallel num_threads(threads)
  {
    ComputeRegion region;
#pragma omp single
    together.reset(new Barrier(omp_get_num_threads()));
    if (in.is_int8) StepWalk<int8_t>(m, in, s, *together, shares).run();
    else StepWalk<bf16>(m, in, s, *together, shares).run();
  }
  return true;
}
#endif
