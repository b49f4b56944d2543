// What the selection of best units keeps of a row. Legend: P rows (prompts or prefixes), S segments.
#pragma once

#include <cstdint>

#include "pointers.h"

namespace trace_megatron {

// After `count` taken units: two powers, whence the value of the next unit follows, and the value of the last one.
struct SelectionRow {
  double power, other_power, last;
  int64_t count;
};

}  // namespace trace_megatron
