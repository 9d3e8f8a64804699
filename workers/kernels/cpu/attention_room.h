// What attention_tiles.h has beside its products: where the tiles of a task lie, and which keys its rows see.
#pragma once
#include "attention_bf16.h"
#ifdef HAS_TILES
#include <utility>

#include "gemm_tiles.h"

constexpr int ROWS = 16, KEY_TILES = KEYS / 16, VALUE_BLOCKS = KEYS / 32;

// A tile of values whose products are sums of probabilities.
struct OnesTile {
  alignas(64) uint16_t numbers[512];
  constexpr OnesTile() : numbers() {
    for (auto& each : numbers) each = 0x3f80;
  }
};
inline constexpr OnesTile ONES;

// Where everything of a task lies; grown by the thread that owns it. D: the elements of a head, or 0: as said at run time.
template <long D> struct TileRoom {
  const long said;
  char *queries, *values, *keys, *weights[2];
  float *out, *scores[2], *offsets;
  int32_t* positions;

  TileRoom(AttentionScratch& s, long d, long tiles) : said(d) {
    const size_t bytes = size_t(tiles) * (query_bytes() + out_floats() * 4 + 128) + size_t(value_tiles() * VALUE_BLOCKS + 2 * KEY_TILES + 2 * VALUE_BLOCKS) * TILE_BYTES +
                         size_t(KEYS) * key_stride();
    char* at = s.tile_space(bytes);
    auto take = [&](size_t n) { return std::exchange(at, at + n); };
    for (int i = 0; i < 2; i++) scores[i] = (float*)take(KEY_TILES * TILE_BYTES), weights[i] = take(VALUE_BLOCKS * TILE_BYTES);
    values = take(size_t(value_tiles() * VALUE_BLOCKS) * TILE_BYTES);
    keys = take(size_t(KEYS) * key_stride());
    queries = take(size_t(tiles) * query_bytes());
    out = (float*)take(size_t(tiles) * out_floats() * 4);
    offsets = (float*)take(size_t(tiles) * 64);
    positions = (int32_t*)take(size_t(tiles) * 64);
  }
  long d() const { return D ? D : said; }
  long wide() const { return blocks() * 32; }
  long blocks() const { return (d() + 31) / 32; }  // of 32 inputs
  long value_tiles() const { return wide() / 16; }  // and one of ones
  size_t key_stride() const { return size_t(blocks()) * 64; }
  size_t query_bytes() const { return size_t(blocks()) * TILE_BYTES; }
  size_t out_floats() const { return size_t(value_tiles() + 1) * 256; }
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
#endif
