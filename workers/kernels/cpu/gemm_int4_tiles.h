// The products of gemm_int4.h in the tile registers of amx.h: the same integers, and floats added in the same order, so the
// same bits.
//
// Codes are unpacked once for all rows, a few groups at a time. What takes time is to scale the sums of every group, which go
// through memory: tiles multiply a batch of groups and rows while the vectors scale the batch before, step by step in turn.
#pragma once
#include "amx.h"
#ifdef HAS_TILES
#include "gemm_int4.h"

constexpr size_t INT4_TILES_FROM = 32;  // rows; of fewer gemm_int4.h is faster: next to tiles vectors work at half speed

// 16 columns of a group: codes [8][16][4].
struct alignas(64) Int4Columns {
  static constexpr size_t COUNT = 16;
  char codes[GROUP * COUNT];
  float scales[COUNT], minima[COUNT];

  // All groups of `vecs` times as many, one group after the other.
  static void unpack(const char* from, size_t groups, int vecs, Int4Columns* to) {
    const __m512i four_bits = _mm512_set1_epi8(15);
    const auto halves = [&] { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); };
    for (size_t g = 0; g < groups; g++, to += vecs) {
      for (int i = 0; i < 4; i++)
        for (int v = 0; v < vecs; v++, from += 64) {
          const __m512i both = _mm512_loadu_si512(from);
          _mm512_store_si512(to[v].codes + i * 128, _mm512_and_si512(both, four_bits));
          _mm512_store_si512(to[v].codes + i * 128 + 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), four_bits));
        }
      for (int v = 0; v < vecs; v++, from += 32) _mm512_store_ps(to[v].scales, halves());
      for (int v = 0; v < vecs; v++, from += 32) _mm512_store_ps(to[v].minima, halves());
    }
  }
};

