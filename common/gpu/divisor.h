/// \file
/// Division of indices by a number that only the host knows: a card takes some twenty instructions
/// for it, and two for a multiplication and a shift. The same source for both targets.
#pragma once

#include <cstdint>

namespace flashsteps {

/// Divides 0 to 2^31 - 1 by `value`; made by divisor_of().
struct Divisor {
  uint32_t value, magic, shift;
};

/// For division by `value`. Host only.
///
/// With s = ceil(log2 value), magic = floor(2^32 (2^s - value) / value) + 1, so that 2^32 + magic
/// lies above 2^(32 + s) / value by at most 1: n (2^32 + magic) / 2^(32 + s) exceeds n / value by
/// at most n / 2^(32 + s) < 1 / value, too little to reach the next integer (Granlund and
/// Montgomery, "Division by Invariant Integers using Multiplication", 1994, section 4).
///
/// \param value 1 to 2^31 - 1 \throws std::invalid_argument otherwise
Divisor divisor_of(int64_t value);

/// n / d, rounded down, for n of 0 to 2^31 - 1: n + the product's upper half stay below 2^32.
constexpr int quotient(int n, const Divisor& d) {
  const uint32_t upper = uint32_t(uint64_t{uint32_t(n)} * d.magic >> 32);
  return int((upper + uint32_t(n)) >> d.shift);
}

/// `count`, of things that a kernel gives indices of 31 bits. Host only.
///
/// \throws DeviceError beyond 2^31 - 1
int index_count(int64_t count);

}  // namespace flashsteps
