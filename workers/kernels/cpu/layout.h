// The message of a step (workers/kernels/step_message.py) laid out for the operators, as build_batch of
// workers/kernels/batch.py does. No operator checks an index: whatever is outside of its limits ends here.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

struct StepLimits {
  long block_size, num_blocks, vocab_size, num_positions;
};

struct StepLayout {
  long num_sequences = 0, tokens = 0, table_width = 0, num_logits = 0;
  const int32_t *token_ids, *logit_rows;  // (tokens), (num_logits); part of the message
  const int32_t* parents;  // (tokens): row of the slice that each token follows, -1: its first; null: no slice is a tree
  std::vector<int32_t> query_starts, context_lens, tables;  // (sequences + 1), (sequences), (sequences, table_width)
  std::vector<int32_t> positions;  // (tokens)
  std::vector<int64_t> slots;      // (tokens): block * block_size + offset, where the token's keys and values go

  // False for a message that is damaged or leaves its limits; then the layout is not to be used.
  bool read(const int32_t* message, long ints, const StepLimits& limits) {
    constexpr long HEADER = 9;
    if (ints < HEADER || *std::min_element(message, message + HEADER) < 0) return false;
    num_sequences = message[0], tokens = message[1], num_logits = message[3];
    const long entries = message[2], num_zeros = message[4], num_copies = message[5], longest = message[6];
    const long num_parents = message[7], num_moves = message[8];
    if (HEADER + 3 * num_sequences + tokens + entries + num_logits + num_zeros + 2 * num_copies + num_parents + 2 * num_moves != ints ||
        longest > limits.num_positions || (num_parents && num_parents != tokens)) return false;
    const int32_t *lens = message + HEADER, *starts = lens + num_sequences, *counts = starts + num_sequences;
    token_ids = counts + num_sequences;
    const int32_t* blocks = token_ids + tokens;
    logit_rows = blocks + entries;
    parents = num_parents ? logit_rows + num_logits + num_zeros + 2 * num_copies : nullptr;
    if (!all_below(token_ids, tokens, limits.vocab_size) || !all_below(blocks, entries, limits.num_blocks) ||
        !all_below(logit_rows, num_logits, tokens))
      return false;
    long rows = 0, used = 0, found = 0;
    table_width = 1;
    for (long s = 0; s < num_sequences; s++) {
      const long context = long(starts[s]) + lens[s];
      if (lens[s] < 1 || starts[s] < 0 || counts[s] * limits.block_size < context) return false;
      rows += lens[s], used += counts[s], found = std::max(found, context), table_width = std::max<long>(table_width, counts[s]);
    }
    if (rows != tokens || used != entries || found != longest) return false;
    query_starts.assign(1, 0), context_lens.clear(), positions.clear(), slots.clear();
    tables.assign(num_sequences * table_width, 0);
    for (long s = 0; s < num_sequences; blocks += counts[s++]) {
      std::copy(blocks, blocks + counts[s], &tables[s * table_width]);
      const size_t first = positions.size();
      for (int32_t p = starts[s], end = starts[s] + lens[s]; p < end; p++) {
        const int32_t row = p - starts[s], parent = parents ? parents[first + row] : row - 1;
        if (row ? parent < 0 || parent >= row : parent != -1) return false;
        positions.push_back(row ? positions[first + parent] + 1 : p);
        slots.push_back(blocks[p / limits.block_size] * limits.block_size + p % limits.block_size);
      }
      query_starts.push_back(int32_t(positions.size()));
      context_lens.push_back(starts[s] + lens[s]);
    }
    return true;
  }

 private:
  static bool all_below(const int32_t* values, long n, long limit) {
    return std::all_of(values, values + n, [&](int32_t v) { return v >= 0 && v < limit; });
  }
};
