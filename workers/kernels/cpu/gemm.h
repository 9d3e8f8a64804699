// Products of rows with packed columns on the vectors of lanes.h, both bf16 or both float, with float sums.
//
// Packed columns: units of 4 vectors (an odd one in two of 2, so that two threads end together); inside a
// unit [k / 2][column][2] of bf16 or [k][column] of float, one linear stream. A sum runs over the inputs in the
// order of order.h, whatever the number of rows: a row's result does not depend on its neighbours.
#pragma once
#include "lanes.h"
#include "order.h"
#ifdef HAS_PRODUCTS

constexpr int UNIT = 4 * LANES;  // columns
constexpr int CHUNK_ROWS = 96;   // rows that pass over a unit while it is in the second-level cache

// What a step along the inputs takes: four bytes of a row and of every column.
struct Pairs {  // of bf16
  static constexpr size_t INPUTS = 2;
  template <int ROWS, int VECS> static inline __attribute__((always_inline)) void multiply(Sums (&sum)[ROWS][VECS], const char* a, size_t a_row, const char* b) {
    multiply_pair(sum, a, a_row, b);
  }
};
struct Floats {
  static constexpr size_t INPUTS = 1;
  template <int ROWS, int VECS> static inline __attribute__((always_inline)) void multiply(Sums (&sum)[ROWS][VECS], const char* a, size_t a_row, const char* b) {
    multiply_float(sum, a, a_row, b);
  }
};

// Where sums go: rows of c, c_row floats apart. add: to what is there. joins: then to the sums that lie `level`, 2 `level`
// .. floats before c, one after the other, and they go where the last of those lay.
struct Target {
  float* c;
  size_t c_row;
  bool add;
  long joins = 0;
  size_t level = 0;
};

// Sums (ROWS, VECS * LANES) of a (ROWS, steps) * b; a: rows of steps, b: [steps][VECS * LANES] at b_step bytes.
// Meanwhile LINES cache lines a step come into the second-level cache from `ahead` on.
template <class Step, int ROWS, int VECS, int LINES>
static void tile(const char* a, size_t a_row, const char* b, size_t b_step, int steps, const Target& to, const char* ahead) {
  Sums sum[ROWS][VECS];
  float* c = to.c;
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) sum[r][v] = to.add ? load_sums(c + r * to.c_row + v * LANES) : no_sums();
  for (int k = 0; k < steps; k++, a += 4, b += b_step, ahead += LINES * 64) {
    for (int i = 0; i < LINES; i++) _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
    Step::multiply(sum, a, a_row, b);
  }
  for (long j = 0; j < to.joins; j++) {
    c -= to.level;
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECS; v++) sum[r][v] = add_sums(load_sums(c + r * to.c_row + v * LANES), sum[r][v]);
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) store_sums(c + r * to.c_row + v * LANES, sum[r][v]);
}

using Tile = void (*)(const char*, size_t, const char*, size_t, int, const Target&, const char*);
template <class Step, int VECS, int LINES = 0, int ROWS = 1> inline Tile tile_of(int rows) {
  if constexpr (ROWS < MAX_ROWS)
    if (rows > ROWS) return tile_of<Step, VECS, LINES, ROWS + 1>(rows);
  return tile<Step, ROWS, VECS, LINES>;
}
template <class Step> inline Tile tile_of(int rows, int vecs, int lines) {
  if (lines && vecs == 4) return lines == 2 ? tile_of<Step, 4, 2>(rows) : tile_of<Step, 4, 1>(rows);
  if (lines) return tile_of<Step, 2, 1>(rows);
  return vecs == 4 ? tile_of<Step, 4>(rows) : vecs == 3 ? tile_of<Step, 3>(rows) : vecs == 2 ? tile_of<Step, 2>(rows) : tile_of<Step, 1>(rows);
}
// Any number of rows, in nearly equal tiles. ahead: as many bytes as b has, to be fetched meanwhile, or null; only for
// 2 or 4 vectors. A single tile fetches nothing: it reads b as fast as memory gives it, and the hardware sees that.
template <class Step>
inline void panel(const char* a, size_t a_row, int rows, const char* b, size_t b_step, int vecs, int steps, Target to, const char* ahead = nullptr) {
  const int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, all = vecs * LANES / 16;  // cache lines of a step of b
  const int lines = tiles > 3 ? 1 : std::max(1, all / 2);
  for (int t = 0; t < tiles; t++) {
    const int n = (rows + tiles - t - 1) / (tiles - t);
    const bool fetch = ahead && tiles > 1 && t * lines < all;
    tile_of<Step>(n, vecs, fetch ? lines : 0)(a, a_row, b, b_step, steps, to, ahead + size_t(fetch ? t : 0) * lines * steps * 64);
    a += n * a_row, to.c += n * to.c_row, rows -= n;
  }
}
// Products of bf16 rows with columns that lie packed, as attention has them.
inline void panel(const char* a, size_t a_row, int rows, const char* b, size_t b_step, int vecs, int pairs, float* c, size_t c_row, bool add) {
  panel<Pairs>(a, a_row, rows, b, b_step, vecs, pairs, {c, c_row, add});
}

