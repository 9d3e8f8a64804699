// What a thread sets up before it computes, and undoes behind.
#pragma once
#include <xmmintrin.h>

#include "amx.h"

// At its end tile registers are free, for what else runs on the thread.
class ComputeRegion {
 public:
  ComputeRegion() = default;
  ~ComputeRegion() {
#ifdef HAS_TILES
    Tiles::release();
#endif
  }
  ComputeRegion(const ComputeRegion&) = delete;
  ComputeRegion& operator=(const ComputeRegion&) = delete;
};

// Numbers below 2^-126 are zero meanwhile: a processor may take a hundred times as long for one of them, and the
// exponentials of masked scores are full of them. For attention only, which is done here for any number of ranks: sums of
// several leaves are joined here, behind a collective or by torch, and have to be the same everywhere.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : before(_mm_getcsr()) { _mm_setcsr(before | ON_THE_WAY_OUT | ON_THE_WAY_IN); }
  ~DenormalsAreZero() { _mm_setcsr(before); }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;

 private:
  static constexpr unsigned ON_THE_WAY_OUT = 0x8000, ON_THE_WAY_IN = 0x40;
  const unsigned before;
};
