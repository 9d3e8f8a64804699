// Products of quantized rows with columns of 8-bit weights that share one scale a column.
//
// Packed columns: the units of gemm.h; in a unit, the groups of quant_rows.h one after the other, of each [8][column][4]
// of weight + 128 (vpdpbusd wants one side unsigned), then the float scales of its columns.
#pragma once
#ifdef __AVX512BF16__
#include "gemm.h"
#include "quant_rows.h"

struct Int8 {
  static constexpr size_t GROUP_BYTES = GROUP;  // of a column
  static size_t column_bytes(size_t groups) { return groups * GROUP_BYTES + 4; }

  // codes (N, groups, 32) in -127..127, scales (N,); columns from N on are zero.
  static void pack(const int8_t* codes, const float* scales, size_t columns, size_t first, size_t groups, int vecs, char* unit) {
    const size_t width = size_t(vecs) * 16, inputs = groups * GROUP;
    float* to = (float*)(unit + width * inputs);
    memset(unit, 128, width * inputs);
    for (size_t j = 0; j < width; j++) {
      to[j] = first + j < columns ? scales[first + j] : 0.f;
      if (first + j >= columns) continue;
      const int8_t* from = codes + (first + j) * inputs;
      for (size_t k = 0; k < inputs; k++) unit[(k / 4 * width + j) * 4 + k % 4] = char(from[k] + 128);
    }
  }
  template <int ROWS, int VECS, int FETCH>
  static void tile(const GroupSpan& span, int v0, const char* ahead, float* sums) {
    const size_t groups = span.row_groups;
    const int vecs = span.vecs;
    __m512 total[ROWS][VECS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) total[r][v] = _mm512_setzero_ps();
    const char* at = span.columns + v0 * 64;
    for (const RowGroup *x = span.rows, *end = x + span.groups; x < end; x++) {
      __m512i sum[ROWS][VECS];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[r][v] = _mm512_set1_epi32(x[r * groups].surplus);
#pragma GCC unroll 8
      for (size_t i = 0; i < GROUP; i += 4, at += vecs * 64, ahead += FETCH * 64) {
        for (int l = 0; l < FETCH; l++) _mm_prefetch(ahead + l * 64, _MM_HINT_T1);
        __m512i weight[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) weight[v] = _mm512_loadu_si512(at + v * 64);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
          const __m512i codes = four_codes(x[r * groups].codes + i);
#pragma GCC unroll 4
          for (int v = 0; v < VECS; v++) sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], weight[v], codes);
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        const __m512 scale = _mm512_set1_ps(x[r * groups].scale);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) total[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][v]), scale, total[r][v]);
      }
    }
    const float* scales = (const float*)span.behind + v0 * 16;
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++)
        _mm512_storeu_ps(sums + r * UNIT + (v0 + v) * 16, _mm512_mul_ps(total[r][v], _mm512_loadu_ps(scales + v * 16)));
  }
};
#endif
