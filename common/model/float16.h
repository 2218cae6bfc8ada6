/// \file
/// IEEE binary16 and bfloat16 as bits, to and from float. Shared by kernels on the model and by the
/// model's own tensor cores; always inlined, because one side is instrumented and the other is not.
#pragma once

#include <cstdint>

namespace flashsteps::model {

#define FLASHSTEPS_INLINE [[gnu::always_inline]] inline

/// The value of a binary16; exact.
FLASHSTEPS_INLINE float half_to_float(uint16_t half) {
  // The magnitude's exponent and mantissa in place of a float's; the product corrects the
  // exponent's bias (127 - 15 = 112) and makes subnormal numbers normal. Infinities and NaNs get
  // the float's largest exponent.
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  const uint32_t scaled =
      __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x7c00u << 13 ? 0x7f800000u : 0u;
  return __builtin_bit_cast(float, scaled | special | (half & 0x8000u) << 16);
}

/// The value of a bfloat16; exact.
FLASHSTEPS_INLINE float bfloat_to_float(uint16_t bfloat) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bfloat) << 16);
}

/// The nearest binary16, ties to even; NaN becomes 0x7fff, as on a card.
FLASHSTEPS_INLINE uint16_t float_to_half(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  uint32_t half;
  if (magnitude >= 0x47800000u) {  // 2^16 and above, and infinity
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5, of ulp 2^-24, rounds
    half = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000u;
  } else {  // rounding may carry into the exponent, up to infinity
    half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

/// The nearest bfloat16, ties to even; NaN becomes 0x7fff, as on a card.
FLASHSTEPS_INLINE uint16_t float_to_bfloat(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#undef FLASHSTEPS_INLINE

}  // namespace flashsteps::model
