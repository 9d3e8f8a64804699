// Products of few rows with the columns of gemm_int8_tiles.h by vectors, which read memory faster than tile registers do. Sums
// of a group are integers, so they are the same ones.
#pragma once
#include "gemm_int8_tiles.h"
#ifdef HAS_TILES

constexpr size_t FEW_BYTE_ROWS = 2;  // at most; more of them take longer than memory does

struct Int8FewRows {
  // The first ROWS rows of a block at `rows` times 32 columns: sums as Int8Tiles::store leaves them.
  template <int ROWS> static void products_of(const char* rows, const char* columns, size_t inputs, int32_t* products) {
    // vpdpbusd wants one side unsigned: it takes weights + 128, and the sums begin with what that gives too much.
    const __m512i flip = _mm512_set1_epi8(-128);
    const int8_t* x = (const int8_t*)rows;
    __m512i sum[2 * ROWS][2];
#pragma GCC unroll 4
    for (int b = 0; b < 2 * ROWS; b++) {  // upper and lower bytes of each row
      __m512i surplus = _mm512_setzero_si512();
      for (size_t i = 0; i < inputs; i += BYTE_INPUTS) surplus = _mm512_dpbusd_epi32(surplus, flip, _mm512_load_si512(x + i * 16 + b * 64));
      sum[b][0] = sum[b][1] = _mm512_set1_epi32(int32_t(-uint32_t(_mm512_reduce_add_epi32(surplus))));
    }
    for (size_t i = 0; i < inputs; i += GROUP, x += i % BYTE_INPUTS ? GROUP : 1024 - GROUP) {
#pragma GCC unroll 8
      for (size_t j = 0; j < GROUP; j += 4, columns += 128) {
        __m512i weight[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
          _mm_prefetch(columns + STREAM_AHEAD + v * 64, _MM_HINT_T1);
          weight[v] = _mm512_xor_si512(_mm512_loadu_si512(columns + v * 64), flip);
        }
#pragma GCC unroll 4
        for (int b = 0; b < 2 * ROWS; b++) {
          const __m512i codes = four_codes(x + b * 64 + j);
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++) sum[b][v] = _mm512_dpbusd_epi32(sum[b][v], weight[v], codes);
        }
      }
    }
#pragma GCC unroll 4
    for (int b = 0; b < 2 * ROWS; b++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) _mm512_store_si512(products + b * 32 + v * 16, sum[b][v]);
  }

  // As Int8Tiles::unit_sums, of at most FEW_BYTE_ROWS rows.
  static void unit_sums(const ByteRows& form, const char* rows, size_t count, const SumOrder& order, const char* unit, int vecs, float* sums) {
    alignas(64) int32_t products[FEW_BYTE_ROWS * 64];
    Int8Tiles::each_part(form, count, order, unit, vecs, sums, [&](const Int8Tiles::Part& part) {
      (count == 1 ? products_of<1> : products_of<2>)(rows + part.at, part.columns, part.width, products);
      const float* scales = (const float*)rows + part.group * BYTE_ROWS;
      Int8Tiles::Finish{count, part.first, part.last, part.joins, count * UNIT, {scales, nullptr}, part.scales, part.to}(products);
    });
  }
};
#endif
