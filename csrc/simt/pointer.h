// Pointers into shared and global memory whose every access is checked. Under nvcc they are raw pointers.
#pragma once

#include <cstddef>
#include <type_traits>

#include "machine.h"

namespace simt {

// Called from code that is inlined into the kernel, so that the return address is a line of the kernel.
[[gnu::noinline]] inline void touch(Access access, const void* at, size_t bytes) {
  machine.touch(*machine.current, access, static_cast<const char*>(at), bytes, __builtin_return_address(0));
}
[[gnu::noinline]] inline const void* here() { return __builtin_return_address(0); }

#define SIMT_INLINE [[gnu::always_inline]] inline

template <class T>
class Pointer;

// What an element's place gives: read by conversion, written by assignment. It can be used at once only, so that
// `auto x = tile[i]` does not compile where x would be read later: name the type.
template <class T>
class Element {
 public:
  explicit Element(T* at) : at_(at) {}
  Element(const Element&) = delete;
  SIMT_INLINE operator T() const&& { return read(); }
  SIMT_INLINE T operator=(T value) && { return write(value); }
  SIMT_INLINE T operator=(Element&& other) && { return write(other.read()); }
  SIMT_INLINE T operator+=(T value) && { return write(T(read() + value)); }
  SIMT_INLINE T operator-=(T value) && { return write(T(read() - value)); }
  SIMT_INLINE T operator*=(T value) && { return write(T(read() * value)); }
  SIMT_INLINE T operator|=(T value) && { return write(T(read() | value)); }
  SIMT_INLINE T operator++() && { return write(T(read() + 1)); }
  SIMT_INLINE T operator--() && { return write(T(read() - 1)); }
  SIMT_INLINE Pointer<T> operator&() && { return Pointer<T>(at_); }

 private:
  SIMT_INLINE T read() const {
    touch(Access::kRead, at_, sizeof(T));
    return *at_;
  }
  SIMT_INLINE T write(T value) const {
    touch(Access::kWrite, at_, sizeof(T));
    return *at_ = value;
  }
  T* at_;
};

template <class T>
class Pointer {
 public:
  using Value = std::remove_const_t<T>;
  Pointer() = default;
  Pointer(T* at) : at_(at) {}
  template <class U>
    requires std::is_same_v<const U, T>
  Pointer(Pointer<U> other) : at_(other.address()) {}

  SIMT_INLINE decltype(auto) operator[](ptrdiff_t i) const {
    if constexpr (std::is_const_v<T>) {
      touch(Access::kRead, at_ + i, sizeof(T));
      return Value(at_[i]);
    } else {
      return Element<T>(at_ + i);
    }
  }
  SIMT_INLINE decltype(auto) operator*() const { return (*this)[0]; }
  Pointer operator+(ptrdiff_t i) const { return at_ + i; }
  Pointer operator-(ptrdiff_t i) const { return at_ - i; }
  ptrdiff_t operator-(Pointer other) const { return at_ - other.at_; }
  Pointer& operator+=(ptrdiff_t i) { return at_ += i, *this; }
  Pointer& operator-=(ptrdiff_t i) { return at_ -= i, *this; }
  bool operator==(const Pointer&) const = default;
  explicit operator bool() const { return at_; }
  T* address() const { return at_; }  // not in kernels: for the simulator and for launch functions

 private:
  T* at_ = nullptr;
};

template <class To, class From>
Pointer<To> pointer_cast(Pointer<From> from) {
  return reinterpret_cast<To*>(from.address());
}

}  // namespace simt
