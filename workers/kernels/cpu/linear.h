// A linear layer over packed weights, whatever their format: the one place that knows the formats.
#pragma once
#ifdef __AVX512BF16__
#include "gemm.h"

enum WeightFormat : long { BF16_PAIRS = 0 };

// Mirrored by workers/kernels/packed.py.
struct PackedWeights {
  long format;        // of WeightFormat
  const char* data;   // laid out as the format wants it
  const float* bias;  // (columns), or null
  long columns, k;
};

// A product of `rows` rows is cut into this many tasks, which may run in any order on any thread.
inline long linear_tasks(const PackedWeights& w, long rows) {
  return long(Units{size_t(w.columns), size_t(w.k)}.count()) * ((rows + CHUNK_ROWS - 1) / CHUNK_ROWS);
}
// One task of out (rows, columns) = x (rows, k; x_stride elements apart) * weights + bias.
template <class Out> void linear_task(const PackedWeights& w, const bf16* x, long x_stride, long rows, long task, Out* out) {
  const Units units{size_t(w.columns), size_t(w.k)};
  const long chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, row0 = task % chunks * CHUNK_ROWS;
  unit_rows((const char*)(x + row0 * x_stride), size_t(x_stride) * 2, size_t(std::min<long>(CHUNK_ROWS, rows - row0)), w.data, units,
            size_t(task / chunks), task % chunks == chunks - 1, [&](size_t r, size_t column, int vecs, const float* sums) {
              finish_row(sums, column, vecs, units.columns, w.bias, out + (size_t(row0) + r) * units.columns);
            });
}
#endif
