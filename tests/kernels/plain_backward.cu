// A backward pass that is as plain as the formulas: the tests of the backward pass are tested with
// it. One thread for each query or key, nothing in shared memory. No stage of the ladder.
//
//   preprocess    D = rowsum(dO o O), and dQ_acc cleared          one thread for each query
//   main          dK, dV, and dQ_acc by atomics                   one thread for each key
//   queries       deterministic: dQ_acc in the order of the keys  one thread for each query
//   postprocess   dQ = scale * dQ_acc                             one thread for each query

#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::plain_backward {

constexpr int kThreads = 64;

// dO o O summed over a row, or Q K^T before the scale.
template <typename T>
__device__ float dot(const T* a, const T* b, int n) {
  float sum = 0.f;
  for (int c = 0; c < n; ++c) sum += to_float(a[c]) * to_float(b[c]);
  return sum;
}

template <typename T>
__device__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

template <typename T>
__global__ void preprocess_kernel(const T* O, const T* dO, float* D, float* dQ_acc, Problem p,
                                  GradientStrides strides) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.rows()) return;
  const int bh = int(row / p.seqlen_q), i = int(row % p.seqlen_q);
  const int b = bh / p.heads, h = bh % p.heads;
  D[row] = dot(O + p.o.offset(b, h, i), dO + strides.d_o.offset(b, h, i), p.head_dim);
  for (int c = 0; c < p.head_dim; ++c) dQ_acc[row * p.head_dim + c] = 0.f;
}

// P and dS of query i and key j; false where the query does not see the key.
template <typename T>
__device__ bool scores_of(const Problem& p, const T* Q, const T* K, const T* V, const T* dO,
                          const float* L, const float* D, int64_t row, int i, int j, float& P,
                          float& dS) {
  if (mask_if(p.causal && j > i + p.seqlen_k - p.seqlen_q)) return false;
  P = fast_exp(p.scale * dot(Q, K, p.head_dim) - L[row]);
  dS = P * (dot(dO, V, p.head_dim) - D[row]);
  return true;
}

template <typename T>
__global__ void main_kernel(const T* Q, const T* K, const T* V, const T* dO, const float* L,
                            const float* D, float* dQ_acc, T* dK, T* dV, Problem p,
                            GradientStrides strides, bool with_dq) {
  const int64_t key = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (key >= int64_t{p.batch} * p.kv_heads * p.seqlen_k) return;
  const int j = int(key % p.seqlen_k), bg = int(key / p.seqlen_k);
  const int b = bg / p.kv_heads, g = bg % p.kv_heads;
  const int group = p.heads / p.kv_heads;
  K += p.k.offset(b, g, j);
  V += p.v.offset(b, g, j);
  float dK_rmem[128] = {}, dV_rmem[128] = {};
  for (int h = g * group; h < (g + 1) * group; ++h) {
    for (int i = 0; i < p.seqlen_q; ++i) {
      const int64_t row = (int64_t{b} * p.heads + h) * p.seqlen_q + i;
      const T* Q_row = Q + p.q.offset(b, h, i);
      const T* dO_row = dO + strides.d_o.offset(b, h, i);
      float P, dS;
      if (!scores_of(p, Q_row, K, V, dO_row, L, D, row, i, j, P, dS)) continue;
      P = rounded<T>(P);
      dS = rounded<T>(dS);
      for (int c = 0; c < p.head_dim; ++c) {
        dV_rmem[c] += P * to_float(dO_row[c]);
        dK_rmem[c] += dS * to_float(Q_row[c]);
        if (with_dq) atomicAdd(dQ_acc + row * p.head_dim + c, dS * to_float(K[c]));
      }
    }
  }
  dK += strides.d_k.offset(b, g, j);
  dV += strides.d_v.offset(b, g, j);
  for (int c = 0; c < p.head_dim; ++c) {
    dK[c] = from_float<T>(p.scale * dK_rmem[c]);
    dV[c] = from_float<T>(dV_rmem[c]);
  }
}

template <typename T>
__global__ void queries_kernel(const T* Q, const T* K, const T* V, const T* dO, const float* L,
                               const float* D, float* dQ_acc, Problem p, GradientStrides strides) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.rows()) return;
  const int bh = int(row / p.seqlen_q), i = int(row % p.seqlen_q);
  const int b = bh / p.heads, h = bh % p.heads;
  for (int j = 0; j < p.seqlen_k; ++j) {
    const T* K_row = K + p.k.offset(b, p.kv_head(h), j);
    float P, dS;
    if (!scores_of(p, Q + p.q.offset(b, h, i), K_row, V + p.v.offset(b, p.kv_head(h), j),
                   dO + strides.d_o.offset(b, h, i), L, D, row, i, j, P, dS)) {
      continue;
    }
    for (int c = 0; c < p.head_dim; ++c)
      dQ_acc[row * p.head_dim + c] += rounded<T>(dS) * to_float(K_row[c]);
  }
}

template <typename T>
__global__ void postprocess_kernel(const float* dQ_acc, T* dQ, Problem p, GradientStrides strides) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.rows()) return;
  const int bh = int(row / p.seqlen_q), i = int(row % p.seqlen_q);
  dQ += strides.d_q.offset(bh / p.heads, bh % p.heads, i);
  for (int c = 0; c < p.head_dim; ++c)
    dQ[c] = from_float<T>(p.scale * dQ_acc[row * p.head_dim + c]);
}

Tiles tiles(const Problem&) {
  return {};
}

WorkspaceList workspaces(const Problem& p) {
  return {2,
          {{"D", DType::fp32, p.rows()}, {"dQ_acc", DType::fp32, p.rows() * int64_t{p.head_dim}}}};
}

template <typename T, int D>
void backward(const Problem& p, const GradientStrides& strides, const BackwardArgs& a,
              Stream stream) {
  const T *Q = static_cast<const T*>(a.Q), *K = static_cast<const T*>(a.K),
          *V = static_cast<const T*>(a.V), *dO = static_cast<const T*>(a.dO);
  float *row_sums = static_cast<float*>(a.workspace[0]),
        *dQ_acc = static_cast<float*>(a.workspace[1]);
  const int64_t blocks_q = (p.rows() + kThreads - 1) / kThreads;
  const int64_t keys = int64_t{p.batch} * p.kv_heads * p.seqlen_k;
  launch(preprocess_kernel<T>, {blocks_q, kThreads, 0, stream}, static_cast<const T*>(a.O), dO,
         row_sums, dQ_acc, p, strides);
  launch(main_kernel<T>, {(keys + kThreads - 1) / kThreads, kThreads, 0, stream}, Q, K, V, dO, a.L,
         row_sums, dQ_acc, static_cast<T*>(a.dK), static_cast<T*>(a.dV), p, strides,
         !a.deterministic);
  if (a.deterministic) {
    launch(queries_kernel<T>, {blocks_q, kThreads, 0, stream}, Q, K, V, dO, a.L, row_sums, dQ_acc,
           p, strides);
  }
  launch(postprocess_kernel<T>, {blocks_q, kThreads, 0, stream}, dQ_acc, static_cast<T*>(a.dQ), p,
         strides);
}

FLASHSTEPS_BACKWARD_STAGE("90", "plain_backward", "the formulas of the backward pass, for tests")

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::plain_backward
