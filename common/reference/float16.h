/// \file
/// The two 16-bit floating-point types on the host, without a GPU's headers.
#pragma once

#include <cstdint>

#include "common/attention/problem.h"

namespace flashsteps {

/// Rounds once, to nearest even, to the 16-bit type and returns its bits; beyond the largest finite
/// value gives an infinity, NaN gives a quiet NaN.
uint16_t to_bits(double value, DType type);

/// The value of 16 bits, exact.
double from_bits(uint16_t bits, DType type);

/// from_bits(to_bits(value)), faster.
double round_to(double value, DType type);

/// The distance between neighbouring values of the type at |value|: 2^(e - 10) for fp16 and 2^(e -
/// 7) for bf16 with e = floor(log2 |value|), and the smallest subnormal near 0. NaN for NaN and
/// infinities.
double ulp(double value, DType type);

/// The largest finite value: 65504 for fp16.
double largest_finite(DType type);

}  // namespace flashsteps
