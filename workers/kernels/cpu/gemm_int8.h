// Products of quantized rows with columns of 8-bit weights that share one scale a column.
//
// Packed columns: the units of gemm.h; in a unit [K / 4][column][4] of weight + 128 (vpdpbusd wants one side
// unsigned), then the float scales of its columns.
#pragma once
#ifdef __AVX512BF16__
#include "gemm.h"
#include "quant_rows.h"

struct Int8 {
  static size_t column_bytes(const RowShape& shape) { return shape.padded() + 4; }

  // codes (N, K) in -127..127, scales (N,); columns from N on are zero.
  static void pack(const int8_t* codes, const float* scales, size_t columns, size_t first, const RowShape& shape, int vecs, char* unit) {
    const size_t width = size_t(vecs) * 16;
    float* to = (float*)(unit + width * shape.padded());
    memset(unit, 128, width * shape.padded());
    for (size_t j = 0; j < width; j++) {
      to[j] = first + j < columns ? scales[first + j] : 0.f;
      if (first + j >= columns) continue;
      const int8_t* from = codes + (first + j) * shape.k;
      for (size_t k = 0; k < shape.k; k++) unit[(k / 4 * width + j) * 4 + k % 4] = char(from[k] + 128);
    }
  }
  // sums[r * UNIT + column] for ROWS rows and the VECS vectors of columns from vector v0 of a unit of `vecs`.
  // FETCH quarters of a wide unit come into the second-level cache from `ahead` on.
  template <int ROWS, int VECS, int FETCH>
  static void tile(const char* rows, const RowShape& shape, const char* unit, int vecs, int v0, const char* ahead, float* sums) {
    const size_t row_bytes = shape.bytes();
    __m512i high[ROWS][VECS], low[ROWS][VECS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) {  // weights carry 128 too much
        high[r][v] = _mm512_set1_epi32(-128 * row_head(rows + r * row_bytes).high);
        low[r][v] = _mm512_set1_epi32(-128 * row_head(rows + r * row_bytes).low);
      }
    const char *at = unit + v0 * 64, *parts = row_parts(rows);
    for (size_t k = 0; k < shape.padded(); k += 4, at += vecs * 64, parts += 8, ahead += FETCH * 64) {
      for (int i = 0; i < FETCH; i++) _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
      __m512i weight[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) weight[v] = _mm512_loadu_si512(at + v * 64);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        const __m512i h = four_parts(parts + r * row_bytes), l = four_parts(parts + r * row_bytes + 4);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
          high[r][v] = _mm512_dpbusd_epi32(high[r][v], weight[v], h);
          low[r][v] = _mm512_dpbusd_epi32(low[r][v], weight[v], l);
        }
      }
    }
    const float* scales = (const float*)(unit + size_t(vecs) * 16 * shape.padded()) + v0 * 16;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) {
        const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r][v]), _mm512_set1_ps(256.f), _mm512_cvtepi32_ps(low[r][v]));
        const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(scales + v * 16), _mm512_set1_ps(row_head(rows + r * row_bytes).scale));
        _mm512_storeu_ps(sums + r * UNIT + (v0 + v) * 16, _mm512_mul_ps(whole, scale));
      }
  }
};
#endif
