// One id per row of logits: the best one, or one at random after temperature, top-k, top-p and min-p. Same rules as
// workers/kernels/draw.py; no row is ever sorted.
//
// A filter keeps the first ids of the order (logit descending, id ascending). Where it ends is found by a radix
// search over the bits of the logits: a histogram of masses over the highest bits, then over the next ones of the
// bucket where the wanted mass is reached, then over the last.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "simd.h"

// Mirrored by workers/kernels/draw.py.
struct Draw {
  double temperature;  // 0: the best id
  double top_k;        // 0: off
  double top_p, min_p, uniform;
};

constexpr long NOT_FINITE = -1;            // instead of an id
constexpr long DRAW_BLOCK = 128;          // ids that are summed before the cumulative sum
constexpr long BEST_BLOCK = 1024;         // ids that are looked at while they are in the first-level cache
constexpr float MAX_LOGIT = 3.4028235e38f;  // below it is only minus infinity: a forbidden id

struct DrawScratch {
  std::vector<float> weights;          // of all ids: probability relative to the best id
  std::vector<double> sums, buckets;   // of blocks of ids; of the radix search over them
  std::vector<int32_t> kept;           // ids that have passed the filters so far, ascending
};

inline bool is_finite_row(const float* x, long n) {
  uint32_t largest[16] = {};
  long whole = n / 16 * 16;
  for (long i = 0; i < whole; i += 16)
    for (long j = 0; j < 16; j++) {
      uint32_t bits;
      memcpy(&bits, x + i + j, 4);
      bits &= 0x7fffffff;
      largest[j] = bits > largest[j] ? bits : largest[j];
    }
  for (long i = whole; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    largest[0] = std::max(largest[0], bits);
  }
  return *std::max_element(largest, largest + 16) < 0x7f800000;
}

inline float row_max(const float* x, long n) {
  float lane[64];
  for (float& v : lane) v = -INFINITY;
  long whole = n / 64 * 64;
  for (long i = 0; i < whole; i += 64)
    for (long j = 0; j < 64; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
  for (long i = whole; i < n; i++) lane[0] = std::max(lane[0], x[i]);
  return *std::max_element(lane, lane + 64);
}

// The first of the largest; NOT_FINITE when all have to be finite and are not. Reads the row once.
inline long best_id(const float* x, long n, bool only_finite) {
  float best = -INFINITY;
  long at = 0;
  for (long i = 0; i < n; i += BEST_BLOCK) {
    const long count = std::min(BEST_BLOCK, n - i);
    if (only_finite && !is_finite_row(x + i, count)) return NOT_FINITE;
    const float here = row_max(x + i, count);
    if (here > best) best = here, at = i;
  }
  return std::find(x + at, x + n, best) - x;
}

inline bool all_best(const Draw* draws, long n) {
  return std::all_of(draws, draws + n, [](const Draw& d) { return d.temperature == 0; });
}

// Larger for larger logits; +0 and -0 are one.
inline uint32_t order_key(float x) {
  int32_t bits;
  x += 0.f;
  memcpy(&bits, &x, 4);
  return bits < 0 ? ~uint32_t(bits) : uint32_t(bits) | 0x80000000u;
}

// Keeps of `ids` the first ones in the order whose predecessors have less than `target` of mass together.
template <class Mass>
inline void keep_heaviest(const float* x, std::vector<int32_t>& ids, double target, Mass mass, std::vector<double>& buckets) {
  uint32_t prefix = 0;  // of the key where it ends
  double before = 0;    // mass of all with greater keys
  int low = 32;         // bits of the prefix still open
  for (int width : {11, 11, 10}) {
    low -= width;
    buckets.assign(1l << width, 0.0);
    const uint64_t known = ~0ull << (low + width);
    for (int32_t id : ids) {
      uint32_t key = order_key(x[id]);
      if (((key ^ prefix) & known & 0xffffffffull) == 0) buckets[key >> low & ((1u << width) - 1)] += mass(id);
    }
    long bucket = (1l << width) - 1, last = -1;  // last: the lowest bucket with anything in it
    for (; bucket >= 0; bucket--) {
      if (buckets[bucket] == 0) continue;
      last = bucket;
      if (before + buckets[bucket] >= target) break;
      before += buckets[bucket];
    }
    if (bucket < 0) {  // rounding, or a target above all there is
      if (last < 0) return;
      before -= buckets[last], bucket = last;
    }
    prefix |= uint32_t(bucket) << low;
  }
  auto end = std::remove_if(ids.begin(), ids.end(), [&](int32_t id) {
    uint32_t key = order_key(x[id]);
    if (key != prefix) return key < prefix;
    if (before >= target) return true;
    before += mass(id);
    return false;
  });
  ids.erase(end, ids.end());
}

// All ids that pass, ascending.
template <class Passes>
inline void collect(std::vector<int32_t>& ids, long n, Passes passes) {
  ids.resize(n);
  long count = 0;
  for (long i = 0; i < n; i++) ids[count] = int32_t(i), count += passes(i);
  ids.resize(count);
}

// A logit that at least k ids reach: the k-th largest of the maxima of blocks. -inf when there are fewer blocks.
inline float reached_by(const float* x, long n, long k, std::vector<double>& maxima) {
  maxima.clear();
  for (long i = 0; i + DRAW_BLOCK <= n; i += DRAW_BLOCK) maxima.push_back(row_max(x + i, DRAW_BLOCK));
  if (k > long(maxima.size())) return -INFINITY;
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<double>());
  return float(maxima[k - 1]);
}

