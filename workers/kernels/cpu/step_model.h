// A model, as one rank holds it, and what a step is given beside its message.
#pragma once
#include "linear.h"
#ifdef HAS_PRODUCTS
#include "collective.h"
#include "draw.h"

// Mirrored by workers/kernels/fused.py; pointers may be null where a comment says so.
struct LayerWeights {
  const bf16* attention_norm;
  PackedWeights qkv;
  const bf16 *query_norm, *key_norm;  // both or neither
  PackedWeights output;
  const float* output_bias;  // where nodes are joined: (hidden) or null; else `output` has it
  const bf16* mlp_norm;
  PackedWeights up;  // columns [gate | up]
  PackedWeights down;
  const float* down_bias;
  long window;  // 0: none
  double scale;
};
// What a rank attends with, which others may do for it: its pool, and rows of a step.
struct AttentionPart {
  void* pool;
  bf16 *qkv, *attended;  // (tokens, heads + 2 kv heads, d), (tokens, heads, d)
  long heads, kv_heads;
};
// Where all ranks leave the logits of a step, and rank 0 says how ids are drawn from them.
struct LogitsPart {
  float* logits;  // (rows, width)
  Draw* draws;    // (rows)
  int64_t* ids;   // (rows)
  long rows, width, first_column;  // of this rank's columns
};
struct Model {
  long hidden, heads, kv_heads, d, inner, num_layers, vocab_size;
  double eps;
  const bf16* embedding;  // rows of the ids first_id .. first_id + num_ids - 1; other ranks have the others
  long first_id, num_ids;
  const LayerWeights* layers;
  const bf16* final_norm;
  PackedWeights head;
  Collective* collective;  // of the ranks that share the heads and inner columns; null for one rank
  // How what `output` and `down` give on each rank is put together: null joins: added up as it is, rounded before.
  NodeOrder output_nodes, down_nodes;
  const AttentionPart* parts;  // of all ranks of `collective`; null: each does its attention alone
  long part_tokens;            // most tokens of a step that has room there
  LogitsPart together;         // no rows: a rank's logits are its own
};
struct StepInput {
  const float *cos, *sin;  // (num_positions, half)
  long num_positions, half;  // half 0: nothing turns
  void* pool;    // (num_blocks, kv heads, layers, 2) pages, of bf16 or int8: strides in elements
  long is_int8;  // what the pages have
  long num_blocks, head_stride, layer_stride, value_stride, block_size;
  float* logits;  // (logit rows, columns of the head): where they are not left together
  const Draw* draws;  // (logit rows); null: nothing is drawn
  int64_t* ids;       // (logit rows): what was drawn, NOT_FINITE for rows with a NaN or an infinity
  bf16* hidden;       // (logit rows, hidden): what the head is given
  long ids_only;      // nobody looks at the logits
};
#endif
