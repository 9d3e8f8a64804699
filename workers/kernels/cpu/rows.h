// Operators on one row. T is float or bf16 in memory; arithmetic is float. `row` is scratch of n floats.
#pragma once
#include <cmath>

#include "exp2.h"
#include "simd.h"

template <class T> inline void norm_from(const float* row, const T* weight, float eps, T* out, size_t n) {
  float scale = 1.f / std::sqrt(lane_sum(n, [&](size_t i) { return row[i] * row[i]; }) / float(n) + eps);
  for (size_t i = 0; i < n; i++) put(out[i], row[i] * scale * widen(weight[i]));
}
template <class T> inline void rms_norm_row(const T* x, const T* weight, float eps, T* out, size_t n, float* row) {
  load_row(x, row, n);
  norm_from(row, weight, eps, out, n);
}
// residual += x (rounded to T, as the next layer will see it), out = norm of that sum.
template <class T>
inline void add_rms_norm_row(const T* x, T* residual, const T* weight, float eps, T* out, size_t n, float* row) {
  for (size_t i = 0; i < n; i++) {
    put(residual[i], widen(residual[i]) + widen(x[i]));
    row[i] = widen(residual[i]);
  }
  norm_from(row, weight, eps, out, n);
}
// Pairs (i, i + half) of one head turn by the angle of (cos[i], sin[i]); in and out may be the same.
template <class T> inline void rotate_head(const T* in, T* out, const float* cos, const float* sin, size_t half) {
  for (size_t i = 0; i < half; i++) {
    float a = widen(in[i]), b = widen(in[i + half]);
    put(out[i], a * cos[i] - b * sin[i]);
    put(out[i + half], b * cos[i] + a * sin[i]);
  }
}
#ifdef __AVX512BF16__
// The same in vectors: 16 elements at a time, what is not there as zeros.
struct SomeOf {  // of n elements, 16 from i on
  const __mmask16 mask;
  SomeOf(size_t n, size_t i) : mask(n - i >= 16 ? 0xffff : __mmask16((1u << (n - i)) - 1)) {}
  __m512 floats(const bf16* from) const { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16); }
  __m512 floats(const float* from) const { return _mm512_maskz_loadu_ps(mask, from); }
  __m512 put(__m512 values, bf16* to) const {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(values);
    _mm256_mask_storeu_epi16(to, mask, rounded);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
  }
};
template <class F> inline void rms_norm_from(const bf16* weight, float eps, bf16* out, size_t n, float* row, F value) {
  __m512 squares = _mm512_setzero_ps();
  for (size_t i = 0; i < n; i += 16) {
    const SomeOf some(n, i);
    const __m512 x = value(some, i);
    _mm512_mask_storeu_ps(row + i, some.mask, x);
    squares = _mm512_add_ps(squares, _mm512_mul_ps(x, x));
  }
  alignas(64) float lane[16];
  _mm512_store_ps(lane, squares);
  const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(join_lanes(lane) / float(n) + eps));
  for (size_t i = 0; i < n; i += 16) {
    const SomeOf some(n, i);
    some.put(_mm512_mul_ps(_mm512_mul_ps(some.floats(row + i), scale), some.floats(weight + i)), out + i);
  }
}
inline void rms_norm_row(const bf16* x, const bf16* weight, float eps, bf16* out, size_t n, float* row) {
  rms_norm_from(weight, eps, out, n, row, [&](const SomeOf& some, size_t i) { return some.floats(x + i); });
}
inline void add_rms_norm_row(const bf16* x, bf16* residual, const bf16* weight, float eps, bf16* out, size_t n, float* row) {
  rms_norm_from(weight, eps, out, n, row, [&](const SomeOf& some, size_t i) {
    return some.put(_mm512_add_ps(some.floats(residual + i), some.floats(x + i)), residual + i);
  });
}
inline void rotate_head(const bf16* in, bf16* out, const float* cos, const float* sin, size_t half) {
  for (size_t i = 0; i < half; i += 16) {
    const SomeOf some(half, i);
    const __m512 a = some.floats(in + i), b = some.floats(in + i + half), c = some.floats(cos + i), s = some.floats(sin + i);
    some.put(_mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s)), out + i);
    some.put(_mm512_add_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, s)), out + i + half);
  }
}
#endif
inline float sigmoid(float x) {
  float e = exp_(x < 0.f ? x : -x);
  return (x < 0.f ? e : 1.f) / (1.f + e);
}
template <class T> inline void silu_mul_row(const T* gate, const T* up, T* out, size_t n) {
  for (size_t i = 0; i < n; i++) put(out[i], widen(gate[i]) * sigmoid(widen(gate[i])) * widen(up[i]));
}
#ifdef __AVX512BF16__
inline __m512 silu_mul(__m512 gate, __m512 up) {
  const __m512 one = _mm512_set1_ps(1.f), power = exp2_short(_mm512_mul_ps(gate, _mm512_set1_ps(-1.44269504f)));
  return _mm512_mul_ps(_mm512_mul_ps(gate, _mm512_div_ps(one, _mm512_add_ps(one, power))), up);
}
inline void silu_mul_row(const bf16* gate, const bf16* up, bf16* out, size_t n) {
  for (size_t i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i >= 16 ? 0xffff : __mmask16((1u << (n - i)) - 1);
    const auto floats_at = [&](const bf16* from) {
      return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + i)), 16);
    };
    _mm256_mask_storeu_epi16(out + i, mask, (__m256i)_mm512_cvtneps_pbh(silu_mul(floats_at(gate), floats_at(up))));
  }
}
#endif
template <class T> inline void silu_row(const T* x, T* out, size_t n) {
  for (size_t i = 0; i < n; i++) put(out[i], widen(x[i]) * sigmoid(widen(x[i])));
}
// x times the normal distribution up to x, by erfc of Abramowitz and Stegun 7.1.26: to about 1e-7 absolute.
template <class T> inline void gelu_row(const T* x, T* out, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const float v = widen(x[i]), z = (v < 0.f ? -v : v) * 0.70710678f, t = 1.f / (1.f + 0.3275911f * z);
    float p = 1.061405429f;
    p = multiply_add(p, t, -1.453152027f);
    p = multiply_add(p, t, 1.421413741f);
    p = multiply_add(p, t, -0.284496736f);
    p = multiply_add(p, t, 0.254829592f);
    const float beyond = 0.5f * p * t * exp_(-z * z);
    put(out[i], v * (v < 0.f ? beyond : 1.f - beyond));
  }
}
template <class T> inline void gelu_new_row(const T* x, T* out, size_t n) {
  for (size_t i = 0; i < n; i++) {
    float v = widen(x[i]);
    put(out[i], v * sigmoid(1.5957691216f * (v + 0.044715f * v * v * v)));  // v (1 + tanh(z)) / 2; 2 sqrt(2 / pi)
  }
}
