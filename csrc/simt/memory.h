// Every access of a kernel to shared or global memory: within bounds, of written bytes, in order with all others.
#pragma once

#include "machine.h"

namespace simt {

inline Region* Machine::find(const char* at) {
  for (Region& region : shared_)
    if (region.holds(at)) return &region;
  auto after = std::upper_bound(globals.begin(), globals.end(), at,
                                [](const char* address, const Region& region) { return address < region.begin; });
  return after != globals.begin() && (after - 1)->holds(at) ? &*(after - 1) : nullptr;
}

// "counts[12]", or how far beyond which array an address lies.
inline std::string Machine::describe(const char* at, size_t bytes) {
  if (const Region* region = find(at)) {
    return region->name + ", bytes " + std::to_string(at - region->begin) + " to " +
           std::to_string(at - region->begin + ptrdiff_t(bytes));
  }
  const Region* nearest = nullptr;
  const auto distance = [&](const Region& region) {
    return at < region.begin ? region.begin - at : at - (region.begin + region.bytes);
  };
  for (const auto* regions : {&shared_, &globals})
    for (const Region& region : *regions)
      if (!nearest || distance(region) < distance(*nearest)) nearest = &region;
  if (!nearest) return "no known array";
  return std::to_string(distance(*nearest)) + " bytes " + (at < nearest->begin ? "before " : "beyond the end of ") +
         nearest->name + " (" + std::to_string(nearest->bytes) + " bytes)";
}

inline Stamp Machine::stamp(const Thread& who, const void* place) const {
  Stamp now;
  now.block = uint32_t(linear_block_) + 1;
  now.thread = who.linear;
  now.barrier = barrier_;
  now.clock = who.clock;
  now.place = place_of(place);
  return now;
}

inline const char* verb(Access access) {
  return access == Access::kRead ? "reads" : access == Access::kWrite ? "writes" : "updates";
}

inline bool Machine::touch(Thread& who, Access access, const char* at, size_t bytes, const void* place) {
  const auto fault = [&](const std::string& what) {
    fail(name(who) + " " + verb(access) + " " + describe(at, bytes) + ", at " + line_of(place_of(place)) + ": " + what);
    return false;
  };
  Region* region = find(at);
  if (!region && trusts_unknown) return true;
  if (!region || at + bytes > region->begin + region->bytes) return fault("out of bounds");
  if (reinterpret_cast<uintptr_t>(at) % std::min<size_t>(bytes & -bytes, 16) != 0) return fault("misaligned");
  if (access != Access::kRead && !region->is_writable) return fault("the array is an input");
  if (!region->is_shared) (access == Access::kRead ? bytes_read : bytes_written) += bytes;
  const Stamp now = stamp(who, place);
  const size_t first = size_t(at - region->begin) / region->granule;
  const size_t last = size_t(at + bytes - 1 - region->begin) / region->granule;
  for (size_t i = first; i <= last; ++i) {
    Cell& cell = region->cells[i];
    const uint32_t owner = region->is_shared ? now.block : launch_;
    if (cell.owner != owner) {  // what an earlier launch wrote to global memory stays written
      const bool written = cell.written && !region->is_shared;
      cell = {}, cell.owner = owner, cell.written = written;
    }
    if (cell.pending_block)
      return fault("thread " + std::to_string(cell.pending_thread) + " has a cp.async into it that it has not waited for");
    if (access != Access::kWrite && !cell.written && !region->starts_written) return fault("not written before it");
    if (const Stamp* other = race(cell, access, now, who.clocks)) {
      const bool was_write = other == &cell.write, was_read = other == cell.reads || other == cell.reads + 1;
      return fault(std::string("race with thread ") + std::to_string(other->thread) + " of block " +
                   std::to_string(other->block - 1) + ", which " +
                   (was_write ? "writes" : was_read ? "reads" : "updates") + " it at " + line_of(other->place) +
                   " with no barrier between");
    }
    if (access != Access::kRead) cell.written = true;
  }
  return true;
}

inline bool Machine::start_copy(const Copy& copy, const void* place) {
  Region* to = find(copy.to);
  if (!to || !to->is_shared) {
    fail(name(*current) + " copies to " + describe(copy.to, copy.bytes) + ", at " + line_of(place_of(place)) +
         ": cp.async writes shared memory only");
    return false;
  }
  if (reinterpret_cast<uintptr_t>(copy.from) % copy.bytes != 0) {
    fail(name(*current) + " copies from " + describe(copy.from, copy.bytes) + ", at " + line_of(place_of(place)) +
         ": misaligned");
    return false;
  }
  if (copy.kept && !touch(*current, Access::kRead, copy.from, copy.kept, place)) return false;
  if (!touch(*current, Access::kWrite, copy.to, copy.bytes, place)) return false;
  for (size_t i = size_t(copy.to - to->begin) / to->granule;
       i < size_t(copy.to + copy.bytes - to->begin) / to->granule; ++i) {
    to->cells[i].pending_block = uint32_t(linear_block_) + 1;
    to->cells[i].pending_thread = uint16_t(current->linear);
    to->cells[i].written = false;
  }
  current->copies.push_back(copy);
  return true;
}

inline void Machine::finish_copies(unsigned still_open, const void* place) {
  const auto is_open = [&](const Copy& copy) { return copy.group + still_open >= current->groups; };
  for (const Copy& copy : current->copies) {
    if (is_open(copy)) continue;
    std::memcpy(copy.to, copy.from, copy.kept);
    std::memset(copy.to + copy.kept, 0, copy.bytes - copy.kept);
    Region* to = find(copy.to);
    for (size_t i = size_t(copy.to - to->begin) / to->granule;
         i < size_t(copy.to + copy.bytes - to->begin) / to->granule; ++i) {
      to->cells[i].pending_block = 0;
      to->cells[i].written = true;
      to->cells[i].write = stamp(*current, place);
    }
  }
  std::erase_if(current->copies, [&](const Copy& copy) { return !is_open(copy); });
}

inline char* Machine::shared_array(const void* tag, const char* name, size_t bytes, size_t granule) {
  for (const SharedArray& array : arrays_)
    if (array.tag == tag) return shared_[array.region].begin;
  size_t total = bytes;
  for (const SharedArray& array : arrays_) total += shared_[array.region].bytes;
  if (total > kMostStaticShared || total + dynamic_bytes_ > kMostShared)
    fail("expected at most 48 KiB of static and 227 KiB of all shared memory, found " + std::to_string(total) +
         " bytes with " + name + " and " + std::to_string(dynamic_bytes_) + " dynamic ones");
  char* begin = arena_begin() + arena_used_;
  arena_used_ += (bytes + kGuard + 127) / 128 * 128;
  std::memset(begin, kPoison, bytes);
  shared_.emplace_back(std::string("shared ") + name, begin, bytes, granule);
  shared_.back().is_shared = true;
  arrays_.push_back({tag, shared_.size() - 1});
  return begin;
}

}  // namespace simt
