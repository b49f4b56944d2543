// How kernels get their threads. Kernels know neither torch nor OpenMP: whoever calls them brings the workers.
#pragma once

#include <cstdint>

namespace trace_megatron {

struct Parallel {
  int num_threads = 1;
  // Calls body(context, task, thread) once for every task in [0, num_tasks), in any order; thread < num_threads.
  void (*run)(int num_threads, int64_t num_tasks, void (*body)(void*, int64_t, int), void* context) = nullptr;

  template <class Body>
  void for_each(int64_t num_tasks, Body& body) const {
    auto call = [](void* context, int64_t task, int thread) { (*static_cast<Body*>(context))(task, thread); };
    if (num_threads > 1 && num_tasks > 1) {
      run(num_threads, num_tasks, call, &body);
    } else {
      for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
    }
  }
};

}  // namespace trace_megatron
