// Attention over int8 keys and values by vpdpbusd.
//
// A query is rounded to 16 bits of its largest number, a row's weights (probability times the value's scale) to 16 bits
// of the largest in a group of keys; both enter as an upper and a lower byte. So every sum of products is one of
// integers, exact in any order, and a row has the same bits in every tile:
//   score = query step * key scale * sum(query * code), out += weight step * sum(weight * code)
// Keys lie in the scratch as [d / 4][KEYS][4] of code + 128 (vpdpbusd wants one side unsigned), values as
// [KEYS / 4][column][4] of codes.
#pragma once
#include "attention_bf16.h"
#ifdef __AVX512BF16__
#include "quant_rows.h"

struct CodeProducts {
  using Element = float;  // a row of numbers has the room of as many floats
  // Sums stay within 32 bits, and a query's bytes and its Tail within its room.
  static bool can_do(long d) { return d % 4 == 0 && d <= 512; }

  static void load_query(const bf16* q, AttentionScratch& s, long row, long d, long wide) {
    __m512i most = _mm512_setzero_si512(), total = most;
    for (long i = 0; i < d; i += 16) most = _mm512_max_epi32(most, bits_of(numbers_at(q, i, d)));
    const Range range(_mm512_reduce_max_epi32(most), MOST_SIGNED);
    char* to = query_at(s, row, wide);
    for (long i = 0; i < wide; i += 16) {
      const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(numbers_at(q, i, d), _mm512_set1_ps(range.inverse)));
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(codes, _mm512_set1_epi32(128)), 8);
      _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128((__m128i*)(to + wide + i), _mm512_cvtepi32_epi8(codes));
      total = _mm512_add_epi32(total, codes);
    }
    put_tail(to + 2 * wide, {range.step, int32_t(-128u * uint32_t(_mm512_reduce_add_epi32(total)))});
  }
  static void score(AttentionScratch& s, long rows, const KeyGroup<int8_t>& now, const KeyGroup<int8_t>& next, long d, long wide) {
    for (int r = 0; r < next.num_runs && next.count; r++) {
      _mm_prefetch((const char*)next.runs[r].k_scales, _MM_HINT_T1);
      _mm_prefetch((const char*)next.runs[r].v_scales, _MM_HINT_T1);
    }
    __m512 scales[4];
    for (int v = 0; v < 4; v++) {
      scales[v] = scales_at(now.k_scales, v * 16, now.count);
      _mm512_storeu_ps(value_scales(s, wide) + v * 16, scales_at(now.v_scales, v * 16, now.count));
    }
    const auto finish = [&](long row, int v, __m512i sum) {
      const Tail tail = tail_at(query_at(s, row, wide) + 2 * wide);
      sum = _mm512_add_epi32(sum, _mm512_set1_epi32(tail.surplus));
      const __m512 step = _mm512_mul_ps(_mm512_set1_ps(tail.step), scales[v]);
      _mm512_storeu_ps(s.scores + row * KEYS + v * 16, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), step));
    };
    if (rows <= FEW && d % 64 == 0) return with_count<1>(rows, [&](auto count) { score_few<std::min(count(), FEW)>(s, now, next, d, wide, finish); });
    load_keys(s, now, next, d);
    in_tiles(rows, [&](auto count, long first) {
      tile<true, count()>(query_at(s, first, wide), wide * 4, wide, (const char*)s.keys, KEYS * 4, d / 4,
                          [&](int r, int v, __m512i sum) { finish(first + r, v, sum); });
    });
  }
  // As PairProducts::softmax.
  static void softmax(AttentionScratch& s, long row, int from, int to, float scale, long wide) {
    __m512 x[4];
    PairProducts::weigh(s, row, from, to, scale, wide, x);
    const uint64_t seen = seen_keys(from, to);  // where a position is not, the scale may be NaN
    __m512i most = _mm512_setzero_si512();
    for (int v = 0; v < 4; v++) {
      x[v] = _mm512_maskz_mul_ps(__mmask16(seen >> (16 * v)), x[v], _mm512_loadu_ps(value_scales(s, wide) + v * 16));
      most = _mm512_max_epi32(most, bits_of(x[v]));
    }
    const Range range(_mm512_reduce_max_epi32(most), MOST_UNSIGNED);
    char* to_bytes = weights_at(s, row);
    for (int v = 0; v < 4; v++) {
      const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(x[v], _mm512_set1_ps(range.inverse)));
      _mm_storeu_si128((__m128i*)(to_bytes + v * 16), _mm512_cvtepi32_epi8(_mm512_srli_epi32(codes, 8)));
      _mm_storeu_si128((__m128i*)(to_bytes + KEYS + v * 16), _mm512_cvtepi32_epi8(codes));
    }
    put_tail(to_bytes + 2 * KEYS, {range.step, 0});
  }
  static void add_values(AttentionScratch& s, long rows, const KeyGroup<int8_t>& now, const KeyGroup<int8_t>& next, long d, long wide) {
    load_values(s, now, next, d);
    for (long i = 0; i < d; i += 64)
      in_tiles(rows, [&](auto count, long first) {
        const char* columns = (const char*)s.values + i * 4;
        tile<false, count()>(weights_at(s, first), KEYS * 4, KEYS, columns, padded(d) * 4, (now.count + 3) / 4, [&](int r, int v, __m512i sum) {
          if (i + v * 16 >= wide) return;
          float* out = s.out + (first + r) * wide + i + v * 16;
          const __m512 step = _mm512_set1_ps(tail_at(weights_at(s, first + r) + 2 * KEYS).step);
          _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, _mm512_loadu_ps(out)));
        });
      });
  }

 private:
  static constexpr float MOST_SIGNED = 32639.f, MOST_UNSIGNED = 65535.f;  // upper and lower byte at their largest
  static constexpr int MOST_ROWS = 6;                                      // of a tile: 24 sums and 4 columns of 32 registers
  static constexpr int FEW = 4;  // rows that take keys from their registers: 8 sums beside 16 of keys

  struct Tail {  // behind the bytes of a row
    float step;
    int32_t surplus;  // -128 * the sum of a query's codes: what code + 128 gives too much, with the other sign
  };
  struct Range {
    float step, inverse;
    // bits: of the largest absolute value; one that is not finite makes the step NaN, and with it the row.
    Range(int32_t bits, float most) {
      float largest;
      memcpy(&largest, &bits, 4);
      const bool is_finite = bits < 0x7f800000, is_zero = !is_finite || largest < TOO_SMALL;
      inverse = is_zero ? 0.f : most / largest;
      step = !is_finite ? NAN : is_zero ? 0.f : largest / most;
    }
  };
  static long padded(long d) { return (d + 63) / 64 * 64; }
  static char* query_at(AttentionScratch& s, long row, long wide) { return (char*)(s.queries + row * wide); }
  static char* weights_at(AttentionScratch& s, long row) { return (char*)(s.weights + row * KEYS); }
  static float* value_scales(AttentionScratch& s, long wide) { return s.keys + KEYS * (wide - 1); }  // behind the keys' bytes
  static void put_tail(char* at, Tail tail) { memcpy(at, &tail, sizeof tail); }
  static Tail tail_at(const char* at) {
    Tail tail;
    memcpy(&tail, at, sizeof tail);
    return tail;
  }
  static __m512i bits_of(__m512 x) { return _mm512_and_si512((__m512i)x, _mm512_set1_epi32(0x7fffffff)); }
  static __m512 numbers_at(const bf16* q, long i, long d) {  // elements i .. i + 15, zero from d on
    const __mmask16 mask = d - i >= 16 ? 0xffff : d <= i ? 0 : __mmask16((1u << (d - i)) - 1);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, q + i)), 16);
  }
  static __m512 scales_at(const half_bits* scales, int j, int count) {  // zero from count on
    const __mmask16 mask = count - j >= 16 ? 0xffff : count <= j ? 0 : __mmask16((1u << (count - j)) - 1);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales + j));
  }
  static __m512i codes_at(const int8_t* row, long i, long d) {  // i .. i + 63, zero from d on
    return d - i >= 64 ? _mm512_loadu_si512(row + i) : _mm512_maskz_loadu_epi8((1ull << (d - i)) - 1, row + i);
  }
  // Numbers i .. i + 63 of 16 keys as [16][key][4] of code + 128. Rows of a group from its count on repeat the last: they
  // count for nothing.
  static inline __attribute__((always_inline)) void take_keys(const KeyGroup<int8_t>& now, const KeyGroup<int8_t>& next, int j, long i, long d, __m512i (&r)[16]) {
    const __m512i flip = _mm512_set1_epi8(-128);
#pragma GCC unroll 16
    for (int n = 0; n < 16; n++) r[n] = _mm512_xor_si512(codes_at(now.k[std::min(j + n, now.count - 1)], i, d), flip);
    for (int n = j; n < std::min(j + 16, next.count); n++) _mm_prefetch(next.k[n] + i, _MM_HINT_T1);
    transpose_pairs(r);
  }
  // The sums of `tile`, for the keys below now.count, rounded up to 16.
  template <int ROWS, class F>
  static void score_few(AttentionScratch& s, const KeyGroup<int8_t>& now, const KeyGroup<int8_t>& next, long d, long wide, F finish) {
    for (int j = 0; j < now.count; j += 16) {
      __m512i upper[ROWS], lower[ROWS];
      for (int row = 0; row < ROWS; row++) upper[row] = lower[row] = _mm512_setzero_si512();
      for (long i = 0; i < d; i += 64) {
        __m512i r[16];
        take_keys(now, next, j, i, d, r);
#pragma GCC unroll 16
        for (int n = 0; n < 16; n++)
#pragma GCC unroll 4
          for (int row = 0; row < ROWS; row++) {
            const int8_t* q = (const int8_t*)query_at(s, row, wide) + i + 4 * n;
            upper[row] = _mm512_dpbusd_epi32(upper[row], r[n], four_codes(q));
            lower[row] = _mm512_dpbusd_epi32(lower[row], r[n], four_codes(q + wide));
          }
      }
      for (int row = 0; row < ROWS; row++) finish(row, j / 16, _mm512_add_epi32(_mm512_slli_epi32(upper[row], 8), lower[row]));
    }
  }
  static void load_keys(AttentionScratch& s, const KeyGroup<int8_t>& now, const KeyGroup<int8_t>& next, long d) {
    for (int j = 0; j < KEYS; j += 16)
      for (long i = 0; i < d; i += 64) {
        __m512i r[16];
        take_keys(now, next, j, i, d, r);
        char* to = (char*)s.keys + (i / 4 * KEYS + j) * 4;
        for (long n = 0, end = std::min(16L, (d - i) / 4); n < end; n++) _mm512_storeu_si512(to + n * KEYS * 4, r[n]);
      }
  }
  static void load_values(AttentionScratch& s, const KeyGroup<int8_t>& now, const KeyGroup<int8_t>& next, long d) {
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);  // undone by unpacking in lanes
    for (int j = 0; j < now.count; j += 4)
      for (long i = 0; i < d; i += 64) {
        __m512i r[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) r[n] = _mm512_permutexvar_epi32(order, codes_at(now.v[std::min(j + n, now.count - 1)], i, d));
        for (int n = j; n < std::min(j + 4, next.count); n++) _mm_prefetch(next.v[n] + i, _MM_HINT_T1);
        const __m512i low01 = _mm512_unpacklo_epi8(r[0], r[1]), low23 = _mm512_unpacklo_epi8(r[2], r[3]);
        const __m512i high01 = _mm512_unpackhi_epi8(r[0], r[1]), high23 = _mm512_unpackhi_epi8(r[2], r[3]);
        char* to = (char*)s.values + (j / 4 * padded(d) + i) * 4;
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low01, low23));
        _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(low01, low23));
        _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(high01, high23));
        _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(high01, high23));
      }
  }
  // f(number of rows as a constant of the type, first row) for nearly equal tiles.
  template <class F> static void in_tiles(long rows, F f) {
    const long tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (long t = 0, first = 0; t < tiles; t++) {
      const long n = (rows - first + tiles - t - 1) / (tiles - t);
      with_count<1>(n, [&](auto count) { f(count, first); });
      first += n;
    }
  }
  template <int N, class F> static void with_count(long n, F f) {
    if constexpr (N < MOST_ROWS)
      if (n > N) return with_count<N + 1>(n, f);
    f(std::integral_constant<int, N>());
  }
  // Hands finish(row, vector, sum) the sums of ROWS rows of 16 bits (bytes at a: upper ones, `low` behind them the
  // lower ones; with SIGNED both signed, else neither) and 64 columns [quad][column][4].
  template <bool SIGNED, int ROWS, class F>
  static void tile(const char* a, long a_row, long low, const char* b, long b_step, long quads, F finish) {
    __m512i sum[ROWS][4];
    for (auto& row : sum)
      for (auto& x : row) x = _mm512_setzero_si512();
    for (int half = 0; half < 2; half++, a += low) {
      if (half)
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++) sum[r][v] = _mm512_slli_epi32(sum[r][v], 8);
      const char* at = b;
      for (long k = 0; k < quads; k++, at += b_step) {
        __m512i column[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) column[v] = _mm512_loadu_si512(at + v * 64);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
          const __m512i four = four_codes((const int8_t*)a + r * a_row + k * 4);
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++)
            sum[r][v] = SIGNED ? _mm512_dpbusd_epi32(sum[r][v], column[v], four) : _mm512_dpbusd_epi32(sum[r][v], four, column[v]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) finish(r, v, sum[r][v]);
  }
};
#endif
