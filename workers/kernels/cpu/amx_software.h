// The tile registers of amx.h in plain C++, for tests on machines without AMX: results to the bit, and misuse ends the
// program. After the pseudo-code of Intel's Software Developer's Manual, volume 2, TDPBF16PS and TDPBSSD.
#pragma once
#include <cassert>
#include <cmath>
#include <cstring>

#include "simd.h"

inline bool can_use_tiles() { return true; }

class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) : shapes(shapes) {
    assert(shapes.palette == 1 && shapes.start_row == 0);
    for (int t = 0; t < 8; t++) assert(shapes.rows[t] <= 16 && shapes.row_bytes[t] <= 64);
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  static void release() {}

  template <int TILE> void zero() {
    check<TILE>();
    memset(data[TILE], 0, sizeof data[TILE]);
  }
  template <int TILE> void load(const void* from, size_t stride) {
    zero<TILE>();
    for (int r = 0; r < shapes.rows[TILE]; r++) memcpy(data[TILE] + r * 64, (const char*)from + r * stride, shapes.row_bytes[TILE]);
  }
  template <int TILE> void store(void* to, size_t stride) {
    check<TILE>();
    for (int r = 0; r < shapes.rows[TILE]; r++) memcpy((char*)to + r * stride, data[TILE] + r * 64, shapes.row_bytes[TILE]);
  }
  template <int C, int A, int B> void multiply() {
    check_product<C, A, B>();
    const int pairs = shapes.row_bytes[A] / 4, columns = shapes.row_bytes[C] / 4;
    for (int m = 0; m < shapes.rows[C]; m++) {
      float sums[2][16] = {};  // of the first and of the second products of the pairs
      for (int k = 0; k < pairs; k++)
        for (int i = 0; i < 2; i++)
          for (int n = 0; n < columns; n++)
            sums[i][n] = flush(std::fma(number<A>(m, 2 * k + i), number<B>(k, 2 * n + i), sums[i][n]));
      for (int n = 0; n < columns; n++) {
        float c;
        memcpy(&c, data[C] + m * 64 + n * 4, 4);
        c = flush(flush(c) + flush(sums[0][n] + sums[1][n]));
        memcpy(data[C] + m * 64 + n * 4, &c, 4);
      }
    }
  }
  template <int C, int A, int B> void multiply_bytes() {
    check_product<C, A, B>();
    for (int m = 0; m < shapes.rows[C]; m++)
      for (int n = 0; n < shapes.row_bytes[C] / 4; n++) {
        uint32_t c;
        memcpy(&c, data[C] + m * 64 + n * 4, 4);
        for (int k = 0; k < shapes.row_bytes[A]; k++) c += uint32_t(int8_t(data[A][m * 64 + k]) * int8_t(data[B][k / 4 * 64 + n * 4 + k % 4]));
        memcpy(data[C] + m * 64 + n * 4, &c, 4);
      }
  }

 private:
  const TileShapes shapes;
  char data[8][1024];

  template <int TILE> void check() const {
    static_assert(TILE >= 0 && TILE < 8);
    assert(shapes.rows[TILE] > 0 && shapes.row_bytes[TILE] > 0);
  }
  template <int C, int A, int B> void check_product() const {
    check<A>(), check<B>(), check<C>();
    static_assert(A != B && B != C && A != C);
    assert(shapes.rows[C] == shapes.rows[A] && shapes.row_bytes[C] == shapes.row_bytes[B]);
    assert(shapes.row_bytes[A] / 4 == shapes.rows[B] && shapes.row_bytes[C] % 4 == 0);
  }
  static float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }  // no denormals
  template <int TILE> float number(int row, int i) const {
    bf16 x;
    memcpy(&x, data[TILE] + row * 64 + i * 2, 2);
    return flush(widen(x));
  }
};
