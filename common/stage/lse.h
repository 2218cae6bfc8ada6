/// \file
/// L = log sum exp(S) for the stages whose kernels do not write it themselves: 01 and 02 (from S),
/// 03 to 05 (from the m and l that they store). One small kernel, timed and counted apart from the
/// stage's own.
#pragma once

#include "common/attention/problem.h"
#include "common/gpu/gpu.h"
#include "common/stage/stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {

/// L_i = log sum_j exp(S_ij), natural logarithm; -inf for a row of nothing but -inf.
/// \param S fp32, (batch, heads, seqlen_q, seqlen_k), scaled and masked, with `S_stride` elements a
/// row \param L fp32, (batch, heads, seqlen_q)
void lse_from_scores(const Problem& p, const float* S, int64_t S_stride, float* L, Stream stream);

/// L_i = m_i + log l_i; -inf where l_i is 0.
/// \param m fp32, (batch, heads, seqlen_q): row maxima of the scaled scores; -inf in an empty row
/// \param l fp32, the same shape: row sums of exp(S - m)
void lse_from_stats(const Problem& p, const float* m, const float* l, float* L, Stream stream);

}  // namespace flashsteps::inline FLASHSTEPS_TARGET
