/// \file
/// What cards can do at most, from their datasheets: for bounds on time, never for times.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace flashsteps {

/// Peak figures of one card, at the clock that the vendor quotes. No sparsity anywhere. card.cpp
/// names the document of NVIDIA's that each figure is from.
struct Card {
  const char* name;                 ///< as --card takes it
  const char* full_name;            ///< with form and memory: cards of one name differ
  const char* device_name;          ///< as the driver calls it, and so the files of docs/results
  int capability;                   ///< compute capability, major * 10 + minor
  int multiprocessors;              ///< SMs
  double clock_ghz;                 ///< boost
  double memory_gb_per_s;           ///< of device memory, 1e9 bytes a second
  double tensor_tflops;             ///< dense fp16 products with fp32 sums on tensor cores
  double fp32_tflops;               ///< FMA, two operations each
  int64_t shared_memory_per_block;  ///< opt-in maximum, bytes

  /// Exponentials or reciprocals in a second (they share the unit that approximates functions): 16
  /// a cycle and SM, 4 in each of its quarters.
  constexpr double special_per_s() const { return 16.0 * multiprocessors * clock_ghz * 1e9; }
};

/// The cards that there are figures of.
std::span<const Card> cards();

/// The card of this name, whatever the case of its letters.
///
/// \throws std::invalid_argument that lists the names
const Card& find_card(std::string_view name);

}  // namespace flashsteps
