// Shadow memory: who touched which bytes last, in which epoch, and whether they were ever written.
//
// Two accesses are in order where one thread makes both, where a barrier of the block lies between them, or where a
// chain of warp synchronisations leads from one to the other (vector clocks within the warp). Two that are not in order,
// of which one is a write and not both are atomic, are a race, whatever order they happened to run in. Different blocks
// are never in order. Of readers (and of atomics) two are kept, in different warps where there are such: a later
// unordered write meets at least one of them. Only warp synchronisations of parts of a warp can hide a third reader.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace simt {

enum class Access : uint8_t { kRead, kWrite, kAtomic };

// Who, and when. Empty where block is 0.
struct Stamp {
  uint32_t block = 0;  // one more than the linear index
  uint32_t thread : 10 = 0, barrier : 22 = 0;
  uint32_t clock = 0;  // of the thread, counted up at each of its warp's synchronisations
  uint32_t place = 0;  // of the instruction, from the start of the library
};

struct Cell {
  Stamp write, reads[2], atomics[2];
  uint32_t owner = 0;          // the block (of shared memory) or the launch (of global) that the stamps belong to
  uint32_t pending_block = 0;  // of the thread whose cp.async into here has not been waited for; 0: none
  uint16_t pending_thread = 0;
  bool written = false;
};

struct Region {
  std::string name;
  char* begin = nullptr;
  size_t bytes = 0;
  size_t granule = 1;  // bytes of one cell
  bool is_shared = false, is_writable = true, starts_written = false;
  Cell* cells = nullptr;  // zero is empty; calloc gives pages that cost nothing until they are touched

  Region() = default;
  Region(std::string name, char* begin, size_t bytes, size_t granule)
      : name(std::move(name)), begin(begin), bytes(bytes), granule(granule) {
    cells = static_cast<Cell*>(std::calloc(bytes / granule + 1, sizeof(Cell)));
    if (!cells) std::abort();
  }
  Region(Region&& other) noexcept { *this = std::move(other); }
  Region& operator=(Region&& other) noexcept {
    name = std::move(other.name), begin = other.begin, bytes = other.bytes, granule = other.granule;
    is_shared = other.is_shared, is_writable = other.is_writable, starts_written = other.starts_written;
    std::swap(cells, other.cells);
    return *this;
  }
  ~Region() { std::free(cells); }
  bool holds(const char* at) const { return at >= begin && at < begin + bytes; }
};

// What a thread knows of its warp: the clock of each lane up to which everything happened before.
struct Clocks {
  uint32_t known[32] = {};
};

inline bool in_order(const Stamp& before, const Stamp& now, const Clocks& clocks) {
  if (before.block != now.block) return before.block == 0;
  if (before.thread == now.thread || before.barrier < now.barrier) return true;
  return before.thread / 32 == now.thread / 32 && before.clock <= clocks.known[before.thread % 32];
}

// The stamp that races with this access, or null. Updates the cell where there is none.
inline const Stamp* race(Cell& cell, Access access, const Stamp& now, const Clocks& clocks) {
  const auto conflict = [&](const Stamp& stamp) { return stamp.block != 0 && !in_order(stamp, now, clocks); };
  if (conflict(cell.write)) return &cell.write;
  if (access != Access::kRead)
    for (const Stamp& stamp : cell.reads)
      if (conflict(stamp)) return &stamp;
  if (access != Access::kAtomic)
    for (const Stamp& stamp : cell.atomics)
      if (conflict(stamp)) return &stamp;
  if (access == Access::kWrite) {
    cell.write = now;
    for (Stamp& stamp : cell.reads) stamp = {};
    for (Stamp& stamp : cell.atomics) stamp = {};
    return nullptr;
  }
  Stamp* const kept = access == Access::kRead ? cell.reads : cell.atomics;
  if (kept[0].block == 0 || in_order(kept[0], now, clocks)) {
    kept[0] = now;
  } else if (kept[1].block == 0 || in_order(kept[1], now, clocks) ||
             (kept[0].block == kept[1].block && kept[0].thread / 32 == kept[1].thread / 32)) {
    kept[1] = now;
  }
  return nullptr;
}

}  // namespace simt
