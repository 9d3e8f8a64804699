// Paged attention of bf16 rows over bf16 pages in the tile registers of amx.h, for any number of rows.
//
// Query rows go in tiles of 16, one a lane: scores of 16 keys and 16 rows are K * Q^T, with keys as they lie in their
// pages, and outputs are V^T * P^T. Softmax so runs down the lanes. Probabilities are bf16 made in integers, and their sum
// is one more row of the second product: V^T has a row of ones below it.
//
//   scores   (64 keys, 16 rows) float   = keys (64, d) * queries (d / 2, 16, 2)
//   output   (d + 1, 16 rows) float    += values (d + 1, 64) * weights (32, 16, 2)
//
// A product in tiles gives each element the same bits wherever it lies, and all else is done lane by lane: a row does
// not depend on its neighbours.
#pragma once
#include "attention_bf16.h"
#ifdef HAS_TILES
#include <utility>

#include "gemm_tiles.h"

constexpr int ROWS = 16, KEY_TILES = KEYS / 16, VALUE_BLOCKS = KEYS / 32;

// 2^x as bf16 of scores, x = (score * scale + offset - BIASED_ZERO) / STEPS below: x + 127 with nine binary places is what
// the bits of a bf16 number are, but for the curve between powers of two and two places.
struct Exponents {
  static constexpr float STEPS = 512.f, MAGIC = 12582912.f;  // 1.5 * 2^23: a float that has an integer in its low bits
  static constexpr float BIASED_ZERO = MAGIC + 127.f * STEPS;

  // Pairs of 2^x of the scores of two keys, one below the other. Below 2^-126 it is zero, so for -inf.
  static __m512i pairs(__m512 first, __m512 second, __m512 scale, __m512 offset) {
    const __m512 least = _mm512_set1_ps(MAGIC);
    const __m512 a = _mm512_max_ps(_mm512_fmadd_ps(first, scale, offset), least);
    const __m512 b = _mm512_max_ps(_mm512_fmadd_ps(second, scale, offset), least);
    return curve(_mm512_permutex2var_epi16(_mm512_castps_si512(a), low_halves(), _mm512_castps_si512(b)));
  }

 private:
  // Where the low halves of two vectors come from when they are interleaved.
  static __m512i low_halves() {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_add_epi32(_mm512_slli_epi32(lane, 17), _mm512_add_epi32(_mm512_slli_epi32(lane, 1), _mm512_set1_epi32(32 << 16)));
  }
  // 1 + f - 2^f = f (1 - f) (0.3042 + 0.0780 f), to 1e-4, is taken off the places f.
  static __m512i curve(__m512i x) {
    const __m512i f = _mm512_slli_epi16(x, 7), bend = _mm512_mulhi_epu16(f, _mm512_sub_epi16(_mm512_setzero_si512(), f));
    const __m512i slope = _mm512_add_epi16(_mm512_set1_epi16(156), _mm512_mulhi_epu16(f, _mm512_set1_epi16(40)));
    return _mm512_srli_epi16(_mm512_sub_epi16(x, _mm512_mulhi_epu16(bend, slope)), 2);
  }
};

// Where everything of a task lies; grown by the thread that owns it.
struct TileRoom {
  const long d, wide, blocks;  // blocks: of 32 inputs
  const long value_tiles;      // and one of ones
  char *queries, *values, *keys, *weights[2], *ones, *all_ones;
  float *out, *scores[2], *offsets;
  int32_t* positions;

