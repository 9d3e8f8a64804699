// Products of rows of 16-bit integers with columns of 8-bit weights that share one scale a column, in the tile registers
// of amx.h.
//
// Every group of inputs of a row has a scale: value = scale * (256 * upper + lower), both bytes with a sign, half to even.
// A group is a leaf of order.h or, of a leaf of more than 2,048 inputs, a part of it (packed_quantized.py): so it is the
// same one on every rank that may have it. Both bytes are rows of a tile: its sums are integers, exact in any order and
// far from 2^31 (2,048 * 128 * 127 < 2^25). Groups of a leaf add up as floats, leaves in the order of order.h. So a row's
// result depends neither on its neighbours nor on which rank has which inputs.
//
// Packed columns: the units of gemm.h; in a unit, 32 columns after 32 columns, the groups one after the other, filled up
// with zeros to 32 inputs, of each [inputs / 4][column][4]; then the float scales of the columns. Two tiles take 64 inputs,
// and what lies behind where 32 are left, as rows have zeros there: 1 KiB behind the last unit is read too.
#pragma once
#include "amx.h"
#ifdef HAS_TILES
#include "gemm.h"
#include "quant_rows.h"

constexpr size_t BYTE_INPUTS = 64, BYTE_ROWS = 8;  // inputs and rows that fill a tile: 16 rows of bytes
constexpr float BYTES_END = 127 * 256;             // what the largest value of a group becomes

inline size_t rounded_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Rows as the tiles take them, BYTE_ROWS together: the scales [groups][rows], to a whole cache line, then for every 64 inputs
// of a group a tile, of every row the upper and the lower bytes. The last rows of the last block may be anything.
struct ByteRows {
  const long* widths;  // inputs of each group
  size_t groups;
  size_t tiles_at() const { return rounded_up(groups * BYTE_ROWS * sizeof(float), 64); }
  size_t block_bytes() const {
    size_t bytes = tiles_at();
    for (size_t g = 0; g < groups; g++) bytes += tiles_of(widths[g]) * 1024;
    return bytes;
  }
  static size_t tiles_of(long width) { return (size_t(width) + BYTE_INPUTS - 1) / BYTE_INPUTS; }

  // Row r of those at `rows`. A value that is not finite makes its group's scale NaN or infinite, and with it every product.
  void quantize(const bf16* x, char* rows, size_t r) const {
    char* block = rows + r / BYTE_ROWS * block_bytes();
    float* scales = (float*)block + r % BYTE_ROWS;
    char* to = block + tiles_at() + r % BYTE_ROWS * 128;
    for (size_t g = 0; g < groups; x += widths[g++]) {
      const long width = widths[g];
      __m512i magnitudes = _mm512_setzero_si512();
      for (long i = 0; i < width; i += 32)
        magnitudes = _mm512_max_epu16(magnitudes, _mm512_and_si512(values(x, i, width), _mm512_set1_epi16(0x7fff)));
      const float max = widen(largest_of(magnitudes));
      const bool is_zero = max < TOO_SMALL;
      const __m512 inverse = _mm512_set1_ps(is_zero ? 0.f : BYTES_END / max);
      scales[g * BYTE_ROWS] = is_zero ? 0.f : max / BYTES_END;
      for (long i = 0; i < width; i += BYTE_INPUTS, to += 1024)
        for (long j = 0; j < long(BYTE_INPUTS); j += 32) {
          const __m512i codes = scaled_codes(values(x, i + j, width), inverse);
          // The lower byte counts from -128 to 127, so the upper one is that of the nearest multiple of 256.
          const __m512i upper = _mm512_srai_epi16(_mm512_add_epi16(codes, _mm512_set1_epi16(128)), 8);
          _mm256_store_si256((__m256i*)(to + j), _mm512_cvtepi16_epi8(upper));
          _mm256_store_si256((__m256i*)(to + 64 + j), _mm512_cvtepi16_epi8(codes));
        }
    }
  }

