#include "common/attention/layout.h"

namespace flashsteps {

const char* name_of(Layout layout) {
  return layout == Layout::bhsd ? "bhsd" : "bshd";
}

const char* name_of(DType type) {
  switch (type) {
    case DType::fp16:
      return "fp16";
    case DType::bf16:
      return "bf16";
    case DType::fp32:
      return "fp32";
  }
  return "?";
}

Strides packed_strides(Layout layout, int heads, int seqlen, int head_dim) {
  const int64_t row = head_dim;
  const int64_t head = row * seqlen;      // of one head's rows, in bhsd
  const int64_t all_heads = row * heads;  // of one position, in bshd
  if (layout == Layout::bhsd) return {.batch = head * heads, .head = head, .row = row};
  return {.batch = head * heads, .head = row, .row = all_heads};
}

void set_packed_strides(Problem& p, Layout layout) {
  p.q = p.o = packed_strides(layout, p.heads, p.seqlen_q, p.head_dim);
  p.k = p.v = packed_strides(layout, p.kv_heads, p.seqlen_k, p.head_dim);
}

int64_t TensorLayout::extent() const {
  if (elements() == 0) return 0;
  return offset(batch - 1, heads - 1, seqlen - 1) + head_dim;
}

TensorLayout layout_q(const Problem& p) {
  return {p.batch, p.heads, p.seqlen_q, p.head_dim, p.q};
}
TensorLayout layout_k(const Problem& p) {
  return {p.batch, p.kv_heads, p.seqlen_k, p.head_dim, p.k};
}
TensorLayout layout_v(const Problem& p) {
  return {p.batch, p.kv_heads, p.seqlen_k, p.head_dim, p.v};
}
TensorLayout layout_o(const Problem& p) {
  return {p.batch, p.heads, p.seqlen_q, p.head_dim, p.o};
}

GradientStrides strides_of_tensors(const Problem& p) {
  return {.d_o = p.o, .d_q = p.q, .d_k = p.k, .d_v = p.v};
}

TensorLayout layout_do(const Problem& p, const GradientStrides& strides) {
  return {p.batch, p.heads, p.seqlen_q, p.head_dim, strides.d_o};
}
TensorLayout layout_dq(const Problem& p, const GradientStrides& strides) {
  return {p.batch, p.heads, p.seqlen_q, p.head_dim, strides.d_q};
}
TensorLayout layout_dk(const Problem& p, const GradientStrides& strides) {
  return {p.batch, p.kv_heads, p.seqlen_k, p.head_dim, strides.d_k};
}
TensorLayout layout_dv(const Problem& p, const GradientStrides& strides) {
  return {p.batch, p.kv_heads, p.seqlen_k, p.head_dim, strides.d_v};
}

}  // namespace flashsteps
