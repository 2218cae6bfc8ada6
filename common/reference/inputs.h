/// \file
/// Input makers. The same seed gives the same bits on every platform.
#pragma once

#include <cstdint>

#include "common/attention/problem.h"
#include "common/attention/tensors.h"

namespace flashsteps {

/// What inputs look like. All but q of `uniform` are free of zeros, and differ for each batch and
/// head.
enum class InputKind {
  normal,      ///< Q, K, V near N(0, 1)
  moving_max,  ///< normal, and scores rise along the keys, or fall in every second KV head, so that
               ///< the running row maximum moves (rising) or is found at once (falling); rows
               ///< differ in how steeply
  large_logits,  ///< scores some hundreds wide: softmax close to one-hot, exp of large differences
  outlier_channels,  ///< as in language models: one channel in 32 of Q and K is 4 and 16 times
                     ///< larger, of V 16 times
  uniform,  ///< Q = 0: O is the mean of the visible rows of V, and L = ln(number of visible keys)
};

/// Every kind.
inline constexpr InputKind kInputKinds[] = {InputKind::normal, InputKind::moving_max,
                                            InputKind::large_logits, InputKind::outlier_channels,
                                            InputKind::uniform};

const char* name_of(InputKind kind);  ///< "moving_max"

/// Makes Q, K and V, rounded to the problem's type and placed with its strides. Gaps between rows
/// hold NaN, so that a kernel that reads them shows it.
///
/// \throws std::invalid_argument for a problem that validate() refuses
Inputs make_inputs(const Problem& problem, InputKind kind, uint64_t seed);

/// Makes dO, near N(0, 1), likewise; different bits from those of Q, K and V of the same seed.
///
/// \throws std::invalid_argument for strides that validate() refuses
std::vector<uint16_t> make_d_o(const Problem& problem, const GradientStrides& strides,
                               uint64_t seed);

}  // namespace flashsteps
