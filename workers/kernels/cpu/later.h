// Rows of sums that become results while tiles make the next sums: what vectors and tiles do in turn takes as long as both.
#pragma once
#include "amx.h"
#include "gemm.h"
#ifdef HAS_TILES

constexpr size_t TILED_COLUMNS = 32;  // that are made at once, of a unit's UNIT

// Rows 0 .. count - 1 of some sums, TILED_COLUMNS of a unit. What a row's function needs is in the fields.
struct SumRows {
  using Finish = void (*)(const SumRows&, size_t row);
  Finish finish = nullptr;  // null: they stay as they are
  size_t count = 0;
  float* sums = nullptr;  // rows are UNIT apart
  long joins = 0;         // to the sums that lie `level`, 2 `level` .. floats before, as in gemm.h
  size_t level = 0;
  char* out = nullptr;  // of row 0 and the first column; rows are out_row bytes apart
  size_t out_row = 0, columns = 0;  // columns: how many exist
  int32_t first_column = 0;
  const float *bias = nullptr, *gate = nullptr, *gate_bias = nullptr;

  // first: of these columns, in the matrix that `of` cuts. all: its bias, or null.
  void see_columns(const Units& of, size_t first, const float* all) {
    first_column = int32_t(first), columns = of.columns > first ? std::min(of.columns - first, TILED_COLUMNS) : 0;
    bias = all ? all + first : nullptr;
  }
  struct Pair {
    __m512 low, high;
  };
  // A row of the sums with those that they join. to: where it lies then.
  Pair joined(size_t row, float*& to) const {
    to = sums + row * UNIT;
    Pair x{_mm512_loadu_ps(to), _mm512_loadu_ps(to + 16)};
    for (long j = 0; j < joins; j++) {
      to -= level;
      x.low = _mm512_add_ps(_mm512_loadu_ps(to), x.low), x.high = _mm512_add_ps(_mm512_loadu_ps(to + 16), x.high);
    }
    return x;
  }
  Pair with_bias(Pair x, const float* from) const {
    if (!from) from = ZEROS;  // an addition all the same: -0 becomes 0 as in finish_row
    return {_mm512_add_ps(x.low, _mm512_maskz_loadu_ps(mask(0), from)), _mm512_add_ps(x.high, _mm512_maskz_loadu_ps(mask(1), from + 16))};
  }
  __mmask16 mask(size_t half) const { return columns_mask(half * 16, columns); }

 private:
  alignas(64) static constexpr float ZEROS[TILED_COLUMNS] = {};
};

inline void join_row(const SumRows& rows, size_t row) {
  float* to;
  const SumRows::Pair x = rows.joined(row, to);
  _mm512_storeu_ps(to, x.low), _mm512_storeu_ps(to + 16, x.high);
}
inline void store_row(const SumRows& rows, SumRows::Pair x, size_t row, const float*) {
  float* out = (float*)(rows.out + row * rows.out_row);
  _mm512_mask_storeu_ps(out, rows.mask(0), x.low), _mm512_mask_storeu_ps(out + 16, rows.mask(1), x.high);
}
inline void store_row(const SumRows& rows, SumRows::Pair x, size_t row, const bf16*) {
  const __mmask32 all = __mmask32(rows.mask(0)) | __mmask32(rows.mask(1)) << 16;
  _mm512_mask_storeu_epi16(rows.out + row * rows.out_row, all, (__m512i)_mm512_cvtne2ps_pbh(x.high, x.low));
}
template <class Out> void finish_joined(const SumRows& rows, size_t row) {
  float* to;
  store_row(rows, rows.with_bias(rows.joined(row, to), rows.bias), row, (const Out*)nullptr);
}

// The rows that a thread still has to finish: some with each step of the next product, the rest before sums are stored
// where these lie.
class Later {
 public:
  void add(const SumRows& these) { rows = these, next = 0; }
  void some(size_t count) {
    for (; count && next < rows.count; count--, next++) rows.finish(rows, next);
  }
  void all() { some(rows.count); }
  // How many to finish with each of so many steps.
  size_t each(size_t steps) const { return (rows.count - next + steps - 1) / std::max<size_t>(steps, 1); }

 private:
  SumRows rows;
  size_t next = 0;
};
#endif
