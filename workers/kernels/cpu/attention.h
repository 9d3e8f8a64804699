// Paged attention of a tile of query rows (tokens x the query heads of one kv head) of one sequence.
//
// Keys are taken in groups of KEYS positions, aligned at multiples of KEYS from the start of the sequence; each
// group is one online-softmax update (Milakov and Gimelshein 2018). A masked position gives probability exactly 0
// and a wholly masked group changes nothing, so a row's result depends neither on the rows that share its tile
// nor on how the prompt was cut. Rows are of T, float or bf16, the pages of S: T or int8. Sums and softmax are float,
// and with AVX512-BF16 probabilities enter the second product with pages of bf16 as bf16.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "cache.h"
#include "gemm.h"
#include "simd.h"

constexpr int KEYS = 64, TILE_ROWS = 96, LARGE_TILE_ROWS = 384;

template <class T, class S = T> struct Attention {
  using Stored = S;
  const T* q;  // (T, heads, d)
  long q_stride;
  T* out;  // (T, heads, d), dense
  Cache<S> cache;
  const int32_t *query_starts, *context_lens, *tables;
  const int32_t* parents;  // (T): row of its sequence that each token follows, -1: the first; null: each the one before
  long num_sequences, table_width, heads, kv_heads, d, window;  // window 0: none
  float scale;
  float cap = 0.f;  // c: scores become c tanh(score / c); 0: they stay

  long group() const { return heads / kv_heads; }
  // Whether its products are made in the tile registers of amx.h, whatever the number of rows.
  bool in_tiles() const {
#ifdef HAS_TILES
    return can_use_tiles() && std::is_same_v<T, bf16> && std::is_same_v<S, bf16> && d % 2 == 0;
#else
    return false;
#endif
  }
  long tile_tokens() const { return std::max(1L, (in_tiles() ? LARGE_TILE_ROWS : TILE_ROWS) / group()); }
  long query_len(long s) const { return query_starts[s + 1] - query_starts[s]; }
  bool is_tree(long s) const {
    for (long i = 0, n = parents ? query_len(s) : 0; i < n; i++)
      if (parents[query_starts[s] + i] != i - 1) return true;
    return false;
  }
  // The rows of the sequence from its first to `row`, each the parent of the next.
  std::vector<int32_t> path_to(long s, int32_t row) const {
    std::vector<int32_t> path;
    for (; row >= 0; row = parents[query_starts[s] + row]) path.push_back(row);
    std::reverse(path.begin(), path.end());
    return path;
  }
};
struct AttentionTask {
  int sequence, head, first;  // kv head, first token of the query tile
  long cost;
};
// All tiles, dearest first, so that threads end together.
template <class A> std::vector<AttentionTask> attention_tasks(const A& a) {
  std::vector<AttentionTask> tasks;
  bool prompts = false;
  for (long s = 0; s < a.num_sequences; s++)
    for (long n = a.query_len(s), i = 0; i < n; i += a.tile_tokens())
      for (long h = 0; h < a.kv_heads; h++) {
        long tokens = std::min(a.tile_tokens(), n - i);
        tasks.push_back({int(s), int(h), int(i), (a.context_lens[s] - n + i + tokens) * (tokens * a.group() + 4)});
        prompts |= n > 1;
      }
  if (prompts)
    std::stable_sort(tasks.begin(), tasks.end(), [](auto& x, auto& y) { return x.cost > y.cost; });
  return tasks;
}

// Where the keys and values of the positions base .. base + count - 1 of one sequence and kv head are.
template <class S> struct KeyGroup {
  const S *k[KEYS], *v[KEYS];
  int count = 0;
  void read_scales() {}
  float k_value(int j, long i) const { return widen(k[j][i]); }
  float v_value(int j, long i) const { return widen(v[j][i]); }
};
template <> struct KeyGroup<int8_t> {
  struct Run {  // positions whose rows lie one behind the other in a page
    int first, count;
    const half_bits *k_scales, *v_scales;
  };
  const int8_t *k[KEYS], *v[KEYS];
  Run runs[KEYS];
  int num_runs = 0;
  half_bits k_scales[KEYS], v_scales[KEYS];  // once they have been read
  int count = 0;
  // Not before the group's turn: whoever reads them waits for memory.
  void read_scales() {
    for (int r = 0; r < num_runs; r++) {
      memcpy(k_scales + runs[r].first, runs[r].k_scales, runs[r].count * sizeof(half_bits));
      memcpy(v_scales + runs[r].first, runs[r].v_scales, runs[r].count * sizeof(half_bits));
    }
  }
  float k_value(int j, long i) const { return k[j][i] * from_half(k_scales[j]); }
  float v_value(int j, long i) const { return v[j][i] * from_half(v_scales[j]); }
};

