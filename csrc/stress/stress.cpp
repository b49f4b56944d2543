// Runs every CPU kernel on random input, on several threads, in every instruction set that the processor has, and
// compares with the generic kernels on one thread. Made to be built with sanitizers: tools/sanitize_ops.sh. No torch.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../cpu/allocate.h"
#include "../cpu/attention.h"
#include "../cpu/block_mask.h"
#include "../cpu/forest.h"
#include "../cpu/pack.h"
#include "../cpu/value_head.h"

using namespace trace_megatron;

namespace {

std::mt19937 generator(1);

int64_t random_int(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }
float random_float() { return std::normal_distribution<float>()(generator); }

void require(bool condition, const char* what, double found) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s, found %g\n", what, found);
  std::exit(1);
}

// Arrays of exactly the asked size, so that a step beyond is seen, filled with NaN.
template <class T>
std::unique_ptr<T[]> poisoned(int64_t size) {
  std::unique_ptr<T[]> memory(new T[size]);
  memset(memory.get(), 0xff, size_t(size) * sizeof(T));
  return memory;
}

Parallel threads(int num_threads) {
  return {num_threads, [](int count, void (*work)(void*, int), void* context) {
            std::vector<std::thread> workers;
            for (int i = 0; i < count; ++i) workers.emplace_back(work, context, i);
            for (std::thread& worker : workers) worker.join();
          }};
}

std::vector<int32_t> random_forest(int64_t num_tokens, int64_t turn) {
  std::vector<int32_t> end(num_tokens, int32_t(num_tokens));
  std::vector<int64_t> path;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const size_t keep = token % turn == 0 ? size_t(random_int(0, int64_t(path.size()))) : path.size();
    for (size_t i = keep; i < path.size(); ++i) end[path[i]] = int32_t(token);
    path.resize(keep);
    path.push_back(token);
  }
  std::vector<int32_t> stack(num_tokens);
  require(check_forest(end.data(), num_tokens, stack.data()).kind == ForestError::kNone, "a good forest", 0);
  return end;
}

struct Problem {
  int64_t num_queries, num_keys, repeats, groups, dim;
  Storage storage;
  std::vector<float> q, k, v, grad;
  std::vector<int32_t> position, end;
};

std::vector<float> random_floats(int64_t size) {
  std::vector<float> values(size);
  for (float& value : values) {  // exact in bfloat16
    value = random_float();
    uint32_t word;
    memcpy(&word, &value, 4);
    word &= 0xffff0000u;
    memcpy(&value, &word, 4);
  }
  return values;
}

// Values as they are stored.
std::unique_ptr<char[]> stored(const std::vector<float>& values, Storage storage) {
  const size_t width = storage == Storage::kFloat32 ? 4 : 2;
  std::unique_ptr<char[]> memory = poisoned<char>(int64_t(values.size() * width));
  for (size_t i = 0; i < values.size(); ++i)  // of a bfloat16, the upper half
    memcpy(memory.get() + i * width, reinterpret_cast<const char*>(&values[i]) + (4 - width), width);
  return memory;
}

std::vector<float> loaded(const char* memory, int64_t size, Storage storage) {
  const size_t width = storage == Storage::kFloat32 ? 4 : 2;
  std::vector<float> values(size, 0.0f);
  for (int64_t i = 0; i < size; ++i)
    memcpy(reinterpret_cast<char*>(&values[i]) + (4 - width), memory + size_t(i) * width, width);
  return values;
}

struct Results {
  std::vector<float> out, lse, grad_q, grad_k, grad_v;
};

template <class Call>
std::unique_ptr<char[]> workspace(size_t (*measure)(const Call&, int), const Call& call, int num_threads,
                                  void*& begin) {
  const size_t bytes = measure(call, num_threads);
  std::unique_ptr<char[]> memory = poisoned<char>(int64_t(bytes) + 64);
  begin = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
  return memory;
}

