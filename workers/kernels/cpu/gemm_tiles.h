// Products of bf16 rows with packed bf16 columns in the tile registers of amx.h.
//
// Packed columns: the units of gemm.h; in a unit, 32 columns after 32 columns, [k / 32][2] tiles of [16 pairs][16
// columns][2], zeros where k or the columns end. A sum runs over k tile after tile in the order of order.h, whatever the
// number of rows: a row's result does not depend on its neighbours. Of several leaves each has whole tiles. (Inside a
// tile the first and the second products of the pairs are summed apart, so the bits differ from those of gemm.h.)
#pragma once
#include "amx.h"
#include "gemm.h"
#include "later.h"
#ifdef HAS_TILES

constexpr size_t BLOCK_ROWS = 16, BLOCK_INPUTS = 32, TILE_BYTES = 1024;

inline size_t tiled_inputs(size_t k) { return (k + BLOCK_INPUTS - 1) / BLOCK_INPUTS * BLOCK_INPUTS; }
inline size_t tiled_bytes(const Units& units) { return units.whole() * UNIT * tiled_inputs(units.k) * 2; }
inline size_t tiled_offset(const Units& units, size_t u) { return units.first(u) * tiled_inputs(units.k) * 2; }

// Copies the columns of unit u from weight (N, K) row-major.
inline void pack_tiled_unit(const bf16* weight, const Units& units, size_t u, char* packed) {
  char* to = packed + tiled_offset(units, u);
  const size_t begin = units.first(u), end = begin + size_t(units.vecs(u)) * LANES;
  for (size_t half = begin; half < end; half += 32)
    for (size_t block = 0; block < units.k; block += BLOCK_INPUTS)
      for (size_t first = half; first < half + 32; first += 16)
        for (size_t k = block; k < block + BLOCK_INPUTS; k += 2)
          for (size_t column = first; column < first + 16; column++, to += 4) {
            int32_t pair = 0;
            if (column < units.columns && k < units.k) memcpy(&pair, weight + column * units.k + k, 4);
            memcpy(to, &pair, 4);
          }
}

