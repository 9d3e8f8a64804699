// The vectors of gemm.h: 16 lanes by AVX512-BF16, or 8 by AVX2 with FMA. A build with neither has no packed products.
#pragma once
#if defined(__AVX512BF16__) || (defined(__AVX2__) && defined(__FMA__))
#define HAS_PRODUCTS
#include <immintrin.h>

#include <algorithm>

#include "simd.h"

#ifdef __AVX512BF16__
constexpr int LANES = 16, MAX_ROWS = 6;  // a register tile: 6 rows x 4 vectors + 4 columns + 1 broadcast
using Sums = __m512;
inline Sums no_sums() { return _mm512_setzero_ps(); }
inline Sums load_sums(const float* from) { return _mm512_loadu_ps(from); }
inline void store_sums(float* to, Sums sums) { _mm512_storeu_ps(to, sums); }
inline Sums add_sums(Sums left, Sums right) { return _mm512_add_ps(left, right); }

// sum[r][v] += both products of the pair at a + r * a_row with the pairs of vector v at b. vdpbf16ps takes bf16 numbers
// below 2^-126 as zero.
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void multiply_pair(Sums (&sum)[ROWS][VECS], const char* a, size_t a_row, const char* b) {
  __m512bh column[VECS];
  for (int v = 0; v < VECS; v++) column[v] = (__m512bh)_mm512_loadu_si512(b + v * 64);
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
    int32_t pair;
    memcpy(&pair, a + r * a_row, 4);
    const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, column[v]);
  }
}
// sum[r][v] += the float at a + r * a_row with the floats of vector v at b.
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void multiply_float(Sums (&sum)[ROWS][VECS], const char* a, size_t a_row, const char* b) {
  __m512 column[VECS];
  for (int v = 0; v < VECS; v++) column[v] = _mm512_loadu_ps(b + v * 64);
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
    const __m512 x = _mm512_set1_ps(*(const float*)(a + r * a_row));
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) sum[r][v] = _mm512_fmadd_ps(x, column[v], sum[r][v]);
  }
}

// 16 rows of 16 pairs -> 16 columns, in place.
inline __attribute__((always_inline)) void transpose_pairs(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2)
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

inline __m512 bias_at(const float* bias, size_t column, __mmask16 mask) {
  return bias ? _mm512_maskz_loadu_ps(mask, bias + column) : _mm512_setzero_ps();
}
inline __mmask16 columns_mask(size_t column, size_t columns) {
  return column + 16 <= columns ? 0xffff : column >= columns ? 0 : __mmask16((1u << (columns - column)) - 1);
}
inline void finish_row(const float* sums, size_t column, int vecs, size_t columns, const float* bias, bf16* out) {
  for (int v = 0; v < vecs; v++, column += 16) {
    __mmask16 mask = columns_mask(column, columns);
    __m512 y = _mm512_add_ps(_mm512_loadu_ps(sums + v * 16), bias_at(bias, column, mask));
    _mm256_mask_storeu_epi16(out + column, mask, (__m256i)_mm512_cvtneps_pbh(y));
  }
}
inline void finish_row(const float* sums, size_t column, int vecs, size_t columns, const float* bias, float* out) {
  for (int v = 0; v < vecs; v++, column += 16) {
    __mmask16 mask = columns_mask(column, columns);
    _mm512_mask_storeu_ps(out + column, mask, _mm512_add_ps(_mm512_loadu_ps(sums + v * 16), bias_at(bias, column, mask)));
  }
}

#else
constexpr int LANES = 8, MAX_ROWS = 2;  // a register tile: 2 rows x 4 vectors + 2 broadcasts + 1 column; 3 rows spill
using Sums = __m256;
inline Sums no_sums() { return _mm256_setzero_ps(); }
inline Sums load_sums(const float* from) { return _mm256_loadu_ps(from); }
inline void store_sums(float* to, Sums sums) { _mm256_storeu_ps(to, sums); }
inline Sums add_sums(Sums left, Sums right) { return _mm256_add_ps(left, right); }

// One number of every pair, as a float.
template <bool SECOND> inline __m256 widen_half(__m256i pairs) {
  return _mm256_castsi256_ps(SECOND ? _mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000))) : _mm256_slli_epi32(pairs, 16));
}
template <bool SECOND, int ROWS, int VECS>
inline __attribute__((always_inline)) void multiply_half(Sums (&sum)[ROWS][VECS], const char* a, size_t a_row, const char* b) {
  __m256 x[ROWS];
#pragma GCC unroll 2
  for (int r = 0; r < ROWS; r++) {
    int32_t pair;
    memcpy(&pair, a + r * a_row, 4);
    x[r] = widen_half<SECOND>(_mm256_set1_epi32(pair));
  }
#pragma GCC unroll 4
  for (int v = 0; v < VECS; v++) {
    const __m256 column = widen_half<SECOND>(_mm256_loadu_si256((const __m256i*)(b + v * 32)));
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; r++) sum[r][v] = _mm256_fmadd_ps(x[r], column, sum[r][v]);
  }
}
// sum[r][v] += the first, then the second product of the pair at a + r * a_row with the pairs of vector v at b.
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void multiply_pair(Sums (&sum)[ROWS][VECS], const char* a, size_t a_row, const char* b) {
  multiply_half<false>(sum, a, a_row, b);
  multiply_half<true>(sum, a, a_row, b);
}
// sum[r][v] += the float at a + r * a_row with the floats of vector v at b.
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void multiply_float(Sums (&sum)[ROWS][VECS], const char* a, size_t a_row, const char* b) {
  __m256 x[ROWS];
#pragma GCC unroll 2
  for (int r = 0; r < ROWS; r++) x[r] = _mm256_set1_ps(*(const float*)(a + r * a_row));
#pragma GCC unroll 4
  for (int v = 0; v < VECS; v++) {
    const __m256 column = _mm256_loadu_ps((const float*)(b + v * 32));
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; r++) sum[r][v] = _mm256_fmadd_ps(x[r], column, sum[r][v]);
  }
}
template <class Out> inline void finish_row(const float* sums, size_t column, int vecs, size_t columns, const float* bias, Out* out) {
  const size_t count = std::min(size_t(vecs) * LANES, columns - column);
  for (size_t i = 0; i < count; i++) put(out[column + i], sums[i] + (bias ? bias[column + i] : 0.f));
}
#endif
#endif
