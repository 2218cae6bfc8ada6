// What programs do with stages: find them by name, say why one cannot run, run one, add and write
// its counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/attention/layout.h"
#include "common/attention/work.h"
#include "common/reference/inputs.h"
#include "common/stage/ledger_json.h"
#include "common/stage/registry.h"
#include "common/stage/run.h"

namespace flashsteps {
namespace {

// What the fake stages saw when they ran.
struct Seen {
  bool outputs_poisoned = false;
  bool forward_before_lse = false;
  std::vector<uint16_t> q;
} seen;

bool poisoned(const void* data, size_t bytes) {
  const auto* byte = static_cast<const unsigned char*>(data);
  return std::all_of(byte, byte + bytes, [](unsigned char b) { return b == 0xff; });
}

WorkspaceList workspaces(const Problem& p) {
  return {1, {{"S", DType::fp32, p.batch_heads() * p.seqlen_q * p.seqlen_k}}};
}
Tiles tiles(const Problem&) {
  return {64, 32};
}

void forward(const Problem& p, const ForwardArgs& args, Stream) {
  seen = {};
  const WorkspaceList list = workspaces(p);
  seen.outputs_poisoned = poisoned(args.O, size_t(2 * layout_o(p).extent())) &&
                          poisoned(args.L, size_t(4 * p.rows())) &&
                          poisoned(args.workspace[0], size_t(4 * list.buffer[0].count));
  const auto* q = static_cast<const uint16_t*>(args.Q);
  seen.q.assign(q, q + layout_q(p).extent());
  auto* o = static_cast<uint16_t*>(args.O);
  std::fill_n(o, layout_o(p).extent(), uint16_t{0x3c00});
  std::memset(args.workspace[0], 0, 4);
}

void lse(const Problem& p, const ForwardArgs& args, Stream) {
  seen.forward_before_lse = !poisoned(args.workspace[0], 4);
  std::fill_n(args.L, p.rows(), 2.f);
}

Stage stage(const char* id, Target target, int capability = 80, bool exact = false) {
  return {id,    "fake",  "",         target,  "",  capability, exact,
          tiles, nullptr, workspaces, forward, lse, nullptr,    nullptr};
}

// Registered in no order, as the linker would.
Stage fakes[] = {stage("92b", Target::model), stage("91", Target::model),
                 stage("92a", Target::model), stage("91", Target::cuda),
                 stage("93", Target::cuda, 90, true)};
const bool registered = [] {
  for (Stage& fake : fakes) register_stage(&fake);
  return true;
}();

TEST(Registry, SortsById) {
  EXPECT_EQ(stage_ids(), (std::vector<std::string>{"91", "92a", "92b", "93"}));
  std::vector<std::string> on_model;
  for (const Stage* s : stages_for(Target::model)) on_model.push_back(s->id);
  EXPECT_EQ(on_model, (std::vector<std::string>{"91", "92a", "92b"}));
}

TEST(Registry, FindsForATarget) {
  EXPECT_EQ(find_stage("91", Target::cuda), &fakes[3]);
  EXPECT_EQ(find_stage("91", Target::model), &fakes[1]);
  EXPECT_EQ(find_stage("93", Target::model), nullptr);
  EXPECT_EQ(find_stage("92", Target::model), nullptr);
}

TEST(Registry, Selects) {
  using Ids = std::vector<std::string>;
  EXPECT_EQ(select_stages("all"), (Ids{"91", "92a", "92b", "93"}));
  EXPECT_EQ(select_stages("91"), (Ids{"91"}));
  EXPECT_EQ(select_stages("92"), (Ids{"92b"}));  // the last step
  EXPECT_EQ(select_stages("93,92a,91,92a"), (Ids{"91", "92a", "93"}));
}

TEST(Registry, RefusesAndListsWhatThereIs) {
  for (const char* wrong :
       {"", "94", "9", "92c", "91,", ",91", "91 ", "all,91", "91,,93", "ALL", "1", "92ab"}) {
    try {
      select_stages(wrong);
      ADD_FAILURE() << "'" << wrong << "' was accepted";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("allowed: all, 91, 92a, 92b, 93"), std::string::npos)
          << error.what();
    }
  }
}

// Host memory as a device.
class FakeDevice : public Device {
 public:
  DeviceInfo info() const override {
    DeviceInfo info;
    info.target = Target::cuda;
    info.name = "a fake card";
    info.capability = capability;
    info.memory_bytes = memory_bytes;
    return info;
  }
  void* allocate(const char* name, DType type, int64_t count) override {
    names.insert(name);
    void* data = std::malloc(size_t(size_of(type) * count + 1));
    std::memset(data, 0x11, size_t(size_of(type) * count));  // so that only poison() gives 0xff
    live.insert(data);
    return data;
  }
  void release(void* data) override {
    EXPECT_EQ(live.erase(data), 1u);
    std::free(data);
  }
  void upload(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void poison(void* data, size_t bytes) override { std::memset(data, 0xff, bytes); }
  void synchronize() override {}

  int capability = 90;
  int64_t memory_bytes = int64_t{1} << 30;
  std::set<std::string> names;
  std::set<void*> live;
};

Problem small(int seqlen_q = 5, int seqlen_k = 7) {
  Problem p{.batch = 2,
            .heads = 2,
            .kv_heads = 1,
            .seqlen_q = seqlen_q,
            .seqlen_k = seqlen_k,
            .head_dim = 8};
  p.scale = default_scale(8);
  set_packed_strides(p);
  p.o.row = 16;  // a gap after each row
  p.o.head = 16 * seqlen_q;
  p.o.batch = 2 * p.o.head;
  return p;
}

TEST(RunForward, PoisonsRunsAndReadsBack) {
  FakeDevice device;
  const Problem p = small();
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  const ForwardRun run = run_forward(device, fakes[3], p, inputs);
  EXPECT_TRUE(seen.outputs_poisoned);
  EXPECT_TRUE(seen.forward_before_lse);
  EXPECT_EQ(seen.q, inputs.q);
  EXPECT_EQ(run.outputs.o, std::vector<uint16_t>(size_t(layout_o(p).extent()), 0x3c00));
  EXPECT_EQ(run.outputs.l, std::vector<float>(size_t(p.rows()), 2.f));
  EXPECT_EQ(device.names, (std::set<std::string>{"Q", "K", "V", "O", "L", "S"}));
  EXPECT_TRUE(device.live.empty());
  EXPECT_FALSE(run.ledger.has_value());  // this device is no model
  EXPECT_FALSE(run.lse_ledger.has_value());
}

TEST(RunForward, RunsEmptyProblems) {
  FakeDevice device;
  Stage idle = fakes[3];
  idle.forward = [](const Problem&, const ForwardArgs&, Stream) {};
  idle.lse = nullptr;
  for (const Problem& p : {small(0, 7), small(5, 0), small(0, 0)}) {
    const ForwardRun run = run_forward(device, idle, p, make_inputs(p, InputKind::normal, 1));
    EXPECT_EQ(run.outputs.o.size(), size_t(layout_o(p).extent()));
    EXPECT_EQ(run.outputs.l.size(), size_t(p.rows()));
  }
}

TEST(RunForward, RefusesIllegalProblemsAndWrongSizes) {
  FakeDevice device;
  const Problem p = small();
  Inputs inputs = make_inputs(p, InputKind::normal, 1);
  inputs.v.pop_back();
  EXPECT_THROW(run_forward(device, fakes[3], p, inputs), std::invalid_argument);
  Problem illegal = p;
  illegal.head_dim = 12;
  EXPECT_THROW(run_forward(device, fakes[3], illegal, make_inputs(p, InputKind::normal, 1)),
               std::invalid_argument);
  EXPECT_TRUE(device.live.empty());
}

TEST(RunForward, SaysWhyADeviceCannot) {
  FakeDevice device;
  const Problem p = small();
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  const auto reason = [&](const Stage& stage) {
    return why_not(stage, p, device.info()).value_or("");
  };
  EXPECT_EQ(reason(fakes[4]), "");
  for (const int other :
       {86, 100}) {  // a stage for one architecture runs on no other, older or newer
    device.capability = other;
    EXPECT_NE(
        reason(fakes[4]).find("needs compute capability 9.0, found " + std::to_string(other / 10)),
        std::string::npos);
    EXPECT_EQ(reason(fakes[3]), "");
    EXPECT_THROW(run_forward(device, fakes[4], p, inputs), DeviceError);
  }
  device.capability = 75;
  EXPECT_NE(reason(fakes[3]).find("8.0 or newer, found 7.5"), std::string::npos);
  device.capability = 90;
  device.memory_bytes = device_bytes(fakes[3], p);
  EXPECT_EQ(reason(fakes[3]), "");
  device.memory_bytes -= 1;
  EXPECT_NE(reason(fakes[3]).find("of device memory"), std::string::npos);
  EXPECT_THROW(run_forward(device, fakes[3], p, inputs), DeviceError);
}

std::string refusal_of(const Stage& stage, const Problem& p, const Variant& variant) {
  try {
    tiles_of(stage, p, variant);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Variants, TilesAreTheStagesOwnOrACandidate) {
  const Problem p = small();
  Stage one = fakes[3];  // built for 64 x 32 alone
  EXPECT_EQ(tiles_of(one, p), (Tiles{64, 32}));
  EXPECT_EQ(tiles_of(one, p, {.tiles = {64, 32}}), (Tiles{64, 32}));
  EXPECT_EQ(refusal_of(one, p, {.tiles = {32, 64}}),
            "stage 91 at head_dim 8 is built for 64x32; 32x64 was given");

  Stage several = fakes[3];
  several.candidates = [](const Problem&) -> TileList { return {2, {{16, 16}, {64, 32}}}; };
  EXPECT_EQ(tile_candidates(several, p), (std::vector<Tiles>{{64, 32}, {16, 16}}));
  EXPECT_EQ(tiles_of(several, p), (Tiles{64, 32}));
  EXPECT_EQ(tiles_of(several, p, {.tiles = {16, 16}}), (Tiles{16, 16}));
  EXPECT_EQ(refusal_of(several, p, {.tiles = {16, 32}}),
            "stage 91 at head_dim 8 is built for 64x32, 16x16; 16x32 was given");

  Stage none = fakes[3];
  none.tiles = [](const Problem&) { return Tiles{}; };
  EXPECT_TRUE(tile_candidates(none, p).empty());
  EXPECT_EQ(tiles_of(none, p), Tiles{});
  EXPECT_EQ(refusal_of(none, p, {.tiles = {64, 32}}),
            "stage 91 has no tiles to choose; 64x32 was given");
}

TEST(Variants, OnlyStage05HasAnotherGrid) {
  EXPECT_NE(refusal_of(fakes[3], small(), {.tiles = {}, .one_block_per_head = true})
                .find("stage 91 has one grid"),
            std::string::npos);
  Stage fifth = fakes[3];
  fifth.id = "05";
  EXPECT_EQ(refusal_of(fifth, small(), {.tiles = {}, .one_block_per_head = true}), "accepted");
}

TEST(Variants, ReachTheStage) {
  static ForwardArgs seen_args;
  FakeDevice device;
  Stage fifth = fakes[3];
  fifth.id = "05";
  fifth.candidates = [](const Problem&) -> TileList { return {1, {{16, 16}}}; };
  fifth.lse = nullptr;
  fifth.forward = [](const Problem&, const ForwardArgs& args, Stream) { seen_args = args; };
  const Problem p = small();
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  run_forward(device, fifth, p, inputs);
  EXPECT_EQ(seen_args.tiles, (Tiles{64, 32}));
  EXPECT_FALSE(seen_args.one_block_per_head);
  run_forward(device, fifth, p, inputs, {.tiles = {16, 16}, .one_block_per_head = true});
  EXPECT_EQ(seen_args.tiles, (Tiles{16, 16}));
  EXPECT_TRUE(seen_args.one_block_per_head);
  EXPECT_THROW(run_forward(device, fifth, p, inputs, {.tiles = {8, 8}}), std::invalid_argument);
  EXPECT_TRUE(device.live.empty());
}

TEST(RunForward, CountsBytesIn64Bits) {
  Problem p{.batch = 1,
            .heads = 1,
            .kv_heads = 1,
            .seqlen_q = 100000,
            .seqlen_k = 100000,
            .head_dim = 128};
  set_packed_strides(p);
  EXPECT_EQ(device_bytes(fakes[3], p), 4 * 2 * 12800000 + 4 * 100000 + 4 * int64_t{10000000000});
}

// --- the backward pass
// ------------------------------------------------------------------------------------

struct SeenBackward {
  bool poisoned = false;
  BackwardArgs args;
  std::vector<uint16_t> o, d_o;
  std::vector<float> l;
} seen_backward;

// dQ = 1, dK = 2, dV = 3.
void backward(const Problem& p, const GradientStrides& strides, const BackwardArgs& args, Stream) {
  const WorkspaceList list = workspaces(p);
  const int64_t dq = layout_dq(p, strides).extent(), dk = layout_dk(p, strides).extent(),
                dv = layout_dv(p, strides).extent();
  seen_backward.poisoned = poisoned(args.dQ, size_t(2 * dq)) && poisoned(args.dK, size_t(2 * dk)) &&
                           poisoned(args.dV, size_t(2 * dv)) &&
                           poisoned(args.workspace[0], size_t(4 * list.buffer[0].count));
  seen_backward.args = args;
  const auto read = [](const void* data, int64_t count) {
    const auto* bits = static_cast<const uint16_t*>(data);
    return std::vector<uint16_t>(bits, bits + count);
  };
  seen_backward.o = read(args.O, layout_o(p).extent());
  seen_backward.d_o = read(args.dO, layout_do(p, strides).extent());
  seen_backward.l.assign(args.L, args.L + p.rows());
  std::fill_n(static_cast<uint16_t*>(args.dQ), dq, uint16_t{1});
  std::fill_n(static_cast<uint16_t*>(args.dK), dk, uint16_t{2});
  std::fill_n(static_cast<uint16_t*>(args.dV), dv, uint16_t{3});
}

Stage backward_stage() {
  Stage stage = fakes[3];
  stage.id = "95";
  stage.forward = nullptr;
  stage.lse = nullptr;
  stage.backward = backward;
  return stage;
}

BackwardInputs backward_inputs(const Problem& p, const GradientStrides& strides) {
  return {.d_o = make_d_o(p, strides, 2),
          .forward = {.o = std::vector<uint16_t>(size_t(layout_o(p).extent()), 0x3c00),
                      .l = std::vector<float>(size_t(p.rows()), 0.5f)}};
}

TEST(RunBackward, PoisonsRunsAndReadsBack) {
  FakeDevice device;
  const Problem p = small();
  GradientStrides strides = strides_of_tensors(p);
  strides.d_k = {.batch = 1000, .head = 1000, .row = 24};
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  const BackwardInputs given = backward_inputs(p, strides);
  const Stage stage = backward_stage();
  for (const bool deterministic : {false, true}) {
    const BackwardRun run = run_backward(device, stage, p, strides, inputs, given,
                                         {.tiles = {}, .deterministic = deterministic});
    EXPECT_TRUE(seen_backward.poisoned);
    EXPECT_EQ(seen_backward.args.deterministic, deterministic);
    EXPECT_EQ(seen_backward.args.tiles, (Tiles{64, 32}));
    EXPECT_EQ(seen_backward.o, given.forward.o);
    EXPECT_EQ(seen_backward.l, given.forward.l);
    EXPECT_EQ(seen_backward.d_o, given.d_o);
    EXPECT_EQ(run.gradients.dq, std::vector<uint16_t>(size_t(layout_q(p).extent()), 1));
    EXPECT_EQ(run.gradients.dk, std::vector<uint16_t>(1000 + 6 * 24 + 8, 2));
    EXPECT_EQ(run.gradients.dv, std::vector<uint16_t>(size_t(layout_v(p).extent()), 3));
    EXPECT_FALSE(run.ledger.has_value());
  }
  EXPECT_EQ(device.names,
            (std::set<std::string>{"Q", "K", "V", "O", "L", "dO", "dQ", "dK", "dV", "S"}));
  EXPECT_TRUE(device.live.empty());
}

TEST(RunBackward, RunsEmptyProblems) {
  FakeDevice device;
  for (const Problem& p : {small(0, 7), small(5, 0), small(0, 0)}) {
    const GradientStrides strides = strides_of_tensors(p);
    const BackwardRun run =
        run_backward(device, backward_stage(), p, strides, make_inputs(p, InputKind::normal, 1),
                     backward_inputs(p, strides));
    EXPECT_EQ(run.gradients.dq.size(), size_t(layout_q(p).extent()));
    EXPECT_EQ(run.gradients.dk.size(), size_t(layout_k(p).extent()));
  }
}

TEST(RunBackward, RefusesWrongSizesAndTheOtherPass) {
  FakeDevice device;
  const Problem p = small();
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  const auto refusal = [&](const Stage& stage, const GradientStrides& its_strides,
                           const BackwardInputs& given, const Variant& variant = {}) {
    try {
      run_backward(device, stage, p, its_strides, inputs, given, variant);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const BackwardInputs good = backward_inputs(p, strides);
  EXPECT_EQ(refusal(backward_stage(), strides, good), "accepted");
  for (const int wrong : {0, 1, 2}) {
    BackwardInputs given = good;
    if (wrong == 0) given.d_o.pop_back();
    if (wrong == 1) given.forward.o.pop_back();
    if (wrong == 2) given.forward.l.pop_back();
    const char* names[] = {"dO holds ", "O holds ", "L holds "};
    EXPECT_EQ(refusal(backward_stage(), strides, given).find(names[wrong]), 0u);
  }
  GradientStrides overlapping = strides;
  overlapping.d_v.row = 0;
  EXPECT_NE(refusal(backward_stage(), overlapping, good).find("the row stride of dV is 0"),
            std::string::npos);
  EXPECT_EQ(refusal(fakes[3], strides, good),
            "stage 91 is of the forward pass; one of the backward is needed");
  EXPECT_NE(refusal(backward_stage(), strides, good, {.tiles = {8, 8}}).find("8x8 was given"),
            std::string::npos);
  try {
    run_forward(device, backward_stage(), p, inputs);
    ADD_FAILURE();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "stage 95 is of the backward pass; one of the forward is needed");
  }
  EXPECT_NE(refusal_of(fakes[3], p, {.tiles = {}, .deterministic = true})
                .find("stage 91 is of the forward pass"),
            std::string::npos);
  EXPECT_TRUE(device.live.empty());
}

TEST(RunBackward, MemoryIsThatOfBothPasses) {
  const Problem p = small();
  const GradientStrides strides = strides_of_tensors(p);
  EXPECT_EQ(device_bytes(backward_stage(), p) - device_bytes(fakes[3], p),
            2 * (layout_do(p, strides).extent() + layout_dq(p, strides).extent() +
                 layout_dk(p, strides).extent() + layout_dv(p, strides).extent()));
}

// The last of the forward pass that can run: neither one of another architecture nor one of the
// backward pass.
TEST(RunBackward, TheLastForwardStageGivesOAndL) {
  FakeDevice device;
  const Problem p = small();
  EXPECT_EQ(last_forward_stage(p, device.info()), &fakes[4]);
  device.capability = 86;  // 93 is for 9.0 alone
  EXPECT_EQ(last_forward_stage(p, device.info()), &fakes[3]);
  device.capability = 75;
  EXPECT_EQ(last_forward_stage(p, device.info()), nullptr);
}

TEST(LedgerCounts, Add) {
  Ledger a, b;
  a.global_read = {{"Q", 1}, {"K", 2}};
  b.global_read = {{"K", 10}, {"S", 20}};
  a.exp = 5;
  b.exp = 7;
  b.tiles_masked = 3;
  a += b;
  EXPECT_EQ(a.global_read, (BytesByTensor{{"Q", 1}, {"K", 12}, {"S", 20}}));
  EXPECT_EQ(a.exp, 12);
  EXPECT_EQ(a.tiles_masked, 3);
  EXPECT_EQ(Ledger::total(a.global_read), 33);
}

// Every count of the struct is added and written: a Ledger made of distinct numbers comes back from
// both.
TEST(LedgerCounts, NoneIsForgotten) {
  Ledger ledger;
  ledger.global_read["a"] = 1;
  ledger.global_written["b"] = 2;
  ledger.global_unique_read["c"] = 3;
  // After the three maps the struct holds nothing but 64-bit counts, up to its end.
  auto* count = &ledger.atomic_bytes;
  const auto counts = size_t(reinterpret_cast<int64_t*>(&ledger + 1) - count);
  for (size_t i = 0; i < counts; ++i) count[i] = int64_t(100 + i);

  Ledger sum;
  sum += ledger;
  EXPECT_EQ(sum, ledger);
  nlohmann::ordered_json json = ledger;
  EXPECT_EQ(json.size(), 3 + counts);
  std::set<int64_t> written;
  for (const auto& [name, value] : json.items()) {
    if (value.is_number()) written.insert(value.get<int64_t>());
  }
  EXPECT_EQ(written.size(), counts);
  EXPECT_EQ(json["global_read"]["a"], 1);
  EXPECT_EQ(json["global_written"]["b"], 2);
  EXPECT_EQ(json["global_unique_read"]["c"], 3);
  for (const char* name : {"atomic_bytes", "shared_read", "shared_written", "warp_exchange_bytes",
                           "bank_conflicts", "barriers", "shuffles", "mma_flops", "exp", "div",
                           "div_in_loop", "grid_blocks", "tiles_visited", "tiles_masked"}) {
    EXPECT_TRUE(json.contains(name)) << name;
  }
  EXPECT_EQ(json["exp"], ledger.exp);
  EXPECT_EQ(json["div_in_loop"], ledger.div_in_loop);
  EXPECT_EQ(json["tiles_masked"], ledger.tiles_masked);
}

}  // namespace
}  // namespace flashsteps
