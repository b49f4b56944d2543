#include "pack.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace trace_megatron {
namespace {

std::vector<char> kept_segments(const Segments& segments, const int64_t* leaves, int64_t num_leaves) {
  std::vector<char> kept(segments.num_segments, leaves == nullptr);
  for (int64_t i = 0; i < num_leaves; ++i)
    for (int64_t segment = leaves[i]; segment >= 0 && !kept[segment]; segment = segments.parents[segment])
      kept[segment] = 1;
  return kept;
}

// Some leaves of one tree, neighbours in preorder.
struct Piece {
  std::vector<int64_t> places;  // in `leaves`
  int64_t num_tokens;
  int64_t num_blocks;
};

// Counts the attention blocks of pieces; `number` is memory that calls share.
int64_t count_blocks(const Segments& segments, const int64_t* leaves, const Piece& piece,
                     std::vector<int64_t>& number) {
  std::vector<int64_t> members;
  for (int64_t place : piece.places)
    for (int64_t s = leaves[place]; s >= 0 && number[s] < 0; s = segments.parents[s]) {
      number[s] = 0;
      members.push_back(s);
    }
  std::sort(members.begin(), members.end());
  std::vector<int64_t> offsets{0}, parents;
  for (size_t i = 0; i < members.size(); ++i) {
    const int64_t parent = segments.parents[members[i]];
    number[members[i]] = int64_t(i);
    offsets.push_back(offsets.back() + segments.size(members[i]));
    parents.push_back(parent >= 0 ? number[parent] : -1);
  }
  for (int64_t s : members) number[s] = -1;
  const Segments own{offsets.data(), parents.data(), int64_t(members.size())};
  const Layout layout = build_layout(own, nullptr, 0);
  std::vector<int32_t> subtree_end(layout.num_tokens);
  for (int64_t s = 0; s < own.num_segments; ++s)
    std::fill_n(subtree_end.begin() + layout.start[s], own.size(s), int32_t(layout.end[s]));
  return count_visited_blocks(subtree_end.data(), layout.num_tokens, kAttentionBlock);
}

int64_t root_of(const Segments& segments, int64_t segment) {
  while (segments.parents[segment] >= 0) segment = segments.parents[segment];
  return segment;
}

std::vector<Piece> cut_into_pieces(const Segments& segments, const int64_t* leaves, int64_t num_leaves, int64_t limit) {
  const Layout layout = build_layout(segments, leaves, num_leaves);
  std::vector<int64_t> order(num_leaves);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return layout.order[leaves[a]] < layout.order[leaves[b]]; });
  std::vector<Piece> pieces;
  std::vector<int64_t> in_piece(segments.num_segments, -1);  // the last piece that holds a segment
  int64_t tree = -1;
  for (int64_t place : order) {
    const int64_t here = root_of(segments, leaves[place]);
    const auto added_to = [&](int64_t piece) {
      int64_t added = 0;
      for (int64_t s = leaves[place]; s >= 0 && in_piece[s] != piece; s = segments.parents[s])
        added += segments.size(s);
      return added;
    };
    int64_t index = int64_t(pieces.size()) - 1;
    if (here != tree || pieces[index].num_tokens + added_to(index) > limit) {
      pieces.push_back({{}, 0, 0});
      ++index;
    }
    tree = here;
    pieces[index].num_tokens += added_to(index);
    pieces[index].places.push_back(place);
    for (int64_t s = leaves[place]; s >= 0 && in_piece[s] != index; s = segments.parents[s]) in_piece[s] = index;
  }
  return pieces;
}

// Spreads pieces, longest first, over the fewest bins in which each fits the emptiest one.
std::vector<std::vector<int64_t>> fill_bins(const std::vector<Piece>& pieces, int64_t limit, int64_t num_ranks) {
  std::vector<int64_t> order(pieces.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return pieces[a].num_tokens > pieces[b].num_tokens; });
  int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.num_tokens;
  const int64_t per_rank = std::max<int64_t>((total - 1) / limit / num_ranks + 1, 1);
  for (int64_t num_bins = per_rank * num_ranks;; num_bins += num_ranks) {
    std::vector<std::vector<int64_t>> bins(num_bins);
    std::vector<int64_t> loads(num_bins, 0);
    bool fits = true;
    for (int64_t piece : order) {
      const int64_t emptiest = std::min_element(loads.begin(), loads.end()) - loads.begin();
      fits = bins[emptiest].empty() || loads[emptiest] + pieces[piece].num_tokens <= limit;
      if (!fits) break;
      bins[emptiest].push_back(piece);
      loads[emptiest] += pieces[piece].num_tokens;
    }
    if (fits) return bins;
  }
}

