#include "common/attention/card.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <string>

namespace flashsteps {
namespace {

constexpr int64_t KiB = 1024;

// Sources, all by NVIDIA. Memory bandwidth, tensor and fp32 figures: "H200 Tensor Core GPU"
// datasheet (SXM); "H100 Tensor Core GPU" datasheet (SXM) and "H100 Tensor Core GPU Architecture"
// whitepaper, which has the dense figures, SMs and clock; "A100 80GB" datasheet (SXM) and "A100
// Tensor Core GPU Architecture" whitepaper; "Ada GPU Architecture" whitepaper, appendix A (GeForce
// RTX 4090, fp16 with fp32 accumulate); "T4 Tensor Core GPU" datasheet, and "Turing GPU
// Architecture" whitepaper for its SMs and clock. Shared memory and the rate of 16 special
// functions: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and
// "Throughput of Native Arithmetic Instructions".
constexpr Card kCards[] = {
    {"H200", "H200 SXM 141 GB", 90, 132, 1.980, 4800, 989.4, 66.9, 227 * KiB},
    {"H100", "H100 SXM 80 GB", 90, 132, 1.980, 3350, 989.4, 66.9, 227 * KiB},
    {"A100", "A100 SXM 80 GB", 80, 108, 1.410, 2039, 312, 19.5, 163 * KiB},
    {"RTX4090", "GeForce RTX 4090", 89, 128, 2.520, 1008, 165.2, 82.6, 99 * KiB},
    {"T4", "T4", 75, 40, 1.590, 320, 65, 8.1, 64 * KiB},
};

bool equal_but_for_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](unsigned char x, unsigned char y) {
    return std::tolower(x) == std::tolower(y);
  });
}

}  // namespace

std::span<const Card> cards() {
  return kCards;
}

const Card& find_card(std::string_view name) {
  std::string names;
  for (const Card& card : kCards) {
    if (equal_but_for_case(card.name, name)) return card;
    names += (names.empty() ? "" : ", ") + std::string(card.name);
  }
  throw std::invalid_argument(fmt::format("'{}'; allowed: {}", name, names));
}

}  // namespace flashsteps
