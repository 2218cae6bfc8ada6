/// \file
/// Which problems are legal.
#pragma once

#include "common/attention/problem.h"

namespace flashsteps {

/// Longest sequence: query and key indices, rounded up to whole tiles, and their sum stay below
/// 2^31.
inline constexpr int kMaxSeqlen = 1'000'000'000;
/// Most (query, key) pairs, masked ones included, of all heads together: FLOPs and bytes then fit
/// in 63 bits.
inline constexpr int64_t kMaxPairs = int64_t{1} << 52;
/// Most elements that one tensor may span.
inline constexpr int64_t kMaxExtent = int64_t{1} << 60;

/// Returns when every stage may be asked for this problem.
///
/// Allowed: batch, heads and kv_heads from 1, with heads a multiple of kv_heads; sequence lengths
/// from 0 to kMaxSeqlen; head_dim a multiple of 8 from 8 to 128; fp16 or bf16; a finite scale (0
/// and negative too). Strides are multiples of 8 (a row is read 16 bytes at a time); along a
/// dimension with more than one entry they are at least head_dim, so that no row begins inside
/// another; and no two rows of O overlap.
///
/// \throws std::invalid_argument with one line: what is wrong, what was given, what is allowed
void validate(const Problem& problem);

/// Returns when every backward stage may be asked for this problem with these strides: validate()
/// for the problem, and the same rules for the strides of dO, dQ, dK and dV, of which no two rows
/// of the gradients may overlap.
///
/// \throws std::invalid_argument as validate(const Problem&)
void validate(const Problem& problem, const GradientStrides& strides);

}  // namespace flashsteps