 private:
  static __m512i values(const bf16* x, long i, long width) {  // 32 from i on, zeros from `width` on
    const long left = width - i;
    return left >= 32 ? _mm512_loadu_si512(x + i) : _mm512_maskz_loadu_epi16(left > 0 ? (1u << left) - 1 : 0, x + i);
  }
  static __m512i scaled_codes(__m512i values, __m512 inverse) {  // of 32 bf16 values, in 16 bits each
    const __m256i first = _mm512_cvtepi32_epi16(::scaled_codes(_mm512_castsi512_si256(values), inverse));
    const __m256i second = _mm512_cvtepi32_epi16(::scaled_codes(_mm512_extracti64x4_epi64(values, 1), inverse));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
};

struct Int8Tiles {
  // codes (N, groups, 32) in -127..127, scales (N,); columns from N on are zero.
  static void pack(const int8_t* codes, const float* scales, size_t columns, size_t first, size_t groups, int vecs, char* unit) {
    const size_t width = size_t(vecs) * 16, inputs = groups * GROUP;
    float* to = (float*)(unit + width * inputs);
    memset(unit, 0, width * inputs);
    for (size_t j = 0; j < width; j++) {
      to[j] = first + j < columns ? scales[first + j] : 0.f;
      if (first + j >= columns) continue;
      const int8_t* from = codes + (first + j) * inputs;
      char* column = unit + j / 32 * 32 * inputs + j % 32 * 4;
      for (size_t k = 0; k < inputs; k += 4) memcpy(column + k * 32, from + k, 4);
    }
  }

  // The rows of a block at a0, with TWO also those of one at a1, times 32 columns at b, `count` tiles deep: sums in tiles 0
  // to 3. With FETCH the columns come from memory.
  template <bool TWO, bool FETCH>
  static void block(Tiles& tiles, const char* a0, const char* a1, const char* b, size_t count) {
    tiles.zero<0>(), tiles.zero<1>();
    if constexpr (TWO) tiles.zero<2>(), tiles.zero<3>();
    for (; count; count--, a0 += 1024, a1 += 1024, b += 2048) {
      if constexpr (FETCH) {
#pragma GCC unroll 32
        for (size_t i = 0; i < 2048; i += 64) _mm_prefetch(b + STREAM_AHEAD + i, _MM_HINT_T1), _mm_prefetch(b + 1024 + i, _MM_HINT_T0);
      }
      tiles.load<6>(b, 128);
      tiles.load<7>(b + 64, 128);
      tiles.load<4>(a0, 64);
      tiles.multiply_bytes<0, 4, 6>();
      tiles.multiply_bytes<1, 4, 7>();
      if constexpr (TWO) {
        tiles.load<5>(a1, 64);
        tiles.multiply_bytes<2, 5, 6>();
        tiles.multiply_bytes<3, 5, 7>();
      }
    }
  }
  // Both sums (16, 32), one behind the other.
  static void store(Tiles& tiles, bool two, int32_t* sums) {
    tiles.store<0>(sums, 128);
    tiles.store<1>(sums + 16, 128);
    if (two) {
      tiles.store<2>(sums + 512, 128);
      tiles.store<3>(sums + 528, 128);
    }
  }

  // Sums of a group in tiles become sums of floats: 32 columns of `count` rows, one block or two.
  struct Finish {
    size_t count;
    bool first, last;  // group of its leaf: over what is there; times the scales of the columns, and then joined
    long joins;        // as in Target of gemm.h, as `level`
    size_t level;
    const float *row_scales[2], *column_scales;
    float* to;

