// Rows of activations as 16-bit integers, for products with quantized columns.
//
// A row of K bf16 values becomes scale * (256 * high + low) with high in -127..127 and low in -128..127: two rows
// of int8 for vpdpbusd, the error at most half of max|x| / 32512, well below that of bf16 itself. A product with
// integer weights is then a sum of integers, exact in any order: a row's result does not depend on its neighbours.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include "simd.h"

constexpr size_t GROUP = 32;           // inputs that share a scale in the 4-bit form; K is padded to it with zeros
constexpr int LARGEST = 127 * 256;     // of a quantized activation
constexpr float TOO_SMALL = 1e-30f;    // a row without a larger value is taken as zero, so that 1 / scale is finite

struct RowHead {
  float scale;
  int32_t high, low;  // sums of all high and of all low parts
};
// A quantized row: head (64 bytes), [K / 4][high 4, low 4] int8, float sums of the integers of every group.
struct RowShape {
  size_t k;
  size_t groups() const { return (k + GROUP - 1) / GROUP; }
  size_t padded() const { return groups() * GROUP; }
  size_t bytes() const { return (64 + 2 * padded() + 4 * groups() + 63) / 64 * 64; }
};
inline const RowHead& row_head(const char* row) { return *(const RowHead*)row; }
inline const char* row_parts(const char* row) { return row + 64; }
inline const float* group_sums(const char* row, const RowShape& shape) { return (const float*)(row + 64 + 2 * shape.padded()); }

inline __m512i float_bits(const bf16* x, size_t i, size_t k) {  // elements i .. i + 15 as float bits, zero from k on
  const size_t n = k > i ? k - i : 0;
  const __m256i half = n >= 16 ? _mm256_loadu_si256((const __m256i*)(x + i)) : _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), x + i);
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}
// A value that is not finite makes the scale NaN or infinite, and with it every product of the row.
inline void quantize_row(const bf16* x, const RowShape& shape, char* row) {
  __m512i largest = _mm512_setzero_si512();  // bits of non-negative floats compare as integers, NaN above all
  for (size_t i = 0; i < shape.k; i += 16)
    largest = _mm512_max_epi32(largest, _mm512_and_si512(float_bits(x, i, shape.k), _mm512_set1_epi32(0x7fffffff)));
  const int32_t bits = _mm512_reduce_max_epi32(largest);
  float max;
  memcpy(&max, &bits, 4);
  const bool is_zero = max < TOO_SMALL;
  const __m512 inverse = _mm512_set1_ps(is_zero ? 0.f : float(LARGEST) / max);
  const __m512i limit = _mm512_set1_epi32(LARGEST), least = _mm512_set1_epi32(-LARGEST);
  __m512i highs = _mm512_setzero_si512(), lows = highs;
  char* parts = row + 64;
  float* sums = (float*)(row + 64 + 2 * shape.padded());
  for (size_t group = 0; group < shape.groups(); group++) {
    __m512i total = _mm512_setzero_si512();
    for (size_t i = group * GROUP; i < (group + 1) * GROUP; i += 16) {
      __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)float_bits(x, i, shape.k), inverse));
      v = _mm512_max_epi32(_mm512_min_epi32(v, limit), least);
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
      const __m512i low = _mm512_sub_epi32(v, _mm512_slli_epi32(high, 8));
      total = _mm512_add_epi32(total, v), highs = _mm512_add_epi32(highs, high), lows = _mm512_add_epi32(lows, low);
      const __m128i h = _mm512_cvtepi32_epi8(high), l = _mm512_cvtepi32_epi8(low);
      _mm_storeu_si128((__m128i*)(parts + 2 * i), _mm_unpacklo_epi32(h, l));
      _mm_storeu_si128((__m128i*)(parts + 2 * i + 16), _mm_unpackhi_epi32(h, l));
    }
    sums[group] = float(_mm512_reduce_add_epi32(total));
  }
  *(RowHead*)row = {is_zero ? 0.f : max / float(LARGEST), _mm512_reduce_add_epi32(highs), _mm512_reduce_add_epi32(lows)};
}
inline __m512i four_parts(const char* at) {  // four int8 in every lane
  int32_t four;
  memcpy(&four, at, 4);
  return _mm512_set1_epi32(four);
}

using QuantizedTile = void (*)(const char*, const RowShape&, const char*, int, int, const char*, float*);
template <class Format, int VECS, int FETCH> inline QuantizedTile quantized_tile(size_t rows) {
  constexpr QuantizedTile table[] = {Format::template tile<1, VECS, FETCH>, Format::template tile<2, VECS, FETCH>,
                                     Format::template tile<VECS == 2 ? 3 : 1, VECS, FETCH>, Format::template tile<VECS == 2 ? 4 : 1, VECS, FETCH>};
  return table[rows - 1];
}
// sums (rows, UNIT) of one unit of `vecs` vectors of columns: tiles of at most 4 rows x 2 vectors, or 2 x 4. More
// rows than that do not fit the registers with two sums each. fetch: bring in what follows the unit in the stream, a
// share in each of the first passes over this one; a single pass reads as fast as memory gives anyway.
template <class Format>
inline void quantized_unit(const char* rows, size_t count, const RowShape& shape, const char* unit, int vecs, bool fetch, float* sums) {
  const int tiles = int(count + 3) / 4, width = vecs == 2 || count <= 2 ? vecs : 2;  // vectors of a tile
  const int passes = tiles * vecs / width, shares = !fetch || passes == 1 ? 0 : passes < vecs ? 2 : vecs;
  const char* ahead = unit + size_t(vecs) * 16 * Format::column_bytes(shape);
  for (int t = 0, pass = 0; t < tiles; t++) {
    const size_t n = (count + size_t(tiles - t) - 1) / size_t(tiles - t);
    for (int v = 0; v < vecs; v += width, pass++) {
      const int lines = pass < shares ? vecs / shares : 0;  // quarters of what a wide unit has
      const QuantizedTile run = width == 4   ? quantized_tile<Format, 4, 0>(n)
                                : lines == 0 ? quantized_tile<Format, 2, 0>(n)
                                : lines == 1 ? quantized_tile<Format, 2, 1>(n)
                                             : quantized_tile<Format, 2, 2>(n);
      run(rows, shape, unit, vecs, v, ahead, sums);
      ahead += size_t(lines) * 16 * Format::column_bytes(shape);
    }
    rows += n * shape.bytes(), sums += n * UNIT, count -= n;
  }
}
#endif
