/// \file
/// Is a stage's output right? The error bound of docs/method.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/attention/problem.h"
#include "common/attention/tensors.h"
#include "common/reference/gradients.h"
#include "common/reference/reference.h"

namespace flashsteps {

/// One element that is out of bounds.
struct Mismatch {
  const char* tensor = "O";  ///< "O", "L", "dQ", "dK" or "dV"
  int batch = 0;
  int head = 0;
  int row = 0;
  int column = 0;  ///< 0 for L
  double got = 0;
  double wanted = 0;
  double bound = 0;  ///< on |got - wanted|

  /// "O[b=0 h=1 i=70 c=3] is nan, should be 0.125 +- 0.001"
  std::string describe() const;
};

/// What comparing a stage's O and L with the oracle found.
struct Comparison {
  bool ok = true;
  /// Largest |O - oracle|, and the bound of the block with the largest error in proportion to its
  /// bound. NaN where one of the two was NaN.
  double max_abs_error = 0;
  double bound = 0;
  /// Largest |L - oracle|, and its bound, likewise.
  double lse_max_abs_error = 0;
  double lse_bound = 0;
  int64_t rows_checked = 0;       ///< over all batches and heads
  int64_t out_of_bounds = 0;      ///< elements of O and L
  std::optional<Mismatch> first;  ///< in order of batch, head, row, column; O before L
  std::optional<Mismatch> worst;  ///< the largest error in proportion to its bound
  int64_t nan_elements = 0;       ///< where rows are sampled: NaN or infinite elements in any row
  int64_t gap_elements_written = 0;  ///< elements between rows of O that no longer hold the poison

  /// One line that says what is wrong; empty where all is right.
  std::string describe() const;
};

/// Compares O and L with the oracle's, block by block of 64 rows of a (batch, head):
///
///     |O - oracle| <= 2 max|ref16 - oracle| + 2 ulp16(max|oracle|)      both maxima over the block
///     |L - oracle| <= 1e-5 max(1, max|scaled score|)
///
/// A bound for the whole tensor would let a dropped key tile pass. In a row that sees no key O must
/// be 0 and L -inf. NaN never passes, wherever it stands, nor does an infinity, but for L = -inf
/// where that is right. Where O has gaps between its rows, they must still hold 0xFFFF.
///
/// \throws std::invalid_argument for outputs of the wrong size
Comparison compare(const Problem& problem, const Oracle& oracle, const Outputs& outputs);

/// What comparing one gradient with its oracle found.
struct TensorComparison {
  const char* tensor = "";
  bool ok = true;
  /// Largest error, and the bound of the block with the largest error in proportion to its bound.
  /// NaN where one of the two was NaN.
  double max_abs_error = 0;
  double bound = 0;
  int64_t rows_checked = 0;       ///< over all batches and heads
  int64_t out_of_bounds = 0;      ///< elements
  std::optional<Mismatch> first;  ///< in order of batch, head, row, column
  std::optional<Mismatch> worst;  ///< the largest error in proportion to its bound
  int64_t nan_elements = 0;       ///< where rows are sampled: NaN or infinite elements in any row
  int64_t gap_elements_written = 0;  ///< elements between rows that no longer hold the poison

  /// One line that says what is wrong; empty where all is right.
  std::string describe() const;
};

/// What comparing the three gradients with their oracles found.
struct GradientComparison {
  TensorComparison dq, dk, dv;

  bool ok() const { return dq.ok && dk.ok && dv.ok; }
  /// One line that says what is wrong, of the first tensor that is; empty where all is right.
  std::string describe() const;
};

/// Compares dQ, dK and dV with their oracles, block by block of 64 rows of a (batch, head):
///
///     |dX - oracle| <= 2 max|ref16 - oracle| + 2 ulp16(max|oracle|) + error of dP - D in fp32
///
/// all three over the block; the last is 0 for dV. A row of dQ whose query sees no key must be 0,
/// and so must dK and dV where there are no queries. NaN never passes, wherever it stands, nor does
/// an infinity. Where a gradient has gaps between its rows, they must still hold 0xFFFF.
///
/// \throws std::invalid_argument for gradients of the wrong size
GradientComparison compare(const Problem& problem, const GradientStrides& strides,
                           const GradientOracles& oracles, const Gradients& gradients);

}  // namespace flashsteps
