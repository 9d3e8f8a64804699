// The best id of each row of a head's logits, which are never stored: as best_id of draw.h, all of them finite.
#pragma once
#include "draw.h"
#include "linear.h"

// By lane: the largest logit of those seen so far, the first of equal ones.
struct alignas(64) BestRow {
  float best[16];
  int32_t ids[16];
  bool is_finite = true;

  BestRow() {
    std::fill(best, best + 16, -INFINITY);
    std::fill(ids, ids + 16, INT32_MAX);
  }
  void join(const BestRow& other) {
    is_finite = is_finite && other.is_finite;
    for (int i = 0; i < 16; i++)
      if (other.best[i] > best[i] || (other.best[i] == best[i] && other.ids[i] < ids[i])) best[i] = other.best[i], ids[i] = other.ids[i];
  }
  int64_t id() const {
    if (!is_finite) return NOT_FINITE;
    const float most = *std::max_element(best, best + 16);
    int32_t first = INT32_MAX;
    for (int i = 0; i < 16; i++)
      if (best[i] == most) first = std::min(first, ids[i]);
    return first;
  }
};

#if defined(HAS_PRODUCTS) && defined(HAS_TILES)
inline bool can_find_best(const PackedWeights& head) { return head.format == BF16_TILES && head.order.nodes() == 1; }

inline void finish_best(const SumRows& rows, size_t row) {
  float* at;
  const SumRows::Pair x = rows.with_bias(rows.joined(row, at), rows.bias);
  BestRow& to = ((BestRow*)rows.out)[row];
  __m512 best = _mm512_load_ps(to.best);
  __m512i ids = _mm512_load_si512(to.ids), id = _mm512_add_epi32(_mm512_set1_epi32(rows.first_column), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  constexpr int NAN_OR_INFINITY = 0x01 | 0x80 | 0x08 | 0x10;
  const auto see = [&](__m512 y, __mmask16 exist) {
    const __mmask16 equal = _mm512_mask_cmp_ps_mask(exist, y, best, _CMP_EQ_OQ);
    const __mmask16 better = _mm512_mask_cmp_ps_mask(exist, y, best, _CMP_GT_OQ) | _mm512_mask_cmplt_epi32_mask(equal, id, ids);
    if (_mm512_mask_fpclass_ps_mask(exist, y, NAN_OR_INFINITY)) to.is_finite = false;
    best = _mm512_mask_mov_ps(best, better, y), ids = _mm512_mask_mov_epi32(ids, better, id);
    id = _mm512_add_epi32(id, _mm512_set1_epi32(16));
  };
  see(x.low, rows.mask(0)), see(x.high, rows.mask(1));
  _mm512_store_ps(to.best, best), _mm512_store_si512(to.ids, ids);
}
// One task of best (rows), joined with what x (rows, k) * weights + bias gives.
inline void best_task(const PackedWeights& w, const LinearRows& x, long rows, long task, LinearScratch& scratch, BestRow* best) {
  const Units units = units_of(w);
  const TaskPart part(rows, task);
  tiled_sums(w, units, part.unit, x, part, scratch.of(w), scratch.later, [&](SumRows& made, size_t row, size_t column) {
    made.see_columns(units, units.first(part.unit) + column, w.bias);
    made.finish = finish_best, made.out = (char*)(best + part.row0 + row);
  });
}
#else
inline bool can_find_best(const PackedWeights&) { return false; }
inline void best_task(const PackedWeights&, const LinearRows&, long, long, LinearScratch&, BestRow*) {}
#endif
