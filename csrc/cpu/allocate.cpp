#include "allocate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace trace_megatron {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kAuthorsTolerance = 1e-12;  // the reference solver replaces an entry only by one better by more

// The next unit of one row.
struct Offer {
  double value;
  int64_t level;
  int64_t row;
};

// Whether a is taken after b.
bool later(const Offer& a, const Offer& b) {
  if (a.value != b.value) return a.value < b.value;
  return a.level != b.level ? a.level > b.level : a.row > b.row;
}

// Takes up to `budget` units in order. next(row, count) is the offer after `count` taken units, below 0 for none.
template <class Next>
void take_best(int64_t num_rows, int64_t budget, bool paid_only, int64_t* counts, const Next& next) {
  std::vector<Offer> offers;
  offers.reserve(num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    counts[row] = 0;
    const Offer offer = next(row, 0);
    if (offer.value >= 0.0) offers.push_back(offer);
  }
  std::make_heap(offers.begin(), offers.end(), later);
  for (; budget > 0 && !offers.empty(); --budget) {
    const Offer best = offers.front();
    if (paid_only && best.value <= 0.0) break;
    const Offer offer = next(best.row, ++counts[best.row]);
    std::pop_heap(offers.begin(), offers.end(), later);
    if (offer.value >= 0.0) {
      offers.back() = offer;
      std::push_heap(offers.begin(), offers.end(), later);
    } else {
      offers.pop_back();
    }
  }
}

// Marginals of the concave hull of 1 - v^m - (1 - v)^m. With p = v (1 - v) they are p, p, p, then p (v^(m-2) +
// (1-v)^(m-2)): the function lies on its hull except at m = 1, where it is 0.
class RootMarginals {
 public:
  RootMarginals(const double* success_probs, int64_t num_prompts) : prompts_(num_prompts) {
    for (int64_t i = 0; i < num_prompts; ++i) {
      const double u = std::min(success_probs[i], 1.0 - success_probs[i]);
      prompts_[i] = {u, u * (1.0 - u), u, 1.0 - u, 0.0, 0.0};
    }
  }

  // The marginal of unit count + 1, asked for in order.
  double advance(int64_t row, int64_t count) {
    Prompt& prompt = prompts_[row];
    prompt.last = prompt.next;
    if (count >= 3) {
      prompt.power *= prompt.u;
      prompt.other_power *= 1.0 - prompt.u;
    }
    prompt.next = count < 3 ? prompt.p : std::min(prompt.last, prompt.p * (prompt.power + prompt.other_power));
    return prompt.next;
  }
  double first(int64_t row) const { return prompts_[row].p; }
  double last(int64_t row) const { return prompts_[row].last; }  // of the unit taken last
  double next(int64_t row) const { return prompts_[row].next; }

 private:
  struct Prompt {
    double u, p, power, other_power, last, next;
  };
  std::vector<Prompt> prompts_;
};

// Lifts the one prompt left at m = 1 to 2, or drops it to 0, whichever costs less.
void close_hole(const RootMarginals& marginals, int64_t num_prompts, const RootBudget& budget, int64_t limit,
                int64_t* counts) {
  const int64_t lone = std::find(counts, counts + num_prompts, 1) - counts;
  if (lone == num_prompts) return;
  double gain = -kInfinity, loss = kInfinity;
  int64_t receiver = -1, giver = -1;
  for (int64_t i = 0; i < num_prompts; ++i) {
    if (counts[i] >= 2 && counts[i] < limit && marginals.next(i) > gain) gain = marginals.next(i), receiver = i;
    if (counts[i] >= 3 && marginals.last(i) < loss) loss = marginals.last(i), giver = i;
  }
  const double best_gain = budget.exact ? gain : std::max(gain, 0.0);
  if (loss - marginals.first(lone) < marginals.first(lone) - best_gain) {
    counts[lone] = 2;
    --counts[giver];
  } else {
    counts[lone] = 0;
    if (receiver >= 0 && (budget.exact || gain > 0.0)) ++counts[receiver];
  }
}

constexpr int64_t kSpends = 16;  // sums that stay in registers

// after[s] = max over counts of before[s - count] + value[count], for s < num_spends <= kSpends.
void best_of_counts(const double* before, const double* value, int64_t cap, int64_t num_spends, double* after) {
  double best[kSpends];
  std::fill(best, best + kSpends, -kInfinity);
  if (num_spends == kSpends) {
    for (int64_t count = 0; count <= cap; ++count)
      for (int64_t i = 0; i < kSpends; ++i) best[i] = std::max(best[i], before[i - count] + value[count]);
  } else {
    for (int64_t count = 0; count <= cap; ++count)
      for (int64_t i = 0; i < num_spends; ++i) best[i] = std::max(best[i], before[i - count] + value[count]);
  }
  std::copy(best, best + num_spends, after);
}

}  // namespace

void allocate_roots(const double* success_probs, int64_t num_prompts, const RootBudget& budget, int64_t* counts) {
  const int64_t limit = std::min(budget.num_rollouts, budget.max_rollouts);
  if (limit < 2) {
    std::fill(counts, counts + num_prompts, 0);
    return;
  }
  RootMarginals marginals(success_probs, num_prompts);
  take_best(num_prompts, budget.num_rollouts, !budget.exact, counts, [&](int64_t row, int64_t count) {
    // a prompt's first two units stand together among ties
    return Offer{count < limit ? marginals.advance(row, count) : (marginals.advance(row, count), -1.0),
                 std::max<int64_t>(count - 1, 0), row};
  });
  close_hole(marginals, num_prompts, budget, limit, counts);
}

void allocate_prefixes(const double* repeat_probs, int64_t num_prefixes, int64_t budget, int64_t* counts) {
  std::vector<double> power(num_prefixes);  // q^count
  take_best(num_prefixes, budget, false, counts, [&](int64_t row, int64_t count) {
    const double q = repeat_probs[row];
    power[row] = count == 0 ? 1.0 : power[row] * q;
    return Offer{power[row] * (1.0 - q), count, row};
  });
}

bool allocate_table(const double* values, int64_t num_rows, int64_t cap, int64_t budget, bool exact, double* table,
                    int64_t* counts) {
  const int64_t width = budget + 1;
  // the best of each spend, before the row and after it; what lies before is forbidden, so that no count needs a bound
  std::vector<double> best(cap + width, -kInfinity), after(width);
  best[cap] = 0.0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const double *value = values + row * (cap + 1), *before = best.data() + cap;
    std::copy(before, before + width, table + row * width);
    for (int64_t first = 0; first < width; first += kSpends)
      best_of_counts(before + first, value, cap, std::min(kSpends, width - first), after.data() + first);
    std::copy(after.begin(), after.end(), best.begin() + cap);
  }
  int64_t spend = exact ? budget : std::max_element(best.begin() + cap, best.end()) - (best.begin() + cap);
  double reached = best[cap + spend];
  if (reached == -kInfinity) return false;
  for (int64_t row = num_rows - 1; row >= 0; --row) {
    const double *value = values + row * (cap + 1), *before = table + row * width;
    int64_t count = 0;
    while (before[spend - count] + value[count] < reached - kAuthorsTolerance) ++count;
    counts[row] = count;
    spend -= count;
    reached = before[spend];
  }
  return true;
}

}  // namespace trace_megatron
