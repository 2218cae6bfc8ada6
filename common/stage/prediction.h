/// \file
/// What the lessons predict that a stage's ledger shows. The tests hold every stage to it, and the
/// grader of a lab what is handed in.
#pragma once

#include <optional>
#include <string_view>

#include "common/attention/problem.h"
#include "common/stage/ledger.h"
#include "common/stage/stage.h"

namespace flashsteps {

/// Whether there are formulas for a stage ("06", "02b").
bool has_prediction(std::string_view stage);

/// The ledger of the stage's own kernels on a problem, by the formulas of its lesson, in the tiles
/// of the stage's own choice on a card with 227 KiB of shared memory for a block and with 3
/// multiprocessors, as the model has them. They are for
/// problems without a causal mask whose lengths are equal and whole tiles; nothing for others, and
/// for a stage without formulas. The counts `global_unique_read`, `ldmatrix`, `mma`, `cp_async` are
/// predicted by no lesson, and are 0 here.
std::optional<Ledger> predicted_ledger(std::string_view stage, const Problem& problem);

}  // namespace flashsteps