// Private to a thread, sized for one tile.
struct AttentionScratch {
  std::unique_ptr<float[]> space;  // never read before it is written
  std::unique_ptr<char[]> tiles;   // of attention_tiles.h
  size_t tile_bytes = 0;
  float *scores, *out, *max, *sum, *keys, *values, *queries, *weights;  // the last four hold T in any form
  AttentionScratch(long group, long d) {
    long rows = std::max<long>(TILE_ROWS, group), wide = (d + 15) / 16 * 16;
    space.reset(new float[rows * (2 * KEYS + 2 * wide + 17) + 2 * KEYS * wide + 64]);
    float* at = (float*)((uintptr_t(space.get()) + 63) / 64 * 64);
    scores = at, at += rows * KEYS;
    weights = at, at += rows * KEYS;
    out = at, at += rows * wide;
    queries = at, at += rows * wide;
    keys = at, at += KEYS * wide;
    values = at, at += KEYS * wide;
    sum = at, at += rows * 16;  // 16 partial sums a row
    max = at;
  }
  // Room of at least `bytes`, at a cache line, that lasts until the next call.
  char* tile_space(size_t bytes) {
    if (tile_bytes < bytes) tiles.reset(new char[(tile_bytes = bytes) + 64]);
    return (char*)((uintptr_t(tiles.get()) + 63) / 64 * 64);
  }
  // The part of `whole` from one row on. element: bytes of a query's and of a weight's.
  AttentionScratch(const AttentionScratch& whole, long row, long wide, size_t element)
      : scores(whole.scores + row * KEYS), out(whole.out + row * wide), max(whole.max + row), sum(whole.sum + row * 16), keys(whole.keys),
        values(whole.values), queries((float*)((char*)whole.queries + size_t(row * wide) * element)),
        weights((float*)((char*)whole.weights + size_t(row * KEYS) * element)) {}
};

// Scores (KEYS) become cap * tanh(scale * score / cap).
inline void cap_scores(float* scores, float scale, float cap) {
  for (int j = 0; j < KEYS; j++) scores[j] = cap * tanh_(scores[j] * scale / cap);
}

// ---- float products, any storage ----
template <class S> struct WideProducts {
  using Element = float;  // of queries and weights in the scratch
  template <class T> static void load_query(const T* q, AttentionScratch& s, long row, long d, long wide) {
    load_row(q, s.queries + row * wide, d);
  }
  // Scores of all rows and KEYS keys; those from now.count on are of no meaning. `next`: the group to come.
  static void score(AttentionScratch& s, long rows, const KeyGroup<S>& now, const KeyGroup<S>&, long d, long wide) {
    load_group(now, s, d, wide);
    for (long r = 0; r < rows; r++) {
      float sum[KEYS] = {};
      for (long i = 0; i < d; i++)
        for (int j = 0; j < KEYS; j++) sum[j] = multiply_add(s.queries[r * wide + i], s.keys[i * KEYS + j], sum[j]);
      memcpy(s.scores + r * KEYS, sum, sizeof sum);
    }
  }
  // Folds the scores of one group into the running maximum, sum and output of a row; only positions
  // [from, to) of the group are seen.
  static void softmax(AttentionScratch& s, long row, int from, int to, float scale, long wide) {
    float *score = s.scores + row * KEYS, *weight = s.weights + row * KEYS, *sum = s.sum + row * 16, lane[16];
    for (int j = 0; j < KEYS; j++) score[j] = j < from || j >= to ? -INFINITY : score[j] * scale;
    for (int j = 0; j < 16; j++)
      lane[j] = std::max(std::max(score[j], score[j + 16]), std::max(score[j + 32], score[j + 48]));
    for (int step = 8; step; step /= 2)
      for (int j = 0; j < step; j++) lane[j] = std::max(lane[j], lane[j + step]);
    float now = std::max(s.max[row], lane[0]), rescale = exp_(s.max[row] - now);
    for (int j = 0; j < KEYS; j++) weight[j] = exp_(score[j] - now);
    for (int j = 0; j < 16; j++)
      sum[j] = sum[j] * rescale + ((weight[j] + weight[j + 16]) + (weight[j + 32] + weight[j + 48]));
    s.max[row] = now;
    if (rescale != 1.f)
      for (long i = 0; i < wide; i++) s.out[row * wide + i] *= rescale;
  }
  static void add_values(AttentionScratch& s, long rows, const KeyGroup<S>&, const KeyGroup<S>&, long d, long wide) {
    for (long r = 0; r < rows; r++)
      for (int j = 0; j < KEYS; j++)
        for (long i = 0; i < d; i++)
          s.out[r * wide + i] = multiply_add(s.weights[r * KEYS + j], s.values[j * wide + i], s.out[r * wide + i]);
  }

 private:
  // keys as [d][KEYS], values as [KEYS][wide]; positions from `count` on are zero.
  static void load_group(const KeyGroup<S>& now, AttentionScratch& s, long d, long wide) {
    for (int j = 0; j < KEYS; j++)
      for (long i = 0; i < d; i++) {
        s.keys[i * KEYS + j] = j < now.count ? now.k_value(j, i) : 0.f;
        s.values[j * wide + i] = j < now.count ? now.v_value(j, i) : 0.f;
      }
  }
};
