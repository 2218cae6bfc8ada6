#include "common/gpu/schedule.h"

#include <algorithm>

namespace flashsteps {

namespace {

// K and V of the heads whose pairs go together are to stay in the L2 cache while they do; an H100's
// has 50 MB.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

// The largest divisor of `heads` that fits, so that all sections are equal; 1 for a prime number
// that does not.
int heads_of_section(const Problem& p) {
  const int64_t bytes = int64_t{p.seqlen_k} * p.head_dim * 2 * size_of(p.dtype);
  const int64_t kv_heads = kSectionBytes / std::max(bytes, int64_t{1});
  int64_t heads = std::clamp(kv_heads * (p.heads / p.kv_heads), int64_t{1}, int64_t{p.heads});
  while (p.heads % heads != 0) --heads;
  return int(heads);
}

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
  // Where there is no whole round of pairs all are at work at once, and in one order.
  const int64_t section = !p.causal                     ? 1
                          : schedule.paired_rounds == 0 ? p.batch_heads()
                                                        : heads_of_section(p);
  schedule.section = divisor_of(section);
  schedule.per_section = divisor_of(std::max(section * per_head, int64_t{1}));
  return schedule;
}

}  // namespace flashsteps