Results attend(const Problem& p, const AttentionKernels& kernels, const Parallel& parallel) {
  const int64_t heads = p.groups * p.repeats, query_size = p.num_queries * heads * p.dim;
  const int64_t key_size = p.num_keys * p.groups * p.dim;
  const auto q = stored(p.q, p.storage), k = stored(p.k, p.storage), v = stored(p.v, p.storage);
  const auto grad = stored(p.grad, p.storage);
  const int64_t width = p.storage == Storage::kFloat32 ? 4 : 2;
  const auto out = poisoned<char>(query_size * width), grad_q = poisoned<char>(query_size * width);
  const auto grad_k = poisoned<char>(key_size * width), grad_v = poisoned<char>(key_size * width);
  const auto lse = poisoned<float>(p.num_queries * heads);
  const auto query_rows = [&](const char* data) { return Rows{data, heads * p.dim, p.dim}; };
  const auto key_rows = [&](const char* data) { return Rows{data, p.groups * p.dim, p.dim}; };
  const AttentionArgs args{p.num_queries,
                           p.num_keys,
                           heads,
                           p.groups,
                           p.dim,
                           p.storage,
                           0.3f,
                           query_rows(q.get()),
                           key_rows(k.get()),
                           key_rows(v.get()),
                           p.position.data(),
                           p.end.data()};
  const AttentionForward forward{args, out.get(), lse.get()};
  const AttentionBackward backward{args,         query_rows(grad.get()), query_rows(out.get()), lse.get(),
                                   grad_q.get(), grad_k.get(),           grad_v.get()};
  void* begin;
  {
    const auto memory = workspace(kernels.forward_workspace, forward, parallel.num_threads, begin);
    kernels.forward(forward, parallel, begin);
  }
  {
    const auto memory = workspace(kernels.backward_workspace, backward, parallel.num_threads, begin);
    kernels.backward(backward, parallel, begin);
  }
  return {loaded(out.get(), query_size, p.storage),
          {lse.get(), lse.get() + p.num_queries * heads},
          loaded(grad_q.get(), query_size, p.storage),
          loaded(grad_k.get(), key_size, p.storage),
          loaded(grad_v.get(), key_size, p.storage)};
}

void compare(const char* what, const std::vector<float>& found, const std::vector<float>& wanted, double tolerance) {
  double largest = 1.0;
  for (float w : wanted) largest = std::max(largest, double(std::fabs(w)));
  for (size_t i = 0; i < found.size(); ++i) {
    const double error = std::fabs(double(found[i]) - wanted[i]);
    require(error <= tolerance * largest, what, error / largest);  // NaN fails
  }
}

void stress_attention(int rounds) {
  const int64_t dims[] = {32, 64, 96, 128, 5, 80, 256};
  for (int round = 0; round < rounds; ++round) {
    Problem p;
    p.num_keys = random_int(1, 200);
    p.repeats = random_int(1, 5);
    p.groups = random_int(1, 4);
    p.dim = dims[round % 7];
    p.storage = round % 2 ? Storage::kBFloat16 : Storage::kFloat32;
    p.end = random_forest(p.num_keys, random_int(1, 30));
    for (int64_t i = 0; i < p.num_keys; ++i)
      if (round % 3 || i + 1 == p.num_keys || random_int(0, 1)) p.position.push_back(int32_t(i));
    p.num_queries = int64_t(p.position.size());
    p.q = random_floats(p.num_queries * p.groups * p.repeats * p.dim);
    p.grad = random_floats(int64_t(p.q.size()));
    p.k = random_floats(p.num_keys * p.groups * p.dim);
    p.v = random_floats(int64_t(p.k.size()));
    const Results wanted = attend(p, *attention_kernels("generic"), threads(1));
    for (const char* name : {"generic", "avx2", "avx512", "avx512_bf16"}) {
      const AttentionKernels* kernels = attention_kernels(name);
      if (!kernels) continue;
      const Results found = attend(p, *kernels, threads(int(random_int(1, 4))));
      const double tolerance = p.storage == Storage::kFloat32 ? 1e-5 : 3e-2;
      compare("out", found.out, wanted.out, tolerance);
      compare("lse", found.lse, wanted.lse, 1e-4);
      compare("grad_q", found.grad_q, wanted.grad_q, tolerance);
      compare("grad_k", found.grad_k, wanted.grad_k, tolerance);
      compare("grad_v", found.grad_v, wanted.grad_v, tolerance);
    }
  }
}

void stress_forest_check() {
  for (int round = 0; round < 2000; ++round) {
    const int64_t size = random_int(0, 8);
    const auto end = poisoned<int32_t>(size), stack = poisoned<int32_t>(size);
    for (int64_t i = 0; i < size; ++i)
      end[i] = int32_t(random_int(0, 9) ? random_int(0, size + 1) : random_int(INT32_MIN, INT32_MAX));
    check_forest(end.get(), size, stack.get());
  }
}

