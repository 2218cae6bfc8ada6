#include "common/attention/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "common/attention/layout.h"

namespace flashsteps {
namespace {

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw std::invalid_argument(fmt::format(format, std::forward<Args>(args)...));
}

void require_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    refuse("{} is {}; allowed: {} to {}", name, value, least, most);
  }
}

// One axis of a tensor: how many entries, and the stride between them.
struct Axis {
  const char* name;
  int64_t size;
  int64_t stride;
};

void validate_tensor(const char* name, const TensorLayout& t, bool written) {
  std::array<Axis, 3> axes = {{{"batch", t.batch, t.strides.batch},
                               {"head", t.heads, t.strides.head},
                               {"row", t.seqlen, t.strides.row}}};
  const bool empty = t.seqlen == 0;
  double last = 0;  // offset of the last row; in double, so that it cannot overflow
  for (const Axis& axis : axes) {
    if (axis.stride % 8 != 0) {
      refuse("the {} stride of {} is {}; allowed: multiples of 8 elements", axis.name, name,
             axis.stride);
    }
    if (!empty && axis.size > 1 && axis.stride < t.head_dim) {
      refuse("the {} stride of {} is {}; allowed: at least head_dim = {}", axis.name, name,
             axis.stride, t.head_dim);
    }
    if (!empty && axis.size > 1) last += double(axis.size - 1) * double(axis.stride);
  }
  if (last >= double(kMaxExtent)) {
    refuse("{} spans {:.3g} elements; allowed: up to {}", name, last, kMaxExtent);
  }
  if (empty || !written) return;
  // Rows that are written may not overlap: with the axes by stride, each steps over all that the
  // ones before span.
  std::sort(axes.begin(), axes.end(),
            [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  int64_t span = t.head_dim;
  for (const Axis& axis : axes) {
    if (axis.size == 1) continue;
    if (axis.stride < span) {
      refuse("the {} stride of {} is {}; allowed: at least {}, so that no two rows of {} overlap",
             axis.name, name, axis.stride, span, name);
    }
    span += (axis.size - 1) * axis.stride;
  }
}

}  // namespace

void validate(const Problem& p) {
  constexpr int kMaxInt = 2147483647;
  require_range("batch", p.batch, 1, kMaxInt);
  require_range("heads", p.heads, 1, kMaxInt);
  require_range("kv_heads", p.kv_heads, 1, kMaxInt);
  require_range("seqlen_q", p.seqlen_q, 0, kMaxSeqlen);
  require_range("seqlen_k", p.seqlen_k, 0, kMaxSeqlen);
  if (p.heads % p.kv_heads != 0) {
    refuse(
        "heads = {} is not a multiple of kv_heads = {}; every KV head serves the same number of "
        "query heads",
        p.heads, p.kv_heads);
  }
  if (p.head_dim < 8 || p.head_dim > 128 || p.head_dim % 8 != 0) {
    refuse("head_dim is {}; allowed: multiples of 8 from 8 to 128", p.head_dim);
  }
  if (p.dtype != DType::fp16 && p.dtype != DType::bf16) {
    refuse("dtype is {}; allowed: fp16, bf16", name_of(p.dtype));
  }
  if (!std::isfinite(p.scale)) refuse("scale is {}; allowed: any finite number", p.scale);

  const double pairs =
      double(p.batch) * p.heads * std::max(p.seqlen_q, 1) * std::max(p.seqlen_k, 1);
  if (pairs > double(kMaxPairs)) {
    refuse("batch * heads * seqlen_q * seqlen_k is {:.3g}; allowed: up to {}", pairs, kMaxPairs);
  }
  validate_tensor("Q", layout_q(p), false);
  validate_tensor("K", layout_k(p), false);
  validate_tensor("V", layout_v(p), false);
  validate_tensor("O", layout_o(p), true);
}

void validate(const Problem& p, const GradientStrides& strides) {
  validate(p);
  validate_tensor("dO", layout_do(p, strides), false);
  validate_tensor("dQ", layout_dq(p, strides), true);
  validate_tensor("dK", layout_dk(p, strides), true);
  validate_tensor("dV", layout_dv(p, strides), true);
}

}  // namespace flashsteps
