/// \file
/// The order in which the blocks of a persistent grid take row blocks of queries, so that all of
/// them have as much work as any other. The same source for both targets; no block waits for
/// another to know its share.
#pragma once

#include "common/attention/problem.h"
#include "common/gpu/divisor.h"

namespace flashsteps {

/// Row blocks as `blocks` blocks share them; made by schedule_of().
///
/// Without a causal mask all row blocks are equal, and are dealt out one after the other, those of
/// a head together. With one (and Nk >= Nq) row block t of a head has about t + 1 tiles of keys,
/// and:
///
/// - t and tiles_q - 1 - t are a pair, of as much work as any other pair. In `paired_rounds` rounds
///   every block takes pairs, the long half first: `paired` pairs in all.
/// - What is left are fewer pairs than there are blocks, and the middle row blocks of odd tiles_q,
///   which have no partner. They are dealt out singly: the long halves and the middle ones
///   (`longs`), then the short halves, `rest` in all.
/// - The pairs of `section` heads, whose K and V the L2 cache can hold, go together, the longest of
///   each first: so the last pairs of all are those in the middle, whose halves are alike.
///
/// Odd rounds of what is dealt out singly go backwards over the blocks: who had the longest of one
/// round has the shortest of the next. Where Nk < Nq the first row blocks see no key, pairs are not
/// equal, and blocks have less equal work.
struct Schedule {
  int blocks, tiles_q;
  int paired_rounds, pairs, paired, longs, rest;
  bool causal;
  Divisor section, per_section;  ///< heads; pairs, or without a mask row blocks

  /// A row block of a head.
  struct RowBlock {
    int bh, tile;  ///< b * heads + h; rows from tile * Br on. Both -1: there is none left
  };

  /// What block `block` does in round 0, 1, …
  constexpr RowBlock operator()(int block, int round) const {
    bool second = round % 2 != 0;
    int n = round / 2 * blocks + block;
    if (round >= paired_rounds) {
      n = (round - paired_rounds) * blocks + (second ? blocks - 1 - block : block);
      if (n >= rest) return {-1, -1};
      second = n >= longs;
      n = paired + (second ? rest - 1 - n : n);
    }
    if (n >= pairs) return {n - pairs, tiles_q / 2};
    const int s = quotient(n, per_section), of_section = n - s * int(per_section.value);
    const int i = quotient(of_section, section);
    return {s * int(section.value) + of_section - i * int(section.value),
            causal && !second ? tiles_q - 1 - i : i};
  }
};

/// The schedule of p's row blocks, tiles_q to a head. Host only.
///
/// \param blocks how many share them, at least 1 \throws DeviceError beyond 2^31 - 1 row blocks
Schedule schedule_of(const Problem& p, int tiles_q, int64_t blocks);

}  // namespace flashsteps
