#include "attention_kernels.h"

namespace trace_megatron {
extern const AttentionKernels kAttentionGeneric{"generic", forward_workspace, backward_workspace, forward, backward};
}
