// The tile registers of AMX: eight, of at most 16 rows of 64 bytes, private to a thread. On machines without them tests
// take the same operations from amx_software.h.
//
// The instructions are written out because the intrinsics of GCC 12 hide from the compiler which memory they read
// (stores before them may be dropped) and want literal register numbers.
#pragma once
#if defined(__AVX512BF16__) && (defined(__AMX_BF16__) && defined(__AMX_INT8__) || defined(SOFTWARE_TILES))
#define HAS_TILES
#include <cstddef>
#include <cstdint>
#include <cstring>

// Rows, and bytes of a row, of every register: the operand of ldtilecfg.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows, int num_bytes) { rows[tile] = uint8_t(num_rows), row_bytes[tile] = uint16_t(num_bytes); }
};

#ifdef SOFTWARE_TILES
#include "amx_software.h"
#else
#include <sys/syscall.h>
#include <unistd.h>

// Whether the CPU has tiles and the system lets this process use them, which has to be asked for once (Linux 5.16). The
// permission holds for all threads.
inline bool can_use_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool found = __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
                            syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return found;
}

// The registers of the calling thread in some shapes. One at a time on a thread. They stay as they are until other shapes
// are wanted: to set them stops the processor for as long as a line takes from memory. So whoever has used them has to
// release them at last, for what else runs on the thread.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) {
    if (memcmp(&shapes, &current, sizeof shapes) == 0) return;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
    current = shapes, is_shaped = true;
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  static void release() {
    if (!is_shaped) return;
    current = TileShapes(), is_shaped = false;
    asm volatile("tilerelease");
  }

  template <int TILE> void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }
  // Rows `stride` bytes apart.
  template <int TILE> void load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
  }
  template <int TILE> void store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
  }
  // C (rows, columns) float += A (rows, pairs) bf16 * B (pairs, columns) pairs of bf16.
  template <int C, int A, int B> void multiply() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B)); }
  // C (rows, columns) int32 += A (rows, quads) int8 * B (quads, columns) fours of int8, modulo 2^32.
  template <int C, int A, int B> void multiply_bytes() { asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B)); }

 private:
  static inline thread_local TileShapes current;
  static inline thread_local bool is_shaped = false;
};
#endif
#endif
