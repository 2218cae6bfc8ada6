// Every planted fault of a Hopper kernel is diagnosed, by its kind and by the names of what takes
// part in it, on 10 of 10 seeds; what TMA refuses of a tensor is refused with the numbers.
#include <algorithm>
#include <random>

#include "common/model/float16.h"
#include "tests/model_test_support.h"

namespace flashsteps::test {
namespace {

using model::Fault;
using enum model::FaultKind;

constexpr int kTile = 64 * 64, kTiles = 6;

struct Planted {
  const char* kernel;
  std::vector<model::FaultKind> kinds;  // which, depends on who is first
  std::vector<const char*> words;       // all in the message
};

void PrintTo(const Planted& p, std::ostream* out) {
  *out << p.kernel;
}

std::vector<uint16_t> tiles(int count) {
  std::vector<uint16_t> values(size_t(count) * kTile);
  std::mt19937 random(1);
  for (uint16_t& v : values) v = model::float_to_half(float(random() % 9) - 4.f);
  return values;
}

struct Buffers {
  std::vector<uint16_t> values = tiles(kTiles);
  DeviceBuffer in = buffer("in", values, DType::fp16);
  DeviceBuffer by_tma{model_device(), "by_tma", DType::fp16, kTile};
  DeviceBuffer out = buffer("out", std::vector<float>(kTile, 0.f));
  // The kernels of one tile get a buffer of just that.
  DeviceBuffer tile = buffer("tile", tiles(1), DType::fp16);
  KernelArgs args(const std::string& kernel) {
    const bool turns = kernel.starts_with("turns_");
    return {.in = turns ? in.data() : tile.data(),
            .out = out.data(),
            .extra = by_tma.data(),
            .n = kTiles};
  }
};

class PlantedHopperFault : public testing::TestWithParam<Planted> {};

TEST_P(PlantedHopperFault, IsDiagnosedOn10Of10Seeds) {
  const Planted& p = GetParam();
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const WithOptions options(seed, 1);
    Buffers buffers;
    // What a launch before has left in shared memory is forgotten.
    run_on_model("hopper_none", buffers.args("hopper_none"));
    const std::optional<Fault> fault = fault_of(p.kernel, buffers.args(p.kernel));
    ASSERT_TRUE(fault) << "not noticed at seed " << seed;
    const std::string text = fault->what();
    EXPECT_NE(std::find(p.kinds.begin(), p.kinds.end(), fault->kind()), p.kinds.end())
        << "seed " << seed << ": " << text;
    for (const char* word : p.words)
      EXPECT_NE(text.find(word), std::string::npos)
          << "seed " << seed << ": " << word << " is not in: " << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    if (seed == 1) std::printf("%s\n", text.c_str());
  }
}

// Without a fault the same kernels are right: it is the fault that is diagnosed.
TEST(HopperFaults, TheKernelsAreRightWithoutAFault) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    const WithOptions options(seed, 1);
    Buffers b;
    const char* const kernel = seed % 3 == 0   ? "hopper_proxy_fence_after_barrier"
                               : seed % 3 == 1 ? "hopper_load_before_arrival"
                                               : "hopper_none";
    ASSERT_NO_THROW(run_on_model(kernel, b.args(kernel))) << seed;
    const std::vector<uint16_t> by_tma = download<uint16_t>(b.by_tma);
    const std::vector<float> out = download<float>(b.out);
    for (int i = 0; i < kTile; ++i) {
      ASSERT_EQ(out[size_t(i)], model::half_to_float(b.values[size_t(i)])) << i;
      ASSERT_EQ(model::half_to_float(by_tma[size_t(i)]), out[size_t(i)]) << i;
    }
    ASSERT_NO_THROW(run_on_model("hopper_reload", b.args("hopper_reload"))) << seed;
    ASSERT_NO_THROW(run_on_model("turns_none", b.args("turns_none"))) << seed;
    const std::vector<float> sums = download<float>(b.out);
    float right = 0.f, sum = 0.f;
    for (const uint16_t v : b.values) right += model::half_to_float(v);
    for (int i = 0; i < 128; ++i) sum += sums[size_t(i)];
    ASSERT_EQ(sum, right);
  }
}

constexpr const char* kFile = "tests/kernels/hopper_planted.cu:";