// Inverse of the cumulative distribution of all ids: by block, then inside.
inline long draw_of_all(const DrawScratch& s, long n, double total, double uniform) {
  const double target = uniform * total;
  double ends = 0;
  size_t block = 0;
  while (block + 1 < s.sums.size() && ends + s.sums[block] <= target) ends += s.sums[block++];
  for (long i = long(block) * DRAW_BLOCK, end = std::min(n, i + DRAW_BLOCK); i < end; i++)
    if ((ends += s.weights[i]) > target) return i;
  for (long i = std::min(n, long(block + 1) * DRAW_BLOCK) - 1; i > 0; i--)  // sums were rounded up
    if (s.weights[i] > 0) return i;
  return 0;
}

inline long draw_id(const float* x, long n, const Draw& d, bool only_finite, DrawScratch& s) {
  if (d.temperature == 0) return best_id(x, n, only_finite);
  if (only_finite && !is_finite_row(x, n)) return NOT_FINITE;
  const float best = row_max(x, n), per_temperature = float(1.0 / d.temperature);
  s.weights.resize(n);
  float* weights = s.weights.data();
  for (long i = 0; i < n; i++) weights[i] = x[i] < -MAX_LOGIT ? 0.f : exp_((x[i] - best) * per_temperature);
  s.sums.clear();
  double total = 0;
  for (long i = 0; i < n; i += DRAW_BLOCK) {
    s.sums.push_back(lane_sum(size_t(std::min(DRAW_BLOCK, n - i)), [&](size_t j) { return weights[i + j]; }));
    total += s.sums.back();
  }
  const bool has_top_k = d.top_k > 0 && d.top_k < double(n);
  if (!has_top_k && d.top_p >= 1 && d.min_p <= 0) return draw_of_all(s, n, total, d.uniform);
  if (has_top_k) {
    const float least = reached_by(x, n, long(d.top_k), s.sums);
    collect(s.kept, n, [&](long i) { return x[i] >= least; });
    keep_heaviest(x, s.kept, d.top_k, [](int32_t) { return 1.0; }, s.buckets);
    total = 0;
    for (int32_t id : s.kept) total += weights[id];
  } else {
    // Ids lighter than (1 - top_p) total / n have less than 1 - top_p of the mass together: the others reach top_p
    // without them. A margin for rounding.
    const float least = float(0.999 * std::max((1 - d.top_p) * total / double(n), d.min_p));
    collect(s.kept, n, [&](long i) { return weights[i] >= least; });
  }
  if (d.top_p < 1) keep_heaviest(x, s.kept, d.top_p * total, [&](int32_t id) { return double(weights[id]); }, s.buckets);
  double left = 0, ends = 0;
  for (int32_t id : s.kept) left += weights[id] < d.min_p ? 0 : weights[id];
  long drawn = s.kept.front();
  for (int32_t id : s.kept) {
    if (weights[id] < d.min_p || weights[id] == 0) continue;
    drawn = id;
    if ((ends += weights[id]) > d.uniform * left) break;
  }
  return drawn;
}
