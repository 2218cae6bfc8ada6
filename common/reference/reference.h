/// \file
/// Attention in double precision: the oracle that every stage is held to.
///
/// S = scale Q K^T; P = softmax(S) over visible keys; O = P V; L = ln sum exp(S). Written with
/// whole rows of S and no online softmax, so that it shares no idea with the kernels that it
/// checks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/attention/problem.h"
#include "common/attention/tensors.h"

namespace flashsteps {

/// Rows are compared in blocks of up to this many of one (batch, head).
inline constexpr int kBlockRows = 64;

/// The right values of selected rows: the same rows of every (batch, head).
struct Oracle {
  /// What the error bound needs to know of one block of rows of one (batch, head).
  struct Block {
    double o_max = 0;        ///< max |O|
    double ref16_error = 0;  ///< max |ref16 - O|, see make_oracle
    double score_max = 0;    ///< max |scaled score| over visible keys
  };

  std::vector<int> rows;      ///< ascending
  std::vector<double> O;      ///< (batch, heads, rows, head_dim), packed
  std::vector<double> L;      ///< (batch, heads, rows); -inf in a row that sees no key
  std::vector<Block> blocks;  ///< (batch, heads, ceil(rows / kBlockRows))

  int blocks_per_head() const { return (int(rows.size()) + kBlockRows - 1) / kBlockRows; }
};

/// Attention as a lab varies it, so that the answer is in no stage of the repository. With s =
/// scale q k, d = i + Nk - Nq - j the distance of key j from query i's own place, and i's own place
/// the last key that it sees under the causal mask.
struct Variation {
  int window = 0;      ///< query i sees key j only where d < window; 0: all. (Mistral 7B)
  float softcap = 0;   ///< s becomes softcap tanh(s / softcap); 0: stays. (Gemma 2)
  float distance = 0;  ///< s becomes s - distance |d|. (ALiBi with one slope)
  /// One more score of 0 in each row, whose value is 0: l is 1 e^-m larger, L = ln(1 + sum e^s). A
  /// row that sees no key then has O = 0 and L = 0.
  bool sink = false;
};

/// Every row.
std::vector<int> all_rows(const Problem& problem);

/// `count` different rows, ascending, one drawn from each of `count` equal parts of the sequence;
/// all rows where there are not more.
std::vector<int> sampled_rows(const Problem& problem, int count, uint64_t seed);
/// The same of a sequence of `seqlen` rows.
std::vector<int> sampled_rows(int seqlen, int count, uint64_t seed);

/// Every row where the oracle then takes about a second or two on one core, otherwise as many
/// random rows as that allows, in whole blocks, never fewer than 64 a head.
std::vector<int> affordable_rows(const Problem& problem, uint64_t seed);

/// Computes O and L of these rows of every head from the 16-bit inputs, in double. Beside it,
/// `ref16`: the same with the two roundings that the conventions demand of every kernel (P to the
/// 16-bit type before P V, then O), whose distance from the oracle tells what error is legitimate.
/// Runs on all cores.
///
/// \param rows ascending, each in [0, seqlen_q)
///
/// \throws std::invalid_argument for a problem that validate() refuses, or inputs of the wrong size
Oracle make_oracle(const Problem& problem, const Inputs& inputs, std::vector<int> rows,
                   const Variation& variation = {});

}  // namespace flashsteps
