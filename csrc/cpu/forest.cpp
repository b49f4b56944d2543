#include "forest.h"

namespace trace_megatron {

ForestError check_forest(const int32_t* subtree_end, int64_t num_tokens, int32_t* stack) {
  int64_t depth = 0;  // of the stack of ancestors of the current token
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t end = subtree_end[token];
    if (end <= token || end > num_tokens) return {ForestError::kRange, token, token};
    while (depth > 0 && subtree_end[stack[depth - 1]] <= token) --depth;
    if (depth > 0 && subtree_end[stack[depth - 1]] < end) return {ForestError::kCrossing, stack[depth - 1], token};
    stack[depth++] = int32_t(token);
  }
  return {ForestError::kNone, 0, 0};
}

}  // namespace trace_megatron
