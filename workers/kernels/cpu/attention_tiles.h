// Paged attention of bf16 rows over bf16 pages in the tile registers of amx.h, for any number of rows.
//
// Query rows go in tiles of 16, one a lane: scores of 16 keys and 16 rows are K * Q^T, with keys as they lie in their
// pages, and outputs are V^T * P^T. Softmax so runs down the lanes. Probabilities are bf16 made in integers, and their sum
// is one more row of the second product: V^T has a row of ones below it, in a tile of that row alone, which takes little time.
//
//   scores   (64 keys, 16 rows) float   = keys (64, d) * queries (d / 2, 16, 2)
//   output   (d + 1, 16 rows) float    += values (d + 1, 64) * weights (32, 16, 2)
//
// A product in tiles gives each element the same bits wherever it lies, and all else is done lane by lane: a row does
// not depend on its neighbours.
#pragma once
#include "attention_bf16.h"
#ifdef HAS_TILES
#include "attention_room.h"
#include "exponents.h"

template <long D> class TiledTask {
 public:
  // lanes: of rows, 16, or 4 for fold_few<4>. few: whether fold_few is to be used, or fold.
  TiledTask(const Attention<bf16>& a, const TileRoom<D>& room, int lanes, bool few)
      : lanes(lanes), a(a), room(room), unit(_mm512_set1_ps((a.cap > 0.f ? 1.f : a.scale) * 1.44269504f * Exponents::STEPS)), tiles(few ? few_shapes(lanes) : shapes()) {}

  // Row tile t: `rows` queries, at most 16, and the position that each has; nothing attended so far.
  template <class Query, class Position> void begin(long t, long rows, Query query, Position position) {
    for (long i = 0; i < room.blocks(); i++) {
      __m512i r[ROWS];
      for (long l = 0; l < ROWS; l++) r[l] = l < rows ? PairProducts::pairs_at(query(l), i * 32, room.d()) : _mm512_setzero_si512();
      transpose_pairs(r);
      for (long l = 0; l < ROWS; l++) _mm512_store_si512(queries(t) + i * TILE_BYTES + l * 64, r[l]);
    }
    for (long l = 0; l < ROWS; l++) room.positions[t * ROWS + l] = int32_t(position(std::min(l % lanes, rows - 1)));
    _mm512_store_ps(room.offsets + t * ROWS, _mm512_set1_ps(NOTHING_SEEN));
    memset(out(t), 0, size_t(lanes * few_stride()) * 4);  // all of it, with 16 lanes
  }
  // Folds a group of keys from position `base` on into the row tiles [first, last): while one has its softmax, the next has
  // its scores and the one before its output, as tiles and vectors can work at the same time.
  void fold(long first, long last, const KeyGroup<bf16>& now, const KeyGroup<bf16>& next, long base, bool in_pages) {
    start_fetching(next);
    load_values(now);
    find_key_tiles(now, in_pages);
    Sight none(room.positions, base, a.window), scored = none, weighed = none, added = none;
    scored.end = weighed.end = added.end = 0;
    for (long t = first; t < last + 2; t++) {
      added = weighed, weighed = scored;
      if (t < last) scored = Sight(room.positions + t * ROWS, base, a.window);
      else scored.end = 0;
      if (weighed.end && soften<ROWS>(t - 1, weighed)) rescale_lanes(t - 1);
      for (int i = 0; i < KEY_TILES; i++) {
        if (scored.end && i == 0) score(t, scored.key_tiles());
        if (added.end && i >= 2) add_values(t - 2, i - 2, (added.key_tiles() + 1) / 2);
        if (i < (weighed.key_tiles() + 1) / 2 * 2) weigh(t - 1, i, i < weighed.key_tiles());
      }
    }
  }
  // The same for a task of at most LANES rows, with fewer steps for a group: scores lie as (keys, LANES), so a vector has
  // those of several keys, output as (rows, wide) in the order of load_pairs, values as (32, wide, 2).
  template <int LANES> void fold_few(long rows, const KeyGroup<bf16>& now, const KeyGroup<bf16>& next, long base) {
    const Sight sight(room.positions, base, a.window);
    start_fetching(next);
    find_key_tiles(now, true);
    score_few<LANES>(sight.key_tiles());
    load_pairs(now);
    if (soften<LANES>(0, sight)) {
      alignas(64) float by[ROWS];
      _mm512_store_ps(by, rescale);
      for (long r = 0; r < rows; r++)
        for (float *o = room.out + r * few_stride(), *end = o + few_stride(); o < end; o += 16) _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), _mm512_set1_ps(by[r])));
    }
    const int blocks = (sight.key_tiles() + 1) / 2;
    for (int block = 0; block < blocks; block++) {
      weigh_few<LANES>(block, std::min(sight.key_tiles() - 2 * block, 2));
      fetch(8);
    }
    for (long first = 0; first <= room.value_tiles(); first += 2) {
      float* to = room.out + first * 16;
      const bool two = first < room.value_tiles();
      tiles.load<3>(to, size_t(few_stride()) * 4);
      if (two) tiles.load<4>(to + 16, size_t(few_stride()) * 4);
      for (int block = 0; block < blocks; block++) {
        tiles.load<5>(room.weights[1] + block * TILE_BYTES, 64);
        tiles.load<6>(two ? (const void*)value_tile(first, block) : ONES.numbers, 64);
        tiles.multiply<3, 5, 6>();
        if (two) {
          tiles.load<7>(value_tile(first + 1, block), 64);
          tiles.multiply<4, 5, 7>();
        }
        fetch(4);
      }
      tiles.store<3>(to, size_t(few_stride()) * 4);
      if (two) tiles.store<4>(to + 16, size_t(few_stride()) * 4);
    }
    fetch(KEYS);
  }
  template <class To> void finish_few(long rows, To to) const {
    for (long r = 0; r < rows; r++) {
      const float* from = room.out + r * few_stride();
      const __m512 inverse = _mm512_set1_ps(1.f / from[room.wide()]);
      for (long i = 0; i < room.d(); i += 32) {
        const __m512 low = _mm512_mul_ps(_mm512_load_ps(from + i), inverse), high = _mm512_mul_ps(_mm512_load_ps(from + i + 16), inverse);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);  // fours of elements: the even ones, the odd ones
        const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
        _mm512_mask_storeu_epi16(to(r) + i, __mmask32(room.d() - i >= 32 ? ~0u : (1u << (room.d() - i)) - 1), _mm512_permutexvar_epi64(order, both));
      }
    }
  }
  // Takes what a lane has so far to a lane of another row tile.
  void move(long t, long lane, long to_t, long to_lane) {
    room.offsets[to_t * ROWS + to_lane] = room.offsets[t * ROWS + lane];
    for (long i = 0; i <= room.wide(); i++) out(to_t)[i * ROWS + to_lane] = out(t)[i * ROWS + lane];
  }
  // Output rows to where `to` says.
  template <class To> void finish(long t, long rows, To to) const {
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.f), _mm512_load_ps(out(t) + room.wide() * ROWS));
    for (long i = 0; i < room.d(); i += 16) {
      __m512i r[ROWS];
      for (long k = 0; k < 16; k++) r[k] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(out(t) + (i + k) * ROWS), inverse));
      transpose_pairs(r);
      for (long l = 0; l < rows; l++)
        _mm256_mask_storeu_epi16(to(l) + i, columns_mask(size_t(i), size_t(room.d())), (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(r[l])));
    }
  }

 private:
  static constexpr float NOTHING_SEEN = 1e30f;
  const int lanes;
  const Attention<bf16>& a;
  const TileRoom<D>& room;
  const __m512 unit;
  __m512 offset, rescale;
  const char* pieces[2 * KEY_TILES];
  int fetched = 0, num_fetches = 0;  // eighths of them
  const char* key_tiles[KEY_TILES];
  size_t key_stride;
  Tiles tiles;

  // 0 to 3: scores or output; 4: sums of weights, a row; 5: keys or values; 6: a row of ones; 7: queries or weights.
  static TileShapes shapes() {
    TileShapes shapes;
    for (int t = 0; t < 8; t++) shapes.set(t, t == 4 || t == 6 ? 1 : 16, 64);
    return shapes;
  }
  // 0, 1: scores; 2: queries; 3, 4: output; 5: weights; 6, 7: keys or values.
  static TileShapes few_shapes(int lanes) {
    TileShapes shapes;
    for (int t = 0; t < 3; t++) shapes.set(t, 16, lanes * 4);
    for (int t = 3; t < 6; t++) shapes.set(t, lanes, 64);
    for (int t = 6; t < 8; t++) shapes.set(t, 16, 64);
    return shapes;
  }
  char* queries(long t) const { return room.queries + size_t(t) * room.query_bytes(); }
  float* out(long t) const { return room.out + size_t(t) * room.out_floats(); }

  // What is likely to come next: the keys and the values of 16 positions each, that mostly lie one behind the other.
  void start_fetching(const KeyGroup<bf16>& next) {
    fetched = num_fetches = 0;
    for (int j = 0; j < next.count; j += 16, num_fetches += 16) pieces[j / 8] = (const char*)next.k[j], pieces[j / 8 + 1] = (const char*)next.v[j];
  }
  // Some more eighths of these pieces, in the order of addresses; many at once would only queue up.
  void fetch(int count) {
    const long bytes = room.d() * 4;
    for (const int end = std::min(fetched + count, num_fetches); fetched < end; fetched++) {
      const char* from = pieces[fetched / 8] + fetched % 8 * bytes;
      for (long i = 0; i < bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
    }
  }
  void find_key_tiles(const KeyGroup<bf16>& now, bool in_pages) {
    if (in_pages && room.d() % 32 == 0 && a.cache.block_size % 16 == 0) {
      key_stride = size_t(room.d()) * 2;
      for (int i = 0; i * 16 < now.count; i++) key_tiles[i] = (const char*)now.k[i * 16];
      return;
    }
    key_stride = room.key_stride();
    for (int j = 0; j < now.count; j++)
      for (long i = 0; i < room.blocks(); i++) _mm512_store_si512(room.keys + j * key_stride + i * 64, PairProducts::pairs_at(now.k[j], i * 32, room.d()));
    for (int i = 0; i < KEY_TILES; i++) key_tiles[i] = room.keys + i * 16 * key_stride;
  }
  long few_stride() const { return room.wide() + 16; }
  // Pairs of the values of two keys, 16 elements of 32 keys a tile, zero from the group's end on. Of 32 elements one tile
  // has the first four of every eight, the next one the others: that is one instruction where their order takes three.
  void load_pairs(const KeyGroup<bf16>& now) {
    const long d = room.d(), wide = room.wide();
    char* const values = room.values;
    for (int j = 0; j < (now.count + 31) / 32 * 32; j += 2) {
      const bf16 *even = now.v[j], *odd = now.v[j + 1];
      char* to = values + j / 32 * TILE_BYTES + j % 32 * 32;
      for (long i = 0; i < wide; i += 32, to += 2 * VALUE_BLOCKS * TILE_BYTES) {
        __m512i x = _mm512_setzero_si512(), y = x;
        if (j < now.count) x = PairProducts::pairs_at(even, i, d);
        if (j + 1 < now.count) y = PairProducts::pairs_at(odd, i, d);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(to + VALUE_BLOCKS * TILE_BYTES, _mm512_unpackhi_epi16(x, y));
      }
      if (j % 4 == 0) fetch(1);
    }
  }
  // Tiles of 16 elements of 32 keys, zero from the group's end on.
  void load_values(const KeyGroup<bf16>& now) {
    for (int block = 0; block * 32 < now.count; block++)
      for (long i = 0; i < room.wide(); i += 32) load_half<false>(now, block, i), load_half<true>(now, block, i);
  }
  // Elements i + 8n + 4 HIGH .. + 3 of 32 keys, n < 4.
  template <bool HIGH> void load_half(const KeyGroup<bf16>& now, int block, long i) {
    __m512i r[16];
    for (int p = 0; p < 16; p++) {
      const __m512i even = values_at(now, block * 32 + 2 * p, i), odd = values_at(now, block * 32 + 2 * p + 1, i);
      r[p] = HIGH ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd);
    }
    transpose_pairs(r);
    for (int n = 0; n < 16 && i + n / 4 * 8 < room.wide(); n++)
      _mm512_store_si512(value_tile((i + n / 4 * 8) / 16, block) + (n / 4 * 8 + n % 4 + HIGH * 4) % 16 * 64, r[n]);
  }
  __m512i values_at(const KeyGroup<bf16>& now, int j, long i) const {
    return j < now.count ? PairProducts::pairs_at(now.v[j], i, room.d()) : _mm512_setzero_si512();
  }
  char* value_tile(long tile, int block) const { return room.values + (tile * VALUE_BLOCKS + block) * TILE_BYTES; }

  void score(long t, int count) {
    tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
    for (long b = 0; b < room.blocks(); b++) {
      tiles.load<7>(queries(t) + b * TILE_BYTES, 64);
      each_tile(count, [&](auto c) {
        tiles.load<5>(key_tiles[c()] + b * 64, key_stride);
        tiles.multiply<c(), 5, 7>();
        fetch(2);
      });
    }
    each_tile(count, [&](auto c) { tiles.store<c()>(room.scores[t & 1] + c() * 256, 64); });
  }
  // Finds the largest scores so far; whether what has been added up has to be multiplied by `rescale`.
  template <int LANES> bool soften(long t, const Sight& sight) {
    float* scores = room.scores[t & 1];
    const int vectors = sight.key_tiles() * LANES;
    if (a.cap > 0.f)
      for (int j = 0; j < vectors * 16; j += KEYS) cap_scores(scores + j, a.scale, a.cap);
    if (!sight.all)
      for (int j = 0; j < vectors; j++) {
        const __m512i key = _mm512_add_epi32(_mm512_set1_epi32(j * (16 / LANES)), first_keys<LANES>());
        const __mmask16 seen = _mm512_mask_cmple_epi32_mask(_mm512_cmplt_epi32_mask(key, sight.to), sight.from, key);
        _mm512_store_ps(scores + j * ROWS, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, _mm512_load_ps(scores + j * ROWS)));
      }
    __m512 most[4];
    for (auto& x : most) x = _mm512_set1_ps(-INFINITY);
    __mmask16 broken = 0;
    for (int j = 0; j < vectors; j += 4) {
      __m512 x[4];
      for (int i = 0; i < 4; i++) x[i] = _mm512_load_ps(scores + (j + i) * ROWS), most[i] = _mm512_max_ps(most[i], x[i]);
      broken |= _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q);
    }
    __m512 top = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    if constexpr (LANES < 16) top = _mm512_max_ps(top, _mm512_shuffle_f32x4(top, top, 0x4e)), broken |= __mmask16(broken << 8 | broken >> 8);
    if constexpr (LANES < 8) top = _mm512_max_ps(top, _mm512_shuffle_f32x4(top, top, 0xb1)), broken |= __mmask16(broken << 4 | broken >> 12);
    broken |= _mm512_cmp_ps_mask(top, _mm512_set1_ps(INFINITY), _CMP_EQ_OQ);
    const __m512 old = _mm512_load_ps(room.offsets + t * ROWS);
    offset = _mm512_min_ps(old, _mm512_fnmadd_round_ps(top, unit, _mm512_set1_ps(Exponents::BIASED_ZERO), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    if (!(_mm512_cmp_ps_mask(offset, old, _CMP_LT_OQ) | broken)) return false;
    _mm512_store_ps(room.offsets + t * ROWS, offset);
    if (!(_mm512_cmp_ps_mask(old, _mm512_set1_ps(NOTHING_SEEN), _CMP_LT_OQ) | broken)) return false;
    const __m512 less = exp2_short(_mm512_mul_ps(_mm512_sub_ps(offset, old), _mm512_set1_ps(1.f / Exponents::STEPS)));
    rescale = _mm512_mask_mov_ps(less, broken, _mm512_set1_ps(NAN));
    return true;
  }
  void rescale_lanes(long t) {
    for (float *o = out(t), *end = o + (room.wide() + 1) * ROWS; o < end; o += ROWS) _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), rescale));
  }
  void weigh(long t, int i, bool seen) {
    const float* scores = room.scores[t & 1] + i * 256;
    char* weights = room.weights[t & 1] + i * 512;
#pragma GCC unroll 8
    for (int j = 0; j < 16; j += 2) {
      const __m512i pairs = seen ? Exponents::pairs(_mm512_load_ps(scores + j * ROWS), _mm512_load_ps(scores + (j + 1) * ROWS), unit, offset) : _mm512_setzero_si512();
      _mm512_store_si512(weights + j * 32, pairs);
    }
  }
  // Which of the keys of a vector each lane has.
  template <int LANES> static __m512i first_keys() {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_srli_epi32(lane, LANES == 16 ? 4 : LANES == 8 ? 3 : 2);
  }
  template <int LANES> void score_few(int count) {
    for (int first = 0; first < count; first += 2) {
      const bool two = first + 1 < count;
      tiles.zero<0>(), tiles.zero<1>();
      for (long b = 0; b < room.blocks(); b++) {
        tiles.load<2>(queries(0) + b * TILE_BYTES, 64);
        tiles.load<6>(key_tiles[first] + b * 64, key_stride);
        tiles.multiply<0, 6, 2>();
        fetch(2);
        if (!two) continue;
        tiles.load<7>(key_tiles[first + 1] + b * 64, key_stride);
        tiles.multiply<1, 7, 2>();
        fetch(2);
      }
      tiles.store<0>(room.scores[0] + first * 16 * LANES, LANES * 4);
      if (two) tiles.store<1>(room.scores[0] + (first + 1) * 16 * LANES, LANES * 4);
    }
  }
  // Weights of 32 keys as (LANES, 16, 2); of the second 16 only if `count` is 2.
  template <int LANES> void weigh_few(int block, int count) {
    const float* scores = room.scores[0] + block * 32 * LANES;
    __m512i r[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      const __m512 x = _mm512_load_ps(scores + i * 32), y = _mm512_load_ps(scores + i * 32 + 16);
      const __m512 even = LANES == 16 ? x : _mm512_shuffle_f32x4(x, y, LANES == 8 ? 0x44 : 0x88);
      const __m512 odd = LANES == 16 ? y : _mm512_shuffle_f32x4(x, y, LANES == 8 ? 0xee : 0xdd);
      r[i] = i < LANES / 2 || count == 2 ? Exponents::pairs(even, odd, unit, offset) : _mm512_setzero_si512();
    }
    transpose_lanes(r);
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) _mm512_store_si512(room.weights[1] + block * TILE_BYTES + l * 64, r[l]);
  }
  static void transpose_lanes(__m512i (&r)[16]) { transpose_pairs(r); }
  // (16, 4) in rows of four to (4, 16).
  static void transpose_lanes(__m512i (&r)[4]) {
    const __m512i first = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0), last = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    const __m512i a = _mm512_permutex2var_epi32(r[0], first, r[1]), b = _mm512_permutex2var_epi32(r[2], first, r[3]);
    const __m512i c = _mm512_permutex2var_epi32(r[0], last, r[1]), d = _mm512_permutex2var_epi32(r[2], last, r[3]);
    r[0] = _mm512_shuffle_i64x2(a, b, 0x44), r[1] = _mm512_shuffle_i64x2(a, b, 0xee);
    r[2] = _mm512_shuffle_i64x2(c, d, 0x44), r[3] = _mm512_shuffle_i64x2(c, d, 0xee);
  }
  // Half of the second product of a row tile, over `blocks` blocks of 32 keys. The tiles of output are taken in parts of at
  // most four, each in two moves; the sums go with the last ones.
  void add_values(long t, int half, int blocks) {
    const long count = room.value_tiles(), parts = (count + 3) / 4;
    for (long move = half * parts; move < (half + 1) * parts; move++) {
      const long first = move / 2 * 4;
      const int n = int(std::min(4L, count - first)), block = int(move % 2);
      const bool with_sums = first + n == count;
      float *to = out(t) + first * 256, *sums = out(t) + count * 256;
      if (block == 0) {
        each_tile(n, [&](auto c) { tiles.load<c()>(to + c() * 256, 64); });
        if (with_sums) tiles.load<4>(sums, 64);
      }
      if (block < blocks) {
        tiles.load<7>(room.weights[t & 1] + block * TILE_BYTES, 64);
        each_tile(n, [&](auto c) {
          tiles.load<5>(value_tile(first + c(), block), 64);
          tiles.multiply<c(), 5, 7>();
        });
        if (with_sums) {
          tiles.load<6>(ONES.numbers, 64);
          tiles.multiply<4, 6, 7>();
        }
      }
      if (block == 1) {
        each_tile(n, [&](auto c) { tiles.store<c()>(to + c() * 256, 64); });
        if (with_sums) tiles.store<4>(sums, 64);
      }
    }
  }
  template <class F> static void each_tile(int n, F f) {
    f(std::integral_constant<int, 0>());
    if (n > 1) f(std::integral_constant<int, 1>());
    if (n > 2) f(std::integral_constant<int, 2>());
    if (n > 3) f(std::integral_constant<int, 3>());
  }
};
#endif