// The units of N columns. Two narrow ones lie in the middle, so that two threads have equal halves.
struct Units {
  size_t columns, k;   // of bf16 k is even
  size_t element = 2;  // bytes of a weight
  size_t whole() const { return (columns + UNIT - 1) / UNIT; }
  bool splits() const { return whole() % 2 && whole() > 1; }
  size_t count() const { return whole() + splits(); }
  size_t middle() const { return splits() ? whole() / 2 : count(); }  // the first of the narrow ones
  size_t first(size_t u) const { return u <= middle() ? u * UNIT : u == middle() + 1 ? u * UNIT - UNIT / 2 : (u - 1) * UNIT; }
  int vecs(size_t u) const { return u == middle() || u == middle() + 1 ? 2 : 4; }
  size_t offset(size_t u) const { return first(u) * k * element; }  // bytes
  size_t bytes() const { return whole() * UNIT * k * element; }
};

// Copies the columns of unit u from weight (N, K) row-major; columns from N on are zero.
inline void pack_unit(const char* weight, const Units& units, size_t u, char* packed) {
  const size_t width = size_t(units.vecs(u)) * LANES, first = units.first(u), steps = units.k * units.element / 4;
  char* to = packed + units.offset(u);
  size_t done = 0;  // steps of all columns
#ifdef __AVX512BF16__
  if (first + width <= units.columns) {
    done = steps / 16 * 16;
    for (size_t j = 0; j < width; j += 16)
      for (size_t k = 0; k < done; k += 16) {
        __m512i rows[16];
        for (size_t i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(weight + ((first + j + i) * steps + k) * 4);
        transpose_pairs(rows);
        for (size_t i = 0; i < 16; i++) _mm512_storeu_si512(to + ((k + i) * width + j) * 4, rows[i]);
      }
  }
#endif
  for (size_t j = 0; j < width; j++)
    for (size_t k = done; k < steps; k++) {
      int32_t step = 0;
      if (first + j < units.columns) memcpy(&step, weight + ((first + j) * steps + k) * 4, 4);
      memcpy(to + (k * width + j) * 4, &step, 4);
    }
}

// Rows of a times unit u: the sums of every node of `order` (nodes, rows, UNIT); below them is room for all its levels.
// fetch: bring in what follows in the stream.
template <class Step>
inline void unit_sums(const char* packed, const Units& units, size_t u, const SumOrder& order, const char* a, size_t a_row, size_t rows, bool fetch, float* sums) {
  const char* b = packed + units.offset(u);
  const int vecs = units.vecs(u);
  const size_t width = size_t(vecs) * LANES, level = rows * UNIT;
  // Inputs of a block: it and the next one stay in the second-level cache; few rows soon need the next.
  const size_t most = (rows <= 2 * MAX_ROWS ? 256 : 1024) / (2 / Step::INPUTS);
  for (long l = 0; l < order.count; l++) {
    const size_t inputs = size_t(order.leaves[l].inputs), blocks = (inputs + most - 1) / most;
    const size_t block = (inputs / Step::INPUTS + blocks - 1) / blocks * Step::INPUTS;
    for (size_t k = 0; k < inputs; k += block) {
      const size_t n = std::min(block, inputs - k), steps = n / Step::INPUTS;
      const long joins = k + n == inputs ? order.leaves[l].joins : 0;
      panel<Step>(a, a_row, int(rows), b, width * 4, vecs, int(steps), {sums, UNIT, k > 0, joins, level}, fetch ? b + steps * width * 4 : nullptr);
      a += steps * 4, b += steps * width * 4;
    }
    sums += long(level) * (1 - order.leaves[l].joins);
  }
}
#endif
