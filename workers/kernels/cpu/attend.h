// One attention task: the loop over groups of keys around the products of attention.h.
#pragma once
#include "attention_decode.h"
#include "attention_int8.h"
#include "attention_tiles.h"

// First position that a row of the task sees, at a multiple of KEYS; and where the positions end that its rows see alike.
struct TaskSpan {
  bool is_tree;
  long start, tokens, base, end;  // `start`: position of its first token, in a tree of the first one of its sequence
  template <class A> TaskSpan(const A& a, const AttentionTask& task) {
    const long length = a.query_len(task.sequence), first = a.context_lens[task.sequence] - length;
    is_tree = a.is_tree(task.sequence);
    start = is_tree ? first : first + task.first;
    tokens = std::min(a.tile_tokens(), length - task.first);
    base = (a.window ? std::max(0L, start - a.window + 1) : 0) / KEYS * KEYS;
    end = is_tree ? first / KEYS * KEYS : start + tokens;
  }
};
// Of a tree, positions from `start` on are those of the rows on `path`; else path is null.
template <class A>
void find_keys(const A& a, const AttentionTask& task, long base, long end, KeyGroup<typename A::Stored>& found, long start = 0,
               const int32_t* path = nullptr) {
  const int32_t* table = a.tables + task.sequence * a.table_width;
  found.count = int(std::min<long>(KEYS, end - base));
  if constexpr (std::is_same_v<typename A::Stored, int8_t>) found.num_runs = 0;
  for (int j = 0; j < found.count;) {
    const bool is_row = path && base + j >= start;
    const long place = is_row ? start + path[base + j - start] : base + j, offset = place % a.cache.block_size;
    const long run = is_row ? 1 : path ? std::min(a.cache.block_size - offset, start - place) : a.cache.block_size - offset;
    const long page = a.cache.page(table[place / a.cache.block_size], task.head);
    const int first = j, stop = int(std::min<long>(found.count, j + run));
    const auto *k = a.cache.k + page + offset * a.d, *v = a.cache.v + page + offset * a.d;
    for (const long d = a.d; j < stop; j++, k += d, v += d) found.k[j] = k, found.v[j] = v;
    if constexpr (std::is_same_v<typename A::Stored, int8_t>)
      found.runs[found.num_runs++] = {first, stop - first, scales_of(a.cache.k + page, a.cache.block_size, a.d) + offset,
                                      scales_of(a.cache.v + page, a.cache.block_size, a.d) + offset};
  }
}
// body(now, then, position of the first key) for every group of keys that all rows of a task see in the same way; `then` is
// the group to come: the task's own, or the first of `next`, which the thread is likely to do then, or empty.
template <class A, class F>
void each_key_group(const A& a, const AttentionTask& task, const AttentionTask* next, const TaskSpan& span, F body) {
  KeyGroup<typename A::Stored> groups[2], *now = groups, *then = groups + 1;
  find_keys(a, task, span.base, span.end, *now);
  for (long base = span.base; base < span.end; base += KEYS, std::swap(now, then)) {
    then->count = 0;
    if (base + KEYS < span.end) {
      find_keys(a, task, base + KEYS, span.end, *then);
    } else if (next) {
      const TaskSpan following(a, *next);
      find_keys(a, *next, following.base, following.end, *then);
    }
    body(*now, *then, base);
  }
}
// Folds the scores of a group of keys into the rows of a token at `position`.
template <class Products, class A>
void soften(const A& a, AttentionScratch& s, long row, long rows, long position, long base, long wide) {
  const long from = a.window ? std::clamp<long>(position - a.window + 1 - base, 0, KEYS) : 0, to = std::clamp<long>(position + 1 - base, 0, KEYS);
  const float scale = a.cap > 0.f ? 1.f : a.scale;
  for (const long end = row + rows; row < end; row++) {
    if (a.cap > 0.f) cap_scores(s.scores + row * KEYS, a.scale, a.cap);
    Products::softmax(s, row, int(from), int(to), scale, wide);
  }
}
// The last groups of keys of a tree, which each token sees in its own way: its ancestors lie before it as in a sequence.
template <class Products, class A>
void attend_path(const A& a, const AttentionTask& task, const TaskSpan& span, long token, const std::vector<int32_t>& path,
                 AttentionScratch& s, long wide) {
  AttentionScratch own(s, token * a.group(), wide, sizeof(typename Products::Element));
  KeyGroup<typename A::Stored> now, none;
  const long end = span.start + long(path.size());
  for (long base = span.end; base < end; base += KEYS) {
    find_keys(a, task, base, end, now, span.start, path.data());
    now.read_scales();
    Products::score(own, a.group(), now, none, a.d, wide);
    soften<Products>(a, own, 0, a.group(), end - 1, base, wide);
    Products::add_values(own, a.group(), now, none, a.d, wide);
  }
}
// next: the task that the thread is likely to do then, or null.
template <class Products, class T, class S>
void attend_with(const Attention<T, S>& a, const AttentionTask& task, const AttentionTask* next, AttentionScratch& s) {
  const TaskSpan span(a, task);
  const long group = a.group(), wide = (a.d + 15) / 16 * 16, rows = span.tokens * group;
  const long token0 = a.query_starts[task.sequence] + task.first;
  for (long r = 0; r < rows; r++) {
    const T* q = a.q + (token0 + r / group) * a.q_stride + (task.head * group + r % group) * a.d;
    Products::load_query(q, s, r, a.d, wide);
    s.max[r] = -1e30f;
    std::fill(s.sum + r * 16, s.sum + r * 16 + 16, 0.f);
    std::fill(s.out + r * wide, s.out + (r + 1) * wide, 0.f);
  }
  std::vector<std::vector<int32_t>> paths;  // of a tree's tokens
  for (long t = 0; span.is_tree && t < span.tokens; t++) paths.push_back(a.path_to(task.sequence, int32_t(task.first + t)));
  each_key_group(a, task, next, span, [&](KeyGroup<S>& now, const KeyGroup<S>& then, long base) {
    now.read_scales();
    Products::score(s, rows, now, then, a.d, wide);
    for (long t = 0; t < span.tokens; t++)
      soften<Products>(a, s, t * group, group, span.start + (span.is_tree ? long(paths[t].size()) - 1 : t), base, wide);
    Products::add_values(s, rows, now, then, a.d, wide);
  });
  for (long t = 0; t < long(paths.size()); t++) attend_path<Products>(a, task, span, t, paths[t], s, wide);
  for (long r = 0; r < rows; r++) {
    T* to = a.out + ((token0 + r / group) * a.heads + task.head * group + r % group) * a.d;
    float inverse = 1.f / lane_sum(16, [&](size_t i) { return s.sum[r * 16 + i]; });
    for (long i = 0; i < a.d; i++) put(to[i], s.out[r * wide + i] * inverse);
  }
}
#ifdef HAS_TILES
// As attend_with, in tiles of 16 rows. D as in attention_tiles.h. A tree's tokens leave their tiles where they no longer see the same keys.
template <long D> void attend_tiles(const Attention<bf16>& a, const AttentionTask& task, const AttentionTask* next, AttentionScratch& s) {
  const TaskSpan span(a, task);
  const long group = a.group(), rows = span.tokens * group, tiles = (rows + ROWS - 1) / ROWS, token0 = a.query_starts[task.sequence] + task.first;
  std::vector<std::vector<int32_t>> paths;  // of a tree's tokens
  for (long t = 0; span.is_tree && t < span.tokens; t++) paths.push_back(a.path_to(task.sequence, int32_t(task.first + t)));
  const auto query = [&](long r) { return a.q + (token0 + r / group) * a.q_stride + (task.head * group + r % group) * a.d; };
  const auto output = [&](long r) { return a.out + ((token0 + r / group) * a.heads + task.head * group + r % group) * a.d; };
  const auto position = [&](long r) { return span.start + (span.is_tree ? long(paths[size_t(r / group)].size()) - 1 : r / group); };
  const TileRoom<D> room(s, a.d, tiles + span.is_tree);
  const bool few = tiles == 1 && !span.is_tree, fewest = few && rows <= 4;
  TiledTask<D> work(a, room, fewest ? 4 : ROWS, few);
  for (long t = 0; t < tiles; t++)
    work.begin(t, std::min<long>(ROWS, rows - t * ROWS), [&](long l) { return query(t * ROWS + l); }, [&](long l) { return position(t * ROWS + l); });
  each_key_group(a, task, next, span, [&](const KeyGroup<bf16>& now, const KeyGroup<bf16>& then, long base) {
    if (fewest) work.template fold_few<4>(rows, now, then, base);
    else if (few) work.template fold_few<ROWS>(rows, now, then, base);
    else work.fold(0, tiles, now, then, base, true);
  });
  KeyGroup<bf16> now, none;
  for (long t = 0; t < long(paths.size()); t++) {
    const std::vector<int32_t>& path = paths[size_t(t)];
    const long end = span.start + long(path.size());
    for (long r = t * group, n; r < (t + 1) * group; r += n) {
      n = std::min<long>(ROWS, (t + 1) * group - r);
      work.begin(tiles, n, [&](long l) { return query(r + l); }, [&](long l) { return position(r + l); });
      for (long l = 0; l < n; l++) work.move((r + l) / ROWS, (r + l) % ROWS, tiles, l);
      for (long base = span.end; base < end; base += KEYS) {
        find_keys(a, task, base, end, now, span.start, path.data());
        work.fold(tiles, tiles + 1, now, none, base, false);
      }
      work.finish(tiles, n, [&](long l) { return output(r + l); });
    }
  }
  if (few) return work.finish_few(rows, output);
  for (long t = 0; !span.is_tree && t < tiles; t++)
    work.finish(t, std::min<long>(ROWS, rows - t * ROWS), [&](long l) { return output(t * ROWS + l); });
}
#endif
inline void attend(const Attention<float>& a, const AttentionTask& task, const AttentionTask* next, AttentionScratch& s) {
  attend_with<WideProducts<float>>(a, task, next, s);
}
inline void attend(const Attention<bf16>& a, const AttentionTask& task, const AttentionTask* next, AttentionScratch& s) {
#ifdef HAS_TILES
  if (a.in_tiles()) return a.d == 64 ? attend_tiles<64>(a, task, next, s) : attend_tiles<0>(a, task, next, s);
#endif
#ifdef __AVX512BF16__
  const long rows = TaskSpan(a, task).tokens * a.group();
  if (a.d % 32 == 0 && rows <= FEW_ROWS) return attend_with<FewRowProducts>(a, task, next, s);
  if (a.d % 2 == 0) return attend_with<PairProducts>(a, task, next, s);
#endif
  attend_with<WideProducts<bf16>>(a, task, next, s);
}
inline void attend(const Attention<float, int8_t>& a, const AttentionTask& task, const AttentionTask* next, AttentionScratch& s) {
  attend_with<WideProducts<int8_t>>(a, task, next, s);
}
inline void attend(const Attention<bf16, int8_t>& a, const AttentionTask& task, const AttentionTask* next, AttentionScratch& s) {
#ifdef __AVX512BF16__
  if (CodeProducts::can_do(a.d)) return attend_with<CodeProducts>(a, task, next, s);
#endif
  attend_with<WideProducts<int8_t>>(a, task, next, s);
}
inline const AttentionTask* after(const std::vector<AttentionTask>& tasks, long i) {
  return i + 1 < long(tasks.size()) ? &tasks[i + 1] : nullptr;
}