  TileRoom(AttentionScratch& s, long d, long tiles) : d(d), wide((d + 15) / 16 * 16), blocks((d + 31) / 32), value_tiles(wide / 16) {
    const size_t bytes = size_t(tiles) * (query_bytes() + out_floats() * 4 + 128) + size_t(value_tiles * VALUE_BLOCKS + 2 * KEY_TILES + 4) * TILE_BYTES +
                         size_t(KEYS) * key_stride() + 3 * TILE_BYTES;
    char* at = s.tile_space(bytes);
    auto take = [&](size_t n) { return std::exchange(at, at + n); };
    for (int i = 0; i < 2; i++) scores[i] = (float*)take(KEY_TILES * TILE_BYTES), weights[i] = take(VALUE_BLOCKS * TILE_BYTES);
    ones = take(TILE_BYTES), all_ones = take(TILE_BYTES);
    values = take(size_t(value_tiles * VALUE_BLOCKS) * TILE_BYTES);
    keys = take(size_t(KEYS) * key_stride());
    queries = take(size_t(tiles) * query_bytes());
    out = (float*)take(size_t(tiles) * out_floats() * 4);
    offsets = (float*)take(size_t(tiles) * 64);
    positions = (int32_t*)take(size_t(tiles) * 64);
    for (int i = 0; i < 512; i++) ((bf16*)all_ones)[i] = 0x3f80, ((bf16*)ones)[i] = i < 32 ? 0x3f80 : 0;
  }
  size_t key_stride() const { return size_t(blocks) * 64; }
  size_t query_bytes() const { return size_t(blocks) * TILE_BYTES; }
  size_t out_floats() const { return size_t(value_tiles + 1) * 256; }
};

// Which positions of a group of keys the lanes of a row tile see: [from, to) of each; none from `end` on.
struct Sight {
  __m512i from, to;
  int end;
  bool all;
  Sight(const int32_t* positions, long base, long window) {
    const __m512i position = _mm512_load_si512(positions), none = _mm512_setzero_si512(), keys = _mm512_set1_epi32(KEYS);
    auto within = [&](__m512i x) { return _mm512_min_epi32(_mm512_max_epi32(x, none), keys); };
    to = within(_mm512_sub_epi32(position, _mm512_set1_epi32(int(base) - 1)));
    from = window ? within(_mm512_sub_epi32(position, _mm512_set1_epi32(int(base + window) - 1))) : none;
    const __mmask16 some = _mm512_cmplt_epi32_mask(from, to);
    end = some ? _mm512_reduce_max_epi32(to) : 0;
    all = _mm512_reduce_min_epi32(to) == KEYS && _mm512_reduce_max_epi32(from) == 0;
  }
  int key_tiles() const { return (end + 15) / 16; }
};

class TiledTask {
 public:
  TiledTask(const Attention<bf16>& a, const TileRoom& room)
      : a(a), room(room), unit(_mm512_set1_ps((a.cap > 0.f ? 1.f : a.scale) * 1.44269504f * Exponents::STEPS)), tiles(shapes()) {}

