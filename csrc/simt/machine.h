// Runs a grid: block after block in random order, the threads of a block as fibers in random order.
#pragma once

#include <algorithm>
#include <functional>
#include <source_location>
#include <string>
#include <vector>

#include "fiber.h"
#include "places.h"
#include "shadow.h"

namespace simt {

struct Index {
  unsigned x = 1, y = 1, z = 1;
  size_t count() const { return size_t(x) * y * z; }
};

constexpr size_t kWarp = 32;
constexpr size_t kMostThreads = 1024;
constexpr size_t kMostStaticShared = 48 * 1024;
constexpr size_t kMostShared = 227 * 1024;  // of a block on sm_90 and sm_100; sm_80 has 163 KiB
constexpr size_t kGuard = 64;               // bytes between two shared arrays that belong to none
constexpr int kPoison = 0xcc;

// A cp.async that was issued and not waited for: its bytes are not there yet.
struct Copy {
  char* to;
  const char* from;
  size_t bytes, kept;  // the rest of the bytes becomes 0
  unsigned group;
};

// What a warp does together once all its lanes have come: slots[lane] is null where the lane takes no part.
using Together = void (*)(size_t first_thread, void* const slots[kWarp]);

struct Wait {
  enum Kind { kNone, kBlock, kWarpwide } kind = kNone;
  std::source_location where;
  uint32_t mask = 0;
  Together together = nullptr;
  void* slot = nullptr;
  bool predicate = false;
};

struct Thread {
  Fiber fiber;
  Index index;
  uint32_t linear = 0, clock = 1;
  Clocks clocks;
  bool done = false;
  Wait wait;
  std::vector<Copy> copies;
  unsigned groups = 0;  // of cp.async, committed
};

struct SharedArray {
  const void* tag;
  size_t region;
};

class Machine {
 public:
  // Set by a test before a launch.
  Random random;
  std::vector<Region> globals;  // what the kernel may touch, by address
  std::string dropped;          // the synchronisation at this file:line does nothing
  bool trusts_unknown = false;  // memory that no region holds may be touched, unchecked

  // Read by a test after a launch.
  std::string error;                // of the first fault; no launch runs after it
  std::vector<std::string> syncs;   // file:line of each synchronisation that was met
  size_t bytes_read = 0, bytes_written = 0, tensor_products = 0;  // of global memory; of m16n8k16
  size_t barriers = 0;                                            // of all blocks together

  Thread* current = nullptr;  // null: the machine itself is at work
  Index grid, block, block_index;

  bool run(Index grid_size, Index block_size, size_t dynamic_shared, std::function<void()> body);
  Thread& thread(size_t linear) { return threads_[linear]; }
  size_t barrier_votes() const { return votes_; }

  // Ends the kernel with this message. Within a thread it does not return.
  void fail(std::string message) {
    if (error.empty()) error = std::move(message);
    if (current) current->fiber.leave();
  }
  std::string name(const Thread& thread) const {
    return "thread " + std::to_string(thread.linear) + " of block " + std::to_string(linear_block_);
  }

  // False where the access is a fault.
  bool touch(Thread& who, Access access, const char* at, size_t bytes, const void* place);
  bool start_copy(const Copy& copy, const void* place);
  void finish_copies(unsigned still_open, const void* place);

  char* shared_array(const void* tag, const char* name, size_t bytes, size_t granule);
  char* dynamic_shared() const { return arena_begin(); }

  bool is_dropped(const std::source_location& where);
  void wait_for_block(const std::source_location& where, bool predicate);
  void wait_for_warp(const std::source_location& where, uint32_t mask, Together together, void* slot);
  void join_clocks(size_t first_thread, void* const slots[kWarp]);

 private:
  void run_block();
  void run_threads();
  bool release_block();
  bool release_warp(size_t first);
  void report_stuck();
  Region* find(const char* at);
  std::string describe(const char* at, size_t bytes);
  Stamp stamp(const Thread& who, const void* place) const;
  char* arena_begin() const { return const_cast<char*>(arena_.data()) + arena_shift_; }

  std::function<void()> body_;
  std::vector<Thread> threads_;
  std::vector<size_t> ready_;
  Stacks stacks_;
  std::vector<Region> shared_;
  std::vector<SharedArray> arrays_;
  std::vector<char> arena_;
  size_t arena_shift_ = 0, arena_used_ = 0, dynamic_bytes_ = 0;
  size_t linear_block_ = 0, votes_ = 0;
  uint32_t barrier_ = 0, launch_ = 0;
  std::vector<std::pair<std::source_location, std::string>> places_;
};

inline Machine machine;

}  // namespace simt

// CUDA's names, set whenever a thread goes on.
inline simt::Index threadIdx, blockIdx, blockDim, gridDim;

#include "memory.h"
#include "schedule.h"
