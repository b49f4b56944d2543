#include "parallel.h"

#include <atomic>
#include <thread>
#include <vector>

namespace trace_megatron {
namespace {

struct Run {
  const Stage* stages;
  int64_t num_stages;
  void (*task)(void*, const Stage&, int64_t, int);
  void* context;
  std::atomic<int64_t> next{0};            // of all tasks, counted through the stages
  std::vector<std::atomic<int64_t>> done;  // finished tasks of each stage

  void wait_for(int64_t stage) {
    if (stage < 0) return;
    while (done[stage].load(std::memory_order_acquire) < stages[stage].num_tasks) std::this_thread::yield();
  }

  void work(int thread) {
    int64_t stage = 0, first = 0;  // the stage's first task in the count
    for (int64_t place = next++;; place = next++) {
      while (stage < num_stages && place >= first + stages[stage].num_tasks) first += stages[stage++].num_tasks;
      if (stage == num_stages) return;
      for (int64_t earlier : stages[stage].after) wait_for(earlier);
      task(context, stages[stage], place - first, thread);
      done[stage].fetch_add(1, std::memory_order_release);
    }
  }
};

}  // namespace

void run_stages(const Parallel& parallel, const Stage* stages, int64_t num_stages,
                void (*task)(void* context, const Stage&, int64_t index, int thread), void* context) {
  Run run{stages, num_stages, task, context, {}, std::vector<std::atomic<int64_t>>(num_stages)};
  const auto work = [](void* shared, int thread) { static_cast<Run*>(shared)->work(thread); };
  if (parallel.num_threads > 1) {
    parallel.run(parallel.num_threads, work, &run);
  } else {
    run.work(0);
  }
}

}  // namespace trace_megatron
