// A linear layer over packed weights, whatever their format: the one place that knows the formats.
#pragma once
#include "gemm.h"
#include "gemm_tiles.h"
#include "rows.h"
#ifdef HAS_PRODUCTS
#include <memory>

#ifdef __AVX512BF16__
#define HAS_QUANTIZED
#include "gemm_int4.h"
#include "gemm_int4_tiles.h"
#include "gemm_int8.h"
#include "gemm_int8_few.h"
#include "gemm_int8_tiles.h"
#endif

enum WeightFormat : long { BF16_PAIRS = 0, INT8 = 1, INT4 = 2, BF16_TILES = 3, FLOATS = 4, INT8_TILES = 5 };

// Mirrored by workers/kernels/packed.py.
struct PackedWeights {
  long format;        // of WeightFormat
  const char* data;   // laid out as the format wants it
  const float* bias;  // (columns), or null
  long columns, k;
  SumOrder order;     // of the k inputs; of quantized weights, of the groups filled up to 32 inputs
  const long* widths;  // of quantized weights: the inputs of each group, which end where leaves do; else null
  long groups;
};

// Room for the sums of one task, and what a thread has not yet written of those before.
class LinearScratch {
 public:
#ifdef HAS_TILES
  Later later;
#endif
  // To be called by who has done its tasks, before anyone reads their results.
  void finish() {
#ifdef HAS_TILES
    later.all();
#endif
  }
  // The last CHUNK_ROWS * UNIT are for the sums of another unit.
  float* of(const PackedWeights& w) {
    const size_t wanted = size_t(w.order.levels() + 1) * CHUNK_ROWS * UNIT;
    if (size < wanted) space.reset(new float[(size = wanted) + 16]);
    return (float*)((uintptr_t(space.get()) + 63) / 64 * 64);
  }
  bf16* wide() {  // (CHUNK_ROWS, 2 * UNIT)
    if (!pairs) pairs.reset(new bf16[CHUNK_ROWS * 2 * UNIT]);
    return pairs.get();
  }

 private:
  std::unique_ptr<bf16[]> pairs;
  std::unique_ptr<float[]> space;  // never read before it is written
  size_t size = 0;
};

// Rows of an input in the form that the products of a format take, `stride` bytes apart. Prepared ones lie in whole lines.
struct alignas(64) CacheLine {
  char bytes[64];
};
constexpr size_t ROWS_TOGETHER = 8;  // that some formats lay out as one
inline size_t prepared_lines(long rows, size_t row_bytes) { return (size_t(rows) + ROWS_TOGETHER - 1) * row_bytes / sizeof(CacheLine) + 1; }
struct LinearRows {
  const char* first;
  size_t stride;
};
// Quantized weights want rows made by prepare_row; others take rows of their own kind as they are.
inline bool is_quantized(const PackedWeights& w) { return w.format == INT8 || w.format == INT4 || w.format == INT8_TILES; }
inline size_t element_bytes(long format) { return format == FLOATS ? 4 : 2; }
inline Units units_of(const PackedWeights& w) { return {size_t(w.columns), size_t(w.k), element_bytes(w.format)}; }
#ifdef HAS_QUANTIZED
#ifdef HAS_TILES
static_assert(BYTE_ROWS == ROWS_TOGETHER);
inline ByteRows byte_rows(const PackedWeights& w) { return {w.widths, size_t(w.groups)}; }
#endif
inline size_t input_bytes(const PackedWeights& w) {
#ifdef HAS_TILES
  if (w.format == INT8_TILES) return byte_rows(w).block_bytes() / BYTE_ROWS;
#endif
  return is_quantized(w) ? row_bytes(size_t(w.groups)) : size_t(w.k) * element_bytes(w.format);
}
// Row r of `rows`, for which there is room for ROWS_TOGETHER - 1 rows more than there are.
inline void prepare_row(const PackedWeights& w, const bf16* x, char* rows, size_t r) {
#ifdef HAS_TILES
  if (w.format == INT8_TILES) return byte_rows(w).quantize(x, rows, r);
#endif
  quantize_row(x, w.widths, size_t(w.groups), rows + r * input_bytes(w));
}