INSTANTIATE_TEST_SUITE_P(
    Mbarriers, PlantedHopperFault,
    testing::Values(
        Planted{"hopper_mbarrier_not_initialised",
                {uninitialised},
                {"full[0], where no mbarrier was initialised", kFile}},
        Planted{"hopper_mbarrier_initialised_twice",
                {barrier},
                {"mbarrier_init", "full[0], which is an mbarrier already, from", kFile}},
        Planted{"hopper_mbarrier_without_fence",
                {proxy},
                {"tma_load", "full[0], with no fence_mbarrier_init", kFile}},
        Planted{"hopper_mbarrier_fenced_by_another",
                {proxy},
                {"tma_load", "full[0], with no fence_mbarrier_init", kFile}},
        Planted{"hopper_mbarrier_without_barrier",
                {race, uninitialised},
                {"mbarrier_wait", "full[0]", kFile}},
        Planted{"hopper_mbarrier_of_no_arrivals", {barrier}, {"full[0] with 0 arrivals", kFile}},
        Planted{"hopper_mbarrier_misaligned", {misaligned}, {"full+4 bytes", "8 bytes", kFile}},
        Planted{"hopper_mbarrier_overwritten", {barrier}, {"full[0]", "has been overwritten"}},
        Planted{"hopper_parity_of_two", {barrier}, {"parity 2", kFile}},
        Planted{"hopper_no_arrival",
                {deadlock},
                {"threads 0-127 wait at mbarrier_wait, parity 0", "for full[0]",
                 "full[0] in phase 0 lacks 1 of 1 arrivals and -8192 bytes"}},
        Planted{"hopper_arrival_too_many", {barrier, deadlock}, {"full[0]"}},
        Planted{"hopper_no_expect", {race, in_flight, barrier, deadlock}, {"full[0]"}},
        Planted{"hopper_expects_too_little",
                {barrier},
                {"TMA load", "brings", "bytes more than were announced at full[0]", kFile}},
        Planted{"hopper_expects_too_little_after_load",
                {barrier},
                {"TMA", "128 bytes more than were announced", "full[0]", kFile}},
        Planted{"hopper_expects_too_much",
                {deadlock},
                {"wait at mbarrier_wait, parity 0",
                 "full[0] in phase 0 lacks 0 of 1 arrivals and "
                 "128 bytes"}},
        Planted{"hopper_wrong_parity", {in_flight, race, deadlock}, {"full[0]", kFile}},
        Planted{"hopper_no_wait_for_load", {in_flight, race}, {"A_smem[", "full[0]", kFile}},
        Planted{"hopper_wait_by_one_warp", {in_flight, race}, {"A_smem[", "full[0]", kFile}},
        Planted{"hopper_load_never_waited_for", {never_waited}, {"full[0]", kFile}},
        Planted{"turns_no_empty_wait", {race, in_flight, barrier}, {"thread 0 (", "[0]", kFile}},
        Planted{"turns_wrong_empty_parity",
                {deadlock},
                {"threads 0 wait at mbarrier_wait, parity 0", "for empty[0]",
                 "empty[0] in phase 0 lacks 128 of 128 arrivals and 0 bytes",
                 "full[0] in phase 0 lacks 1 of 1 arrivals and 0 bytes"}},
        Planted{"turns_wrong_full_parity", {race, in_flight, uninitialised}, {"reads tile_smem["}},
        Planted{"turns_early_arrival", {race, in_flight}, {"tile_smem["}},
        Planted{"turns_no_empty_arrival",
                {deadlock},
                {"for empty[0]", "empty[0] in phase 0 lacks 128 of 128 arrivals"}},
        Planted{"turns_one_arrival_more_than_expected",
                {deadlock},
                {"for empty[0]", "empty[0] in phase 0 lacks 1 of 129 arrivals"}},
        Planted{"turns_one_thread_waits",
                {race, in_flight, uninitialised, deadlock, barrier},
                {"turns_kernel"}},
        Planted{"turns_reads_without_wait", {race, in_flight, uninitialised}, {"tile_smem["}}));

