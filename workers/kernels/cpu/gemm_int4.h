// Products of quantized rows with columns of 4-bit weights: every group of a column has a scale and a minimum, weight =
// scale * code + minimum, code 0..15 (the form of GGUF's Q4_1, five bits a weight).
//
// Packed columns: the units of gemm.h; in a unit, a group after the other, [4][column][4] bytes (the low halves hold
// the codes of inputs 8 i .. 8 i + 3 of the group, the high halves of 8 i + 4 .. 8 i + 7), then half-precision scales
// and minima of the columns.
#pragma once
#ifdef __AVX512BF16__
#include "gemm.h"
#include "quant_rows.h"

struct Int4 {
  static constexpr size_t GROUP_BYTES = GROUP / 2 + 4;  // of a column
  static size_t column_bytes(size_t groups) { return groups * GROUP_BYTES; }

  // codes (N, groups, 32) in 0..15; scales and minima (N, groups) are halves. Columns from N on are zero.
  static void pack(const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, size_t columns, size_t first,
                   size_t groups, int vecs, char* unit) {
    const size_t width = size_t(vecs) * 16, inputs = groups * GROUP;
    memset(unit, 0, width * column_bytes(groups));
    for (size_t j = 0; j < width && first + j < columns; j++) {
      const uint8_t* from = codes + (first + j) * inputs;
      for (size_t k = 0; k < inputs; k++) {
        const size_t in_group = k % GROUP;
        char& to = unit[k / GROUP * width * GROUP_BYTES + (in_group / 8 * width + j) * 4 + k % 4];
        to = char(to | from[k] << (in_group % 8 / 4 * 4));
      }
      for (size_t group = 0; group < groups; group++) {
        uint16_t* halves = (uint16_t*)(unit + group * width * GROUP_BYTES + width * GROUP / 2);
        halves[j] = scales[(first + j) * groups + group];
        halves[width + j] = minima[(first + j) * groups + group];
      }
    }
  }
  template <int ROWS, int VECS, int FETCH>
  static void tile(const GroupSpan& span, int v0, const char* ahead, float* sums) {
    const size_t groups = span.row_groups;
    const int vecs = span.vecs;
    constexpr int LINES = FETCH * GROUP_BYTES / 4;  // to be fetched a group
    const size_t width = size_t(vecs) * 16;
    const __m512i four_bits = _mm512_set1_epi8(15);
    __m512 total[ROWS][VECS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) total[r][v] = _mm512_setzero_ps();
    const char* at = span.columns + v0 * 64;
    for (const RowGroup *x = span.rows, *end = x + span.groups; x < end; x++, at += width * GROUP_BYTES, ahead += LINES * 64) {
#pragma GCC unroll 20
      for (int i = 0; i < LINES; i++) _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
      __m512i sum[ROWS][VECS];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[r][v] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        __m512i first[VECS], second[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
          const __m512i both = _mm512_loadu_si512(at + size_t(i * vecs + v) * 64);
          first[v] = _mm512_and_si512(both, four_bits);
          second[v] = _mm512_and_si512(_mm512_srli_epi16(both, 4), four_bits);
        }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
          const __m512i x0 = four_codes(x[r * groups].codes + i * 8), x1 = four_codes(x[r * groups].codes + i * 8 + 4);
#pragma GCC unroll 4
          for (int v = 0; v < VECS; v++) sum[r][v] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[r][v], first[v], x0), second[v], x1);
        }
      }
      const char* halves = at + width * GROUP / 2 - v0 * 32;
      __m512 scale[VECS], minimum[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) {
        scale[v] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(halves + v * 32)));
        minimum[v] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(halves + width * 2 + v * 32)));
      }
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        const __m512 row_scale = _mm512_set1_ps(x[r * groups].scale), row_sum = _mm512_set1_ps(x[r * groups].sum);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
          const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][v]), row_scale);
          total[r][v] = _mm512_fmadd_ps(scaled, scale[v], _mm512_fmadd_ps(row_sum, minimum[v], total[r][v]));
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) _mm512_storeu_ps(sums + r * UNIT + (v0 + v) * 16, total[r][v]);
  }
};
#endif
