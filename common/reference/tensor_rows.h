/// \file
/// From 16-bit tensors to matrices of doubles. For the sources of the reference alone: includes
/// Eigen.
#pragma once

#include <fmt/format.h>

#include <Eigen/Core>
#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "common/attention/layout.h"
#include "common/reference/float16.h"

namespace flashsteps {

/// Rows of a tensor.
using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Row i of head h into `to`, head_dim doubles.
inline void read_row(const TensorLayout& t, DType type, const std::vector<uint16_t>& bits, int b,
                     int h, int64_t i, double* to) {
  const uint16_t* from = bits.data() + t.offset(b, h, i);
  for (int c = 0; c < t.head_dim; ++c) to[c] = from_bits(from[c], type);
}

/// All rows of a head.
inline Matrix read_head(const TensorLayout& t, DType type, const std::vector<uint16_t>& bits, int b,
                        int h) {
  Matrix head(t.seqlen, t.head_dim);
  for (int i = 0; i < t.seqlen; ++i) read_row(t, type, bits, b, h, i, head.row(i).data());
  return head;
}

/// These rows of a head.
inline Matrix read_rows(const TensorLayout& t, DType type, const std::vector<uint16_t>& bits, int b,
                        int h, const int* rows, int count) {
  Matrix read(count, t.head_dim);
  for (int r = 0; r < count; ++r) read_row(t, type, bits, b, h, rows[r], read.row(r).data());
  return read;
}

/// \throws std::invalid_argument where a tensor has not the size that its layout needs
inline void require_size(std::string_view name, size_t given, int64_t needed) {
  if (given != size_t(needed)) {
    throw std::invalid_argument(
        fmt::format("{} holds {} elements; the problem's strides span {}", name, given, needed));
  }
}

/// \throws std::invalid_argument where rows do not ascend within [0, seqlen)
inline void require_rows(std::string_view seqlen_name, const std::vector<int>& rows, int seqlen) {
  const bool ascending =
      std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end();
  if (!rows.empty() && (!ascending || rows.front() < 0 || rows.back() >= seqlen)) {
    throw std::invalid_argument(
        fmt::format("the rows to check must ascend within [0, {} = {})", seqlen_name, seqlen));
  }
}

}  // namespace flashsteps
