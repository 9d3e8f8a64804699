// The C entry points that workers/kernels/native.py calls, one per operator; `dtype` 0 is float, 1 is bf16.
// Every entry splits its work over an OpenMP team (the runtime that torch has loaded) and returns when done.
// Not covered: a child forked after the first call. libgomp's threads do not exist there, so a team of two would wait
// for ever, as in torch's own operators.
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "attend.h"
#include "block_answer.h"
#include "collective.h"
#include "draw.h"
#include "guess.h"
#include "region.h"
#include "roof.h"
#include "rows.h"
#include "shared_map.h"
#include "step.h"

namespace {
constexpr long ROW_GRAIN = 1 << 14;  // elements worth a second thread

template <class F> void for_rows(long rows, long elements_per_row, int threads, F body) {
  int team = int(std::min<long>(threads, 1 + rows * elements_per_row / ROW_GRAIN));
  if (team <= 1) {
    ComputeRegion region;
    for (long r = 0; r < rows; r++) body(r);
    return;
  }
#pragma omp parallel num_threads(team)
  {
    ComputeRegion region;
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++) body(r);
  }
}
// Tasks of different cost: each thread makes its scratch once and takes the next task when free.
// finish: what a thread does with its scratch in the end.
template <class Make, class F, class Finish> void for_tasks(long tasks, int threads, Make make, F body, Finish finish) {
  std::atomic<long> next{0};
#pragma omp parallel num_threads(int(std::clamp<long>(tasks, 1, threads)))
  {
    ComputeRegion region;
    auto scratch = make();
    for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(i, scratch);
    finish(scratch);
  }
}
template <class Make, class F> void for_tasks(long tasks, int threads, Make make, F body) {
  for_tasks(tasks, threads, make, body, [](auto&) {});
}
template <class T> T* row_scratch(long n) {
  static thread_local std::vector<T> space;
  if (long(space.size()) < n) space.resize(n);
  return space.data();
}

// x rows (outer, inner) at two strides; out dense.
template <class T>
void rms_norm(const T* x, long outer, long inner, long outer_stride, long inner_stride, long n, const T* weight, float eps, T* out, int threads) {
  for_rows(outer * inner, n, threads, [&](long r) {
    rms_norm_row(x + r / inner * outer_stride + r % inner * inner_stride, weight, eps, out + r * n, n, row_scratch<float>(n));
  });
}
template <class T, class S>
void rotary_and_write(T* q, long q_stride, const T* k, long k_stride, const T* v, long v_stride, const float* cos, const float* sin, long half,
                      long tokens, long heads, long kv_heads, long d, const int64_t* slots, Cache<S> cache, int threads) {
  for_rows(tokens, (heads + 2 * kv_heads) * d, threads, [&](long t) {
    rotate_and_write(q + t * q_stride, k + t * k_stride, v + t * v_stride, cos + t * half, sin + t * half, half, heads, kv_heads, d,
                     slots[t], cache, row_scratch<T>(d));
  });
}
template <class A> void attention(const A& a, int threads) {
  auto tasks = attention_tasks(a);
  for_tasks(long(tasks.size()), threads, [&] { return AttentionScratch(a.group(), a.d); },
            [&](long i, AttentionScratch& scratch) {
              DenormalsAreZero during;
              attend(a, tasks[i], after(tasks, i), scratch);
            });
}
}  // namespace

#define BY_DTYPE(call)      \
  do {                      \
    if (dtype) {            \
      using T = bf16;       \
      call;                 \
    } else {                \
      using T = float;      \
      call;                 \
    }                       \
  } while (0)

// The same for a cache of T, or with is_int8 of int8: S.
#define BY_STORAGE(call)    \
  do {                      \
    if (is_int8) {          \
      using S = int8_t;     \
      BY_DTYPE(call);       \
    } else if (dtype) {     \
      using T = bf16;       \
      using S = T;          \
      call;                 \
    } else {                \
      using T = float;      \
      using S = T;          \
      call;                 \
    }                       \
  } while (0)

