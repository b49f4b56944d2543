// One thread of a block: a stack of its own, switched to and from by hand where that is known, else by ucontext.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

namespace simt {

constexpr size_t kStackBytes = 64 * 1024;
constexpr uint64_t kCanary = 0x5ca1ab1e0ddba11;

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
// Saves the callee-saved registers and the stack pointer in *from, continues at `to`.
[[gnu::naked, gnu::noinline]] inline void switch_stack(void** /*from*/, void* /*to*/) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

class Fiber {
 public:
  void start(char* stack, void (*entry)()) {
    stack_ = stack;
    *reinterpret_cast<uint64_t*>(stack) = kCanary;
    void** top = reinterpret_cast<void**>(stack + kStackBytes) - 1;  // entry finds the stack as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    inside_ = top;
  }
  void enter() { switch_stack(&outside_, inside_); }
  void leave() { switch_stack(&inside_, outside_); }
  bool overflowed() const { return *reinterpret_cast<const uint64_t*>(stack_) != kCanary; }

 private:
  char* stack_ = nullptr;
  void *inside_ = nullptr, *outside_ = nullptr;
};
#else
class Fiber {
 public:
  void start(char* stack, void (*entry)()) {
    stack_ = stack;
    *reinterpret_cast<uint64_t*>(stack) = kCanary;
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack + 64;
    inside_.uc_stack.ss_size = kStackBytes - 64;
    inside_.uc_link = nullptr;
    makecontext(&inside_, entry, 0);
  }
  void enter() { swapcontext(&outside_, &inside_); }
  void leave() { swapcontext(&inside_, &outside_); }
  bool overflowed() const { return *reinterpret_cast<const uint64_t*>(stack_) != kCanary; }

 private:
  char* stack_ = nullptr;
  ucontext_t inside_, outside_;
};
#endif

// Stacks are kept from block to block; pages that no thread touched cost nothing.
class Stacks {
 public:
  char* get(size_t index) {
    while (stacks_.size() <= index) {
      void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) {
        std::fprintf(stderr, "simt: no memory for the stack of thread %zu\n", index);
        std::abort();
      }
      stacks_.push_back(static_cast<char*>(memory));
    }
    return stacks_[index];
  }

 private:
  std::vector<char*> stacks_;
};

// xorshift64*: the order of threads follows from the seed alone.
class Random {
 public:
  explicit Random(uint64_t seed = 1) : state_(seed * 0x9e3779b97f4a7c15 + 0x1234567) {}
  uint64_t below(uint64_t bound) {
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return (state_ * 0x2545f4914f6cdd1d >> 33) % bound;
  }

 private:
  uint64_t state_;
};

}  // namespace simt
