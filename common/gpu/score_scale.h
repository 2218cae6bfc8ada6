/// \file
/// The factor between Q K^T and the exponent of a power of two, for any finite scale.
#pragma once

#include "common/gpu/gpu.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {

/// Exponentials are powers of two of `log2 * S`, where log2 > 0, so that the largest S is also the
/// largest exponent, and -inf stays -inf. What scale lacks in that (a sign, or being 0) goes into S
/// itself.
struct ScoreScale {
  float log2;  ///< |scale| log2(e); 1 for scale 0
  float sign;  ///< 1, -1 or 0
};

/// The factor for S = scale * Q K^T.
inline ScoreScale score_scale(float scale) {
  constexpr float kLog2e = 1.4426950408889634f;
  if (scale == 0.f) return {1.f, 0.f};
  return {fabsf(scale) * kLog2e, scale > 0.f ? 1.f : -1.f};
}

/// S *= sign; nothing to do for all usual scales.
template <int kN>
__device__ __forceinline__ void apply_sign(float (&S_rmem)[kN][4], ScoreScale scale) {
  if (scale.sign == 1.f) return;
#pragma unroll
  for (int k = 0; k < kN; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) S_rmem[k][e] *= scale.sign;
  }
}
/// Likewise, of several row blocks.
template <int kM, int kN>
__device__ __forceinline__ void apply_sign(float (&S_rmem)[kM][kN][4], ScoreScale scale) {
#pragma unroll
  for (int r = 0; r < kM; ++r) apply_sign(S_rmem[r], scale);
}

}  // namespace flashsteps::inline FLASHSTEPS_TARGET