void stress_block_mask() {
  for (int round = 0; round < 300; ++round) {
    const int64_t num_tokens = random_int(1, 300), block = random_int(1, 40);
    const int64_t num_blocks = (num_tokens + block - 1) / block;
    const std::vector<int32_t> end = random_forest(num_tokens, random_int(1, 30));
    std::unique_ptr<int32_t[]> counts[4], indices[4];
    BlockLists lists[4];
    for (int i = 0; i < 4; ++i) {
      counts[i] = poisoned<int32_t>(num_blocks);
      indices[i] = poisoned<int32_t>(num_blocks * num_blocks);
      lists[i] = {counts[i].get(), indices[i].get()};
    }
    build_block_mask(end.data(), num_tokens, block, {lists[0], lists[1], lists[2], lists[3]});
    int64_t by_query = 0, by_key = 0;
    for (int64_t i = 0; i < num_blocks; ++i) {
      by_query += counts[0][i] + counts[1][i];
      by_key += counts[2][i] + counts[3][i];
    }
    require(by_query == by_key && by_query == count_visited_blocks(end.data(), num_tokens, block), "visited blocks",
            double(by_query - by_key));
  }
}

void stress_pack() {
  for (int round = 0; round < 500; ++round) {
    const int64_t n = random_int(0, 30);
    std::vector<int64_t> offsets{0}, parents, leaves;
    for (int64_t i = 0; i < n; ++i) {
      offsets.push_back(offsets.back() + random_int(0, 9));
      parents.push_back(random_int(-1, i - 1));
      if (random_int(0, 1)) leaves.push_back(i);
    }
    const auto tokens = poisoned<int64_t>(offsets.back());
    const Segments segments{offsets.data(), parents.data(), n};
    const Layout layout =
        build_layout(segments, round % 2 ? leaves.data() : nullptr, round % 2 ? int64_t(leaves.size()) : 0);
    const int64_t size = layout.num_tokens;
    const auto packed = poisoned<int64_t>(size), positions = poisoned<int64_t>(size);
    const auto end = poisoned<int32_t>(size), predecessor = poisoned<int32_t>(size), stack = poisoned<int32_t>(size);
    write_pack(segments, layout, tokens.get(), {packed.get(), positions.get(), end.get(), predecessor.get()});
    require(check_forest(end.get(), size, stack.get()).kind == ForestError::kNone, "a packed forest", double(size));
    const int64_t num_ranks = random_int(1, 4);
    const Bins bins = cut_by_leaves(segments, leaves.data(), int64_t(leaves.size()), random_int(1, 50), num_ranks);
    require(int64_t(bins.rank.size()) % num_ranks == 0, "equally many bins a rank", double(bins.rank.size()));
  }
}

void stress_allocation() {
  for (int round = 0; round < 2000; ++round) {
    const int64_t n = random_int(1, 20), budget = random_int(2, 40);
    const auto probs = poisoned<double>(n);
    const auto counts = poisoned<int64_t>(n);
    for (int64_t i = 0; i < n; ++i) probs[i] = double(random_int(0, 8)) / 8;
    const auto spent = [&] {
      int64_t sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += counts[i];
      return sum;
    };
    const bool exact = round % 3;
    const int64_t most = round % 2 ? std::numeric_limits<int64_t>::max() : random_int(3, 5);
    if (!exact || most >= budget || n * most >= budget) {
      allocate_roots(probs.get(), n, {budget, most, exact}, counts.get());
      require(exact ? spent() == budget : spent() <= budget, "spent rollouts", double(spent()));
    }
    allocate_prefixes(probs.get(), n, budget, counts.get());
    require(spent() == budget, "spent continuations", double(spent()));
    const int64_t cap = random_int(0, 5);
    const auto values = poisoned<double>(n * (cap + 1)), table = poisoned<double>(n * (budget + 1));
    for (int64_t i = 0; i < n * (cap + 1); ++i)
      values[i] = random_int(0, 3) ? double(random_int(-3, 3)) : -std::numeric_limits<double>::infinity();
    if (allocate_table(values.get(), n, cap, budget, exact, table.get(), counts.get()))
      require(exact ? spent() == budget : spent() <= budget, "spent by a table", double(spent()));
  }
}

void stress_value_head() {
  for (int64_t channels = 1; channels < 70; ++channels) {
    const std::vector<float> norm = random_floats(channels), weight = random_floats(channels);
    const std::vector<float> row = random_floats(channels);
    std::vector<float> grad(channels, 0.0f), scaled(channels, 0.0f);
    const ValueHead head{norm.data(), weight.data(), 0.1f, 1e-6f, channels};
    const RowSums sums = value_head_sums(head, row.data());
    require(std::isfinite(sums.inverse_rms * sums.product), "a finite logit", sums.product);
    add_value_head_grads(head, row.data(), sums, 0.5f, grad.data(), scaled.data());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
  stress_attention(rounds);
  stress_forest_check();
  stress_block_mask();
  stress_pack();
  stress_allocation();
  stress_value_head();
  std::printf("all kernels agree over %d rounds (fastest: %s)\n", rounds, attention_kernels()->name);
}
