// Prints how fast the CPU model is: seconds for each GFLOP of tensor-core work in a kernel built as
// the stages are (cp.async, ldmatrix, mma, shuffles, barriers), and nanoseconds for each element
// that a naive kernel reads, with every check on, on one worker and on all.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <thread>

#include "tests/model_test_support.h"

namespace flashsteps::test {
namespace {

/// The shortest of five runs, in seconds of processor time (so that other programs do not count;
/// with several workers the sum over them), and the ledger of one.
template <typename F>
std::pair<double, Ledger> time_of(F&& run) {
  double shortest = 1e9;
  Ledger ledger;
  for (int i = 0; i < 5; ++i) {
    model::take_ledger();
    const std::clock_t start = std::clock();
    run();
    shortest = std::min(shortest, double(std::clock() - start) / CLOCKS_PER_SEC);
    ledger = model::take_ledger();
  }
  return {shortest, ledger};
}

void measure(int workers) {
  const WithOptions options(1, workers);
  constexpr int kBlocks = 16, kTiles = 64, kD = 64;
  DeviceBuffer Q = buffer("Q", std::vector<uint16_t>(kBlocks * 64 * kD, 0x3c00), DType::fp16);
  DeviceBuffer K = buffer("K", std::vector<uint16_t>(kTiles * 32 * kD, 0x3c00), DType::fp16);
  DeviceBuffer row_max(model_device(), "row_max", DType::fp32, kBlocks * 64);
  DeviceBuffer sums = buffer("sums", std::vector<float>{0.f}),
               visits = buffer("visits", std::vector<int>{0});
  const auto [seconds, ledger] = time_of([&] {
    run_on_model(
        "row_max",
        {Q.data(), row_max.data(), K.data(), {sums.data(), visits.data()}, kTiles, kBlocks});
  });
  fmt::print("{} worker(s): {:.2f} s of processor time per GFLOP ({:.3f} GFLOP in {:.3f} s)\n",
             workers, seconds / (1e-9 * double(ledger.mma_flops)), 1e-9 * double(ledger.mma_flops),
             seconds);

  constexpr int kTilesQ = 6, kTilesK = 16;  // of 128 and of 64 rows
  DeviceBuffer Q2 = buffer("Q", std::vector<uint16_t>(kTilesQ * 128 * kD, 0), DType::fp16);
  DeviceBuffer K2 = buffer("K", std::vector<uint16_t>(kTilesK * 64 * kD, 0), DType::fp16);
  DeviceBuffer V2 = buffer("V", std::vector<uint16_t>(kTilesK * 64 * kD, 0), DType::fp16);
  DeviceBuffer O2(model_device(), "O", DType::fp16, kTilesQ * 128 * kD);
  DeviceBuffer maxima(model_device(), "maxima", DType::fp32, kTilesQ * 128);
  const auto [hopper_seconds, hopper] = time_of([&] {
    run_on_model("products",
                 {Q2.data(), O2.data(), K2.data(), {V2.data(), maxima.data()}, kTilesQ, kTilesK});
  });
  fmt::print(
      "{} worker(s): {:.2f} s of processor time per GFLOP by TMA and wgmma ({:.3f} GFLOP in "
      "{:.3f} s)\n",
      workers, hopper_seconds / (1e-9 * double(hopper.mma_flops)), 1e-9 * double(hopper.mma_flops),
      hopper_seconds);

  DeviceBuffer in = buffer("in", ramp(1 << 20)), out(model_device(), "out", DType::fp32, 3 * 64);
  const auto [naive_seconds, naive] =
      time_of([&] { run_on_model("reread", {.in = in.data(), .out = out.data(), .n = 1 << 20}); });
  const double reads = double(Ledger::total(naive.global_read)) / 4;
  fmt::print("{} worker(s): {:.1f} ns for each of {:.1f} million element reads\n", workers,
             1e9 * naive_seconds / reads, 1e-6 * reads);
}

}  // namespace
}  // namespace flashsteps::test

int main() {
  flashsteps::test::measure(1);
  const int all = int(std::thread::hardware_concurrency());
  if (all > 1) flashsteps::test::measure(all);
}