// groups: of 32 inputs, filled up.
inline size_t quantized_column_bytes(long format, size_t groups) {
  return format == INT4 ? Int4::column_bytes(groups) : Int8::column_bytes(groups);  // of INT8_TILES as of INT8
}
inline size_t quantized_behind(long format) { return format == INT8_TILES ? 1024 : 0; }  // bytes behind the last unit that may be read
inline void quantized_sums(const PackedWeights& w, const Units& units, size_t u, const char* rows, size_t count, bool fetch, float* sums) {
#ifdef HAS_TILES
  if (w.format == INT8_TILES) {
    const char* unit = w.data + units.first(u) * quantized_column_bytes(w.format, size_t(w.order.inputs()) / GROUP);
    const auto run = count <= FEW_BYTE_ROWS ? Int8FewRows::unit_sums : Int8Tiles::unit_sums;
    return run(byte_rows(w), rows, count, w.order, unit, units.vecs(u), sums);
  }
#endif
  const size_t groups = size_t(w.groups);
  const char* unit = w.data + units.first(u) * quantized_column_bytes(w.format, groups);
#ifdef HAS_TILES
  if (w.format == INT4 && can_use_tiles() && count >= INT4_TILES_FROM) {
    const auto run = units.vecs(u) == 4 ? Int4Tiles<4>::unit_sums : Int4Tiles<2>::unit_sums;
    return run((const RowGroup*)rows, count, groups, w.order, unit, sums);
  }
#endif
  if (w.format == INT4) quantized_unit<Int4>(rows, count, groups, w.order, unit, units.vecs(u), fetch, sums);
  else quantized_unit<Int8>(rows, count, groups, w.order, unit, units.vecs(u), fetch, sums);
}
#else  // and no weights in those formats
inline size_t input_bytes(const PackedWeights& w) { return size_t(w.k) * element_bytes(w.format); }
inline void prepare_row(const PackedWeights&, const bf16*, char*, size_t) {}
inline void quantized_sums(const PackedWeights&, const Units&, size_t, const char*, size_t, bool, float*) {}
#endif

// The formats of weights as they are: steps for vectors, or tiles, which only some builds know.
inline size_t plain_bytes(long format, const Units& units) {
#ifdef HAS_TILES
  if (format == BF16_TILES) return tiled_bytes(units);
#endif
  return units.bytes();
}
inline void pack_plain(long format, const char* weight, const Units& units, size_t u, char* packed) {
#ifdef HAS_TILES
  if (format == BF16_TILES) return pack_tiled_unit((const bf16*)weight, units, u, packed);
#endif
  pack_unit(weight, units, u, packed);
}
inline void plain_sums(const PackedWeights& w, const Units& units, size_t u, const char* a, size_t a_row, size_t rows, bool fetch, float* sums) {
  if (w.format == FLOATS) unit_sums<Floats>(w.data, units, u, w.order, a, a_row, rows, fetch, sums);
  else unit_sums<Pairs>(w.data, units, u, w.order, a, a_row, rows, fetch, sums);
}

// A product of `rows` rows is cut into this many tasks, which may run in any order on any thread.
inline long linear_tasks(const PackedWeights& w, long rows) {
  return long(units_of(w).count()) * ((rows + CHUNK_ROWS - 1) / CHUNK_ROWS);
}
// The rows and the unit of a task.
struct TaskPart {
  long row0;
  size_t count, unit, chunk, chunks;  // chunk: which part of the rows
  bool fetch;  // what follows in the stream comes next
  TaskPart(long rows, long task) {
    chunks = size_t(rows + CHUNK_ROWS - 1) / CHUNK_ROWS, chunk = size_t(task) % chunks, unit = size_t(task) / chunks;
    row0 = long(chunk) * CHUNK_ROWS, count = size_t(std::min<long>(CHUNK_ROWS, rows - row0));
    fetch = chunk == chunks - 1;
  }
};
#ifdef HAS_TILES
template <class Finish>
void tiled_sums(const PackedWeights& w, const Units& units, size_t u, const LinearRows& x, const TaskPart& part, float* sums, Later& later, Finish finish) {
  Ahead ahead;
  if (part.chunks > 1) {  // each task of this unit brings in its part of the next one
    const size_t bytes = size_t(units.vecs(u)) * 16 * tiled_inputs(units.k) * 2, each = bytes / part.chunks;
    ahead.at = w.data + tiled_offset(units, u) + bytes + each * part.chunk, ahead.end = ahead.at + each;
  }
  tiled_unit_sums(w.data, units, u, w.order, x.first + size_t(part.row0) * x.stride, x.stride, part.count, sums, later, finish, ahead);
}
#endif
inline void sums_of(const PackedWeights& w, const Units& units, size_t u, const LinearRows& x, const TaskPart& part, float* sums) {
  const char* first = x.first + size_t(part.row0) * x.stride;
#ifdef HAS_TILES
  if (w.format == BF16_TILES) {
    Later later;
    tiled_sums(w, units, u, x, part, sums, later, [](SumRows&, size_t, size_t) {});
    return later.all();
  }
#endif
  if (is_quantized(w)) quantized_sums(w, units, u, first, part.count, part.fetch, sums);
  else plain_sums(w, units, u, first, x.stride, part.count, part.fetch, sums);
}
// One task of out (nodes, rows, columns) = x (rows, k) * weights + bias; with several nodes there is no bias. A row of out is
// `width` wide, of which this fills the first `columns`.
template <class Out>
void linear_task(const PackedWeights& w, const LinearRows& x, long rows, long task, LinearScratch& scratch, Out* out, long width) {
  const Units units = units_of(w);
  const TaskPart part(rows, task);
  const size_t u = part.unit;
  float* sums = scratch.of(w);
#ifdef HAS_TILES
  if (w.format == BF16_TILES && w.order.nodes() == 1) {
    const size_t out_row = size_t(width) * sizeof(Out);
    return tiled_sums(w, units, u, x, part, sums, scratch.later, [&](SumRows& made, size_t row, size_t column) {
      made.see_columns(units, column += units.first(u), w.bias);
      made.finish = finish_joined<Out>;
      made.out = (char*)(out + column) + (size_t(part.row0) + row) * out_row, made.out_row = out_row;
    });
  }
#endif
  sums_of(w, units, u, x, part, sums);
  for (size_t node = 0, nodes = size_t(w.order.nodes()); node < nodes; node++, out += rows * width)
    for (size_t r = 0; r < part.count; r++, sums += UNIT)
      finish_row(sums, units.first(u), units.vecs(u), units.columns, w.bias, out + (size_t(part.row0) + r) * size_t(width));
}

