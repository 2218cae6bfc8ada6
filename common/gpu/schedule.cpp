#include "common/gpu/schedule.h"

#include <algorithm>

namespace flashsteps {

namespace {
// Pairs of so many heads go together. A multiprocessor's row block reads a tile of K and one of V
// in the time of two products: with four row blocks of a head at work at once on some 130
// multiprocessors, a quarter of that has to come from memory, which can give that much.
constexpr int kMostHeads = 32;
}  // namespace

Schedule schedule_of(const Problem& p, int tiles_q, int64_t blocks) {
  const int64_t all = p.batch_heads() * tiles_q;
  index_count(all + 2 * blocks);  // the rounds' last places, too
  const int per_head = p.causal ? tiles_q / 2 : tiles_q;
  const int64_t pairs = p.batch_heads() * per_head;
  Schedule schedule{};
  schedule.blocks = int(blocks);
  schedule.tiles_q = tiles_q;
  schedule.pairs = int(pairs);
  schedule.causal = p.causal;
  schedule.longs = schedule.rest = int(all);
  if (p.causal) {
    const int64_t rounds = pairs / blocks;
    schedule.paired_rounds = int(2 * rounds);
    schedule.paired = int(rounds * blocks);
    schedule.longs = int(all - pairs - schedule.paired);
    schedule.rest = schedule.longs + int(pairs) - schedule.paired;
  }
  // A section is all of these heads: no fewer are left for the last one.
  int section = p.causal ? std::min(p.heads, kMostHeads) : 1;
  while (p.heads % section != 0) --section;
  schedule.section = divisor_of(section);
  schedule.per_section = divisor_of(std::max(int64_t{section} * per_head, int64_t{1}));
  return schedule;
}

}  // namespace flashsteps
