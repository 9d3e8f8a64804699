// Powers of two for results that become bf16.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

// 2^x to 3e-6; exactly 0 below -200, so for -inf; NaN stays NaN (max gives its second operand then).
inline __m512 exp2_short(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.f), x);
  const __m512 whole = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.3333558e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, whole);
}
#endif