INSTANTIATE_TEST_SUITE_P(
    Tma, PlantedHopperFault,
    testing::Values(
        Planted{"hopper_load_misaligned",
                {misaligned},
                {"tma_load", "A_smem[256]", "multiple of 1024", kFile}},
        Planted{"hopper_load_past_shared_memory",
                {out_of_bounds},
                {"tma_load", "24704 bytes of dynamic shared memory", kFile}},
        Planted{"hopper_load_past_buffer",
                {out_of_bounds},
                {"reads 16 bytes at tile[4096]; tile has 4096 fp16 elements"}},
        Planted{"hopper_load_of_no_head",
                {out_of_bounds},
                {"tma_load", "head 1 and batch 0 of a tensor of 1 heads and 1 batches", kFile}},
        Planted{"hopper_load_by_empty_map", {uninitialised}, {"make_tensor_map", kFile}},
        Planted{"hopper_load_over_ordinary_stores",
                {proxy},
                {"tma_load", "overwrites A_smem[0]", "fence_proxy_async", kFile}},
        Planted{"hopper_stores_over_load", {in_flight, race}, {"A_smem[", "TMA"}},
        Planted{"hopper_no_proxy_fence_for_store",
                {proxy},
                {"tma_store", "reads D_smem[", "fence_proxy_async", kFile}},
        Planted{"hopper_store_without_barrier",
                {race, uninitialised},
                {"tma_store", "reads D_smem[", kFile}},
        Planted{"hopper_store_overwritten",
                {in_flight},
                {"overwrites D_smem[9]", "TMA store of thread 0", "no wait covers it", kFile}},
        Planted{"hopper_store_overwritten_by_another", {race, in_flight}, {"D_smem["}},
        Planted{"hopper_reload_read_by_thread", {race, in_flight}, {"tile_smem[2560]"}},
        Planted{"hopper_reload_read_by_product",
                {race},
                {"a TMA load overwrites tile_smem[2048] while the wgmma of warpgroup 0", kFile}},
        Planted{"hopper_reload_read_by_second_product",
                {race},
                {"a TMA load overwrites tile_smem[2048] while the wgmma of warpgroup 0", kFile}},
        Planted{"hopper_reload_read_too_early",
                {in_flight, race},
                {"reads tile_smem[", "full[0]", kFile}},
        Planted{"hopper_reload_read_by_store",
                {in_flight},
                {"a TMA load overwrites tile_smem[2560] while the TMA store of thread 0", kFile}},
        Planted{"hopper_store_not_committed",
                {never_waited},
                {"TMA store", "D_smem[0]", "never committed", kFile}},
        Planted{"hopper_store_never_waited_for",
                {never_waited},
                {"TMA store", "D_smem[0]", "was committed", kFile}},
        Planted{"hopper_store_past_buffer",
                {out_of_bounds},
                {"writes 16 bytes at by_tma[4096]; by_tma has 4096 fp16 elements"}}));

INSTANTIATE_TEST_SUITE_P(
    Wgmma, PlantedHopperFault,
    testing::Values(
        Planted{"hopper_no_proxy_fence_for_wgmma",
                {proxy},
                {"wgmma", "for B, reads B_smem[", "fence_proxy_async", kFile}},
        Planted{"hopper_proxy_fence_before_stores",
                {proxy},
                {"wgmma", "for B, reads B_smem[", "fence_proxy_async", kFile}},
        Planted{"hopper_no_barrier_for_wgmma",
                {race},
                {"wgmma", "for B, reads B_smem[", "written by thread", kFile}},
        Planted{"hopper_no_wgmma_fence", {registers}, {"no wgmma_fence before", kFile}},
        Planted{"hopper_sums_touched_after_fence",
                {registers},
                {"its sums were touched, with no wgmma_fence after", kFile}},
        Planted{"hopper_sums_read_after_fence",
                {registers},
                {"its sums were touched, with no wgmma_fence after", kFile}},
        Planted{"hopper_operand_touched_after_fence",
                {registers},
                {"its operand A was touched, with no wgmma_fence after", kFile}},
        Planted{"hopper_no_commit", {registers}, {"reads sums of its wgmma", "not committed"}},
        Planted{"hopper_no_wait", {registers}, {"reads sums of its wgmma", "(committed)", kFile}},
        Planted{"hopper_waits_for_all_but_one", {registers}, {"reads sums of its wgmma", kFile}},
        Planted{"hopper_sums_written_in_flight", {registers}, {"sums of its wgmma", kFile}},
        Planted{"hopper_operand_written_in_flight",
                {registers},
                {"writes the operand A of its wgmma", kFile}},
        Planted{"hopper_operand_lost_in_flight", {registers}, {"operand A of its wgmma", kFile}},
        Planted{"hopper_other_shape_in_flight",
                {registers},
                {"uses registers of the wgmma", "before a wait that covers it", kFile}},
        Planted{"hopper_wait_names_other_sums",
                {registers},
                {"wgmma_wait", "completes the sums of the wgmma", "does not name", kFile}},
        Planted{"hopper_operand_of_sums_in_flight",
                {registers},
                {"uses registers of the wgmma", kFile}},
        Planted{"hopper_wgmma_never_waited_for",
                {never_waited},
                {"4 wgmma that no wait covers", "committed", kFile}},
        Planted{"hopper_wgmma_of_two_warps", {divergence}, {"128 threads; the block has 64"}},
        Planted{"hopper_wgmma_of_three_warps",
                {deadlock},
                {"threads 64-95 ended", "wait at wgmma", kFile}},
        Planted{"hopper_wgmma_at_two_lines",
                {divergence},
                {"wgmma", "other threads of its warpgroup", kFile}},
        Planted{"hopper_wgmma_of_two_minds", {divergence}, {"ask for different products", kFile}},
        Planted{"hopper_wgmma_of_two_groups", {divergence}, {"committed", "groups", kFile}},
        Planted{"hopper_descriptor_past_shared_memory",
                {out_of_bounds},
                {"wgmma", "for B", "24704 bytes of dynamic shared memory", kFile}},
        Planted{"hopper_descriptor_misaligned",
                {misaligned},
                {"wgmma", "for B", "B_smem[128]", "1024", kFile}},
        Planted{"hopper_descriptor_of_no_swizzle", {unsupported}, {"descriptor", kFile}},
        Planted{"hopper_descriptor_of_base_offset", {unsupported}, {"descriptor", kFile}},
        Planted{"hopper_reads_unwritten",
                {uninitialised},
                {"wgmma", "reads B_smem[", "nobody has written", kFile}},
        Planted{"hopper_reads_unloaded",
                {uninitialised},
                {"wgmma", "for A, reads A_smem[0], which nobody has written", kFile}},
        Planted{"hopper_overwrites_operand_in_flight",
                {race},
                {"overwrites B_smem[5] while the wgmma of warpgroup 0", kFile}}));

