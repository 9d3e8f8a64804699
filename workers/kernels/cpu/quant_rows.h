// Rows of activations as 8-bit integers, for products with quantized columns.
//
// Every group of at most 32 inputs of a row has a scale of its own (as Q8_0 and Q8_1 of llama.cpp): value = scale * code
// with code = round(value * 127 / max|value|), half to even. The product of a group is a sum of integers, exact in any
// order; groups add up as floats, in the order of order.h. So a row's result depends neither on its neighbours nor, as
// groups end where leaves do, on which rank has which inputs.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include "order.h"
#include "simd.h"

constexpr size_t GROUP = 32;         // the most inputs that share a scale; all groups are filled up to it with zeros
constexpr float TOO_SMALL = 1e-30f;  // a group without a larger value is taken as zero, so that 1 / scale is finite

struct RowGroup {
  int8_t codes[GROUP];
  float scale;
  int32_t surplus;  // -128 * the sum of the codes: what weights + 128 give too much, with the other sign
  float sum;        // scale * the sum of the codes
};
inline size_t row_bytes(size_t groups) { return groups * sizeof(RowGroup); }

inline uint16_t largest_of(__m512i values) {  // of 32 unsigned 16-bit values
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(values), _mm512_extracti64x4_epi64(values, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return uint16_t(~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi8(-1))), 0));
}
inline __m512i scaled_codes(__m256i values, __m512 inverse) {  // of 16 bf16 values, in 32 bits each
  return _mm512_cvtps_epi32(_mm512_mul_ps((__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16), inverse));
}
// A value that is not finite makes its group's scale NaN or infinite, and with it every product of the row.
// widths: inputs of each group.
inline void quantize_row(const bf16* x, const long* widths, size_t groups, char* row) {
  for (size_t group = 0; group < groups; x += widths[group++]) {
    RowGroup& to = ((RowGroup*)row)[group];
    const __m512i values = _mm512_maskz_loadu_epi16(widths[group] == long(GROUP) ? ~0u : (1u << widths[group]) - 1, x);
    // Bits of non-negative floats compare as integers, NaN above all.
    const float max = widen(largest_of(_mm512_and_si512(values, _mm512_set1_epi16(0x7fff))));
    const bool is_zero = max < TOO_SMALL;
    const __m512 inverse = _mm512_set1_ps(is_zero ? 0.f : 127.f / max);
    const __m512i first = scaled_codes(_mm512_castsi512_si256(values), inverse);
    const __m512i second = scaled_codes(_mm512_extracti64x4_epi64(values, 1), inverse);
    _mm_storeu_si128((__m128i*)to.codes, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i*)(to.codes + 16), _mm512_cvtepi32_epi8(second));
    const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    to.scale = is_zero ? 0.f : max / 127.f;
    to.surplus = int32_t(-128u * uint32_t(sum));  // of codes that are no numbers the sum may be anything
    to.sum = to.scale * float(sum);
  }
}
inline __m512i four_codes(const int8_t* at) {  // the same four in every lane
  int32_t four;
  memcpy(&four, at, 4);
  return _mm512_set1_epi32(four);
}

