// Attention of few query rows, as in decoding: keys and values are used as they lie in their pages, one transposed
// register tile at a time, while the next group of pages comes in. Every sum is made in the order of
// attention_bf16.h, so a row has the same bits there and here.
#pragma once
#include "attention_bf16.h"
#ifdef __AVX512BF16__

constexpr int FEW_ROWS = 8;

// Takes the place of PairProducts for at most FEW_ROWS rows and d a multiple of 32.
struct FewRowProducts : PairProducts {
  static void score(AttentionScratch& s, long rows, const KeyGroup<bf16>& now, const KeyGroup<bf16>& next, long d, long) {
    each_count<1>(rows, [&](auto fixed) { score_rows<fixed()>(s, now, next, d); });
  }
  static void add_values(AttentionScratch& s, long rows, const KeyGroup<bf16>& now, const KeyGroup<bf16>& next, long d, long) {
    each_count<1>(rows, [&](auto fixed) { add_rows<fixed()>(s, now, next, d); });
  }

 private:
  // Calls f with the number of rows as a constant of the type.
  template <int ROWS, class F> static void each_count(long rows, F f) {
    if (rows == ROWS) return f(std::integral_constant<int, ROWS>());
    if constexpr (ROWS < FEW_ROWS) each_count<ROWS + 1>(rows, f);
  }
  // Only keys below now.count, rounded up to 16.
  template <int ROWS> static void score_rows(AttentionScratch& s, const KeyGroup<bf16>& now, const KeyGroup<bf16>& next, long d) {
    for (int j = 0; j < now.count; j += 16) {
      __m512 sum[ROWS];
      for (auto& x : sum) x = _mm512_setzero_ps();
      for (long i = 0; i < d; i += 32) {
        fetch(next.k + j, next.count - j, 16, i);
        __m512i r[16];
#pragma GCC unroll 16
        for (int n = 0; n < 16; n++) r[n] = _mm512_loadu_si512(now.k[std::min(j + n, now.count - 1)] + i);
        transpose_pairs(r);
#pragma GCC unroll 16
        for (int n = 0; n < 16; n++)
#pragma GCC unroll 8
          for (int row = 0; row < ROWS; row++)
            sum[row] = _mm512_dpbf16_ps(sum[row], query_pair(s, row, d, i + 2 * n), (__m512bh)r[n]);
      }
      for (int row = 0; row < ROWS; row++) _mm512_storeu_ps(s.scores + row * KEYS + j, sum[row]);
    }
  }
  template <int ROWS> static void add_rows(AttentionScratch& s, const KeyGroup<bf16>& now, const KeyGroup<bf16>& next, long d) {
    const __m512i low = interleave_low(), high = interleave_high();
    for (long i = 0; i < d; i += 32) {
      __m512 sum[ROWS][2];
      for (int row = 0; row < ROWS; row++)
        for (int h = 0; h < 2; h++) sum[row][h] = _mm512_loadu_ps(s.out + row * d + i + h * 16);
      for (int j = 0; j < now.count; j += 2) {
        fetch(next.v + j, next.count - j, 2, i);
        const __m512i a = _mm512_loadu_si512(now.v[j] + i);
        const __m512i b = j + 1 < now.count ? _mm512_loadu_si512(now.v[j + 1] + i) : _mm512_setzero_si512();
        const __m512bh left = (__m512bh)_mm512_permutex2var_epi16(a, low, b), right = (__m512bh)_mm512_permutex2var_epi16(a, high, b);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
          const __m512bh p = broadcast_pair((const bf16*)s.weights + row * KEYS + j);
          sum[row][0] = _mm512_dpbf16_ps(sum[row][0], p, left);
          sum[row][1] = _mm512_dpbf16_ps(sum[row][1], p, right);
        }
      }
      for (int row = 0; row < ROWS; row++)
        for (int h = 0; h < 2; h++) _mm512_storeu_ps(s.out + row * d + i + h * 16, sum[row][h]);
    }
  }
  static __m512bh broadcast_pair(const bf16* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static __m512bh query_pair(const AttentionScratch& s, int row, long d, long i) { return broadcast_pair((const bf16*)s.queries + row * d + i); }
  // Spread over the arithmetic: many at once would only queue up. `left` of the rows exist.
  static void fetch(const bf16* const* rows, int left, int most, long i) {
    for (int j = 0; j < std::min(left, most); j++) _mm_prefetch(rows[j] + i, _MM_HINT_T1);
  }
};
#endif