INSTANTIATE_TEST_SUITE_P(
    NamedBarriersAndRegisters, PlantedHopperFault,
    testing::Values(
        Planted{"hopper_barrier_zero", {barrier}, {"barrier 0; 1 to 15 are allowed", kFile}},
        Planted{"hopper_barrier_of_part_of_a_warp", {barrier}, {"100 threads", kFile}},
        Planted{"hopper_barrier_of_too_many", {barrier}, {"256 threads", "block's 128", kFile}},
        Planted{"hopper_barrier_for_others", {race, uninitialised}, {"buffer_smem["}},
        Planted{"hopper_arrival_learns_nothing", {race, uninitialised}, {"buffer_smem["}},
        Planted{"turns_no_sync", {race, uninitialised}, {"reads sum_smem["}},
        Planted{"turns_no_named_arrival",
                {deadlock},
                {"threads 0-127 wait at named_barrier_sync", "threads 128-255 ended",
                 "named barrier 1: 128 of 256 threads have arrived"}},
        Planted{"turns_other_count",
                {barrier, race, uninitialised},
                {"turns_kernel block (0,0,0) thread"}},
        Planted{"turns_too_small_count", {race, uninitialised, deadlock}, {"turns_kernel"}},
        Planted{"turns_sync_at_another",
                {deadlock},
                {"named barrier 1: 128 of 256 threads", "named barrier 2: 128 of 256 threads"}},
        Planted{"hopper_registers_no_multiple_of_8", {registers}, {"<100>", "multiples of 8"}},
        Planted{"hopper_registers_too_many", {registers}, {"<264>", "to 256"}},
        Planted{"hopper_registers_of_part", {deadlock, divergence}, {"shrink_registers", kFile}},
        Planted{"hopper_registers_shrink_up", {registers}, {"<72>", "has 64 registers"}},
        Planted{"hopper_registers_without_shrink",
                {deadlock},
                {"wait at grow_registers", "of 65536 registers are free", kFile}},
        Planted{"hopper_lanes_differ", {divergence}, {"warp_uniform", kFile}}));

TEST(HopperRefused, TensorsThatTmaDoesNotTake) {
  DeviceBuffer in = buffer("in", tiles(1), DType::fp16);
  EXPECT_NO_THROW(run_on_model("tensor_maps", {.in = in.data(), .n = 0}));
  const char* const why[] = {"",
                             "aligned to 16 bytes",
                             "row stride that is a multiple of 8 elements, from 0 to 2^39; 68 was",
                             "head stride that is a multiple of 8 elements, from 0 to 2^39; -8 was",
                             "batch stride that is a multiple of 8 elements, from 0 to 2^39; 1099",
                             "boxes of 1 to 256 rows; 257 were",
                             "boxes of 64 columns; 72 were",
                             "boxes of 64 columns; 32 were",
                             "along row; 0 were",
                             "along head_dim; 0 were",
                             "address is null",
                             "boxes of 1 to 256 rows; 0 were",
                             "along head; -1 were",
                             "along batch; 0 were",
                             "boxes of 64 columns; 512 were"};
  for (int n = 1; n < int(std::size(why)); ++n) {
    try {
      run_on_model("tensor_maps", {.in = in.data(), .n = n});
      ADD_FAILURE() << why[n] << ": was not refused";
    } catch (const DeviceError& e) {
      EXPECT_NE(std::string(e.what()).find(why[n]), std::string::npos) << e.what();
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace flashsteps::test