// Costliest bins first, each to the rank with the least so far that has room.
std::vector<int64_t> balance(const std::vector<int64_t>& costs, int64_t num_ranks) {
  std::vector<int64_t> order(costs.size()), rank(costs.size()), load(num_ranks, 0), count(num_ranks, 0);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });
  const int64_t per_rank = int64_t(costs.size()) / num_ranks;
  for (int64_t bin : order) {
    int64_t best = -1;
    for (int64_t r = 0; r < num_ranks; ++r)
      if (count[r] < per_rank && (best < 0 || load[r] < load[best])) best = r;
    rank[bin] = best;
    load[best] += costs[bin];
    ++count[best];
  }
  return rank;
}

}  // namespace

Layout build_layout(const Segments& segments, const int64_t* leaves, int64_t num_leaves) {
  const int64_t n = segments.num_segments;
  const std::vector<char> kept = kept_segments(segments, leaves, num_leaves);
  Layout layout;
  layout.start.assign(n, -1);
  layout.last.assign(n, -1);
  layout.end.assign(n, 0);
  layout.depth.assign(n, 0);
  layout.order.assign(n, -1);
  std::vector<int64_t> tokens(n, 0), members(n, 0);  // at and below a segment; then where its next child goes
  for (int64_t s = n - 1; s >= 0; --s) {
    if (!kept[s]) continue;
    tokens[s] += segments.size(s);
    members[s] += 1;
    const int64_t parent = segments.parents[s];
    if (parent >= 0) tokens[parent] += tokens[s], members[parent] += members[s];
  }
  int64_t num_tokens = 0, num_members = 0;
  for (int64_t s = 0; s < n; ++s) {
    if (!kept[s]) continue;
    const int64_t parent = segments.parents[s], size = segments.size(s);
    int64_t& place = parent >= 0 ? tokens[parent] : num_tokens;
    int64_t& number = parent >= 0 ? members[parent] : num_members;
    layout.start[s] = place;
    layout.end[s] = place + tokens[s];
    layout.depth[s] = parent >= 0 ? layout.depth[parent] + segments.size(parent) : 0;
    layout.last[s] = size > 0 ? place + size - 1 : parent >= 0 ? layout.last[parent] : -1;
    layout.order[s] = number;
    place += tokens[s];
    number += members[s];
    tokens[s] = layout.start[s] + size;
    members[s] = layout.order[s] + 1;
  }
  layout.num_tokens = num_tokens;
  return layout;
}

void write_pack(const Segments& segments, const Layout& layout, const int64_t* tokens, const PackedTokens& to) {
  for (int64_t s = 0; s < segments.num_segments; ++s) {
    const int64_t size = segments.size(s), start = layout.start[s], parent = segments.parents[s];
    if (start < 0 || size == 0) continue;
    memcpy(to.tokens + start, tokens + segments.offsets[s], size_t(size) * sizeof(int64_t));
    int64_t* position_ids = to.position_ids + start;
    int32_t *subtree_end = to.subtree_end + start, *predecessor = to.predecessor + start;
    const int64_t depth = layout.depth[s];
    const int32_t end = int32_t(layout.end[s]), before = int32_t(start) - 1;
    for (int64_t i = 0; i < size; ++i) position_ids[i] = depth + i;
    for (int64_t i = 0; i < size; ++i) subtree_end[i] = end;
    for (int64_t i = 0; i < size; ++i) predecessor[i] = before + int32_t(i);
    predecessor[0] = parent >= 0 ? int32_t(layout.last[parent]) : -1;
  }
}

int64_t count_visited_blocks(const int32_t* subtree_end, int64_t num_tokens, int64_t block) {
  int64_t count = 0;
  for (int64_t first = 0; first < num_tokens; first += block) {
    const int64_t last = std::min(first + block, num_tokens);
    const int64_t end = *std::max_element(subtree_end + first, subtree_end + last);
    count += (end + block - 1) / block - first / block;  // its own queries, and blocks that begin before that end
  }
  return count;
}

Bins cut_by_leaves(const Segments& segments, const int64_t* leaves, int64_t num_leaves, int64_t limit,
                   int64_t num_ranks) {
  const std::vector<Piece> pieces = cut_into_pieces(segments, leaves, num_leaves, limit);
  const std::vector<std::vector<int64_t>> bins = fill_bins(pieces, limit, num_ranks);
  Bins result{std::vector<int64_t>(num_leaves), {}};
  std::vector<int64_t> costs(bins.size(), 0), number(segments.num_segments, -1);
  for (size_t bin = 0; bin < bins.size(); ++bin) {
    for (int64_t piece : bins[bin]) {
      costs[bin] += count_blocks(segments, leaves, pieces[piece], number);
      for (int64_t place : pieces[piece].places) result.of_leaf[place] = int64_t(bin);
    }
  }
  result.rank = balance(costs, num_ranks);
  return result;
}

}  // namespace trace_megatron
