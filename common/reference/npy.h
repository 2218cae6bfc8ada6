/// \file
/// NumPy's .npy files: a strict reader, and a writer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "common/attention/problem.h"

namespace flashsteps {

/// An array from a file: C order, float16 or float32.
struct NpyArray {
  std::vector<int64_t> shape;
  DType dtype = DType::fp32;   ///< fp16 or fp32
  std::vector<uint16_t> fp16;  ///< the elements of a float16 array, as bits
  std::vector<float> fp32;     ///< the elements of a float32 array

  int64_t size() const { return int64_t(dtype == DType::fp16 ? fp16.size() : fp32.size()); }
  /// Element i in C order, exact.
  double value(int64_t i) const;
};

/// Reads a .npy file of format version 1.0 or 2.0 with little-endian float16 or float32 in C order.
///
/// Refused, each by name: a file that is no .npy, another version, a header over 10000 bytes
/// (NumPy's own limit) or that is not the dictionary it should be, another element type, big
/// endian, Fortran order, another number of dimensions, a shape whose size overflows, a truncated
/// file, bytes after the data. Nothing is allocated before the file's size is known to match.
///
/// \param dimensions how many the array must have
/// \throws std::invalid_argument with one line that begins with the path
NpyArray read_npy(const std::filesystem::path& path, int dimensions);

/// Writes float16 bits, or float32 values, as format version 1.0. The file appears whole or not at
/// all.
///
/// \throws std::runtime_error where it cannot be written
void write_npy(const std::filesystem::path& path, std::span<const int64_t> shape,
               std::span<const uint16_t> fp16);
/// \overload
void write_npy(const std::filesystem::path& path, std::span<const int64_t> shape,
               std::span<const float> fp32);

}  // namespace flashsteps
