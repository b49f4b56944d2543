// Forests in preorder: subtree_end[j] is one past the last token of the subtree that hangs below token j.
#pragma once

#include <cstdint>

namespace trace_megatron {

// What is wrong with a subtree_end vector, if anything.
struct ForestError {
  enum Kind { kNone, kRange, kCrossing } kind;
  int64_t token;   // kRange: token < subtree_end[token] <= T fails
  int64_t inside;  // kCrossing: token < inside < subtree_end[token] < subtree_end[inside]
};

// `stack` has room for num_tokens values.
ForestError check_forest(const int32_t* subtree_end, int64_t num_tokens, int32_t* stack);

}  // namespace trace_megatron
