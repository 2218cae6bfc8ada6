// The C interface of libflashsteps.so: it computes what the oracle says, refuses bad input with one
// line, and lets no exception out. The program is linked with the stages too, so that it knows what
// the library should answer.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <regex>
#include <thread>

#include "common/attention/layout.h"
#include "common/capi/flashsteps.h"
#include "common/gpu/cuda_support.h"
#include "tests/stage_suite.h"

namespace flashsteps {
namespace {

#ifdef FLASHSTEPS_HAS_MODEL
constexpr flashsteps_target kTarget = FLASHSTEPS_MODEL;
#else
constexpr flashsteps_target kTarget = FLASHSTEPS_CUDA;
#endif

alignas(256) char some_memory[256];  // for calls that are refused before they look into it

flashsteps_strides c_strides(const Strides& s) {
  return {s.batch, s.head, s.row};
}

// The call for a problem, without tensors.
flashsteps_forward_args args_for(const Problem& p, const char* stage, flashsteps_target target) {
  flashsteps_forward_args args{};
  args.size = sizeof args;
  args.stage = stage;
  args.target = target;
  args.dtype = p.dtype == DType::fp16 ? FLASHSTEPS_FP16 : FLASHSTEPS_BF16;
  args.batch = p.batch;
  args.heads = p.heads;
  args.kv_heads = p.kv_heads;
  args.seqlen_q = p.seqlen_q;
  args.seqlen_k = p.seqlen_k;
  args.head_dim = p.head_dim;
  args.scale = p.scale;
  args.causal = p.causal;
  args.q_strides = c_strides(p.q);
  args.k_strides = c_strides(p.k);
  args.v_strides = c_strides(p.v);
  args.o_strides = c_strides(p.o);
  return args;
}

// Grouped heads, lengths that fill no tile, rows with gaps between them in O.
Problem small_problem(DType dtype = DType::fp16) {
  Problem p{.batch = 2,
            .heads = 4,
            .kv_heads = 2,
            .seqlen_q = 37,
            .seqlen_k = 70,
            .head_dim = 40,
            .dtype = dtype,
            .causal = true,
            .scale = 0.2f};
  set_packed_strides(p, Layout::bshd);
  p.o.row += 8;
  p.o.batch += 8 * p.seqlen_q;
  return p;
}

flashsteps_forward_args good_args() {
  flashsteps_forward_args args = args_for(small_problem(), "08", kTarget);
  args.q = args.k = args.v = args.o = some_memory;
  args.l = reinterpret_cast<float*>(some_memory);
  return args;
}

void expect_refused(flashsteps_status status, flashsteps_status wanted, const std::string& words) {
  const std::string error = flashsteps_last_error();
  EXPECT_EQ(status, wanted) << error;
  EXPECT_NE(error.find(words), std::string::npos) << "'" << words << "' is not in: " << error;
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
}

void expect_ok(flashsteps_status status) {
  EXPECT_EQ(status, FLASHSTEPS_OK) << flashsteps_last_error();
  EXPECT_STREQ(flashsteps_last_error(), "");
}

TEST(Capi, Version) {
  EXPECT_EQ(flashsteps_version(), 100);
  EXPECT_TRUE(std::regex_match(flashsteps_commit(), std::regex("([0-9a-f]{40}(-dirty)?)?")))
      << flashsteps_commit();
}

TEST(Capi, StagesAreThoseOfTheBuild) {
  for (Target target : {Target::model, Target::cuda}) {
    std::string ids;
    for (const Stage* stage : stages_for(target))
      ids += (ids.empty() ? "" : ",") + std::string(stage->id);
    EXPECT_EQ(flashsteps_stages(target == Target::model ? FLASHSTEPS_MODEL : FLASHSTEPS_CUDA), ids);
  }
  EXPECT_STREQ(flashsteps_stages(7), "");
}

TEST(Capi, BadInputIsRefused) {
  struct Case {
    const char* words;
    std::function<void(flashsteps_forward_args&)> spoil;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Case cases[] = {
      {"size is 0; allowed: sizeof(flashsteps_forward_args) = 232", [](auto& a) { a.size = 0; }},
      {"size is 231", [](auto& a) { a.size = 231; }},
      {"size is 1000000", [](auto& a) { a.size = 1000000; }},
      {"reserved is 1; allowed: 0", [](auto& a) { a.reserved = 1; }},
      {"stage is NULL; allowed: 01, ", [](auto& a) { a.stage = nullptr; }},
      {"there is no stage '99'; allowed: all, 01, ", [](auto& a) { a.stage = "99"; }},
      {"there is no stage ''", [](auto& a) { a.stage = ""; }},
      {"stage is '06,08'; one stage is allowed", [](auto& a) { a.stage = "06,08"; }},
      {"target is 2; allowed: 0 (model), 1 (cuda)", [](auto& a) { a.target = 2; }},
      {"dtype is -1; allowed: 0 (fp16), 1 (bf16)", [](auto& a) { a.dtype = -1; }},
      {"batch is 0; allowed: 1 to", [](auto& a) { a.batch = 0; }},
      {"heads = 4 is not a multiple of kv_heads = 3", [](auto& a) { a.kv_heads = 3; }},
      {"seqlen_q is -1", [](auto& a) { a.seqlen_q = -1; }},
      {"head_dim is 12; allowed: multiples of 8 from 8 to 128", [](auto& a) { a.head_dim = 12; }},
      {"head_dim is 136", [](auto& a) { a.head_dim = 136; }},
      {"scale is nan; allowed: any finite number", [nan](auto& a) { a.scale = nan; }},
      {"causal is 2; allowed: 0, 1", [](auto& a) { a.causal = 2; }},
      {"q is NULL; stage 08 needs it", [](auto& a) { a.q = nullptr; }},
      {"k is NULL", [](auto& a) { a.k = nullptr; }},
      {"v is NULL", [](auto& a) { a.v = nullptr; }},
      {"o is NULL", [](auto& a) { a.o = nullptr; }},
      {"l is NULL; stage 08 needs it", [](auto& a) { a.l = nullptr; }},
      {"allowed: addresses that are multiples of 16", [](auto& a) { a.q = some_memory + 2; }},
      {"allowed: addresses that are multiples of 4",
       [](auto& a) { a.l = reinterpret_cast<float*>(some_memory + 2); }},
      {"the row stride of Q is 41; allowed: multiples of 8", [](auto& a) { a.q_strides.row = 41; }},
      {"the row stride of O is 40; allowed: at least",
       [](auto& a) {
         a.o_strides = {4000, 40, 40};
       }},
      {"; 32x32 was given", [](auto& a) { a.tile_rows = a.tile_keys = 32; }},
      {"; -1x0 was given", [](auto& a) { a.tile_rows = -1; }},
      {"one_block_per_head is 2; allowed: 0, 1", [](auto& a) { a.one_block_per_head = 2; }},
      {"stage 08 has one grid; only 05", [](auto& a) { a.one_block_per_head = 1; }},
  };
  for (const Case& c : cases) {
    flashsteps_forward_args args = good_args();
    c.spoil(args);
    expect_refused(flashsteps_forward(&args), FLASHSTEPS_BAD_INPUT, c.words);
  }
  expect_refused(flashsteps_forward(nullptr), FLASHSTEPS_BAD_INPUT, "args is NULL");
  flashsteps_forward_args args = good_args();
  expect_refused(flashsteps_forward_workspace(&args, nullptr), FLASHSTEPS_BAD_INPUT,
                 "bytes is NULL");
  int32_t rows = 0;
  expect_refused(flashsteps_forward_tiles(&args, &rows, nullptr), FLASHSTEPS_BAD_INPUT,
                 "keys is NULL");
}

// A caller that was compiled with a newer header: its longer struct is taken while it asks for
// nothing new.
TEST(Capi, NewerCallersAreUnderstood) {
  struct Newer {
    flashsteps_forward_args known;
    int64_t more;
  } newer{good_args(), 0};
  newer.known.size = sizeof newer;
  uint64_t bytes = 1;
  expect_ok(flashsteps_forward_workspace(&newer.known, &bytes));
  EXPECT_EQ(bytes, 0u);
  newer.more = 1;
  expect_refused(flashsteps_forward_workspace(&newer.known, &bytes), FLASHSTEPS_BAD_INPUT,
                 "too old to know it");
}

TEST(Capi, WorkspaceIsTheSumOfTheStages) {
  Problem p{.batch = 3, .heads = 5, .kv_heads = 1, .seqlen_q = 123, .seqlen_k = 77, .head_dim = 64};
  set_packed_strides(p);
  for (const Stage* stage : all_stages()) {
    const WorkspaceList list = stage->workspaces(p);
    uint64_t sum = 0;
    for (int i = 0; i < list.size; ++i) {
      sum += (uint64_t(list.buffer[i].count) * uint64_t(size_of(list.buffer[i].dtype)) + 255) /
             256 * 256;
    }
    flashsteps_forward_args args =
        args_for(p, stage->id, stage->target == Target::model ? FLASHSTEPS_MODEL : FLASHSTEPS_CUDA);
    uint64_t bytes = ~uint64_t{0};
    expect_ok(flashsteps_forward_workspace(&args, &bytes));
    EXPECT_EQ(bytes, sum) << stage->id;
    EXPECT_EQ(sum == 0, std::string(stage->id) >= "06") << stage->id;
    // Packed is what strides of 0 mean.
    args.q_strides = args.k_strides = args.v_strides = args.o_strides = {};
    expect_ok(flashsteps_forward_workspace(&args, &bytes));
  }
}

TEST(Capi, WithoutACardItIsUnavailable) {
#ifdef FLASHSTEPS_HAS_CUDA
  if (*why_no_cuda() == '\0') GTEST_SKIP() << "there is a card";
  const std::string why = why_no_cuda();
#else
  const std::string why = "this library was built without CUDA";
#endif
  flashsteps_forward_args args = good_args();
  args.target = FLASHSTEPS_CUDA;
  expect_refused(flashsteps_forward(&args), FLASHSTEPS_UNAVAILABLE, why);
  int32_t rows = 0, keys = 0;
  expect_refused(flashsteps_forward_tiles(&args, &rows, &keys), FLASHSTEPS_UNAVAILABLE, why);
  args.head_dim = 7;
  EXPECT_EQ(flashsteps_forward(&args), FLASHSTEPS_BAD_INPUT)
      << "what is wrong everywhere is told first";
}

#ifdef FLASHSTEPS_HAS_MODEL

// Forward on the model through the library, O and L poisoned before.
Outputs forward_on_model(const Problem& p, const Inputs& inputs, flashsteps_forward_args args,
                         flashsteps_status& status, bool with_lse = true) {
  Outputs outputs{std::vector<uint16_t>(size_t(layout_o(p).extent()), 0xffff),
                  std::vector<float>(size_t(p.rows()), std::numeric_limits<float>::quiet_NaN())};
  args.q = inputs.q.data();
  args.k = inputs.k.data();
  args.v = inputs.v.data();
  args.o = outputs.o.data();
  args.l = with_lse ? outputs.l.data() : nullptr;
  status = flashsteps_forward(&args);
  return outputs;
}

TEST(Capi, EveryStageIsRightOnTheModel) {
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    const Problem p = small_problem(dtype);
    const Inputs inputs = make_inputs(p, InputKind::moving_max, 3);
    const Oracle oracle = make_oracle(p, inputs, all_rows(p));
    for (const Stage* stage : stages_for(Target::model)) {
      flashsteps_status status = FLASHSTEPS_FAILED;
      const Outputs outputs =
          forward_on_model(p, inputs, args_for(p, stage->id, FLASHSTEPS_MODEL), status);
      expect_ok(status);
      const Comparison comparison = compare(p, oracle, outputs);
      EXPECT_TRUE(comparison.ok) << stage->id << ": " << comparison.describe();
    }
  }
}

TEST(Capi, VariantsRunAndAreTold) {
  const Problem p = small_problem();
  const Inputs inputs = make_inputs(p, InputKind::normal, 4);
  const Oracle oracle = make_oracle(p, inputs, all_rows(p));
  flashsteps_forward_args tiled = args_for(p, "07", FLASHSTEPS_MODEL),
                          grid = args_for(p, "05", FLASHSTEPS_MODEL);
  tiled.tile_rows = tiled.tile_keys = 64;
  grid.one_block_per_head = 1;
  for (const flashsteps_forward_args& args : {tiled, grid}) {
    flashsteps_status status = FLASHSTEPS_FAILED;
    const Comparison comparison = compare(p, oracle, forward_on_model(p, inputs, args, status));
    expect_ok(status);
    EXPECT_TRUE(comparison.ok) << comparison.describe();
  }
  int32_t rows = 0, keys = 0;
  expect_ok(flashsteps_forward_tiles(&tiled, &rows, &keys));
  EXPECT_EQ(std::pair(rows, keys), std::pair(64, 64));
  tiled.tile_rows = tiled.tile_keys = 0;
  expect_ok(flashsteps_forward_tiles(&tiled, &rows, &keys));
  const Tiles choice = find_stage("07", Target::model)->tiles(p);
  EXPECT_EQ(std::pair(rows, keys), std::pair(choice.Br, choice.Bc));
}

TEST(Capi, LMayBeLeftOutWhereAKernelOfItsOwnComputesIt) {
  const Problem p = small_problem();
  const Inputs inputs = make_inputs(p, InputKind::normal, 5);
  flashsteps_status status = FLASHSTEPS_FAILED;
  const flashsteps_forward_args args = args_for(p, "03", FLASHSTEPS_MODEL);
  const Outputs with = forward_on_model(p, inputs, args, status);
  const Outputs without = forward_on_model(p, inputs, args, status, false);
  expect_ok(status);
  EXPECT_EQ(without.o, with.o);
  EXPECT_TRUE(std::isnan(without.l.front()));
}

TEST(Capi, EmptyProblems) {
  Problem p{.batch = 2,
            .heads = 2,
            .kv_heads = 2,
            .seqlen_q = 0,
            .seqlen_k = 5,
            .head_dim = 8,
            .scale = 1.f};
  flashsteps_forward_args args = args_for(p, "08", FLASHSTEPS_MODEL);
  args.k = args.v = some_memory;
  expect_ok(flashsteps_forward(&args));  // no query: o, q and l may be NULL

  p.seqlen_q = 5;
  p.seqlen_k = 0;
  set_packed_strides(p);
  flashsteps_status status = FLASHSTEPS_FAILED;
  const Outputs outputs = forward_on_model(p, {std::vector<uint16_t>(160), {}, {}},
                                           args_for(p, "08", FLASHSTEPS_MODEL), status);
  expect_ok(status);
  EXPECT_EQ(outputs.o, std::vector<uint16_t>(160, 0));
  EXPECT_EQ(outputs.l, std::vector<float>(20, -std::numeric_limits<float>::infinity()));
}

TEST(Capi, ThreadsDoNotMeet) {
  const Problem p = small_problem();
  const Inputs inputs = make_inputs(p, InputKind::normal, 6);
  flashsteps_status status = FLASHSTEPS_FAILED;
  const Outputs wanted = forward_on_model(p, inputs, args_for(p, "08", FLASHSTEPS_MODEL), status);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 3; ++i) {
        flashsteps_status mine = FLASHSTEPS_FAILED;
        const Outputs outputs =
            forward_on_model(p, inputs, args_for(p, "08", FLASHSTEPS_MODEL), mine);
        expect_ok(mine);
        EXPECT_EQ(outputs.o, wanted.o);
        EXPECT_EQ(outputs.l, wanted.l);
        const std::string stage = "9" + std::to_string(t);
        flashsteps_forward_args bad = args_for(p, stage.c_str(), FLASHSTEPS_MODEL);
        expect_refused(flashsteps_forward(&bad), FLASHSTEPS_BAD_INPUT, "'" + stage + "'");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

#else

TEST(Capi, WithoutTheModelItIsUnavailable) {
  flashsteps_forward_args args = good_args();
  args.target = FLASHSTEPS_MODEL;
  expect_refused(flashsteps_forward(&args), FLASHSTEPS_UNAVAILABLE,
                 "this library was built without the CPU model");
}

#endif

#ifdef FLASHSTEPS_HAS_CUDA

TEST(Capi, cuda_forward) {
  std::string reason;
  Device* device = device_for(Target::cuda, &reason);
  if (!device) GTEST_SKIP() << reason;
  const Problem p = small_problem(DType::bf16);
  const Inputs inputs = make_inputs(p, InputKind::moving_max, 7);
  const Oracle oracle = make_oracle(p, inputs, all_rows(p));
  for (const Stage* stage : stages_for(Target::cuda)) {
    if (why_not(*stage, p, device->info())) continue;
    ForwardBuffers buffers(*device, *stage, p);
    buffers.upload(inputs);
    buffers.poison_outputs();
    flashsteps_forward_args args = args_for(p, stage->id, FLASHSTEPS_CUDA);
    args.q = buffers.args().Q;
    args.k = buffers.args().K;
    args.v = buffers.args().V;
    args.o = buffers.args().O;
    args.l = buffers.args().L;
    uint64_t bytes = 0;
    expect_ok(flashsteps_forward_workspace(&args, &bytes));
    const DeviceBuffer workspace(*device, "workspace", DType::fp32, int64_t(bytes / 4));
    if (bytes > 0) {
      expect_refused(flashsteps_forward(&args), FLASHSTEPS_BAD_INPUT, "the workspace has 0 bytes");
      args.workspace = workspace.data();
      args.workspace_bytes = bytes - 1;
      expect_refused(flashsteps_forward(&args), FLASHSTEPS_BAD_INPUT,
                     "needs " + std::to_string(bytes));
      args.workspace_bytes = bytes;
    }
    expect_ok(flashsteps_forward(&args));
    device->synchronize();
    const Comparison comparison = compare(p, oracle, buffers.download());
    EXPECT_TRUE(comparison.ok) << stage->id << ": " << comparison.describe();

    args.v = some_memory;
    expect_refused(flashsteps_forward(&args), FLASHSTEPS_BAD_INPUT, "v at ");
    expect_refused(flashsteps_forward(&args), FLASHSTEPS_BAD_INPUT, "is no memory of a card");
  }
}

#endif

}  // namespace
}  // namespace flashsteps
