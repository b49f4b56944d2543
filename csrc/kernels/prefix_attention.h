// Attention of new tokens over paged prefixes and over their own tree. Legend: T new tokens, H query heads, G key/value
// heads, R = H / G, D head dim. Values are bfloat16, given as their bits; strides count elements.
#pragma once

#include "launch.h"

namespace trace_megatron {

constexpr int kPageTokens = 16;      // of a prefix lie together in the pool
constexpr int kAttentionKeys = 64;   // of a key tile
constexpr int kItemFields = 6;

struct PrefixAttentionParams {
  Global<const uint16_t> q;                       // [T, H, D]
  Global<const uint16_t> k, v;                    // [T, G, D]
  Global<const uint16_t> key_pages, value_pages;  // [slots, G, D], page p holds slots 16 p to 16 p + 15
  Global<uint16_t> out;                           // [T, H, D] without gaps
  Global<const int32_t> subtree_end;              // [T] token i sees new token j if and only if j <= i < subtree_end[j]
  Global<const int32_t> page_table;               // pages of every prefix, one prefix after the other
  Global<const int32_t> items;                    // [num_items, 6], see below
  Global<const int32_t> key_tiles;                // 2 * tile + (1: some row does not see some key of it)
  int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  int64_t slot_stride;
  int num_tokens, num_groups, heads_per_group, head_dim;
  int num_items;
  int rows;  // of an item at most: 64 or 128
  float scale;
};

// An item is one block's work: rows of one prompt. Row token * R + r is query head r of a key/value head's R.
//   first row, number of rows, tokens of their prefix, place of its pages in page_table, their key_tiles: from, to
// Key tile t holds new tokens 64 t to 64 t + 63. An item lists every tile that one of its rows sees, its own included.

// Deterministic. cudaErrorInvalidValue for other head dims or rows.
extern "C" cudaError_t launch_prefix_attention(const PrefixAttentionParams* params, cudaStream_t stream);

}  // namespace trace_megatron
