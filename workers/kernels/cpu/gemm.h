// Products of bf16 rows with packed bf16 columns by vdpbf16ps (two products a lane, float sums).
//
// Packed columns: units of 64 columns (a last odd one in two of 32, so that two threads end together); inside a
// unit [k / 2][column][2], one linear stream. A sum runs over k in order in one accumulator, whatever the
// number of rows: a row's result does not depend on its neighbours.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include <algorithm>

#include "simd.h"

constexpr int MAX_ROWS = 6, UNIT = 64;      // a register tile: 6 rows x 4 vectors + 4 columns + 1 broadcast
constexpr int CHUNK_ROWS = 96;              // rows that pass over a unit while it is in the second-level cache

// c (ROWS, VECS * 16) = [c +] a (ROWS, 2 pairs) * b; a: rows of pairs, b: [pairs][VECS * 16] at b_step bytes.
template <int ROWS, int VECS>
static void tile(const char* a, size_t a_row, const char* b, size_t b_step, int pairs, float* c, size_t c_row,
                 bool add) {
  __m512 sum[ROWS][VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) sum[r][v] = add ? _mm512_loadu_ps(c + r * c_row + v * 16) : _mm512_setzero_ps();
  for (int k = 0; k < pairs; k++, b += b_step) {
    __m512bh column[VECS];
    for (int v = 0; v < VECS; v++) column[v] = (__m512bh)_mm512_loadu_si512(b + v * 64);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      memcpy(&pair, a + r * a_row + k * 4, 4);
      __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, column[v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) _mm512_storeu_ps(c + r * c_row + v * 16, sum[r][v]);
}

using Tile = void (*)(const char*, size_t, const char*, size_t, int, float*, size_t, bool);
template <int VECS> inline Tile tile_of(int rows) {
  constexpr Tile table[] = {tile<1, VECS>, tile<2, VECS>, tile<3, VECS>, tile<4, VECS>, tile<5, VECS>, tile<6, VECS>};
  return table[rows - 1];
}
// Any number of rows, in nearly equal tiles.
inline void panel(const char* a, size_t a_row, int rows, const char* b, size_t b_step, int vecs, int pairs, float* c,
                  size_t c_row, bool add) {
  for (int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS; tiles > 0; tiles--) {
    int n = (rows + tiles - 1) / tiles;
    Tile run = vecs == 4 ? tile_of<4>(n) : vecs == 3 ? tile_of<3>(n) : vecs == 2 ? tile_of<2>(n) : tile_of<1>(n);
    run(a, a_row, b, b_step, pairs, c, c_row, add);
    a += n * a_row, c += n * c_row, rows -= n;
  }
}

// The units of N columns.
struct Units {
  size_t columns, k;  // k even
  size_t count() const { size_t n = (columns + UNIT - 1) / UNIT; return n % 2 && n > 1 ? n + 1 : n; }
  size_t wide() const { size_t n = (columns + UNIT - 1) / UNIT; return n % 2 && n > 1 ? n - 1 : n; }  // units of 64
  size_t first(size_t u) const { return u <= wide() ? u * UNIT : wide() * UNIT + (u - wide()) * UNIT / 2; }
  int vecs(size_t u) const { return u < wide() ? 4 : 2; }
  size_t offset(size_t u) const { return first(u) * k * 2; }  // bytes
  size_t bytes() const { return (columns + UNIT - 1) / UNIT * UNIT * k * 2; }
};

// Copies column order[i] of weight (N, K) row-major to packed column i; a negative order is a column of zeros.
template <class Order> inline void pack_unit(const bf16* weight, const Units& units, size_t u, Order order, char* packed) {
  int width = units.vecs(u) * 16;
  char* to = packed + units.offset(u);
  for (int j = 0; j < width; j++) {
    long column = order(units.first(u) + j);
    for (size_t k = 0; k < units.k; k += 2) {
      int32_t pair = 0;
      if (column >= 0) memcpy(&pair, weight + size_t(column) * units.k + k, 4);
      memcpy(to + (k / 2 * width + j) * 4, &pair, 4);
    }
  }
}

// One task of a product: rows [chunk * CHUNK_ROWS, ...) times unit u; finish(row, first column, vecs, sums) a row.
template <class Finish>
inline void unit_rows(const char* a, size_t a_row, size_t rows, const char* packed, const Units& units, size_t u, Finish finish) {
  alignas(64) float sums[CHUNK_ROWS * UNIT];
  const char* b = packed + units.offset(u);
  int vecs = units.vecs(u);
  constexpr size_t K_BLOCK = 4096;  // columns of the unit that stay in the second-level cache
  for (size_t k = 0; k < units.k; k += K_BLOCK) {
    size_t pairs = std::min(K_BLOCK, units.k - k) / 2;
    panel(a + k * 2, a_row, int(rows), b + k * vecs * 32, vecs * 64, vecs, int(pairs), sums, UNIT, k > 0);
  }
  for (size_t r = 0; r < rows; r++) finish(r, units.first(u), vecs, sums + r * UNIT);
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
    __m512 y = _mm512_add_ps(_mm512_load_ps(sums + v * 16), bias_at(bias, column, mask));
    _mm256_mask_storeu_epi16(out + column, mask, (__m256i)_mm512_cvtneps_pbh(y));
  }
}
inline void finish_row(const float* sums, size_t column, int vecs, size_t columns, const float* bias, float* out) {
  for (int v = 0; v < vecs; v++, column += 16) {
    __mmask16 mask = columns_mask(column, columns);
    _mm512_mask_storeu_ps(out + column, mask, _mm512_add_ps(_mm512_load_ps(sums + v * 16), bias_at(bias, column, mask)));
  }
}
#endif
