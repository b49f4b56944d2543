// Where in the kernel's source an instruction is. Asked for only when a fault is reported: binutils' addr2line.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <string>

namespace simt {

inline std::string file_name(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

inline char* library_begin() {
  static Dl_info info{};
  if (!info.dli_fbase) dladdr(reinterpret_cast<void*>(&library_begin), &info);
  return static_cast<char*>(info.dli_fbase);
}

inline uint32_t place_of(const void* instruction) {
  return uint32_t(static_cast<const char*>(instruction) - library_begin());
}

// The innermost line of the kernel itself: what was inlined from the simulator is passed over.
inline std::string find_line(uint32_t place) {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<void*>(&library_begin), &info) || !info.dli_fname) return "?";
  char command[4096], line[4096];
  std::snprintf(command, sizeof(command), "addr2line -i -e '%s' 0x%x 2>/dev/null", info.dli_fname, place - 1);
  FILE* output = popen(command, "r");
  if (!output) return "?";
  std::string found = "?";
  while (std::fgets(line, sizeof(line), output)) {
    std::string path(line);
    path = path.substr(0, path.find_first_of(" \n"));
    if (path.find("/simt/") != std::string::npos || path.find("primitives.cuh") != std::string::npos) continue;
    if (found == "?") found = file_name(path);
  }
  pclose(output);
  return found;
}

inline std::string line_of(uint32_t place) {
  static std::map<uint32_t, std::string> known;
  const auto [entry, is_new] = known.try_emplace(place);
  if (is_new) entry->second = find_line(place);
  return entry->second;
}

}  // namespace simt
