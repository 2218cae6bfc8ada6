#include "common/reference/float16.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace flashsteps {
namespace {

// Bits of the stored significand, the smallest normal exponent, and the largest finite value.
struct Format {
  int fraction;
  int min_exponent;
  int bias;
  double largest;
};

constexpr Format kFp16 = {10, -14, 15, 65504.0};
constexpr Format kBf16 = {7, -126, 127, 0x1.fep127};

constexpr const Format& format_of(DType type) {
  return type == DType::fp16 ? kFp16 : kBf16;
}

constexpr int kDoubleFraction = 52;

}  // namespace

double round_to(double value, DType type) {
  const Format& f = format_of(type);
  const double magnitude = std::fabs(value);
  if (!(magnitude <= std::numeric_limits<double>::max())) return value;  // infinite or NaN
  double rounded;
  if (magnitude < std::ldexp(1.0, f.min_exponent)) {
    // Subnormal: whole multiples of the smallest one. Both products are exact.
    const double smallest = std::ldexp(1.0, f.min_exponent - f.fraction);
    rounded = std::nearbyint(magnitude / smallest) * smallest;
  } else {
    // Add half of the last kept place, less one where the kept part is even, and cut. A carry into
    // the exponent is right.
    const int drop = kDoubleFraction - f.fraction;
    uint64_t bits = std::bit_cast<uint64_t>(magnitude);
    bits += (uint64_t{1} << (drop - 1)) - 1 + ((bits >> drop) & 1);
    bits &= ~((uint64_t{1} << drop) - 1);
    rounded = std::bit_cast<double>(bits);
    if (rounded > f.largest) rounded = std::numeric_limits<double>::infinity();
  }
  return std::copysign(rounded, value);
}

uint16_t to_bits(double value, DType type) {
  const Format& f = format_of(type);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = uint16_t((2 * f.bias + 1) << f.fraction);
  if (std::isnan(value)) return sign | infinity | uint16_t(1 << (f.fraction - 1));
  const double magnitude = std::fabs(round_to(value, type));
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude < std::ldexp(1.0, f.min_exponent)) {
    return sign | uint16_t(std::ldexp(magnitude, f.fraction - f.min_exponent));
  }
  const uint64_t bits = std::bit_cast<uint64_t>(magnitude);
  const int exponent = int(bits >> kDoubleFraction) - 1023;
  const uint64_t fraction =
      (bits >> (kDoubleFraction - f.fraction)) & ((uint64_t{1} << f.fraction) - 1);
  return sign | uint16_t(((exponent + f.bias) << f.fraction) | int(fraction));
}

double from_bits(uint16_t bits, DType type) {
  const Format& f = format_of(type);
  const int exponent = (bits & 0x7fff) >> f.fraction;
  const uint64_t fraction = bits & ((1u << f.fraction) - 1);
  double magnitude;
  if (exponent == 0) {
    magnitude = std::ldexp(double(fraction), f.min_exponent - f.fraction);
  } else if (exponent == 2 * f.bias + 1) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else {
    magnitude = std::bit_cast<double>((uint64_t(exponent - f.bias + 1023) << kDoubleFraction) |
                                      (fraction << (kDoubleFraction - f.fraction)));
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

double ulp(double value, DType type) {
  const Format& f = format_of(type);
  if (!std::isfinite(value)) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = value == 0 ? f.min_exponent : std::max(std::ilogb(value), f.min_exponent);
  return std::ldexp(1.0, exponent - f.fraction);
}

double largest_finite(DType type) {
  return format_of(type).largest;
}

}  // namespace flashsteps
