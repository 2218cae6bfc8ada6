/// \file
/// The model's random numbers: small, fast, and the same on every machine.
#pragma once

#include <cstdint>

namespace flashsteps::model {

/// Scrambles the bits of x (the finaliser of SplitMix64; Steele, Lea and Flood, 2014).
inline uint64_t scramble(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

/// A linear congruential generator with a permuted output (PCG, O'Neill 2014).
class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(scramble(seed)) {}
  uint32_t bits() {
    const uint64_t s = state_;
    state_ = s * 6364136223846793005u + 1442695040888963407u;
    const auto x = uint32_t((s >> 18 ^ s) >> 27);
    const auto r = uint32_t(s >> 59);
    return x >> r | x << (-r & 31);
  }
  /// Uniform in [0, n), n > 0.
  uint32_t below(uint32_t n) { return uint32_t(uint64_t{bits()} * n >> 32); }

 private:
  uint64_t state_;
};

}  // namespace flashsteps::model
