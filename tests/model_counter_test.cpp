// The counters of the CPU model, against kernels whose every count is known beforehand: the ledger
// is worth what these are worth. If a compiler changes what it keeps of a kernel's loads and
// stores, it shows here.
#include "tests/model_test_support.h"

namespace flashsteps::test {
namespace {

/// The ledger of one launch.
Ledger count(const char* kernel, const KernelArgs& args) {
  model::take_ledger();
  run_on_model(kernel, args);
  return model::take_ledger();
}

int64_t conflicts_of_stride(const char* kernel, int element_size, int elements) {
  DeviceBuffer in = buffer("in", std::vector<float>(elements * element_size / 4, 1.f));
  DeviceBuffer out(model_device(), "out", DType::fp32, elements * element_size / 4);
  const Ledger l = count(kernel, {.in = in.data(), .out = out.data()});
  EXPECT_EQ(l.shared_written, elements * element_size) << kernel;
  EXPECT_EQ(l.shared_read, elements * element_size) << kernel;
  EXPECT_EQ(l.global_read, (BytesByTensor{{"in", elements * element_size}})) << kernel;
  EXPECT_EQ(l.global_written, (BytesByTensor{{"out", elements * element_size}})) << kernel;
  return l.bank_conflicts;
}

TEST(Counters, Transpose) {
  constexpr int kN = 256, kBytes = kN * kN * 4;
  DeviceBuffer in = buffer("in", ramp(kN * kN));
  for (const bool padded : {false, true}) {
    DeviceBuffer out(model_device(), "out", DType::fp32, kN * kN);
    const Ledger l = count(padded ? "transpose_33" : "transpose_32",
                           {.in = in.data(), .out = out.data(), .n = kN});
    const std::vector<float> values = download<float>(out);
    for (int i = 0; i < kN * kN; ++i) ASSERT_EQ(values[i], float(i % kN * kN + i / kN));
    // 64 blocks, each with 32 column reads of 32 words of one bank: 31 wavefronts too many for
    // each.
    EXPECT_EQ(l.bank_conflicts, padded ? 0 : 64 * 32 * 31);
    EXPECT_EQ(l.global_read, (BytesByTensor{{"in", kBytes}}));
    EXPECT_EQ(l.global_unique_read, (BytesByTensor{{"in", kBytes}}));
    EXPECT_EQ(l.global_written, (BytesByTensor{{"out", kBytes}}));
    EXPECT_EQ(l.shared_written, kBytes);
    EXPECT_EQ(l.shared_read, kBytes);
    // Of the 8 warps that wrote the words of a column, 7 are others.
    EXPECT_EQ(l.warp_exchange_bytes, kBytes / 8 * 7);
    EXPECT_EQ(l.barriers, 64);
    EXPECT_EQ(l.grid_blocks, 64);
    EXPECT_EQ(l.launches, 1);
    EXPECT_EQ(l.warp_barriers + l.shuffles + l.ldmatrix + l.mma + l.mma_flops + l.cp_async + l.exp +
                  l.div + l.div_in_loop + l.atomic_bytes + l.tiles_visited + l.tiles_masked,
              0);
  }
}

TEST(Counters, BankConflictsOfStrides) {
  // A warp stores once and loads once. 4 bytes: 32 lanes at a time.
  EXPECT_EQ(conflicts_of_stride("stride_half_1", 2, 32), 0);
  EXPECT_EQ(conflicts_of_stride("stride_half_64", 2, 32), 2 * 31);
  EXPECT_EQ(conflicts_of_stride("stride_float_1", 4, 32), 0);
  EXPECT_EQ(conflicts_of_stride("stride_float_2", 4, 32), 2 * 1);
  EXPECT_EQ(conflicts_of_stride("stride_float_33", 4, 32), 0);
  // 8 bytes: two halves of 16 lanes, each of which fills the 32 banks once; or twice at a stride
  // of 2.
  EXPECT_EQ(conflicts_of_stride("stride_float2_1", 8, 32), 0);
  EXPECT_EQ(conflicts_of_stride("stride_float2_2", 8, 32), 2 * 2);
  // 16 bytes: four quarters of 8 lanes.
  EXPECT_EQ(conflicts_of_stride("stride_float4_1", 16, 32), 0);
  EXPECT_EQ(conflicts_of_stride("stride_float4_2", 16, 32), 2 * 4);
}

TEST(Counters, OneWordForAllIsNoConflict) {
  DeviceBuffer in = buffer("in", ramp(32)), out = buffer("out", ramp(32));
  const Ledger l = count("broadcast", {.in = in.data(), .out = out.data()});
  EXPECT_EQ(l.bank_conflicts, 0);
  EXPECT_EQ(l.shared_read, 32 * 4);
  EXPECT_EQ(l.shared_written, 4);
}

TEST(Counters, LanesThatGoDifferentWays) {
  DeviceBuffer in = buffer("in", ramp(32)), out = buffer("out", ramp(32));
  const Ledger l = count("divergent", {.in = in.data(), .out = out.data()});
  EXPECT_EQ(l.bank_conflicts, 15 + 1 + 15 + 1);  // low and all, stored and loaded
  EXPECT_EQ(l.warp_barriers, 2);
}

TEST(Counters, CopiesAndLdmatrixOnRowsOf128Bytes) {
  DeviceBuffer in = buffer("in", std::vector<uint16_t>(32 * 8, 0x3c00), DType::fp16);
  DeviceBuffer out(model_device(), "out", DType::fp32, 32 * 4);
  const Ledger l = count("rows", {.in = in.data(), .out = out.data()});
  // 8 lanes at a time, all in the same four banks.
  EXPECT_EQ(l.bank_conflicts, 4 * 7 + 4 * 7);
  EXPECT_EQ(l.cp_async, 32);
  EXPECT_EQ(l.global_read, (BytesByTensor{{"in", 24 * 16}}));  // the last 8 copies are zeros
  EXPECT_EQ(l.shared_written, 32 * 16);
  EXPECT_EQ(l.shared_read, 32 * 16);
  EXPECT_EQ(l.ldmatrix, 1);
  EXPECT_EQ(l.warp_exchange_bytes, 0);
}

TEST(Counters, UniqueReadsCountAByteOnceForEachBlock) {
  constexpr int kN = 1000;  // ends within a piece of the map
  DeviceBuffer in = buffer("in", ramp(kN));
  DeviceBuffer out(model_device(), "out", DType::fp32, 3 * 64);
  for (const int workers : {1, 2}) {
    const WithOptions options(1, workers);
    const Ledger l = count("reread", {.in = in.data(), .out = out.data(), .n = kN});
    EXPECT_EQ(l.global_read, (BytesByTensor{{"in", 3 * 2 * kN * 4}}));
    EXPECT_EQ(l.global_unique_read, (BytesByTensor{{"in", 3 * kN * 4}}));
  }
}

TEST(Counters, VectorsAreOneAccess) {
  DeviceBuffer in = buffer("in", ramp(128));
  DeviceBuffer out(model_device(), "out", DType::fp32, 128);
  const Ledger l = count("vector", {.in = in.data(), .out = out.data()});
  EXPECT_EQ(l.global_read, (BytesByTensor{{"in", 512}}));
  EXPECT_EQ(l.global_written, (BytesByTensor{{"out", 512}}));
  EXPECT_EQ(download<float>(out), ramp(128));
}

TEST(Counters, AWideReadExchangesWhatAnotherWarpWrote) {
  DeviceBuffer in = buffer("in", ramp(128)), out(model_device(), "out", DType::fp32, 128);
  const Ledger l = count("gather", {.in = in.data(), .out = out.data()});
  EXPECT_EQ(l.shared_read, 32 * 16);
  EXPECT_EQ(l.warp_exchange_bytes, 32 * 12);  // three of the four words
  EXPECT_EQ(l.bank_conflicts, 4 * 3);         // of the stores, at a stride of 4
}

TEST(Counters, TilesExponentialsAndDivisions) {
  DeviceBuffer in = buffer("in", std::vector<float>(64, 1.f));
  DeviceBuffer out(model_device(), "out", DType::fp32, 4 * 64);
  const Ledger l = count("tiles", {.in = in.data(), .out = out.data()});
  EXPECT_EQ(l.tiles_visited, 1 + 2 + 3 + 4);
  EXPECT_EQ(l.tiles_masked, 4);
  EXPECT_EQ(l.barriers, 1 + 2 + 3 + 4);
  EXPECT_EQ(l.exp, (10 + 4) * 64);
  EXPECT_EQ(l.div, (10 + 4) * 64);
  EXPECT_EQ(l.div_in_loop, 10 * 64);
  EXPECT_EQ(l.shuffles, 4 * 2);
  EXPECT_EQ(l.warp_barriers, 4);
  EXPECT_EQ(l.grid_blocks, 4);
}

TEST(Counters, AtomicsAddAndCount) {
  constexpr int kBlocks = 5;
  DeviceBuffer in = buffer("in", std::vector<float>(kBlocks * 64, 0.5f));
  DeviceBuffer sum = buffer("sum", std::vector<float>{0.f});
  DeviceBuffer counts = buffer("counts", std::vector<int>{0, 0});
  const Ledger l =
      count("atomics", {.in = in.data(), .out = sum.data(), .extra = counts.data(), .n = kBlocks});
  EXPECT_EQ(download<int>(counts), (std::vector<int>{kBlocks * 64, kBlocks * 128}));
  EXPECT_EQ(download<float>(sum)[0], kBlocks * 32.f);
  EXPECT_EQ(l.atomic_bytes, kBlocks * (64 * 4 * 2 + 4));
  EXPECT_EQ(l.global_written, BytesByTensor{});  // atomics are not stores
  EXPECT_EQ(l.global_read, (BytesByTensor{{"in", kBlocks * 64 * 4}}));
}

// One lane of a warp reads the turn, and one passes it on.
TEST(Counters, TurnsGoFromBlockToBlock) {
  constexpr int kBlocks = 5;
  std::vector<float> values(kBlocks * 64), right(64 * 4);
  for (int i = 0; i < kBlocks * 64; ++i) {
    values[i] = float(i % 7);
    for (int e = 0; e < 4; ++e) right[i % 64 * 4 + e] += float((e + 1) * (i % 7));
  }
  DeviceBuffer in = buffer("in", values), sums = buffer("sums", std::vector<float>(64 * 4));
  DeviceBuffer turns = buffer("turns", std::vector<int>{0, 0});
  const Ledger l =
      count("turns", {.in = in.data(), .out = sums.data(), .extra = turns.data(), .n = kBlocks});
  EXPECT_EQ(download<float>(sums), right);
  EXPECT_EQ(download<int>(turns), (std::vector<int>{kBlocks, kBlocks}));
  EXPECT_EQ(l.atomic_bytes, kBlocks * (64 * 16 + 2 * 4));
  EXPECT_EQ(l.global_written, BytesByTensor{});
  EXPECT_EQ(l.global_read, (BytesByTensor{{"in", kBlocks * 64 * 4}, {"turns", kBlocks * 2 * 4}}));
  EXPECT_EQ(l.warp_barriers, kBlocks * 2 * 2);
}

TEST(Counters, TheLedgerIsTakenOnceAndAdds) {
  DeviceBuffer in = buffer("in", ramp(128));
  DeviceBuffer out(model_device(), "out", DType::fp32, 128);
  model::take_ledger();
  for (int i = 0; i < 3; ++i) run_on_model("vector", {.in = in.data(), .out = out.data()});
  const Ledger l = model::take_ledger();
  EXPECT_EQ(l.launches, 3);
  EXPECT_EQ(Ledger::total(l.global_read), 3 * 512);
  EXPECT_EQ(model::take_ledger().launches, 0);
}

}  // namespace
}  // namespace flashsteps::test
