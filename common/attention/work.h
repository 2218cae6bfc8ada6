/// \file
/// What follows from a problem by arithmetic alone: the default scale, and how much work there is.
#pragma once

#include <cstdint>

#include "common/attention/problem.h"

namespace flashsteps {

/// 1 / sqrt(head_dim), with the true head_dim, never that of a zero-filled tile.
float default_scale(int head_dim);

/// How many keys query i sees: all of them, or under the causal mask clamp(i + 1 + Nk - Nq, 0, Nk).
constexpr int64_t visible_keys(const Problem& p, int64_t i) {
  if (!p.causal) return p.seqlen_k;
  const int64_t keys = i + 1 + p.seqlen_k - p.seqlen_q;
  return keys < 0 ? 0 : keys > p.seqlen_k ? p.seqlen_k : keys;
}

/// Visible (query, key) pairs of one (batch, head).
int64_t visible_pairs(const Problem& problem);

/// FLOPs of the forward pass, 4 * batch * heads * head_dim * visible_pairs: two products, a
/// multiplication and an addition for each pair and column. The count that every TFLOP/s of this
/// project is based on.
int64_t forward_flops(const Problem& problem);

/// FLOPs of the backward pass: 2.5 times the forward's. Five products in place of two: S = Q K^T
/// again, dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q.
int64_t backward_flops(const Problem& problem);

/// How many (row block, key tile) pairs a kernel works on, over all batches and heads.
struct TileCounts {
  int64_t visited = 0;
  int64_t masked = 0;  ///< of these, the ones that need masking code
};

/// Counts for a kernel with row blocks of Br queries and tiles of Bc keys that visits only tiles
/// with a visible pair, and masks only tiles with an invisible one (a tile that reaches beyond Nk
/// has such pairs).
///
/// Row block i visits v_i = clamp(ceil((min((i+1) Br, Nq) + Nk - Nq) / Bc), 0, Tc) tiles under the
/// causal mask and masks all of them but the first clamp(floor((i Br + Nk - Nq + 1) / Bc), 0, v_i).
/// Without it every block visits Tc tiles and masks the last one where Nk is no multiple of Bc.
TileCounts skipping_tile_counts(const Problem& problem, int Br, int Bc);

}  // namespace flashsteps
