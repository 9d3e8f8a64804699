// The paged KV pool, as one layer sees it: pages of rows, of the model's numbers or of int8.
//
// An int8 page has the codes of all its rows, then their scales as halves: value = code * scale. A row's codes depend on
// its own numbers alone (workers/kernels/paged_cache.py).
#pragma once
#include <algorithm>
#include <cmath>

#include "rows.h"

using half_bits = uint16_t;

// S: float, bf16 or int8_t. Strides in elements of S.
template <class S> struct Cache {  // (num_blocks, kv_heads) pages of (block_size, d), of keys and of values
  S *k, *v;
  long block_stride, head_stride, block_size;

  long page(long block, long head) const { return block * block_stride + head * head_stride; }
};

// The least half that is not below a value >= 0. NaN where that is more than a half can hold, and for NaN.
inline half_bits half_above(float value) {
  if (!(value <= 65504.f)) return 0x7e00;
  if (value < 0x1p-14f) return half_bits(std::ceil(value * 0x1p24f));  // subnormal, in units of 2^-24
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return half_bits(((bits + 0x1fff) >> 13) - (112 << 10));
}
// Of a scale: not negative, or NaN.
inline float from_half(half_bits value) {
  if (value < 0x400) return value * 0x1p-24f;
  if (value >= 0x7c00) return NAN;
  const uint32_t bits = (uint32_t(value) + (112 << 10)) << 13;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
inline half_bits* scales_of(int8_t* page, long block_size, long d) { return (half_bits*)(page + block_size * d); }
inline const half_bits* scales_of(const int8_t* page, long block_size, long d) { return (const half_bits*)(page + block_size * d); }

template <class T> inline void write_row(const T* x, T* page, long offset, long, long d) { memcpy(page + offset * d, x, d * sizeof(T)); }
template <class T> inline void write_row(const T* x, int8_t* page, long offset, long block_size, long d) {
  uint32_t most = 0;  // bits of non-negative floats compare as integers, infinity and NaN above all
  for (long i = 0; i < d; i++) {
    const float value = widen(x[i]);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    most = std::max(most, bits & 0x7fffffffu);
  }
  float largest;
  memcpy(&largest, &most, 4);
  const half_bits scale = half_above(largest / 127.f);
  const float step = from_half(scale);
  int8_t* codes = page + offset * d;
  scales_of(page, block_size, d)[offset] = scale;
  if (!(step > 0.f)) {
    memset(codes, 0, d);
    return;
  }
  for (long i = 0; i < d; i++) codes[i] = int8_t(int32_t((widen(x[i]) / step + 12582912.f) - 12582912.f));  // half to even
}

// Turns the query heads of one token in place, and writes its turned keys and its values at `slot`. turned: room for d.
template <class T, class S>
inline void rotate_and_write(T* q, const T* k, const T* v, const float* cos, const float* sin, long half, long heads, long kv_heads,
                             long d, int64_t slot, const Cache<S>& cache, T* turned) {
  for (long h = 0; half && h < heads; h++) rotate_head(q + h * d, q + h * d, cos, sin, half);
  const long block = slot / cache.block_size, offset = slot % cache.block_size;
  for (long h = 0; h < kv_heads; h++) {
    rotate_head(k + h * d, turned, cos, sin, half);
    memcpy(turned + 2 * half, k + h * d + 2 * half, (d - 2 * half) * sizeof(T));
    write_row(turned, cache.k + cache.page(block, h), offset, cache.block_size, d);
    write_row(v + h * d, cache.v + cache.page(block, h), offset, cache.block_size, d);
  }
}
