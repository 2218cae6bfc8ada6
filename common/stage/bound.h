/// \file
/// The least time that a stage can take on a card, from what the model counted and from the card's
/// datasheet (docs/method.md, "Bounds"). A bound, not a time.
#pragma once

#include <optional>
#include <string>

#include "common/attention/card.h"
#include "common/attention/problem.h"
#include "common/stage/ledger.h"
#include "common/stage/stage.h"

namespace flashsteps {

/// What each part of a card would need on its own, in microseconds, if it did nothing else and
/// never waited. The parts work side by side, so the slowest of them bounds the whole.
struct TimeBound {
  int multiprocessors = 0;  ///< SMs that have work: no more than blocks were launched
  /// Q, K and V read once, O and L written once, at the memory's bandwidth; of a backward stage O,
  /// dO and L read, too, and dQ, dK and dV written.
  double memory_us = 0;
  double mma_us = 0;  ///< the MMA FLOPs that were executed, on the SMs that have a block
  double fma_us = 0;  ///< where no MMA was executed: the products' FLOPs by FMA, on these SMs
  double exp_us = 0;  ///< exponentials and divisions, on these SMs

  /// All bytes that threads asked for at the memory's bandwidth: what the papers' counting of HBM
  /// accesses says. No bound, since caches serve repeated reads; so it is not part of bound_us().
  double requested_us = 0;

  double bound_us() const;
  /// Which part bounds: "memory", "MMA", "FMA", "exp"; "nothing" where it is 0.
  const char* bound_by() const;
};

/// The bound of one pass of the stage (of a forward stage without the common kernel for L).
///
/// \param ledger of the stage on this problem
TimeBound time_bound(const Card& card, const Stage& stage, const Problem& problem,
                     const Ledger& ledger);

/// The bound on `larger`, a problem that is `problem` but for its batch and its heads, without
/// running it: each (batch, head) does the same work, so every count grows with their number.
///
/// \param ledger of the stage on `problem`
///
/// \throws std::invalid_argument where the two differ in more, or in the queries to a KV head
TimeBound time_bound_of_more_heads(const Card& card, const Stage& stage, const Problem& problem,
                                   const Ledger& ledger, const Problem& larger);

/// Which instruction of the ledger the card lacks, so that what was counted cannot run there;
/// nothing where it has them all.
std::optional<std::string> why_no_bound(const Card& card, const Problem& problem,
                                        const Ledger& ledger);

}  // namespace flashsteps