    void operator()(const int32_t* products) const {
      for (size_t r = 0; r < count; r++) {
        const int32_t* sums = products + r * 64;  // of the upper, then of the lower bytes
        const __m512 scale = _mm512_set1_ps(row_scales[r / BYTE_ROWS][r % BYTE_ROWS]);
#pragma GCC unroll 2
        for (size_t v = 0; v < 32; v += 16) {
          const __m512 upper = _mm512_cvtepi32_ps(_mm512_load_si512(sums + v)), lower = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 32 + v));
          const __m512 both = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.f), lower);
          float* at = to + r * UNIT + v;
          __m512 total = first ? _mm512_mul_ps(both, scale) : _mm512_fmadd_ps(both, scale, _mm512_loadu_ps(at));
          if (last) total = _mm512_mul_ps(total, _mm512_loadu_ps(column_scales + v));
          for (long j = 0; j < joins; j++) at -= level, total = _mm512_add_ps(_mm512_loadu_ps(at), total);
          _mm512_storeu_ps(at, total);
        }
      }
    }
  };

  // A group of inputs of 32 columns.
  struct Part {
    const char* columns;
    size_t at, group, width;  // where its tiles lie in a block of rows; its number; inputs, filled up
    bool first, last;         // group of its leaf
    long joins;
    const float* scales;
    float* to;
  };
  // body(part) for every one of a unit, as they lie in memory.
  template <class F>
  static void each_part(const ByteRows& form, size_t count, const SumOrder& order, const char* unit, int vecs, float* sums, F body) {
    const float* scales = (const float*)(unit + vecs * 16 * order.inputs());
    for (int v = 0; v < vecs; v += 2, sums += 32, scales += 32) {
      size_t at = form.tiles_at(), g = 0;
      float* to = sums;
      for (long l = 0; l < order.count; to += long(count * UNIT) * (1 - order.leaves[l++].joins))
        for (long left = order.leaves[l].inputs, all = left; left > 0; g++) {
          const size_t width = rounded_up(size_t(form.widths[g]), GROUP);
          const bool is_first = left == all, is_last = (left -= long(width)) == 0;
          body(Part{unit, at, g, width, is_first, is_last, is_last ? order.leaves[l].joins : 0, scales, to});
          at += form.tiles_of(form.widths[g]) * 1024, unit += width * 32;
        }
    }
  }

  // Rows made by ByteRows times a unit, as quantized_unit of quant_rows.h; at most CHUNK_ROWS rows, in pairs of blocks. What
  // tiles leave is finished while the next ones are at work, before these store theirs: loads would wait for stores in
  // front of them.
  static void unit_sums(const ByteRows& form, const char* rows, size_t count, const SumOrder& order, const char* unit, int vecs, float* sums) {
    alignas(64) int32_t products[2 * 16 * 32];
    Finish pending{};
    const size_t block_bytes = form.block_bytes();
    TileShapes shapes;
    for (int t = 0; t < 6; t++) shapes.set(t, int(2 * std::min(count, BYTE_ROWS)), 64);  // sums and rows
    for (int t = 6; t < 8; t++) shapes.set(t, 16, 64);
    Tiles tiles(shapes);
    each_part(form, count, order, unit, vecs, sums, [&](const Part& part) {
      for (size_t r = 0; r < count; r += 2 * BYTE_ROWS) {
        const char *a0 = rows + r / BYTE_ROWS * block_bytes, *a1 = a0 + block_bytes;
        const bool two = r + BYTE_ROWS < count;
        const auto run = r ? (two ? block<true, false> : block<false, false>) : two ? block<true, true> : block<false, true>;
        run(tiles, a0 + part.at, a1 + part.at, part.columns, form.tiles_of(long(part.width)));
        pending(products);
        store(tiles, two, products);
        const float *scales0 = (const float*)a0 + part.group * BYTE_ROWS, *scales1 = (const float*)a1 + part.group * BYTE_ROWS;
        pending = {std::min(count - r, 2 * BYTE_ROWS), part.first, part.last, part.joins, count * UNIT, {scales0, scales1}, part.scales, part.to + r * UNIT};
      }
    });
    pending(products);
  }
};
#endif