  // Row tile t: `rows` queries, at most 16, and the position that each has; nothing attended so far.
  template <class Query, class Position> void begin(long t, long rows, Query query, Position position) {
    for (long i = 0; i < room.blocks; i++) {
      __m512i r[ROWS];
      for (long l = 0; l < ROWS; l++) r[l] = l < rows ? PairProducts::pairs_at(query(l), i * 32, a.d) : _mm512_setzero_si512();
      transpose_pairs(r);
      for (long l = 0; l < ROWS; l++) _mm512_store_si512(queries(t) + i * TILE_BYTES + l * 64, r[l]);
    }
    for (long l = 0; l < ROWS; l++) room.positions[t * ROWS + l] = int32_t(position(std::min(l, rows - 1)));
    _mm512_store_ps(room.offsets + t * ROWS, _mm512_set1_ps(NOTHING_SEEN));
    memset(out(t), 0, room.out_floats() * 4);
  }
  // Folds a group of keys from position `base` on into the row tiles [first, last): while one has its softmax, the next has
  // its scores and the one before its output, as tiles and vectors can work at the same time.
  void fold(long first, long last, const KeyGroup<bf16>& now, const KeyGroup<bf16>& next, long base, bool in_pages) {
    following = &next, fetched = 0;
    load_values(now);
    find_key_tiles(now, in_pages);
    Sight none(room.positions, base, a.window), scored = none, weighed = none, added = none;
    scored.end = weighed.end = added.end = 0;
    for (long t = first; t < last + 2; t++) {
      added = weighed, weighed = scored;
      if (t < last) scored = Sight(room.positions + t * ROWS, base, a.window);
      else scored.end = 0;
      if (weighed.end && soften(t - 1, weighed)) rescale_lanes(t - 1);
      for (int i = 0; i < KEY_TILES; i++) {
        if (scored.end && i == 0) score(t, scored.key_tiles());
        if (added.end && i >= 2) add_values(t - 2, i - 2, (added.key_tiles() + 1) / 2);
        if (i < (weighed.key_tiles() + 1) / 2 * 2) weigh(t - 1, i, i < weighed.key_tiles());
      }
    }
  }
  // The same for a task of one row tile, with fewer steps for a group: output lies as (rows, d), values as (32, d, 2).
  void fold_few(long rows, const KeyGroup<bf16>& now, const KeyGroup<bf16>& next, long base) {
    const Sight sight(room.positions, base, a.window);
    following = &next, fetched = 0;
    find_key_tiles(now, true);
    score(0, sight.key_tiles());
    load_pairs(now);
    if (soften(0, sight)) {
      alignas(64) float by[ROWS];
      _mm512_store_ps(by, rescale);
      for (long r = 0; r < rows; r++)
        for (float *o = room.out + r * few_stride(), *end = o + few_stride(); o < end; o += 16) _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), _mm512_set1_ps(by[r])));
    }
    const int blocks = (sight.key_tiles() + 1) / 2;
    for (int i = 0; i < 2 * blocks; i++) {
      weigh(0, i, i < sight.key_tiles());
      fetch(4);
    }
    for (int block = 0; block < blocks; block++) {
      __m512i r[ROWS];
      for (int p = 0; p < 16; p++) r[p] = _mm512_load_si512(room.weights[0] + block * TILE_BYTES + p * 64);
      transpose_pairs(r);
      for (int l = 0; l < ROWS; l++) _mm512_store_si512(room.weights[1] + block * TILE_BYTES + l * 64, r[l]);
    }
    for (long first = 0; first <= room.value_tiles; first += 5) {
      const int n = int(std::min(5L, room.value_tiles + 1 - first));
      float* to = room.out + first * 16;
      each_tile(n, [&](auto c) { tiles.load<c()>(to + c() * 16, size_t(few_stride()) * 4); });
      for (int block = 0; block < blocks; block++) {
        tiles.load<7>(room.weights[1] + block * TILE_BYTES, 64);
        each_tile(n, [&](auto c) {
          tiles.load<5 + c() % 2>(first + c() < room.value_tiles ? value_tile(first + c(), block) : room.all_ones, 64);
          tiles.multiply<c(), 7, 5 + c() % 2>();
          fetch(2);
        });
      }
      each_tile(n, [&](auto c) { tiles.store<c()>(to + c() * 16, size_t(few_stride()) * 4); });
    }
    fetch(KEYS);
  }
  template <class To> void finish_few(long rows, To to) const {
    for (long r = 0; r < rows; r++) {
      const float* from = room.out + r * few_stride();
      const __m512 inverse = _mm512_set1_ps(1.f / from[room.wide]);
      for (long i = 0; i < a.d; i += 16)
        _mm256_mask_storeu_epi16(to(r) + i, columns_mask(size_t(i), size_t(a.d)), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_load_ps(from + i), inverse)));
    }
  }
  // Takes what a lane has so far to a lane of another row tile.
  void move(long t, long lane, long to_t, long to_lane) {
    room.offsets[to_t * ROWS + to_lane] = room.offsets[t * ROWS + lane];
    for (long i = 0; i <= room.wide; i++) out(to_t)[i * ROWS + to_lane] = out(t)[i * ROWS + lane];
  }
  // Output rows to where `to` says.
  template <class To> void finish(long t, long rows, To to) const {
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.f), _mm512_load_ps(out(t) + room.wide * ROWS));
    for (long i = 0; i < a.d; i += 16) {
      __m512i r[ROWS];
      for (long k = 0; k < 16; k++) r[k] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(out(t) + (i + k) * ROWS), inverse));
      transpose_pairs(r);
      for (long l = 0; l < rows; l++)
        _mm256_mask_storeu_epi16(to(l) + i, columns_mask(size_t(i), size_t(a.d)), (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(r[l])));
    }
  }

 private:
  static constexpr float NOTHING_SEEN = 1e30f;
  const Attention<bf16>& a;
  const TileRoom& room;
  const __m512 unit;
  __m512 offset, rescale;
  const KeyGroup<bf16>* following = nullptr;
  int fetched = 0;  // of them
  const char* key_tiles[KEY_TILES];
  size_t key_stride;
  Tiles tiles;  // 0 to 4: output or scores; 5, 6: values or keys; 7: weights or queries

  static TileShapes shapes() {
    TileShapes shapes;
    for (int t = 0; t < 8; t++) shapes.set(t, 16, 64);
    return shapes;
  }
  char* queries(long t) const { return room.queries + size_t(t) * room.query_bytes(); }
  float* out(long t) const { return room.out + size_t(t) * room.out_floats(); }

  // Of some more of the keys that are likely to come next, and their values; many at once would only queue up.
  void fetch(int count) {
    for (const int end = std::min(fetched + count, following->count); fetched < end; fetched++)
      for (long i = 0; i < a.d; i += 32) _mm_prefetch(following->k[fetched] + i, _MM_HINT_T1), _mm_prefetch(following->v[fetched] + i, _MM_HINT_T1);
  }
  void find_key_tiles(const KeyGroup<bf16>& now, bool in_pages) {
    if (in_pages && a.d % 32 == 0 && a.cache.block_size % 16 == 0) {
      key_stride = size_t(a.d) * 2;
      for (int i = 0; i * 16 < now.count; i++) key_tiles[i] = (const char*)now.k[i * 16];
      return;
    }
    key_stride = room.key_stride();
    for (int j = 0; j < now.count; j++)
      for (long i = 0; i < room.blocks; i++) _mm512_store_si512(room.keys + j * key_stride + i * 64, PairProducts::pairs_at(now.k[j], i * 32, a.d));
    for (int i = 0; i < KEY_TILES; i++) key_tiles[i] = room.keys + i * 16 * key_stride;
  }
  long few_stride() const { return room.wide + 16; }
  // Pairs of the values of two keys, 16 elements of 32 keys a tile, zero from the group's end on.
  void load_pairs(const KeyGroup<bf16>& now) {
    const __m512i low = interleave_low(), high = interleave_high();
    for (int j = 0; j < (now.count + 31) / 32 * 32; j += 2) {
      for (long i = 0; i < room.wide; i += 32) {
        const __m512i even = values_at(now, j, i), odd = values_at(now, j + 1, i);
        char* to = value_tile(i / 16, j / 32) + j % 32 * 32;
        _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        if (i + 16 < room.wide) _mm512_store_si512(to + VALUE_BLOCKS * TILE_BYTES, _mm512_permutex2var_epi16(even, high, odd));
      }
      if (j % 4 == 0) fetch(1);
    }
  }
  // Tiles of 16 elements of 32 keys, zero from the group's end on.
  void load_values(const KeyGroup<bf16>& now) {
    for (int block = 0; block * 32 < now.count; block++)
      for (long i = 0; i < room.wide; i += 32) load_half<false>(now, block, i), load_half<true>(now, block, i);
  }
  // Elements i + 8n + 4 HIGH .. + 3 of 32 keys, n < 4.
  template <bool HIGH> void load_half(const KeyGroup<bf16>& now, int block, long i) {
    __m512i r[16];
    for (int p = 0; p < 16; p++) {
      const __m512i even = values_at(now, block * 32 + 2 * p, i), odd = values_at(now, block * 32 + 2 * p + 1, i);
      r[p] = HIGH ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd);
    }
    transpose_pairs(r);
    for (int n = 0; n < 16 && i + n / 4 * 8 < room.wide; n++)
      _mm512_store_si512(value_tile((i + n / 4 * 8) / 16, block) + (n / 4 * 8 + n % 4 + HIGH * 4) % 16 * 64, r[n]);
  }
  __m512i values_at(const KeyGroup<bf16>& now, int j, long i) const {
    return j < now.count ? PairProducts::pairs_at(now.v[j], i, a.d) : _mm512_setzero_si512();
  }
  char* value_tile(long tile, int block) const {
    return tile < room.value_tiles ? room.values + (tile * VALUE_BLOCKS + block) * TILE_BYTES : room.ones;
  }

  void score(long t, int count) {
    tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
    for (long b = 0; b < room.blocks; b++) {
      tiles.load<7>(queries(t) + b * TILE_BYTES, 64);
      each_tile(count, [&](auto c) {
        tiles.load<5 + c() % 2>(key_tiles[c()] + b * 64, key_stride);
        tiles.multiply<c(), 5 + c() % 2, 7>();
        fetch(2);
      });
    }
    each_tile(count, [&](auto c) { tiles.store<c()>(room.scores[t & 1] + c() * 256, 64); });
  }
  // Finds the largest scores so far; whether what has been added up has to be multiplied by `rescale`.
  bool soften(long t, const Sight& sight) {
    float* scores = room.scores[t & 1];
    const int keys = sight.key_tiles() * 16;
    if (a.cap > 0.f)
      for (int j = 0; j < keys * ROWS; j += KEYS) cap_scores(scores + j, a.scale, a.cap);
    if (!sight.all)
      for (int j = 0; j < keys; j++) {
        const __m512i key = _mm512_set1_epi32(j);
        const __mmask16 seen = _mm512_mask_cmple_epi32_mask(_mm512_cmplt_epi32_mask(key, sight.to), sight.from, key);
        _mm512_store_ps(scores + j * ROWS, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, _mm512_load_ps(scores + j * ROWS)));
      }
    __m512 most[4];
    for (auto& x : most) x = _mm512_set1_ps(-INFINITY);
    __mmask16 broken = 0;
    for (int j = 0; j < keys; j += 4) {
      __m512 x[4];
      for (int i = 0; i < 4; i++) x[i] = _mm512_load_ps(scores + (j + i) * ROWS), most[i] = _mm512_max_ps(most[i], x[i]);
      broken |= _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q);
    }
    const __m512 top = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
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
    for (float *o = out(t), *end = o + (room.wide + 1) * ROWS; o < end; o += ROWS) _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), rescale));
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
  // Half of the second product of a row tile, over `blocks` blocks of 32 keys. The tiles of output are taken in parts of at
  // most five, each in two moves.
  void add_values(long t, int half, int blocks) {
    const long count = room.value_tiles + 1, parts = (count + 4) / 5;
    for (long move = half * parts; move < (half + 1) * parts; move++) {
      const long first = move / 2 * 5;
      const int n = int(std::min(5L, count - first)), block = int(move % 2);
      float* to = out(t) + first * 256;
      if (block == 0) each_tile(n, [&](auto c) { tiles.load<c()>(to + c() * 256, 64); });
      if (block < blocks) {
        tiles.load<7>(room.weights[t & 1] + block * TILE_BYTES, 64);
        each_tile(n, [&](auto c) {
          tiles.load<5 + c() % 2>(value_tile(first + c(), block), 64);
          tiles.multiply<c(), 5 + c() % 2, 7>();
        });
      }
      if (block == 1) each_tile(n, [&](auto c) { tiles.store<c()>(to + c() * 256, 64); });
    }
  }
  template <class F> static void each_tile(int n, F f) {
    f(std::integral_constant<int, 0>());
    if (n > 1) f(std::integral_constant<int, 1>());
    if (n > 2) f(std::integral_constant<int, 2>());
    if (n > 3) f(std::integral_constant<int, 3>());
    if (n > 4) f(std::integral_constant<int, 4>());
  }
};
#endif