extern "C" {
// 1 when this build has packed products, so pack, linear and step; and when it has those with quantized weights.
int tandem_has_linear() {
#ifdef HAS_PRODUCTS
  return 1;
#else
  return 0;
#endif
}
int tandem_has_quantized() {
#ifdef HAS_QUANTIZED
  return 1;
#else
  return 0;
#endif
}
long tandem_read_all(const void* from, long bytes, int threads) { return read_all((const char*)from, bytes, threads); }
double tandem_multiply_all(long rounds, int threads) { return multiply_all(rounds, threads); }
void tandem_rms_norm(int dtype, const void* x, long outer, long inner, long outer_stride, long inner_stride, long n,
                     const void* weight, float eps, void* out, int threads) {
  BY_DTYPE(rms_norm((const T*)x, outer, inner, outer_stride, inner_stride, n, (const T*)weight, eps, (T*)out, threads));
}
void tandem_add_rms_norm(int dtype, const void* x, void* residual, long rows, long n, const void* weight, float eps,
                         void* out, int threads) {
  BY_DTYPE(for_rows(rows, n, threads, [&](long r) {
    add_rms_norm_row((const T*)x + r * n, (T*)residual + r * n, (const T*)weight, eps, (T*)out + r * n, n, row_scratch<float>(n));
  }));
}
void tandem_rotary_and_write(int dtype, void* q, long q_stride, const void* k, long k_stride, const void* v, long v_stride,
                             const float* cos, const float* sin, long half, long tokens, long heads, long kv_heads, long d,
                             const int64_t* slots, int is_int8, void* k_cache, void* v_cache, long block_stride,
                             long head_stride, long block_size, int threads) {
  BY_STORAGE(rotary_and_write((T*)q, q_stride, (const T*)k, k_stride, (const T*)v, v_stride, cos, sin, half, tokens, heads,
                              kv_heads, d, slots, Cache<S>{(S*)k_cache, (S*)v_cache, block_stride, head_stride, block_size},
                              threads));
}
void tandem_attention(int dtype, const void* q, long q_stride, void* out, int is_int8, void* k_cache, void* v_cache, long block_stride,
                      long head_stride, long block_size, const int32_t* query_starts, const int32_t* context_lens, const int32_t* tables, const int32_t* parents, long num_sequences,
                      long table_width, long heads, long kv_heads, long d, long window, float scale, float cap, int threads) {
  BY_STORAGE(attention(Attention<T, S>{(const T*)q, q_stride, (T*)out,
                                       {(S*)k_cache, (S*)v_cache, block_stride, head_stride, block_size},
                                       query_starts, context_lens, tables, parents, num_sequences, table_width, heads, kv_heads, d,
                                       window, scale, cap}, threads));
}
void tandem_silu_mul(int dtype, const void* gate_up, long row_stride, void* out, long rows, long n, int threads) {
  BY_DTYPE(for_rows(rows, 4 * n, threads, [&](long r) {
    silu_mul_row((const T*)gate_up + r * row_stride, (const T*)gate_up + r * row_stride + n, (T*)out + r * n, n);
  }));
}
void tandem_silu(int dtype, const void* x, void* out, long rows, long n, int threads) {
  BY_DTYPE(for_rows(rows, 4 * n, threads, [&](long r) { silu_row((const T*)x + r * n, (T*)out + r * n, n); }));
}
void tandem_gelu(int dtype, const void* x, void* out, long rows, long n, int threads) {
  BY_DTYPE(for_rows(rows, 4 * n, threads, [&](long r) { gelu_row((const T*)x + r * n, (T*)out + r * n, n); }));
}
void tandem_gelu_new(int dtype, const void* x, void* out, long rows, long n, int threads) {
  BY_DTYPE(for_rows(rows, 4 * n, threads, [&](long r) { gelu_new_row((const T*)x + r * n, (T*)out + r * n, n); }));
}
// ids[r] is NOT_FINITE where all logits of a row have to be finite and are not.
void tandem_draw(const float* logits, long rows, long row_stride, long n, const Draw* draws, int only_finite, int64_t* ids, int threads) {
  for_tasks(rows, threads, [] { return DrawScratch(); }, [&](long r, DrawScratch& scratch) {
    ids[r] = draw_id(logits + r * row_stride, n, draws[r], only_finite, scratch);
  });
}
long tandem_collective_bytes(int ranks) { return long(Collective::bytes(ranks)); }
Collective* tandem_collective(char* memory, int rank, int ranks, double timeout_s) {
  return new Collective(memory, rank, ranks, timeout_s);
}
void tandem_free_collective(Collective* collective) { delete collective; }
void tandem_abort(Collective* collective) { collective->abort(); }
long tandem_failure(const Collective* collective) { return collective->failure(); }
void tandem_all_reduce(int dtype, Collective* collective, void* x, long n) { BY_DTYPE(collective->all_reduce((T*)x, size_t(n))); }
// out (rows, columns) of `dtype` from this rank's nodes (nodes, rows, columns); bias (columns) or null.
void tandem_join(int dtype, Collective* collective, const float* nodes, long rows, long columns, const long* counts, const long* joins,
                 const float* bias, void* out) {
  BY_DTYPE(collective->join(nodes, size_t(rows), size_t(columns), NodeOrder{counts, joins}, bias, (T*)out));
}
void tandem_gather_rows(Collective* collective, const void* mine, long rows, const long* row_bytes, void* out) {
  collective->gather_rows((const char*)mine, size_t(rows), row_bytes, (char*)out);
}
long tandem_map_shared(int fd, long bytes) { return SharedMap::map(fd, size_t(bytes)); }
int tandem_collapse_shared(char* begin, long bytes) { return SharedMap::collapse(begin, size_t(bytes)); }
void tandem_unmap_shared(char* begin, long bytes) { SharedMap::unmap(begin, size_t(bytes)); }
long tandem_send_answer(BlockAnswer* answer, int socket, long max_bytes) { return answer->send(socket, max_bytes); }
long tandem_receive_answer(BlockStream* stream, int socket, double timeout_s, const char* head, long head_bytes, char* frame, long room) {
  return receive_answer(*stream, socket, timeout_s, head, head_bytes, frame, room);
}
#ifdef HAS_PRODUCTS
// 1 when weights of format BF16_TILES can be used from now on.
int tandem_can_use_tiles() { return can_use_tiles(); }
long tandem_packed_bytes(int format, long n, long k) { return long(plain_bytes(format, Units{size_t(n), size_t(k), element_bytes(format)})); }
// weight (n, k) of the type that the format holds.
void tandem_pack(int format, const void* weight, long n, long k, char* packed, int threads) {
  const Units units{size_t(n), size_t(k), element_bytes(format)};
  for_rows(long(units.count()), UNIT * k, threads, [&](long u) { pack_plain(format, (const char*)weight, units, size_t(u), packed); });
}
// out (nodes, rows, columns) = x (rows, k; x_stride bytes apart) * weights + bias; out_float: float instead of bf16.
void tandem_linear(const PackedWeights* weights, const void* x, long x_stride, long rows, void* out, int out_float, int threads) {
  LinearRows input{(const char*)x, size_t(x_stride)};
  if (is_quantized(*weights)) {
    const size_t bytes = input_bytes(*weights);
    char* prepared = (char*)row_scratch<CacheLine>(long(prepared_lines(rows, bytes)));
    for_rows(rows, 8 * weights->k, threads, [&](long r) { prepare_row(*weights, (const bf16*)((const char*)x + r * x_stride), prepared, size_t(r)); });
    input = {prepared, bytes};
  }
  for_tasks(linear_tasks(*weights, rows), threads, [] { return LinearScratch(); }, [&](long i, LinearScratch& scratch) {
    if (out_float) linear_task(*weights, input, rows, i, scratch, (float*)out, weights->columns);
    else linear_task(*weights, input, rows, i, scratch, (bf16*)out, weights->columns);
  }, [](LinearScratch& scratch) { scratch.finish(); });
}
#ifdef HAS_QUANTIZED
// Bytes of a packed matrix of n outputs in a quantized format.
long tandem_quantized_bytes(int format, long n, long groups) {
  const Units units{size_t(n), size_t(groups) * GROUP};
  return long(units.first(units.count()) * quantized_column_bytes(format, size_t(groups)) + quantized_behind(format));
}
// codes (n, groups, 32): int8, or uint8 for INT4. scales (n,) float; for INT4 scales and minima (n, groups) as halves.
void tandem_pack_quantized(int format, const void* codes, const void* scales, const void* minima, long n, long groups, char* packed, int threads) {
  const Units units{size_t(n), size_t(groups) * GROUP};
  for_rows(long(units.count()), UNIT * long(units.k), threads, [&](long u) {
    const size_t first = units.first(size_t(u));
    char* unit = packed + first * quantized_column_bytes(format, size_t(groups));
    if (format == INT4)
      Int4::pack((const uint8_t*)codes, (const uint16_t*)scales, (const uint16_t*)minima, units.columns, first, size_t(groups), units.vecs(size_t(u)), unit);
#ifdef HAS_TILES
    else if (format == INT8_TILES)
      Int8Tiles::pack((const int8_t*)codes, (const float*)scales, units.columns, first, size_t(groups), units.vecs(size_t(u)), unit);
#endif
    else Int8::pack((const int8_t*)codes, (const float*)scales, units.columns, first, size_t(groups), units.vecs(size_t(u)), unit);
  });
}
#endif
StepScratch* tandem_step_scratch() { return new StepScratch; }
void tandem_free_step_scratch(StepScratch* scratch) { delete scratch; }
int tandem_step(const Model* model, const StepInput* input, const int32_t* message, long ints, StepScratch* scratch, int threads) {
  return run_step(*model, *input, message, ints, *scratch, threads);
}
GuessScratch* tandem_guess_scratch() { return new GuessScratch; }
void tandem_free_guess_scratch(GuessScratch* scratch) { delete scratch; }
int tandem_guess(const GuessHeads* heads, const GuessInput* input, GuessScratch* scratch, int threads) {
  return run_guess(*heads, *input, *scratch, threads);
}
#endif
}
