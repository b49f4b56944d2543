// The table of one instruction set. Included by one translation unit for each, after it has chosen the set.
#pragma once

#include "attention_backward.h"
#include "attention_forward.h"

namespace trace_megatron {
namespace {

template <class PassType, class Call>
size_t measure(const Call& call, int num_threads) {
  Arena arena(nullptr);
  PassType pass(call, num_threads, arena);
  return arena.used();
}

template <class PassType, class Call>
void compute(const Call& call, const Parallel& parallel, void* workspace) {
  Arena arena(workspace);
  PassType pass(call, parallel.num_threads, arena);
  pass.run(parallel);
}

#if defined(TRACE_AVX512_BF16)
typedef PairProduct BFloat16Product;
#else
typedef FloatProduct BFloat16Product;  // operands are widened where they are laid out
#endif

size_t forward_workspace(const AttentionForward& call, int num_threads) {
  return call.args.storage == Storage::kFloat32 ? measure<ForwardPass<FloatProduct, float>>(call, num_threads)
                                                : measure<ForwardPass<BFloat16Product, BFloat16>>(call, num_threads);
}

size_t backward_workspace(const AttentionBackward& call, int num_threads) {
  return call.args.storage == Storage::kFloat32 ? measure<BackwardPass<FloatProduct, float>>(call, num_threads)
                                                : measure<BackwardPass<BFloat16Product, BFloat16>>(call, num_threads);
}

void forward(const AttentionForward& call, const Parallel& parallel, void* workspace) {
  if (call.args.storage == Storage::kFloat32) {
    compute<ForwardPass<FloatProduct, float>>(call, parallel, workspace);
  } else {
    compute<ForwardPass<BFloat16Product, BFloat16>>(call, parallel, workspace);
  }
}

void backward(const AttentionBackward& call, const Parallel& parallel, void* workspace) {
  if (call.args.storage == Storage::kFloat32) {
    compute<BackwardPass<FloatProduct, float>>(call, parallel, workspace);
  } else {
    compute<BackwardPass<BFloat16Product, BFloat16>>(call, parallel, workspace);
  }
}

}  // namespace
}  // namespace trace_megatron
