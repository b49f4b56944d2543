// CUDA's small vectors, and 16-bit floats with the rounding of the hardware (nearest, ties to even).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };

namespace simt {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
inline bf16 to_bf16(float x) {
  if (std::isnan(x)) return {0x7fff};
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float to_float(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  const float size = exponent ? std::ldexp(float(1024 + fraction), int(exponent) - 25) : std::ldexp(float(fraction), -24);
  return sign ? -size : size;
}
inline f16 to_f16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return {0x7fff};
  const float size = std::fabs(x);
  if (size >= 65520.0f) return {uint16_t(sign | 0x7c00)};
  int exponent = size == 0.0f ? -14 : std::max(std::ilogb(size), -14);
  uint32_t units = uint32_t(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 1024 up to 2048, or less: subnormal
  if (units == 2048) units = 1024, ++exponent;
  return {uint16_t(sign | (units < 1024 ? units : uint32_t(exponent + 14) * 1024 + units))};
}


}  // namespace simt
