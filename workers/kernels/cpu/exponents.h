// The exponential of softmax in attention_tiles.h.
#pragma once
#include "amx.h"
#include "simd.h"
#ifdef HAS_TILES

// 2^x as bf16 of scores, x = (score * scale + offset - BIASED_ZERO) / STEPS below: x + 127 with nine binary places is what
// the bits of a bf16 number are, but for the curve between powers of two and two places.
struct Exponents {
  static constexpr float STEPS = 512.f, MAGIC = 12582912.f;  // 1.5 * 2^23: a float that has an integer in its low bits
  static constexpr float BIASED_ZERO = MAGIC + 127.f * STEPS;

  // Pairs of 2^x of the scores of two keys, one below the other. Below 2^-126 it is zero, so for -inf.
  static __m512i pairs(__m512 first, __m512 second, __m512 scale, __m512 offset) {
    const __m512 least = _mm512_set1_ps(MAGIC);
    const __m512 a = _mm512_max_ps(_mm512_fmadd_ps(first, scale, offset), least);
    const __m512 b = _mm512_max_ps(_mm512_fmadd_ps(second, scale, offset), least);
    return curve(_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(b), 16)));
  }

 private:
  // 1 + f - 2^f = f (1 - f) (0.3042 + 0.0780 f), to 1e-4, is taken off the places f.
  static __m512i curve(__m512i x) {
    const __m512i f = _mm512_slli_epi16(x, 7), bend = _mm512_mulhi_epu16(f, _mm512_sub_epi16(_mm512_setzero_si512(), f));
    const __m512i slope = _mm512_add_epi16(_mm512_set1_epi16(156), _mm512_mulhi_epu16(f, _mm512_set1_epi16(40)));
    return _mm512_srli_epi16(_mm512_sub_epi16(x, _mm512_mulhi_epu16(bend, slope)), 2);
  }
};
#endif
