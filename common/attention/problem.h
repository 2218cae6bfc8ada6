/// \file
/// The attention problem: what is asked of every stage. Knows no GPU, includes nothing heavy, so
/// that kernel files may include it.
#pragma once

#include <cstdint>

namespace flashsteps {

/// Element type of a tensor in memory.
enum class DType { fp16, bf16, fp32 };

/// Bytes of one element.
constexpr int size_of(DType type) {
  return type == DType::fp32 ? 4 : 2;
}

/// How to find element (b, h, i, c) of a tensor: `b * batch + h * head + i * row + c`, in elements.
/// head_dim is always contiguous.
struct Strides {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t row = 0;

  /// Offset of element (b, h, i, 0); 64-bit throughout.
  constexpr int64_t offset(int b, int h, int i = 0) const { return b * batch + h * head + i * row; }
};

/// One attention problem, with the conventions of docs/notation.md.
///
/// Q and O have shape (batch, heads, seqlen_q, head_dim); K and V (batch, kv_heads, seqlen_k,
/// head_dim); L has shape (batch, heads, seqlen_q), is fp32 and always packed. Trivially copyable:
/// kernels take it by value.
struct Problem {
  int batch = 1;
  int heads = 1;
  int kv_heads = 1;
  int seqlen_q = 0;           ///< Nq, may be 0
  int seqlen_k = 0;           ///< Nk, may be 0
  int head_dim = 0;           ///< d, a multiple of 8 up to 128
  DType dtype = DType::fp16;  ///< of Q, K, V and O
  bool causal = false;        ///< query i sees key j when j <= i + Nk - Nq (bottom-right aligned)
  float scale = 0.f;          ///< S = scale * Q K^T; any finite value
  Strides q{}, k{}, v{}, o{};

  /// The KV head that query head h reads (grouped-query attention).
  constexpr int kv_head(int h) const { return h / (heads / kv_heads); }
  /// The last key that query i sees; -1 where it sees none. Larger i than there are see all keys.
  constexpr int last_key(int i) const {
    const int diagonal = i + seqlen_k - seqlen_q;
    return !causal || diagonal >= seqlen_k ? seqlen_k - 1 : diagonal < -1 ? -1 : diagonal;
  }
  /// Rows of L: batch * heads * seqlen_q.
  constexpr int64_t rows() const { return int64_t{batch} * heads * seqlen_q; }
  /// How many (batch, head) pairs there are.
  constexpr int64_t batch_heads() const { return int64_t{batch} * heads; }
};

/// How to find elements of dO (of O's shape) and of the gradients dQ, dK and dV (of the shapes of
/// Q, K and V); as Problem has it for Q, K, V and O.
struct GradientStrides {
  Strides d_o{}, d_q{}, d_k{}, d_v{};
};

}  // namespace flashsteps
