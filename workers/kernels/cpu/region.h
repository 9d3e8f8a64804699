// What a thread sets up before it computes, and undoes behind.
#pragma once
#include <xmmintrin.h>

#include "amx.h"

// Numbers below 2^-126 are zero meanwhile, as they are for products of bf16 anyway: a processor may take a hundred times
// as long for one of them, and the exponentials of masked scores are full of them. At the end tile registers are free.
class ComputeRegion {
 public:
  ComputeRegion() : before(_mm_getcsr()) { _mm_setcsr(before | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
  ~ComputeRegion() {
    _mm_setcsr(before);
#ifdef HAS_TILES
    Tiles::release();
#endif
  }
  ComputeRegion(const ComputeRegion&) = delete;
  ComputeRegion& operator=(const ComputeRegion&) = delete;

 private:
  static constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x40;
  const unsigned before;
};
