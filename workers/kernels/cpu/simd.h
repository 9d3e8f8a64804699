// Number formats and the exponential, in plain C++ that GCC turns into vectors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;  // upper half of a float

inline float widen(float v) { return v; }
inline float widen(bf16 v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// Round to nearest even; NaN stays NaN.
inline bf16 narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return f == f ? bf16(rounded) : bf16(0x7fc0);
}
inline void put(float& to, float f) { to = f; }
inline void put(bf16& to, float f) { to = narrow(f); }

template <class T> inline void load_row(const T* from, float* to, size_t n) {
  for (size_t i = 0; i < n; i++) to[i] = widen(from[i]);
}
template <class T> inline void store_row(const float* from, T* to, size_t n) {
  for (size_t i = 0; i < n; i++) put(to[i], from[i]);
}

// a * b + c, rounded once where the CPU can. The compiler makes none of its own (-ffp-contract=off): the vectors of a
// loop, its remainder, and every place that it is inlined into give the same bits.
inline float multiply_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// e^x to about 1e-7 relative for x <= 88; exactly 0 below -87 (so for -inf), which masked scores rely on.
inline float exp_(float x) {
  float y = x < -87.f ? -87.f : x;
  float n = multiply_add(y, 1.44269504f, 12582912.f) - 12582912.f;  // to the nearest integer
  float f = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, y));
  float p = 1.9875691500e-4f;  // minimax of Cephes' expf
  p = multiply_add(p, f, 1.3981999507e-3f);
  p = multiply_add(p, f, 8.3334519073e-3f);
  p = multiply_add(p, f, 4.1665795894e-2f);
  p = multiply_add(p, f, 1.6666665459e-1f);
  p = multiply_add(p, f, 5.0000001201e-1f);
  p = multiply_add(p * f, f, f) + 1.f;
  int32_t bits = (int32_t(n) + 127) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  return x < -87.f ? 0.f : p * scale;
}

// To about 1e-7 absolute.
inline float tanh_(float x) {
  const float e = exp_(x < 0.f ? 2.f * x : -2.f * x), t = (1.f - e) / (1.f + e);
  return x < 0.f ? -t : t;
}

// The sum of 16 lanes.
inline float join_lanes(float* lane) {
  for (size_t step = 8; step; step /= 2)
    for (size_t j = 0; j < step; j++) lane[j] += lane[j + step];
  return lane[0];
}
// Sum over n elements in 16 fixed lanes: the order depends on n alone.
template <class F> inline float lane_sum(size_t n, F value) {
  float lane[16] = {};
  size_t whole = n / 16 * 16;
  for (size_t i = 0; i < whole; i += 16)
    for (size_t j = 0; j < 16; j++) lane[j] += value(i + j);
  for (size_t i = whole; i < n; i++) lane[i - whole] += value(i);
  return join_lanes(lane);
}
