// The paged KV pool, as one layer sees it.
#pragma once
#include "rows.h"

template <class T> struct Cache {  // (num_blocks, kv_heads, block_size, d), strides in elements
  T *k, *v;
  long block_stride, head_stride, block_size;
};

// Turns the query heads of one token in place, and stores its turned keys and its values at `slot`.
template <class T>
inline void rotate_and_write(T* q, const T* k, const T* v, const float* cos, const float* sin, long half, long heads, long kv_heads,
                             long d, int64_t slot, Cache<T> cache) {
  for (long h = 0; half && h < heads; h++) rotate_head(q + h * d, q + h * d, cos, sin, half);
  const long at = slot / cache.block_size * cache.block_stride + slot % cache.block_size * d;
  for (long h = 0; h < kv_heads; h++) {
    T* to = cache.k + at + h * cache.head_stride;
    rotate_head(k + h * d, to, cos, sin, half);
    memcpy(to + 2 * half, k + h * d + 2 * half, (d - 2 * half) * sizeof(T));
    memcpy(cache.v + at + h * cache.head_stride, v + h * d, d * sizeof(T));
  }
}
