#include "common/attention/card.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <string>

namespace flashsteps {
namespace {

constexpr int64_t KiB = 1024;

// Sources, all by NVIDIA, by card:
//
//   H200     "NVIDIA H200 Tensor Core GPU" datasheet, column SXM: 4.8 TB/s. It gives 1,979 TFLOPS
//            of fp16 and bf16 with sparsity, and 67 of fp32: the H100's, as is the chip.
//   H100     "NVIDIA H100 Tensor Core GPU" datasheet, column SXM: 3.35 TB/s; "NVIDIA H100 Tensor
//            Core GPU Architecture" whitepaper, table of peak rates, H100 SXM5: 132 SMs, 989.4
//            TFLOPS dense (at 1.83 GHz), 66.9 of fp32 (at 1.98 GHz).
//   A100     "NVIDIA A100 Tensor Core GPU" datasheet, A100 80GB SXM: 2,039 GB/s, 312 and 19.5
//            TFLOPS; "NVIDIA A100 Tensor Core GPU Architecture" whitepaper: 108 SMs, 1,410 MHz.
//   RTX4090  "NVIDIA Ada GPU Architecture" whitepaper, table of the GeForce RTX 4090: 128 SMs,
//            2,520 MHz, 1,008 GB/s, 82.6 TFLOPS of fp32, 165.2 of fp16 with fp32 sums (330.3 is
//            with fp16 sums, which no stage has).
//   T4       "NVIDIA Turing GPU Architecture" whitepaper, Tesla T4: 40 SMs, 1,590 MHz, 65 and 8.1
//            TFLOPS, 320 GB/s: 256 bits at 10 Gbit/s. (Later pages of the T4 say 300; a bound takes
//            the larger.)
//
// Shared memory and 16 special functions a cycle and SM, for each of these: "CUDA C++ Programming
// Guide", "Technical Specifications per Compute Capability" and "Throughput of Native Arithmetic
// Instructions". The tests hold SMs, clocks and rates against each other.
constexpr Card kCards[] = {
    {"H200", "H200 SXM 141 GB", "NVIDIA H200", 90, 132, 1.980, 4800, 989.4, 66.9, 227 * KiB},
    {"H100", "H100 SXM 80 GB", "NVIDIA H100 80GB HBM3", 90, 132, 1.980, 3350, 989.4, 66.9,
     227 * KiB},
    {"A100", "A100 SXM 80 GB", "NVIDIA A100-SXM4-80GB", 80, 108, 1.410, 2039, 312, 19.5, 163 * KiB},
    {"RTX4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090", 89, 128, 2.520, 1008, 165.2, 82.6,
     99 * KiB},
    {"T4", "T4", "Tesla T4", 75, 40, 1.590, 320, 65, 8.1, 64 * KiB},
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
