// How kernels get their threads. Kernels know neither torch nor OpenMP: whoever calls them brings the workers.
#pragma once

#include <cstdint>

namespace trace_megatron {

struct Parallel {
  int num_threads = 1;
  // Calls work(context, thread) for each thread in [0, num_threads), at the same time or one after the other.
  void (*run)(int num_threads, void (*work)(void*, int), void* context) = nullptr;
};

// Equal pieces of work that may run at the same time.
struct Stage {
  int kind;      // what the work is: the kernel's own numbers
  int64_t wave;  // which part of the data
  int64_t num_tasks;
  int64_t after[2];  // earlier stages that must be complete, -1 for none
};

// Runs all tasks of all stages, taken in order, on all threads. A thread waits only where its task needs an unfinished
// stage: there is one parallel region however many stages there are, and no barrier that every thread must reach.
void run_stages(const Parallel& parallel, const Stage* stages, int64_t num_stages,
                void (*task)(void* context, const Stage&, int64_t index, int thread), void* context);

}  // namespace trace_megatron
