// The small common kernel that gives L for the stages that do not write it themselves.
#include "common/stage/lse.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// One warp for each row of S: two passes, the maximum and then the sum of exponentials.
__global__ void lse_from_scores_kernel(const float* __restrict__ S, float* __restrict__ L,
                                       int64_t rows, int columns, int64_t S_stride) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  S += row * S_stride;

  float m = -INFINITY;
  for (int j = lane; j < columns; j += 32) m = fmaxf(m, S[j]);
  for (int offset = 16; offset > 0; offset /= 2)
    m = fmaxf(m, __shfl_xor_sync(kFullMask, m, offset));
  if (m == -INFINITY) {  // no key is seen
    if (lane == 0) L[row] = -INFINITY;
    return;
  }

  float l = 0.f;
  for (int j = lane; j < columns; j += 32) l += fast_exp(S[j] - m);
  for (int offset = 16; offset > 0; offset /= 2) l += __shfl_xor_sync(kFullMask, l, offset);
  if (lane == 0) L[row] = m + natural_log(l);
}

// One thread for each row.
__global__ void lse_from_stats_kernel(const float* __restrict__ m, const float* __restrict__ l,
                                      float* __restrict__ L, int64_t rows) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < rows) L[row] = l[row] == 0.f ? -INFINITY : m[row] + natural_log(l[row]);
}

}  // namespace

void lse_from_scores(const Problem& p, const float* S, int64_t S_stride, float* L, Stream stream) {
  launch(lse_from_scores_kernel, {(p.rows() + kWarps - 1) / kWarps, kThreads, 0, stream}, S, L,
         p.rows(), p.seqlen_k, S_stride);
}

void lse_from_stats(const Problem& p, const float* m, const float* l, float* L, Stream stream) {
  launch(lse_from_stats_kernel, {(p.rows() + kThreads - 1) / kThreads, kThreads, 0, stream}, m, l,
         L, p.rows());
}

}  // namespace flashsteps::inline FLASHSTEPS_TARGET