// A unit of VECS times 16 columns and at most CHUNK_ROWS rows.
template <int VECS> class Int4Tiles {
 public:
  // As quantized_unit of quant_rows.h. More than 16 rows go in blocks of 16, the last of which may start inside the one
  // before.
  static void unit_sums(const RowGroup* rows, size_t count, size_t row_groups, const SumOrder& order, const char* unit, float* sums) {
    const size_t height = std::min(count, BLOCK_ROWS);
    TileShapes shapes;
    for (int t = 0; t < 4; t++) shapes.set(t, int(height), 64);                               // sums
    for (int t = 4; t < 6; t++) shapes.set(t, int(height), GROUP), shapes.set(t + 2, GROUP / 4, 64);  // rows, columns
    Tiles tiles(shapes);
    Int4Tiles walk(tiles, count, row_groups);
    for (long l = 0; l < order.count; l++) {
      const size_t groups = size_t(order.leaves[l].inputs) / GROUP, pieces = (groups + MOST_GROUPS - 1) / MOST_GROUPS;
      for (size_t piece = 0, left = groups; piece < pieces; piece++) {
        const size_t n = (left + pieces - piece - 1) / (pieces - piece);
        unit = walk.add(rows, unit, n, piece == 0, sums);
        rows += n, left -= n;
      }
      sums = joined(sums, count, VECS * 16, order.leaves[l].joins) + count * UNIT;
    }
  }

 private:
  static constexpr size_t BLOCK_ROWS = 16;
  static constexpr size_t MOST_GROUPS = 8;             // unpacked at once, to stay in the first-level cache
  static constexpr size_t PRODUCTS = 8;                // of tiles in a batch
  static constexpr size_t BATCH_GROUPS = PRODUCTS / VECS;
  static constexpr size_t STEP_ROWS = 4;               // whose sums, with scales and minima of columns, fit the registers
  struct Batch {
    const RowGroup* block;  // its rows
    size_t skipped, rows;   // those that are in the block before as well, and the others
    const Int4Columns* columns;
    size_t groups;
    float* sums;  // of the others
  };

  Tiles& tiles;
  const size_t count, row_groups, height, blocks;
  Int4Columns columns[MOST_GROUPS * VECS];
  alignas(64) int32_t products[2][PRODUCTS][BLOCK_ROWS * 16];  // of a batch, and of the next
  // What is made meanwhile in every step: the next batch, and lines of the stream come into the cache.
  Batch next;
  size_t made = 0, wanted = 0, a_step = 0;
  int32_t (*to)[BLOCK_ROWS * 16] = nullptr;
  const char* ahead = nullptr;
  const int lines;

  Int4Tiles(Tiles& tiles, size_t count, size_t row_groups)
      : tiles(tiles), count(count), row_groups(row_groups), height(std::min(count, BLOCK_ROWS)), blocks((count + BLOCK_ROWS - 1) / BLOCK_ROWS),
        lines(int((VECS * 5 * STEP_ROWS + count - 1) / count)) {}  // 16 columns of a group are five lines

  // Adds the next groups; returns where the unit goes on.
  const char* add(const RowGroup* rows, const char* unit, size_t groups, bool is_first, float* sums) {
    Int4Columns::unpack(unit, groups, VECS, columns);
    unit += groups * VECS * 16 * Int4::GROUP_BYTES;
    ahead = unit;
    const size_t batches = (groups + BATCH_GROUPS - 1) / BATCH_GROUPS, all = blocks * batches;
    const auto plan = [&](size_t i) {
      const size_t own = i / batches * BLOCK_ROWS, first = std::min(own, count - height), g = i % batches * BATCH_GROUPS;
      next = {rows + first * row_groups + g, own - first, std::min(BLOCK_ROWS, count - own), columns + g * VECS, std::min(BATCH_GROUPS, groups - g), sums + own * UNIT};
      made = 0, wanted = next.groups * VECS, to = products[i % 2];
    };
    plan(0);
    while (made < wanted) make();
    for (size_t i = 0; i < all; i++) {
      const Batch batch = next;
      if (i + 1 < all) plan(i + 1);
      const size_t steps = (batch.rows + STEP_ROWS - 1) / STEP_ROWS * batch.groups;
      a_step = (wanted - made + steps - 1) / steps;
      const bool is_new = is_first && i % batches == 0;
      for (size_t r = 0; r < batch.rows; r += STEP_ROWS) scale_of(batch.rows - r)(*this, batch, r, products[i % 2][0], is_new);
      while (made < wanted) make();
    }
    return unit;
  }

  void meanwhile() {
    for (size_t i = 0; i < a_step && made < wanted; i++) make();
    for (int i = 0; i < lines; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
  }
  // The next product of the next batch.
  void make() {
    switch (made % 8) {
      case 0: return make<0>();
      case 1: return make<1>();
      case 2: return make<2>();
      case 3: return make<3>();
      case 4: return make<4>();
      case 5: return make<5>();
      case 6: return make<6>();
      default: return make<7>();
    }
  }
  template <int I> void make() {
    constexpr int SUM = I % 4, ROW = 4 + I / VECS % 2, COLUMN = 6 + I % 2;
    if constexpr (I % VECS == 0) tiles.load<ROW>(next.block + I / VECS, row_groups * sizeof(RowGroup));
    tiles.zero<SUM>();
    tiles.load<COLUMN>(next.columns[I].codes, 64);
    tiles.multiply_bytes<SUM, ROW, COLUMN>();
    tiles.store<SUM>(to[I], 64);
    made++;
  }

  // Adds what a batch has of ROWS rows.
  template <int ROWS> static void scale(Int4Tiles& walk, const Batch& batch, size_t first, const int32_t* products, bool is_new) {
    const RowGroup* x = batch.block + (batch.skipped + first) * walk.row_groups;
    float* sums = batch.sums + first * UNIT;
    products += (batch.skipped + first) * 16;
    __m512 total[ROWS][VECS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) total[r][v] = is_new ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * UNIT + v * 16);
    for (size_t g = 0; g < batch.groups; g++, x++, products += VECS * BLOCK_ROWS * 16) {
      walk.meanwhile();
      const Int4Columns* columns = batch.columns + g * VECS;
      __m512 scale[VECS], minimum[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) scale[v] = _mm512_load_ps(columns[v].scales), minimum[v] = _mm512_load_ps(columns[v].minima);
      const RowGroup* row = x;
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++, row += walk.row_groups) {
        const __m512 row_scale = _mm512_set1_ps(row->scale), row_sum = _mm512_set1_ps(row->sum);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) {
          const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(products + (v * BLOCK_ROWS + r) * 16)), row_scale);
          total[r][v] = _mm512_fmadd_ps(scaled, scale[v], _mm512_fmadd_ps(row_sum, minimum[v], total[r][v]));
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) _mm512_storeu_ps(sums + r * UNIT + v * 16, total[r][v]);
  }
  static auto scale_of(size_t rows) {
    return rows >= 4 ? scale<4> : rows == 3 ? scale<3> : rows == 2 ? scale<2> : scale<1>;
  }
};
#endif
