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
// Meanwhile LINES cache lines a pair come into the second-level cache from `ahead` on.
template <int ROWS, int VECS, int LINES>
static void tile(const char* a, size_t a_row, const char* b, size_t b_step, int pairs, float* c, size_t c_row,
                 bool add, const char* ahead) {
  __m512 sum[ROWS][VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) sum[r][v] = add ? _mm512_loadu_ps(c + r * c_row + v * 16) : _mm512_setzero_ps();
  for (int k = 0; k < pairs; k++, b += b_step, ahead += LINES * 64) {
    for (int i = 0; i < LINES; i++) _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
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

using Tile = void (*)(const char*, size_t, const char*, size_t, int, float*, size_t, bool, const char*);
template <int VECS, int LINES = 0> inline Tile tile_of(int rows) {
  constexpr Tile table[] = {tile<1, VECS, LINES>, tile<2, VECS, LINES>, tile<3, VECS, LINES>,
                            tile<4, VECS, LINES>, tile<5, VECS, LINES>, tile<6, VECS, LINES>};
  return table[rows - 1];
}
inline Tile tile_of(int rows, int vecs, int lines) {
  if (lines && vecs == 4) return lines == 2 ? tile_of<4, 2>(rows) : tile_of<4, 1>(rows);
  if (lines) return tile_of<2, 1>(rows);
  return vecs == 4 ? tile_of<4>(rows) : vecs == 3 ? tile_of<3>(rows) : vecs == 2 ? tile_of<2>(rows) : tile_of<1>(rows);
}
// Any number of rows, in nearly equal tiles. ahead: as many bytes as b has, to be fetched meanwhile, or null; only for
// 2 or 4 vectors. A single tile fetches nothing: it reads b as fast as memory gives it, and the hardware sees that.
inline void panel(const char* a, size_t a_row, int rows, const char* b, size_t b_step, int vecs, int pairs, float* c,
                  size_t c_row, bool add, const char* ahead = nullptr) {
  const int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, lines = tiles > 3 ? 1 : vecs / 2;
  for (int t = 0; t < tiles; t++) {
    const int n = (rows + tiles - t - 1) / (tiles - t);
    const bool fetch = ahead && tiles > 1 && t * lines < vecs;
    tile_of(n, vecs, fetch ? lines : 0)(a, a_row, b, b_step, pairs, c, c_row, add, ahead + size_t(fetch ? t : 0) * lines * pairs * 64);
    a += n * a_row, c += n * c_row, rows -= n;
  }
}

// The units of N columns. Two narrow ones lie in the middle, so that two threads have equal halves.
struct Units {
  size_t columns, k;  // k even
  size_t whole() const { return (columns + UNIT - 1) / UNIT; }
  bool splits() const { return whole() % 2 && whole() > 1; }
  size_t count() const { return whole() + splits(); }
  size_t middle() const { return splits() ? whole() / 2 : count(); }  // the first of the narrow ones
  size_t first(size_t u) const { return u <= middle() ? u * UNIT : u == middle() + 1 ? u * UNIT - UNIT / 2 : (u - 1) * UNIT; }
  int vecs(size_t u) const { return u == middle() || u == middle() + 1 ? 2 : 4; }
  size_t offset(size_t u) const { return first(u) * k * 2; }  // bytes
  size_t bytes() const { return whole() * UNIT * k * 2; }
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

// Rows of a times unit u; finish(row, first column, vecs, sums) a row. fetch: bring in what follows in the stream.
template <class Finish>
inline void unit_rows(const char* a, size_t a_row, size_t rows, const char* packed, const Units& units, size_t u, bool fetch,
                      Finish finish) {
  alignas(64) float sums[CHUNK_ROWS * UNIT];
  const char* b = packed + units.offset(u);
  const int vecs = units.vecs(u);
  // Inputs of a block: it and the next one stay in the second-level cache; few rows soon need the next.
  const size_t most = rows <= 2 * MAX_ROWS ? 256 : 1024, blocks = (units.k + most - 1) / most, block = (units.k / 2 + blocks - 1) / blocks * 2;
  for (size_t k = 0; k < units.k; k += block) {
    const size_t n = std::min(block, units.k - k);
    panel(a + k * 2, a_row, int(rows), b, vecs * 64, vecs, int(n / 2), sums, UNIT, k > 0, fetch ? b + n * vecs * 32 : nullptr);
    b += n * vecs * 32;
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
