// 01 naive: standard attention, as the papers' Algorithm 0 has it. Three kernels, and between them
// S and P lie in global memory:
//
//   scores    S = scale * Q K^T      one thread for each element of S
//   softmax   P = softmax(S)         one warp for each row, three passes over it
//   output    O = P V                one thread for each element of O

#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_01_naive {

constexpr int kThreads = 256;
constexpr int kTile = 16;  // a block of the scores kernel covers kTile x kTile elements of S
constexpr int kWarps = kThreads / 32;

// S (batch, heads, seqlen_q, seqlen_k), fp32: scaled, and -inf where query i does not see key j.
template <typename T>
__global__ void scores_kernel(const T* __restrict__ Q, const T* __restrict__ K,
                              float* __restrict__ S, Problem p) {
  const int tiles_q = ceil_div(p.seqlen_q, kTile), tiles_k = ceil_div(p.seqlen_k, kTile);
  const int tile_k = blockIdx.x % tiles_k;
  const int tile_q = blockIdx.x / tiles_k % tiles_q;
  const int bh = blockIdx.x / tiles_k / tiles_q;
  const int i = tile_q * kTile + threadIdx.x / kTile;  // query
  const int j = tile_k * kTile + threadIdx.x % kTile;  // key
  if (i >= p.seqlen_q || j >= p.seqlen_k) return;

  const int b = bh / p.heads, h = bh % p.heads;
  Q += p.q.offset(b, h, i);
  K += p.k.offset(b, p.kv_head(h), j);
  float s = 0.f;
  for (int c = 0; c < p.head_dim; ++c) s += to_float(Q[c]) * to_float(K[c]);
  s *= p.scale;
  if (mask_if(p.causal && j > i + p.seqlen_k - p.seqlen_q)) s = -INFINITY;
  S[(int64_t{bh} * p.seqlen_q + i) * padded_row(p.seqlen_k) + j] = s;
}

// P = softmax(S) by rows, rounded to T; zeros in a row that sees no key, and in the padding.
template <typename T>
__global__ void softmax_kernel(const float* __restrict__ S, T* __restrict__ P, Problem p) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows()) return;
  S += row * padded_row(p.seqlen_k);
  P += row * padded_row(p.seqlen_k);

  float m = -INFINITY;  // pass 1: the row's maximum
  for (int j = lane; j < p.seqlen_k; j += 32) m = fmaxf(m, S[j]);
  for (int offset = 16; offset > 0; offset /= 2) {
    m = fmaxf(m, __shfl_xor_sync(kFullMask, m, offset));
  }
  if (m == -INFINITY) m = 0.f;  // no key is seen: exp(-inf - 0) = 0 where -inf - -inf would be NaN

  float l = 0.f;  // pass 2: the sum of the exponentials
  for (int j = lane; j < p.seqlen_k; j += 32) l += fast_exp(S[j] - m);
  for (int offset = 16; offset > 0; offset /= 2) l += __shfl_xor_sync(kFullMask, l, offset);

  // pass 3: normalise
  for (int j = lane; j < p.seqlen_k; j += 32) {
    P[j] = from_float<T>(l == 0.f ? 0.f : divide(fast_exp(S[j] - m), l));
  }
  for (int64_t j = p.seqlen_k + lane; j < padded_row(p.seqlen_k); j += 32) {
    P[j] = from_float<T>(0.f);
  }
}

// O (batch, heads, seqlen_q, head_dim)
template <typename T>
__global__ void output_kernel(const T* __restrict__ P, const T* __restrict__ V, T* __restrict__ O,
                              Problem p) {
  const int64_t element = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = element / p.head_dim;
  const int c = element % p.head_dim;
  if (row >= p.rows()) return;

  const int bh = row / p.seqlen_q, i = row % p.seqlen_q;
  const int b = bh / p.heads, h = bh % p.heads;
  P += row * padded_row(p.seqlen_k);
  V += p.v.offset(b, p.kv_head(h)) + c;
  float o = 0.f;
  for (int j = 0; j < p.seqlen_k; ++j) o += to_float(P[j]) * to_float(V[j * p.v.row]);
  O[p.o.offset(b, h, i) + c] = from_float<T>(o);
}

Tiles tiles(const Problem&) {
  return {};
}

WorkspaceList workspaces(const Problem& p) {
  const int64_t elements = p.rows() * padded_row(p.seqlen_k);
  return {2, {{"S", DType::fp32, elements}, {"P", p.dtype, elements}}};
}

template <typename T, int D>
void forward(const Problem& p, const ForwardArgs& a, Stream stream) {
  const T* Q = static_cast<const T*>(a.Q);
  const T* K = static_cast<const T*>(a.K);
  const T* V = static_cast<const T*>(a.V);
  T* O = static_cast<T*>(a.O);
  float* S = static_cast<float*>(a.workspace[0]);
  T* P = static_cast<T*>(a.workspace[1]);
  const int64_t score_tiles =
      p.batch_heads() * ceil_div(p.seqlen_q, kTile) * ceil_div(p.seqlen_k, kTile);

  launch(scores_kernel<T>, {score_tiles, kThreads, 0, stream}, Q, K, S, p);
  launch(softmax_kernel<T>, {(p.rows() + kWarps - 1) / kWarps, kThreads, 0, stream}, S, P, p);
  launch(output_kernel<T>, {(p.rows() * p.head_dim + kThreads - 1) / kThreads, kThreads, 0, stream},
         P, V, O, p);
}

void lse(const Problem& p, const ForwardArgs& a, Stream stream) {
  lse_from_scores(p, static_cast<const float*>(a.workspace[0]), padded_row(p.seqlen_k), a.L,
                  stream);
}

FLASHSTEPS_STAGE("01", "naive", "standard attention: three kernels, S and P in global memory", lse)

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_01_naive
