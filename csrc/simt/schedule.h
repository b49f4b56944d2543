// Who runs next, and when those that wait go on: nobody waits who could run, and all that wait for nothing are named.
#pragma once

#include "machine.h"

namespace simt {

inline bool Machine::run(Index grid_size, Index block_size, size_t dynamic_shared, std::function<void()> body) {
  grid = gridDim = grid_size, block = blockDim = block_size, body_ = std::move(body);
  dynamic_bytes_ = dynamic_shared;
  shared_.clear(), arrays_.clear();
  arena_.resize(kMostShared + kMostStaticShared + 64 * kGuard);
  arena_shift_ = size_t(-reinterpret_cast<intptr_t>(arena_.data())) % 128;
  arena_used_ = (dynamic_shared + kGuard + 127) / 128 * 128;
  if (dynamic_shared) {
    shared_.emplace_back("dynamic shared memory", arena_begin(), dynamic_shared, 2);
    shared_.back().is_shared = true;
  }
  ++launch_;
  threads_.resize(block.count());
  std::vector<size_t> order(grid.count());
  for (size_t i = 0; i < order.size(); ++i) std::swap(order[i] = i, order[random.below(i + 1)]);
  for (size_t linear : order) {
    linear_block_ = linear;
    block_index = blockIdx = {unsigned(linear % grid.x), unsigned(linear / grid.x % grid.y),
                              unsigned(linear / grid.x / grid.y)};
    run_block();
    if (!error.empty()) return false;
  }
  return true;
}

inline void Machine::run_block() {
  std::memset(arena_begin(), kPoison, arena_used_);
  barrier_ = 1;
  ready_.clear();
  for (size_t i = 0; i < threads_.size(); ++i) {
    Thread& thread = threads_[i];
    thread.linear = uint32_t(i);
    thread.index = {unsigned(i % block.x), unsigned(i / block.x % block.y), unsigned(i / block.x / block.y)};
    thread.clock = 1, thread.clocks = {}, thread.done = false, thread.wait = {}, thread.copies.clear();
    thread.groups = 0;
    thread.fiber.start(stacks_.get(i), [] {
      machine.body_();
      Thread& self = *machine.current;
      self.done = true;
      if (!self.copies.empty()) machine.fail(machine.name(self) + " ends with a cp.async that it never waited for");
      self.fiber.leave();
    });
    ready_.push_back(i);
  }
  for (;;) {
    run_threads();
    if (!error.empty()) return;
    if (std::all_of(threads_.begin(), threads_.end(), [](const Thread& thread) { return thread.done; })) return;
    bool released = release_block();
    for (size_t first = 0; first < threads_.size(); first += kWarp) released |= release_warp(first);
    if (!error.empty()) return;
    if (!released) return report_stuck();
  }
}

inline void Machine::run_threads() {
  while (!ready_.empty() && error.empty()) {
    std::swap(ready_[random.below(ready_.size())], ready_.back());
    current = &threads_[ready_.back()];
    ready_.pop_back();
    threadIdx = current->index;
    current->fiber.enter();
    if (current->fiber.overflowed()) {
      std::fprintf(stderr, "simt: the stack of a thread overflowed (%zu bytes)\n", kStackBytes);
      std::abort();
    }
    current = nullptr;
  }
}

inline bool Machine::is_dropped(const std::source_location& where) {
  for (const auto& [known, name] : places_)
    if (known.file_name() == where.file_name() && known.line() == where.line()) return name == dropped;
  places_.emplace_back(where, file_name(where.file_name()) + ":" + std::to_string(where.line()));
  if (std::find(syncs.begin(), syncs.end(), places_.back().second) == syncs.end())
    syncs.push_back(places_.back().second);
  return places_.back().second == dropped;
}

inline void Machine::wait_for_block(const std::source_location& where, bool predicate) {
  Wait wait;
  wait.kind = Wait::kBlock, wait.where = where, wait.predicate = predicate;
  current->wait = wait;
  current->fiber.leave();
}

inline void Machine::wait_for_warp(const std::source_location& where, uint32_t mask, Together together, void* slot) {
  if (!(mask >> current->linear % kWarp & 1))
    fail(name(*current) + " is not in the mask that it gives, at " + file_name(where.file_name()) + ":" +
         std::to_string(where.line()));
  Wait wait;
  wait.kind = Wait::kWarpwide, wait.where = where, wait.mask = mask, wait.together = together, wait.slot = slot;
  current->wait = wait;
  current->fiber.leave();
}

inline bool same_place(const Wait& a, const Wait& b) {
  return a.kind == b.kind && a.where.line() == b.where.line() && a.where.file_name() == b.where.file_name();
}

inline bool Machine::release_block() {
  const Wait* first = nullptr;
  votes_ = 0;
  for (const Thread& thread : threads_) {
    if (thread.done) continue;
    if (thread.wait.kind != Wait::kBlock || (first && !same_place(*first, thread.wait))) return false;
    first = &thread.wait;
    votes_ += thread.wait.predicate;
  }
  ++barrier_, ++barriers;
  for (Thread& thread : threads_) {
    if (thread.done) continue;
    thread.wait = {};
    ready_.push_back(thread.linear);
  }
  return true;
}

inline bool Machine::release_warp(size_t first) {
  const size_t lanes = std::min(kWarp, threads_.size() - first);
  bool released = false;
  for (size_t lane = 0; lane < lanes; ++lane) {
    const Wait wait = threads_[first + lane].wait;
    if (wait.kind != Wait::kWarpwide) continue;
    void* slots[kWarp] = {};
    bool complete = true;
    for (size_t i = 0; i < lanes; ++i) {
      const Thread& other = threads_[first + i];
      if (other.done || !(wait.mask >> i & 1)) continue;
      complete &= same_place(wait, other.wait) && other.wait.mask == wait.mask;
      slots[i] = other.wait.slot;
    }
    if (!complete) continue;
    wait.together(first, slots);
    for (size_t i = 0; i < lanes; ++i) {
      if (!slots[i]) continue;
      threads_[first + i].wait = {};
      ready_.push_back(first + i);
    }
    released = true;
  }
  return released;
}

// __syncwarp: what any of these lanes has done or knows of is now behind all of them.
inline void Machine::join_clocks(size_t first, void* const slots[kWarp]) {
  Clocks joined;
  for (size_t lane = 0; lane < kWarp; ++lane) {
    if (!slots[lane]) continue;
    const Thread& thread = threads_[first + lane];
    for (size_t i = 0; i < kWarp; ++i) joined.known[i] = std::max(joined.known[i], thread.clocks.known[i]);
    joined.known[lane] = std::max(joined.known[lane], thread.clock);
  }
  for (size_t lane = 0; lane < kWarp; ++lane) {
    if (!slots[lane]) continue;
    threads_[first + lane].clocks = joined;
    ++threads_[first + lane].clock;
  }
}

inline void Machine::report_stuck() {
  std::string message = "threads of block " + std::to_string(linear_block_) + " wait for each other:";
  const Wait* last = nullptr;
  for (const Thread& thread : threads_) {
    if (thread.done || (last && same_place(*last, thread.wait) && last->mask == thread.wait.mask)) continue;
    last = &thread.wait;
    message += " thread " + std::to_string(thread.linear) + " at " + file_name(last->where.file_name()) + ":" +
               std::to_string(last->where.line());
  }
  const auto ended = std::count_if(threads_.begin(), threads_.end(), [](const Thread& thread) { return thread.done; });
  fail(message + ", " + std::to_string(ended) + " ended");
}

}  // namespace simt
