#include "row_kernels.h"

namespace trace_megatron {
extern const RowKernels kRowsGeneric{"generic", row_ops<float>(), row_ops<BFloat16>()};
}
