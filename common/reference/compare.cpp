#include "common/reference/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "common/attention/layout.h"
#include "common/attention/work.h"
#include "common/reference/float16.h"

namespace flashsteps {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// |got - wanted|; 0 for two -inf, and NaN where either is NaN or +inf.
double error_of(double got, double wanted) {
  if (got == wanted && got != kInfinity) return 0;
  return std::fabs(got - wanted);
}

// How an error compares with its bound: up to 1 where it is allowed, infinite where it or the bound
// is NaN.
double severity_of(double error, double bound) {
  const double ratio = error == 0 && bound == 0 ? 0 : error / bound;
  return std::isnan(ratio) ? kInfinity : ratio;
}

// The largest error of one tensor (NaN is the largest), and the element with the severest.
struct Extremes {
  double max_error = 0;
  double severity = -1;
  Mismatch worst;

  void add(const Mismatch& element, double error) {
    if (!std::isnan(max_error) && !(error <= max_error)) max_error = error;
    const double its_severity = severity_of(error, element.bound);
    if (its_severity <= severity) return;
    severity = its_severity;
    worst = element;
  }
};

// Calls `visit(row)` with the first element of every row.
template <typename Visit>
void for_each_row(const TensorLayout& t, Visit&& visit) {
  for (int b = 0; b < t.batch; ++b) {
    for (int h = 0; h < t.heads; ++h) {
      for (int i = 0; i < t.seqlen; ++i) visit(t.offset(b, h, i));
    }
  }
}

int64_t count_gaps_written(const TensorLayout& t, const std::vector<uint16_t>& bits) {
  if (t.extent() == t.elements()) return 0;
  std::vector<bool> gap(bits.size(), true);
  for_each_row(t, [&](int64_t row) { std::fill_n(gap.begin() + row, t.head_dim, false); });
  int64_t written = 0;
  for (size_t i = 0; i < bits.size(); ++i) written += gap[i] && bits[i] != 0xffff;
  return written;
}

// NaN and infinities in all rows.
int64_t count_nan(const TensorLayout& t, DType type, const std::vector<uint16_t>& bits) {
  int64_t bad = 0;
  for_each_row(t, [&](int64_t row) {
    for (int c = 0; c < t.head_dim; ++c) bad += !std::isfinite(from_bits(bits[row + c], type));
  });
  return bad;
}

std::string describe_failure(int64_t out_of_bounds, const std::optional<Mismatch>& first,
                             const std::optional<Mismatch>& worst, int64_t nan_elements,
                             int64_t gap_elements_written, const char* tensor) {
  if (out_of_bounds > 0) {
    std::string text = fmt::format("{} of the checked elements out of bounds; first: {}",
                                   out_of_bounds, first->describe());
    if (out_of_bounds > 1) text += fmt::format("; worst: {}", worst->describe());
    return text;
  }
  if (nan_elements > 0) return fmt::format("{} elements are NaN or infinite", nan_elements);
  return fmt::format("{} elements between the rows of {} were written", gap_elements_written,
                     tensor);
}

TensorComparison compare_gradient(const Problem& p, const char* name, const TensorLayout& t,
                                  const GradientOracle& oracle, const std::vector<uint16_t>& bits) {
  if (bits.size() != size_t(t.extent())) {
    throw std::invalid_argument(
        fmt::format("{} holds {} elements; the problem has {}", name, bits.size(), t.extent()));
  }
  const int64_t rows_per_head = int64_t(oracle.rows.size());
  const int64_t all_heads = int64_t{t.batch} * t.heads;
  if (oracle.heads != t.heads ||
      oracle.values.size() != size_t(all_heads * rows_per_head * t.head_dim)) {
    throw std::invalid_argument("the oracle belongs to another problem");
  }
  const bool of_queries = name[1] == 'Q';
  TensorComparison result;
  result.tensor = name;
  Extremes extremes;
  for (int64_t bh = 0; bh < all_heads; ++bh) {
    const int b = int(bh / t.heads), h = int(bh % t.heads);
    for (int64_t r = 0; r < rows_per_head; ++r) {
      const GradientOracle::Block& block =
          oracle.blocks[bh * oracle.blocks_per_head() + r / kBlockRows];
      const int i = oracle.rows[r];
      const bool zero = of_queries ? visible_keys(p, i) == 0 : p.seqlen_q == 0;
      double bound =
          zero ? 0 : 2 * block.ref16_error + 2 * ulp(block.max, p.dtype) + block.fp32_error;
      // Where even ref16 leaves the range of the type, nothing can be said, and nothing passes.
      if (!std::isfinite(bound)) bound = std::numeric_limits<double>::quiet_NaN();
      const uint16_t* got = bits.data() + t.offset(b, h, i);
      const double* wanted = oracle.values.data() + (bh * rows_per_head + r) * t.head_dim;
      for (int c = 0; c < t.head_dim; ++c) {
        const Mismatch element{name, b, h, i, c, from_bits(got[c], p.dtype), wanted[c], bound};
        const double error = error_of(element.got, element.wanted);
        extremes.add(element, error);
        if (error <= bound) continue;
        ++result.out_of_bounds;
        if (!result.first) result.first = element;
      }
    }
  }
  result.max_abs_error = extremes.max_error;
  result.bound = extremes.worst.bound;
  if (result.out_of_bounds > 0) result.worst = extremes.worst;
  result.rows_checked = all_heads * rows_per_head;
  if (rows_per_head < t.seqlen) result.nan_elements = count_nan(t, p.dtype, bits);
  result.gap_elements_written = count_gaps_written(t, bits);
  result.ok =
      result.out_of_bounds == 0 && result.nan_elements == 0 && result.gap_elements_written == 0;
  return result;
}

}  // namespace

