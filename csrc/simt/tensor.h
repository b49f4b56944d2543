// The bodies of the tensor-core wrappers in kernels/primitives.cuh, with the fragment layouts of the PTX manual.
//
// m16n8k16, lane l, g = l / 4, t = l % 4. Each 32-bit register holds two neighbours, the lower index in the low half:
//   a[0] = A[g][2t..], a[1] = A[g + 8][2t..], a[2] = A[g][2t + 8..], a[3] = A[g + 8][2t + 8..]
//   b[0] = B[2t..][g], b[1] = B[2t + 8..][g]
//   c[0], c[1] = C[g][2t..], c[2], c[3] = C[g + 8][2t..]
#pragma once

#include "cuda.h"

namespace simt {

template <class Half>
struct Product {
  float* c;
  const uint32_t *a, *b;
};

template <class Half>
float half_of(uint32_t pair, int high) {
  return to_float(Half{uint16_t(high ? pair >> 16 : pair)});
}

template <class Half>
void multiply(Product<Half>* const lanes[kWarp]) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    if (!lanes[l]) return machine.fail("a tensor-core product needs all 32 lanes, lane " + std::to_string(l) + " ended");
    const int g = l / 4, t = l % 4;
    for (int high = 0; high < 2; ++high) {
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + high] = half_of<Half>(lanes[l]->a[i], high);
      for (int i = 0; i < 2; ++i) b[2 * t + i * 8 + high][g] = half_of<Half>(lanes[l]->b[i], high);
    }
  }
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      lanes[l]->c[i] += sum;
    }
  ++machine.tensor_products;
}

template <class Half>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  Product<Half> product{c, a, b};
  with_warp<Product<Half>, multiply<Half>>(where, 0xffffffff, product);
}

struct Matrices {
  const char* row;  // lane l gives row l % 8 of matrix l / 8: 8 values of 16 bits
  uint32_t* result;
  bool transposed;
  const void* place;
  size_t thread;
};

// Lane l receives M[l / 4][2 (l % 4)..] of each matrix, or, transposed, M[2 (l % 4)..][l / 4].
inline void load_matrices(Matrices* const lanes[kWarp]) {
  for (int l = 0; l < 32; ++l)
    if (!lanes[l]) return machine.fail("ldmatrix needs all 32 lanes, lane " + std::to_string(l) + " ended");
  for (int l = 0; l < 32; ++l) {
    const Matrices& slot = *lanes[l];
    if (reinterpret_cast<uintptr_t>(slot.row) % 16 != 0)
      return machine.fail("ldmatrix: the row that lane " + std::to_string(l) + " gives is not on 16 bytes, at " +
                          line_of(place_of(slot.place)));
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t halves[2];
      for (int high = 0; high < 2; ++high) {
        const int row = slot.transposed ? 2 * (l % 4) + high : l / 4;
        const int column = slot.transposed ? l / 4 : 2 * (l % 4) + high;
        const char* at = lanes[matrix * 8 + row]->row + 2 * column;
        if (!machine.touch(machine.thread(slot.thread), Access::kRead, at, 2, slot.place)) return;
        uint16_t bits;
        std::memcpy(&bits, at, 2);
        halves[high] = bits;
      }
      slot.result[matrix] = halves[0] | halves[1] << 16;
    }
  }
}

inline void ldmatrix(uint32_t (&result)[4], const void* row, bool transposed, const void* place, Where where) {
  Matrices slot{static_cast<const char*>(row), result, transposed, place, machine.current->linear};
  with_warp<Matrices, load_matrices>(where, 0xffffffff, slot);
}

[[gnu::noinline]] inline void copy_async(void* to, const void* from, size_t bytes, size_t kept) {
  machine.start_copy({static_cast<char*>(to), static_cast<const char*>(from), bytes, kept, machine.current->groups},
                     __builtin_return_address(0));
}

[[gnu::noinline]] inline void wait_for_copies(unsigned still_open, const Where& where) {
  if (!machine.is_dropped(where)) machine.finish_copies(still_open, __builtin_return_address(0));
}

}  // namespace simt
