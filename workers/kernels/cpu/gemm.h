// Products of bf16 rows with packed bf16 columns on the vectors of lanes.h, with float sums.
//
// Packed columns: units of 4 vectors (an odd one in two of 2, so that two threads end together); inside a
// unit [k / 2][column][2], one linear stream. A sum runs over k in order in one accumulator, whatever the
// number of rows: a row's result does not depend on its neighbours.
#pragma once
#include "lanes.h"
#ifdef HAS_PRODUCTS

constexpr int UNIT = 4 * LANES;  // columns
constexpr int CHUNK_ROWS = 96;   // rows that pass over a unit while it is in the second-level cache

// c (ROWS, VECS * LANES) = [c +] a (ROWS, 2 pairs) * b; a: rows of pairs, b: [pairs][VECS * LANES] at b_step bytes.
// Meanwhile LINES cache lines a pair come into the second-level cache from `ahead` on.
template <int ROWS, int VECS, int LINES>
static void tile(const char* a, size_t a_row, const char* b, size_t b_step, int pairs, float* c, size_t c_row,
                 bool add, const char* ahead) {
  Sums sum[ROWS][VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) sum[r][v] = add ? load_sums(c + r * c_row + v * LANES) : no_sums();
  for (int k = 0; k < pairs; k++, a += 4, b += b_step, ahead += LINES * 64) {
    for (int i = 0; i < LINES; i++) _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
    multiply_pair(sum, a, a_row, b);
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) store_sums(c + r * c_row + v * LANES, sum[r][v]);
}

using Tile = void (*)(const char*, size_t, const char*, size_t, int, float*, size_t, bool, const char*);
template <int VECS, int LINES = 0, int ROWS = 1> inline Tile tile_of(int rows) {
  if constexpr (ROWS < MAX_ROWS)
    if (rows > ROWS) return tile_of<VECS, LINES, ROWS + 1>(rows);
  return tile<ROWS, VECS, LINES>;
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
  const int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, all = vecs * LANES / 16;  // cache lines of a pair of rows of b
  const int lines = tiles > 3 ? 1 : std::max(1, all / 2);
  for (int t = 0; t < tiles; t++) {
    const int n = (rows + tiles - t - 1) / (tiles - t);
    const bool fetch = ahead && tiles > 1 && t * lines < all;
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

// Copies the columns of unit u from weight (N, K) row-major; columns from N on are zero.
inline void pack_unit(const bf16* weight, const Units& units, size_t u, char* packed) {
  const size_t width = size_t(units.vecs(u)) * LANES, first = units.first(u);
  char* to = packed + units.offset(u);
  size_t done = 0;  // inputs of all columns
#ifdef __AVX512BF16__
  if (first + width <= units.columns) {
    done = units.k / 32 * 32;
    for (size_t j = 0; j < width; j += 16)
      for (size_t k = 0; k < done; k += 32) {
        __m512i pairs[16];
        for (size_t i = 0; i < 16; i++) pairs[i] = _mm512_loadu_si512(weight + (first + j + i) * units.k + k);
        transpose_pairs(pairs);
        for (size_t i = 0; i < 16; i++) _mm512_storeu_si512(to + ((k / 2 + i) * width + j) * 4, pairs[i]);
      }
  }
#endif
  for (size_t j = 0; j < width; j++)
    for (size_t k = done; k < units.k; k += 2) {
      int32_t pair = 0;
      if (first + j < units.columns) memcpy(&pair, weight + (first + j) * units.k + k, 4);
      memcpy(to + (k / 2 * width + j) * 4, &pair, 4);
    }
}

// sums (rows, UNIT) = rows of a times unit u. fetch: bring in what follows in the stream.
inline void unit_sums(const char* packed, const Units& units, size_t u, const char* a, size_t a_row, size_t rows, bool fetch, float* sums) {
  const char* b = packed + units.offset(u);
  const int vecs = units.vecs(u);
  const size_t width = size_t(vecs) * LANES;
  // Inputs of a block: it and the next one stay in the second-level cache; few rows soon need the next.
  const size_t most = rows <= 2 * MAX_ROWS ? 256 : 1024, blocks = (units.k + most - 1) / most, block = (units.k / 2 + blocks - 1) / blocks * 2;
  for (size_t k = 0; k < units.k; k += block) {
    const size_t n = std::min(block, units.k - k);
    panel(a + k * 2, a_row, int(rows), b, width * 4, vecs, int(n / 2), sums, UNIT, k > 0, fetch ? b + n * width * 2 : nullptr);
    b += n * width * 2;
  }
}
#endif