std::string Mismatch::describe() const {
  const std::string where =
      tensor[0] == 'L' ? fmt::format("L[b={} h={} i={}]", batch, head, row)
                       : fmt::format("{}[b={} h={} {}={} c={}]", tensor, batch, head,
                                     tensor[1] == 'K' || tensor[1] == 'V' ? "j" : "i", row, column);
  return fmt::format("{} is {:.7g}, should be {:.7g} +- {:.2g}", where, got, wanted, bound);
}

std::string Comparison::describe() const {
  if (ok) return "";
  return describe_failure(out_of_bounds, first, worst, nan_elements, gap_elements_written, "O");
}

std::string TensorComparison::describe() const {
  if (ok) return "";
  const std::string what =
      describe_failure(out_of_bounds, first, worst, nan_elements, gap_elements_written, tensor);
  return fmt::format("{}: {}", tensor, what);
}

std::string GradientComparison::describe() const {
  for (const TensorComparison* tensor : {&dq, &dk, &dv}) {
    if (!tensor->ok) return tensor->describe();
  }
  return "";
}

Comparison compare(const Problem& p, const Oracle& oracle, const Outputs& outputs) {
  const TensorLayout o = layout_o(p);
  if (outputs.o.size() != size_t(o.extent()) || outputs.l.size() != size_t(p.rows())) {
    throw std::invalid_argument(
        fmt::format("O and L hold {} and {} elements; the problem has {} and {}", outputs.o.size(),
                    outputs.l.size(), o.extent(), p.rows()));
  }
  const int64_t rows_per_head = int64_t(oracle.rows.size());
  if (oracle.L.size() != size_t(p.batch_heads() * rows_per_head)) {
    throw std::invalid_argument("the oracle belongs to another problem");
  }
  Comparison result;
  Extremes o_extremes, l_extremes;
  // Notes one element. NaN fails, since it is not <= anything.
  const auto note = [&](const Mismatch& element, Extremes& extremes) {
    const double error = error_of(element.got, element.wanted);
    extremes.add(element, error);
    if (error <= element.bound) return;
    ++result.out_of_bounds;
    if (!result.first) result.first = element;
  };

  for (int64_t bh = 0; bh < p.batch_heads(); ++bh) {
    const int b = int(bh / p.heads), h = int(bh % p.heads);
    for (int64_t r = 0; r < rows_per_head; ++r) {
      const Oracle::Block& block = oracle.blocks[bh * oracle.blocks_per_head() + r / kBlockRows];
      const int i = oracle.rows[r];
      const bool empty = visible_keys(p, i) == 0;
      const double o_bound = empty ? 0 : 2 * block.ref16_error + 2 * ulp(block.o_max, p.dtype);
      const uint16_t* got = outputs.o.data() + o.offset(b, h, i);
      const double* wanted = oracle.O.data() + (bh * rows_per_head + r) * p.head_dim;
      for (int c = 0; c < p.head_dim; ++c) {
        note({"O", b, h, i, c, from_bits(got[c], p.dtype), wanted[c], o_bound}, o_extremes);
      }
      const double l_bound = empty ? 0 : 1e-5 * std::max(1.0, block.score_max);
      note({"L", b, h, i, 0, outputs.l[bh * p.seqlen_q + i], oracle.L[bh * rows_per_head + r],
            l_bound},
           l_extremes);
    }
  }
  result.max_abs_error = o_extremes.max_error;
  result.bound = o_extremes.worst.bound;
  result.lse_max_abs_error = l_extremes.max_error;
  result.lse_bound = l_extremes.worst.bound;
  if (result.out_of_bounds > 0) {
    result.worst = o_extremes.severity >= l_extremes.severity ? o_extremes.worst : l_extremes.worst;
  }
  result.rows_checked = p.batch_heads() * rows_per_head;
  if (rows_per_head < p.seqlen_q) {
    result.nan_elements = count_nan(o, p.dtype, outputs.o);
    for (const float l : outputs.l) result.nan_elements += !(l < float(kInfinity));
  }
  result.gap_elements_written = count_gaps_written(o, outputs.o);
  result.ok =
      result.out_of_bounds == 0 && result.nan_elements == 0 && result.gap_elements_written == 0;
  return result;
}

GradientComparison compare(const Problem& p, const GradientStrides& strides,
                           const GradientOracles& oracles, const Gradients& gradients) {
  return {.dq = compare_gradient(p, "dQ", layout_dq(p, strides), oracles.dq, gradients.dq),
          .dk = compare_gradient(p, "dK", layout_dk(p, strides), oracles.dk, gradients.dk),
          .dv = compare_gradient(p, "dV", layout_dv(p, strides), oracles.dv, gradients.dv)};
}

}  // namespace flashsteps
