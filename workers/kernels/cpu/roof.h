// What the machine can do at most, measured with the loads and products that the kernels use.
#pragma once
#include <omp.h>

#include <vector>

#include "gemm_tiles.h"
#include "region.h"

constexpr long READ_AHEAD = 1024;  // as the products do

// Reads `bytes` (a multiple of 512 per thread is used) once over all threads; returns bytes read.
inline long read_all(const char* from, long bytes, int threads) {
  long each = bytes / threads / 512 * 512;
#pragma omp parallel num_threads(threads)
  {
    const char* at = from + omp_get_thread_num() * each;
    typedef uint64_t Vector __attribute__((vector_size(64), aligned(8), may_alias));
    Vector lane[8] = {};
    for (long i = 0; i < each; i += 512) {
      const Vector* p = (const Vector*)(at + i);
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        _mm_prefetch(at + i + READ_AHEAD + j * 64, _MM_HINT_T0);  // one line asked for with each that is read: 10 to 15 % faster
        lane[j] |= p[j];
      }
    }
    Vector all = lane[0] | lane[1] | lane[2] | lane[3] | lane[4] | lane[5] | lane[6] | lane[7];
    asm volatile("" : : "m"(all));
  }
  return each * threads;
}
#ifdef HAS_TILES
// As multiply_all, in tile registers.
inline double multiply_tiles(long rounds, int threads) {
  constexpr size_t ROWS = 2 * BLOCK_ROWS, INPUTS = 128;
#pragma omp parallel num_threads(threads)
  {
    const Units units{UNIT, INPUTS};
    std::vector<char> a(ROWS * INPUTS * 2), b(tiled_bytes(units));
    std::vector<float> c(ROWS * UNIT);
    const Leaf leaf{INPUTS, 0};
    Later later;
    ComputeRegion region;
    for (long i = 0; i < rounds; i++) tiled_unit_sums(b.data(), units, 0, {&leaf, 1}, a.data(), INPUTS * 2, ROWS, c.data(), later, [](SumRows&, size_t, size_t) {});
  }
  return double(rounds) * threads * 2 * ROWS * UNIT * INPUTS;
}
#endif
// Floating-point operations of `rounds` register tiles a thread on data that stays in the first-level cache.
inline double multiply_all(long rounds, int threads) {
#ifdef HAS_TILES
  if (can_use_tiles()) return multiply_tiles(rounds, threads);
#endif
#ifdef HAS_PRODUCTS
  constexpr int PAIRS = 64;
#pragma omp parallel num_threads(threads)
  {
    std::vector<char> a(MAX_ROWS * PAIRS * 4), b(PAIRS * UNIT * 4);
    std::vector<float> c(MAX_ROWS * UNIT);
    for (long i = 0; i < rounds; i++)
      panel(a.data(), PAIRS * 4, MAX_ROWS, b.data(), UNIT * 4, 4, PAIRS, c.data(), UNIT, true);
    asm volatile("" : : "r"(c.data()) : "memory");
  }
  return double(rounds) * threads * 2 * MAX_ROWS * UNIT * 2 * PAIRS;
#else
  return double(rounds * threads) * 0;
#endif
}
