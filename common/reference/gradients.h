/// \file
/// The backward pass in double precision: the oracle that every backward stage is held to.
///
/// Of a loss with the gradient dO: with P = exp(S - L) over visible keys and D = rowsum(dO o O),
///
///     dV = P^T dO     dP = dO V^T     dS = P o (dP - D)     dQ = scale dS K     dK = scale dS^T Q
///
/// where dK and dV of a KV head are summed over its query heads (FlashAttention-2, section 3.1.2,
/// Algorithm 2). Written with whole rows and whole columns of P, apart for dQ and for dK and dV, so
/// that it shares no idea with the kernels that it checks.
#pragma once

#include <cstdint>
#include <vector>

#include "common/attention/problem.h"
#include "common/attention/tensors.h"
#include "common/reference/reference.h"

namespace flashsteps {

/// What the backward pass takes of a forward pass, for every row of every head, packed (batch,
/// heads, seqlen_q).
struct RowStatistics {
  std::vector<double> L;       ///< -inf in a row that sees no key
  std::vector<double> D;       ///< sum over head_dim of dO o O
  std::vector<double> norm_o;  ///< Euclidean norm of the row of O; 0 where none is known
};

/// Of O and L as a stage gave them: so the oracle judges the backward pass alone, on the very
/// values that it was given.
///
/// \throws std::invalid_argument for tensors of the wrong size
RowStatistics row_statistics(const Problem& problem, const GradientStrides& strides,
                             const BackwardInputs& backward);

/// Of exact O and L: `oracle` has all rows. Gives the gradients of attention itself, to double
/// precision.
///
/// \throws std::invalid_argument for tensors of the wrong size
RowStatistics row_statistics(const Problem& problem, const GradientStrides& strides,
                             const std::vector<uint16_t>& d_o, const Oracle& oracle);

/// Rows of the gradients to check: the same of every (batch, head). Ascending.
struct GradientRows {
  std::vector<int> query;  ///< of dQ, in [0, seqlen_q)
  std::vector<int> key;    ///< of dK and dV, in [0, seqlen_k)
};

/// Every row.
GradientRows all_gradient_rows(const Problem& problem);

/// Every row where the oracle then takes about a second or two on one core, otherwise as many
/// random rows of each kind as that allows, in whole blocks, never fewer than 64 a head.
GradientRows affordable_gradient_rows(const Problem& problem, uint64_t seed);

/// The right values of selected rows of one gradient, and what their bound needs to know.
struct GradientOracle {
  /// One block of up to kBlockRows rows of one (batch, head).
  struct Block {
    double max = 0;          ///< max |gradient|
    double ref16_error = 0;  ///< max |ref16 - gradient|, see make_gradient_oracles
    double fp32_error = 0;   ///< of dP - D in fp32, see make_gradient_oracles; 0 for dV
  };

  int heads = 1;               ///< of this tensor: heads for dQ, kv_heads for dK and dV
  std::vector<int> rows;       ///< ascending
  std::vector<double> values;  ///< (batch, heads, rows, head_dim), packed
  std::vector<Block> blocks;   ///< (batch, heads, ceil(rows / kBlockRows))

  int blocks_per_head() const { return (int(rows.size()) + kBlockRows - 1) / kBlockRows; }
};

/// The oracles of the three gradients.
struct GradientOracles {
  GradientOracle dq, dk, dv;
};

/// Largest error of a difference dP - D in fp32, in units of |dO| (|V| + |O|), the norms of the
/// rows whose products dP and D are. Eight steps of a tensor core that cuts off what is below 2^-23
/// of the sum, or as many roundings of fp32.
inline constexpr double kFp32Error = 0x1p-20;

/// Computes these rows of dQ, dK and dV in double. Beside them
///
/// - `ref16`: the same with the roundings that the conventions demand of every kernel (P to the
///   16-bit type before P^T dO, dS before both of its products, then the results), whose distance
///   from the oracle tells what error is legitimate;
/// - the error that dP - D may have because both are summed in fp32, carried through to dQ and dK:
///   where P is all on one key the two are equal, and their difference is nothing but that error.
///
/// Runs on all cores.
///
/// \param rows ascending, within the sequences
///
/// \param variation of attention as a lab varies it; `statistics` are of its O and L
///
/// \throws std::invalid_argument for a problem or strides that validate() refuses, or tensors of the
/// wrong size
GradientOracles make_gradient_oracles(const Problem& problem, const GradientStrides& strides,
                                      const Inputs& inputs, const std::vector<uint16_t>& d_o,
                                      const RowStatistics& statistics, GradientRows rows,
                                      const Variation& variation = {});

/// O and L as a forward stage that makes no error but the last rounding would give them: for a
/// backward stage where there is no forward stage to ask.
Outputs reference_outputs(const Problem& problem, const Inputs& inputs,
                          const Variation& variation = {});

}  // namespace flashsteps
