/// \file
/// Where the elements of a tensor lie in memory.
#pragma once

#include <cstdint>

#include "common/attention/problem.h"

namespace flashsteps {

/// Order of the axes of a packed tensor, slowest first.
enum class Layout {
  bhsd,  ///< (batch, heads, seqlen, head_dim): PyTorch's attention
  bshd,  ///< (batch, seqlen, heads, head_dim): flash-attn's
};

const char* name_of(Layout layout);  ///< "bhsd"
const char* name_of(DType type);     ///< "fp16"

/// Strides, in elements, of a packed tensor with `heads` heads, `seqlen` rows a head, `head_dim`
/// columns a row. In the layout bshd, element (b, h, i, c) is at `((b * seqlen + i) * heads + h) *
/// head_dim + c`.
Strides packed_strides(Layout layout, int heads, int seqlen, int head_dim);

/// Sets the strides of Q, K, V and O to packed ones.
void set_packed_strides(Problem& problem, Layout layout = Layout::bhsd);

/// The shape of one of the four tensors together with its strides.
struct TensorLayout {
  int batch = 0;
  int heads = 0;
  int seqlen = 0;
  int head_dim = 0;
  Strides strides;

  /// Offset of the first element of a row, in elements.
  int64_t offset(int b, int h, int64_t i) const {
    return b * strides.batch + h * strides.head + i * strides.row;
  }
  /// Elements, without the gaps between rows.
  int64_t elements() const { return int64_t{batch} * heads * seqlen * head_dim; }
  /// Elements from the first to the last inclusive, gaps included; 0 for an empty tensor. What to
  /// allocate.
  int64_t extent() const;
};

TensorLayout layout_q(const Problem& problem);  ///< of the problem's Q
TensorLayout layout_k(const Problem& problem);  ///< of its K
TensorLayout layout_v(const Problem& problem);  ///< of its V
TensorLayout layout_o(const Problem& problem);  ///< of its O

/// The strides of O for dO, of Q for dQ, of K for dK and of V for dV.
GradientStrides strides_of_tensors(const Problem& problem);

/// Of dO, dQ, dK and dV.
TensorLayout layout_do(const Problem& problem, const GradientStrides& strides);
TensorLayout layout_dq(const Problem& problem, const GradientStrides& strides);  ///< see layout_do
TensorLayout layout_dk(const Problem& problem, const GradientStrides& strides);  ///< see layout_do
TensorLayout layout_dv(const Problem& problem, const GradientStrides& strides);  ///< see layout_do

}  // namespace flashsteps