// Asks for LINES lines of what follows b, from line FROM on, where b comes from memory.
template <bool FETCH, int FROM, int LINES> inline __attribute__((always_inline)) void fetch_lines(const char* b) {
  if constexpr (FETCH)
#pragma GCC unroll 16
    for (int i = FROM; i < FROM + LINES; i++) _mm_prefetch(b + TILE_BYTES + i * 64, _MM_HINT_T0);
}
// 16 rows at a0, and with TWO 16 more at a1, times 32 columns and 32 inputs at b. Sums in tiles 0 to 3. What is asked for
// is spread over the step: asked for at once, it would keep the loads of tiles waiting.
template <bool TWO, bool FETCH> inline void tile_step(Tiles& tiles, const char* a0, const char* a1, size_t a_row, const char* b) {
  tiles.load<6>(b, 64);
  fetch_lines<FETCH, 0, 8>(b);
  tiles.load<4>(a0, a_row);
  tiles.multiply<0, 4, 6>();
  tiles.load<7>(b + TILE_BYTES, 64);
  fetch_lines<FETCH, 8, 8>(b);
  tiles.multiply<1, 4, 7>();
  fetch_lines<FETCH, 16, 8>(b);
  if constexpr (TWO) {
    tiles.load<5>(a1, a_row);
    tiles.multiply<2, 5, 6>();
  }
  fetch_lines<FETCH, 24, 8>(b);
  if constexpr (TWO) tiles.multiply<3, 5, 7>();
}
// Weights to come, brought into the second-level cache: some with each step, as many at once would only queue up.
struct Ahead {
  const char *at = nullptr, *end = nullptr;
  size_t lines = 0;  // a step
  void some() {
    for (size_t n = lines; n && at < end; n--, at += 64) _mm_prefetch(at, _MM_HINT_T1);
  }
};
// The rows from first0 on, and with TWO those from first1 on, of a times 32 columns; c rows are UNIT wide. tails: the last
// inputs of every row, filled up to 32 with zeros, where k is no multiple of 32.
template <bool TWO, bool FETCH>
inline void tile_block(Tiles& tiles, const char* a, size_t a_row, size_t k, const char* tails, size_t first0, size_t first1, const char* b, float* c, Later& later, Ahead& ahead) {
  const char *a0 = a + first0 * a_row, *a1 = a + first1 * a_row;
  const size_t each = later.each(k / BLOCK_INPUTS);
  tiles.zero<0>(), tiles.zero<1>();
  if constexpr (TWO) tiles.zero<2>(), tiles.zero<3>();
  for (; k >= BLOCK_INPUTS; k -= BLOCK_INPUTS, a0 += 64, a1 += 64, b += 2 * TILE_BYTES) {
    tile_step<TWO, FETCH>(tiles, a0, a1, a_row, b);
    later.some(each);
    ahead.some();
  }
  if (k) tile_step<TWO, FETCH>(tiles, tails + first0 * 64, tails + first1 * 64, 64, b);
  later.all();
  tiles.store<0>(c + first0 * UNIT, UNIT * 4);
  tiles.store<1>(c + first0 * UNIT + 16, UNIT * 4);
  if constexpr (TWO) {
    tiles.store<2>(c + first1 * UNIT, UNIT * 4);
    tiles.store<3>(c + first1 * UNIT + 16, UNIT * 4);
  }
}
// Rows of a times unit u, as unit_sums of gemm.h; at most CHUNK_ROWS rows. More than 16 go in blocks of 16, the last of which
// may start inside the one before and makes the same sums again. finish(rows, first row, first column in the unit) says what
// becomes of sums that have all their inputs; rows are joined, and so finished, later.
template <class Finish>
inline void tiled_unit_sums(const char* packed, const Units& units, size_t u, const SumOrder& order, const char* a, size_t a_row, size_t rows, float* sums, Later& later, Finish finish, Ahead ahead = {}) {
  alignas(64) char tails[CHUNK_ROWS * 64];
  const size_t block_rows = std::min(rows, BLOCK_ROWS), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, tail = units.k % BLOCK_INPUTS, level = rows * UNIT;
  for (size_t r = 0; tail && r < rows; r++) {
    memset(tails + r * 64, 0, 64);
    memcpy(tails + r * 64, a + r * a_row + (units.k - tail) * 2, tail * 2);
  }
  TileShapes shapes;
  for (int t = 0; t < 6; t++) shapes.set(t, int(block_rows), 64);  // sums and rows of a
  for (int t = 6; t < 8; t++) shapes.set(t, 16, 64);
  Tiles tiles(shapes);
  const auto first = [&](size_t block) { return std::min(block * BLOCK_ROWS, rows - block_rows); };
  const char* b = packed + tiled_offset(units, u);
  const size_t steps = size_t(units.vecs(u)) / 2 * ((blocks + 1) / 2) * (units.k / BLOCK_INPUTS) + 1;
  ahead.lines = size_t(ahead.end - ahead.at) / 64 / steps + 1;
  for (size_t column = 0; column < size_t(units.vecs(u)) * 16; column += TILED_COLUMNS) {
    float* to = sums + column;
    const char* x = a;
    for (long l = 0; l < order.count; to += long(level) * (1 - order.leaves[l++].joins)) {
      const size_t k = size_t(order.leaves[l].inputs);
      for (size_t i = 0; i < blocks; i += 2) {
        const bool two = i + 1 < blocks;
        const auto run = i == 0 ? (two ? tile_block<true, true> : tile_block<false, true>) : two ? tile_block<true, false> : tile_block<false, false>;
        run(tiles, x, a_row, k, tails, first(i), two ? first(i + 1) : 0, b, to, later, ahead);
        const size_t row0 = i * BLOCK_ROWS;  // rows before it have been made and may have been joined
        SumRows made;
        made.sums = to + row0 * UNIT, made.count = std::min(rows - row0, 2 * BLOCK_ROWS), made.joins = order.leaves[l].joins, made.level = level;
        if (made.joins) made.finish = join_row;
        if (l + 1 == order.count) finish(made, row0, column);
        if (made.finish) later.add(made);
      }
      x += k * 2, b += tiled_inputs(k) * 64;
    }
  }
}
#else
inline bool can_use_tiles() { return false; }
#endif
