// One attention task: the loop over groups of keys around the products of attention.h.
#pragma once
#include "attention_bf16.h"

template <class T, class Products> void attend(const Attention<T>& a, const AttentionTask& task, AttentionScratch& s) {
  const long group = a.group(), wide = (a.d + 15) / 16 * 16, block_size = a.cache.block_size;
  const long length = a.query_len(task.sequence), start = a.context_lens[task.sequence] - length + task.first;
  const long tokens = std::min(a.tile_tokens(), length - task.first), rows = tokens * group;
  const int32_t* table = a.tables + task.sequence * a.table_width;
  const long token0 = a.query_starts[task.sequence] + task.first;
  for (long r = 0; r < rows; r++) {
    const T* q = a.q + (token0 + r / group) * a.q_stride + (task.head * group + r % group) * a.d;
    Products::load_query(q, s, r, a.d, wide);
    s.max[r] = -1e30f;
    std::fill(s.sum + r * 16, s.sum + r * 16 + 16, 0.f);
    std::fill(s.out + r * wide, s.out + (r + 1) * wide, 0.f);
  }
  const long end = start + tokens;  // positions any row of the tile can see: [begin, end)
  const long begin = a.window ? std::max(0L, start - a.window + 1) : 0;
  for (long base = begin / KEYS * KEYS; base < end; base += KEYS) {
    const T *k[KEYS], *v[KEYS];
    const int count = int(std::min<long>(KEYS, end - base));
    long block = base / block_size, offset = base % block_size;
    for (int j = 0; j < count; j++) {
      long at = table[block] * a.cache.block_stride + task.head * a.cache.head_stride + offset * a.d;
      k[j] = a.cache.k + at, v[j] = a.cache.v + at;
      if (++offset == block_size) offset = 0, block++;
    }
    Products::load_group(k, v, count, s, a.d, wide);
    Products::score(s, rows, a.d, wide);
    for (long r = 0; r < rows; r++) {
      long position = start + r / group;
      long from = a.window ? std::clamp<long>(position - a.window + 1 - base, 0, KEYS) : 0;
      Products::softmax(s, r, int(from), int(std::clamp<long>(position + 1 - base, 0, KEYS)), a.scale, wide);
    }
    Products::add_values(s, rows, a.d, wide);
  }
  for (long r = 0; r < rows; r++) {
    T* to = a.out + ((token0 + r / group) * a.heads + task.head * group + r % group) * a.d;
    float inverse = 1.f / lane_sum(16, [&](size_t i) { return s.sum[r * 16 + i]; });
    for (long i = 0; i < a.d; i++) put(to[i], s.out[r * wide + i] * inverse);
  }
}
inline void attend(const Attention<float>& a, const AttentionTask& task, AttentionScratch& s) {
  attend<float, WideProducts<float>>(a, task, s);
}
inline void attend(const Attention<bf16>& a, const AttentionTask& task, AttentionScratch& s) {
#ifdef __AVX512BF16__
  if (a.d % 2 == 0) return attend<bf16, PairProducts>(a, task, s);
#endif
  attend<bf16, WideProducts<bf16>>(a, task, s);
}
