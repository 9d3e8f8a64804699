// The two products of attention by vdpbf16ps, for an even d: keys as [d / 2][KEYS][2], values as [KEYS / 2][d][2].
#pragma once
#include "attention.h"
#include "exp2.h"
#ifdef __AVX512BF16__

// Where the pairs of two rows of 32 come from when they are interleaved.
inline __m512i interleave_low() {
  return _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1,
                          32, 0);
}
inline __m512i interleave_high() { return _mm512_add_epi16(interleave_low(), _mm512_set1_epi16(16)); }

// A bit for each of the positions [from, to) of a group.
inline uint64_t seen_keys(int from, int to) { return (to == KEYS ? ~0ull : (1ull << to) - 1) & (from == KEYS ? 0 : ~0ull << from); }

struct PairProducts {
  using Element = bf16;
  static void load_query(const bf16* q, AttentionScratch& s, long row, long d, long wide) {
    memcpy((bf16*)s.queries + row * wide, q, d * 2);
  }
  static __m512i pairs_at(const bf16* p, long i, long d) {  // elements i .. i + 31, zero from d on
    long n = d - i;
    return n >= 32 ? _mm512_loadu_si512(p + i) : _mm512_maskz_loadu_epi16(__mmask32((1u << n) - 1), p + i);
  }
  static void load_group(const bf16* const* k, const bf16* const* v, int count, AttentionScratch& s, long d, long wide) {
    for (int j = 0; j < KEYS; j += 16)
      for (long i = 0; i < d; i += 32) {
        __m512i r[16];
        for (int n = 0; n < 16; n++) r[n] = j + n < count ? pairs_at(k[j + n], i, d) : _mm512_setzero_si512();
        transpose_pairs(r);
        uint32_t* to = (uint32_t*)s.keys + i / 2 * KEYS + j;
        for (int n = 0; n < (i / 2 + 16 <= wide / 2 ? 16 : 8); n++) _mm512_storeu_si512(to + n * KEYS, r[n]);
      }
    const __m512i low = interleave_low(), high = interleave_high();
    for (int j = 0; j < KEYS; j += 2)
      for (long i = 0; i < d; i += 32) {
        __m512i a = j < count ? pairs_at(v[j], i, d) : _mm512_setzero_si512();
        __m512i b = j + 1 < count ? pairs_at(v[j + 1], i, d) : _mm512_setzero_si512();
        uint32_t* to = (uint32_t*)s.values + j / 2 * wide + i;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
        if (i + 16 < wide) _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, high, b));
      }
  }
  static void score(AttentionScratch& s, long rows, const KeyGroup<bf16>& now, const KeyGroup<bf16>&, long d, long wide) {
    load_group(now.k, now.v, now.count, s, d, wide);
    panel((const char*)s.queries, wide * 2, int(rows), (const char*)s.keys, KEYS * 4, KEYS / 16, int(d / 2), s.scores, KEYS, false);
  }
  // As WideProducts::softmax, in base 2.
  static void softmax(AttentionScratch& s, long row, int from, int to, float scale, long wide) {
    __m512 x[4];
    weigh(s, row, from, to, scale, wide, x);
    for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i*)((bf16*)s.weights + row * KEYS + i * 16), (__m256i)_mm512_cvtneps_pbh(x[i]));
  }
  // The same, with the probabilities in x.
  static void weigh(AttentionScratch& s, long row, int from, int to, float scale, long wide, __m512 (&x)[4]) {
    const __m512 unit = _mm512_set1_ps(scale * 1.44269504f);
    for (int i = 0; i < 4; i++) x[i] = _mm512_mul_ps(_mm512_loadu_ps(s.scores + row * KEYS + i * 16), unit);
    if (from > 0 || to < KEYS) {
      const uint64_t seen = seen_keys(from, to);
      for (int i = 0; i < 4; i++)
        x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(seen >> (16 * i)), x[i]);
    }
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
    const float old = s.max[row], now = std::max(old, largest);
    const __m512 top = _mm512_set1_ps(now);
    for (int i = 0; i < 4; i++) x[i] = exp2_short(_mm512_sub_ps(x[i], top));
    __m512 sum = _mm512_loadu_ps(s.sum + row * 16), more = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
    if (now > old) {
      const __m512 rescale = exp2_short(_mm512_set1_ps(old - now));
      sum = _mm512_mul_ps(sum, rescale);
      for (float *o = s.out + row * wide, *end = o + wide; o < end; o += 16)
        _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), rescale));
      s.max[row] = now;
    }
    _mm512_storeu_ps(s.sum + row * 16, _mm512_add_ps(sum, more));
  }
  static void add_values(AttentionScratch& s, long rows, const KeyGroup<bf16>&, const KeyGroup<bf16>&, long, long wide) {
    for (long i = 0; i < wide; i += UNIT)
      panel((const char*)s.weights, KEYS * 2, int(rows), (const char*)((uint32_t*)s.values + i), wide * 4,
            int(std::min<long>(4, (wide - i) / 16)), KEYS / 2, s.out + i, wide, true);
  }
};
#endif