// Groups of a unit of `vecs` vectors of columns, and the same ones of rows that are `row_groups` long.
struct GroupSpan {
  const RowGroup* rows;
  size_t row_groups, groups;
  const char* columns;
  const char* behind;  // the last group of the unit
  int vecs;
};
// sums[r * UNIT + column] of ROWS rows and the VECS vectors of columns from vector v0 on. FETCH quarters of what a wide
// unit has of these groups come into the second-level cache from `ahead` on.
using QuantizedTile = void (*)(const GroupSpan& span, int v0, const char* ahead, float* sums);
template <class Format, int VECS, int FETCH> inline QuantizedTile quantized_tile(size_t rows) {
  // 12 sums of integers and 12 of floats, columns and a row's codes fit the registers. 4 x 4 keeps its floats in
  // memory: slower on cached columns, but four rows wait for memory anyway, which one pass reads best.
  constexpr int MOST = VECS == 4 ? 4 : 6;
  constexpr QuantizedTile table[] = {Format::template tile<1, VECS, FETCH>, Format::template tile<2, VECS, FETCH>,
                                     Format::template tile<3, VECS, FETCH>, Format::template tile<std::min(4, MOST), VECS, FETCH>,
                                     Format::template tile<std::min(5, MOST), VECS, FETCH>, Format::template tile<MOST, VECS, FETCH>};
  return table[rows - 1];
}
// How many bytes behind what it reads a single pass fetches, or 0: then it reads as fast as memory gives anyway. Processors
// with AMX read a third faster so, where the weights are more than the last cache holds.
#ifdef __AMX_TILE__
constexpr size_t STREAM_AHEAD = 16 << 10;
#else
constexpr size_t STREAM_AHEAD = 0;
#endif
// sums (rows, UNIT) of some groups: tiles of at most 4 rows x 4 vectors, or 6 x 2. ahead: as many bytes as the groups
// have, to be fetched in shares by the first passes over these, or null.
template <class Format> inline void quantized_leaf(GroupSpan span, size_t count, const char* ahead, float* sums) {
  const int vecs = span.vecs, tiles = int(count + 5) / 6, width = vecs == 2 || count <= 4 ? vecs : 2;  // vectors of a tile
  const int passes = tiles * vecs / width, shares = !ahead || passes == 1 ? 0 : passes < vecs ? 2 : vecs;
  if (passes == 1 && STREAM_AHEAD) return (vecs == 4 ? quantized_tile<Format, 4, 4> : quantized_tile<Format, 2, 2>)(count)(span, 0, span.columns + STREAM_AHEAD, sums);
  for (int t = 0, pass = 0; t < tiles; t++) {
    const size_t n = (count + size_t(tiles - t) - 1) / size_t(tiles - t);
    for (int v = 0; v < vecs; v += width, pass++) {
      const int lines = pass < shares ? vecs / shares : 0;  // quarters of what a wide unit has
      const QuantizedTile run = width == 4   ? quantized_tile<Format, 4, 0>(n)
                                : lines == 0 ? quantized_tile<Format, 2, 0>(n)
                                : lines == 1 ? quantized_tile<Format, 2, 1>(n)
                                             : quantized_tile<Format, 2, 2>(n);
      run(span, v, ahead, sums);
      if (lines) ahead += size_t(lines) * 16 * span.groups * Format::GROUP_BYTES;
    }
    span.rows += n * span.row_groups, sums += n * UNIT, count -= n;
  }
}
// The last sums of a list (rows, UNIT), `width` columns of them, join those before; where they lie then.
inline float* joined(float* sums, size_t rows, size_t width, long joins) {
  for (const size_t level = rows * UNIT; joins > 0; joins--, sums -= level)
    for (size_t r = 0; r < rows; r++)
      for (float *to = sums + r * UNIT - level, *end = to + width; to < end; to += 16)
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(to + level)));
  return sums;
}
// The same of a whole unit: the sums of every node of `order` (nodes, rows, UNIT), whose leaves have whole groups; below
// them is room for all its levels. fetch: bring in what follows the unit in the stream.
template <class Format>
inline void quantized_unit(const char* rows, size_t count, size_t row_groups, const SumOrder& order, const char* unit, int vecs, bool fetch, float* sums) {
  const size_t width = size_t(vecs) * 16, group_bytes = width * Format::GROUP_BYTES, level = count * UNIT;
  const char* const behind = unit + row_groups * group_bytes;
  const char* const next = unit + width * Format::column_bytes(row_groups);
  size_t first = 0;
  for (long l = 0; l < order.count; l++) {
    const size_t groups = size_t(order.leaves[l].inputs) / GROUP, at = first * group_bytes;
    quantized_leaf<Format>({(const RowGroup*)rows + first, row_groups, groups, unit + at, behind, vecs}, count, fetch ? next + at : nullptr, sums);
    sums = joined(sums, count, width, order.leaves[l].joins) + level;
    first += groups;
  }
}
#endif