#ifdef HAS_TILES
// silu(gate) * up, both rounded as if they had been stored.
inline void finish_gated(const SumRows& rows, size_t row) {
  float* to;
  const auto rounded = [](SumRows::Pair x) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x.high, x.low);
    const auto widened = [](__m256i half) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16); };
    return SumRows::Pair{widened(_mm512_castsi512_si256(both)), widened(_mm512_extracti64x4_epi64(both, 1))};
  };
  const float* from = rows.gate + row * UNIT;
  const SumRows::Pair gate = rounded(rows.with_bias({_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)}, rows.gate_bias));
  const SumRows::Pair up = rounded(rows.with_bias(rows.joined(row, to), rows.bias));
  store_row(rows, {silu_mul(gate.low, up.low), silu_mul(gate.high, up.high)}, row, (const bf16*)nullptr);
}
#endif

// Whether columns [gate | up] can be made a unit of each at a time.
inline bool gates_in_place(const PackedWeights& w) { return w.columns % (2 * UNIT) == 0 && w.order.count == 1; }
inline long gated_tasks(const PackedWeights& w, long rows) { return linear_tasks(w, rows) / 2; }
// One task of out (rows, columns / 2) = silu(gate) * up of x (rows, k) * weights + bias, rounded as if those had been stored.
inline void gated_task(const PackedWeights& w, const LinearRows& x, long rows, long task, LinearScratch& scratch, bf16* out) {
  const Units units = units_of(w);
  const TaskPart part(rows, task);
  const size_t inner = units.columns / 2;
  float* sums = scratch.of(w);
#ifdef HAS_TILES
  if (w.format == BF16_TILES) {
    float* gate = sums + size_t(w.order.levels()) * CHUNK_ROWS * UNIT;
    const size_t up = part.unit + units.count() / 2;
    tiled_sums(w, units, part.unit, x, part, gate, scratch.later, [](SumRows&, size_t, size_t) {});
    return tiled_sums(w, units, up, x, part, sums, scratch.later, [&](SumRows& made, size_t row, size_t column) {
      made.see_columns(units, units.first(up) + column, w.bias);
      made.finish = finish_gated, made.gate = gate + row * UNIT + column;
      if (w.bias) made.gate_bias = made.bias - inner;
      made.out = (char*)(out + (size_t(part.row0) + row) * inner + units.first(part.unit) + column), made.out_row = inner * sizeof(bf16);
    });
  }
#endif
  bf16* wide = scratch.wide();
  for (int half = 0; half < 2; half++) {
    const size_t u = part.unit + half * units.count() / 2;
    sums_of(w, units, u, x, part, sums);
    for (size_t r = 0; r < part.count; r++)
      finish_row(sums + r * UNIT, 0, 4, UNIT, w.bias ? w.bias + units.first(u) : nullptr, wide + (2 * r + half) * UNIT);
  }
  for (size_t r = 0; r < part.count; r++, wide += 2 * UNIT)
    silu_mul_row(wide, wide + UNIT, out + (size_t(part.row0) + r) * inner + units.first(part.unit), UNIT);
}
#endif
