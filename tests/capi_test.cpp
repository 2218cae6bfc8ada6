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
  EXPECT_EQ(flashsteps_version(), FLASHSTEPS_VERSION);
  EXPECT_TRUE(std::regex_match(flashsteps_commit(), std::regex("([0-9a-f]{40}(-dirty)?)?")))
      << flashsteps_commit();
}

TEST(Capi, StagesAreThoseOfTheBuild) {
  for (Target target : {Target::model, Target::cuda}) {
    std::string ids[2];  // of the forward pass, of the backward pass
    for (const Stage* stage : stages_for(target)) {
      std::string& its = ids[is_backward(*stage)];
      its += (its.empty() ? "" : ",") + std::string(stage->id);
    }
    const int32_t number = target == Target::model ? FLASHSTEPS_MODEL : FLASHSTEPS_CUDA;
    EXPECT_EQ(flashsteps_stages(number), ids[0]);
    EXPECT_EQ(flashsteps_backward_stages(number), ids[1]);
  }
  EXPECT_STREQ(flashsteps_stages(7), "");
  EXPECT_STREQ(flashsteps_backward_stages(7), "");
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
  for (const Stage* stage : stages_of(false)) {
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
    for (const Stage* stage : stages_of(false)) {
      if (stage->target != Target::model) continue;
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
  for (const Stage* stage : stages_of(false)) {
    if (stage->target != Target::cuda || why_not(*stage, p, device->info())) continue;
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

// --- the backward pass
// ------------------------------------------------------------------------------------

// The call for a problem, without tensors. Gradients lie in an order of their own.
flashsteps_backward_args args_for(const Problem& p, const GradientStrides& strides,
                                  const char* stage, flashsteps_target target) {
  const flashsteps_forward_args forward = args_for(p, stage, target);
  flashsteps_backward_args args{};
  args.size = sizeof args;
  args.stage = stage;
  args.target = forward.target;
  args.dtype = forward.dtype;
  args.batch = forward.batch;
  args.heads = forward.heads;
  args.kv_heads = forward.kv_heads;
  args.seqlen_q = forward.seqlen_q;
  args.seqlen_k = forward.seqlen_k;
  args.head_dim = forward.head_dim;
  args.scale = forward.scale;
  args.causal = forward.causal;
  args.q_strides = forward.q_strides;
  args.k_strides = forward.k_strides;
  args.v_strides = forward.v_strides;
  args.o_strides = forward.o_strides;
  args.d_o_strides = c_strides(strides.d_o);
  args.dq_strides = c_strides(strides.d_q);
  args.dk_strides = c_strides(strides.d_k);
  args.dv_strides = c_strides(strides.d_v);
  return args;
}

// dO with gaps, dQ in the other layout, dK with gaps, dV packed.
GradientStrides strides_of_its_own(const Problem& p) {
  Problem packed = p;
  set_packed_strides(packed);
  const GradientStrides strides = strides_of_tensors(packed);
  return {with_gaps(strides.d_o), p.q, with_gaps(strides.d_k), strides.d_v};
}

flashsteps_backward_args good_backward_args() {
  const Problem p = small_problem();
  flashsteps_backward_args args = args_for(p, strides_of_its_own(p), "09", kTarget);
  args.q = args.k = args.v = args.o = args.d_o = some_memory;
  args.dq = args.dk = args.dv = some_memory;
  args.l = reinterpret_cast<const float*>(some_memory);
  return args;
}

TEST(CapiBackward, BadInputIsRefused) {
  struct Case {
    const char* words;
    std::function<void(flashsteps_backward_args&)> spoil;
  };
  const Case cases[] = {
      {"size is 0; allowed: sizeof(flashsteps_backward_args) = 360", [](auto& a) { a.size = 0; }},
      {"size is 359", [](auto& a) { a.size = 359; }},
      {"size is 232", [](auto& a) { a.size = sizeof(flashsteps_forward_args); }},
      {"reserved is 1; allowed: 0", [](auto& a) { a.reserved = 1; }},
      {"stage is NULL; allowed: 01, ", [](auto& a) { a.stage = nullptr; }},
      {"there is no stage '99'", [](auto& a) { a.stage = "99"; }},
      {"stage is 'all'; one stage is allowed", [](auto& a) { a.stage = "all"; }},
      {"stage 08 is of the forward pass; flashsteps_forward() runs it",
       [](auto& a) { a.stage = "08"; }},
      {"target is 2; allowed: 0 (model), 1 (cuda)", [](auto& a) { a.target = 2; }},
      {"dtype is 2", [](auto& a) { a.dtype = 2; }},
      {"causal is 2; allowed: 0, 1", [](auto& a) { a.causal = 2; }},
      {"deterministic is -1; allowed: 0, 1", [](auto& a) { a.deterministic = -1; }},
      {"head_dim is 12", [](auto& a) { a.head_dim = 12; }},
      {"heads = 3 is not a multiple of kv_heads = 2", [](auto& a) { a.heads = 3; }},
      {"the row stride of Q is 41", [](auto& a) { a.q_strides.row = 41; }},
      {"the row stride of dO is 12; allowed: multiples of 8",
       [](auto& a) { a.d_o_strides.row = 12; }},
      {"the row stride of dQ is 8; allowed: at least head_dim = 40",
       [](auto& a) { a.dq_strides.row = 8; }},
      {"no two rows of dK overlap",
       [](auto& a) { a.dk_strides = {.batch = 40, .head = 40, .row = 40}; }},
      {"the head stride of dV is 0",
       [](auto& a) { a.dv_strides = {.batch = 400, .head = 0, .row = 40}; }},
      {"stage 09 at head_dim 40 is built for ", [](auto& a) { a.tile_rows = 1; }},
      {"q is NULL; stage 09 needs it", [](auto& a) { a.q = nullptr; }},
      {"o is NULL; stage 09 needs it", [](auto& a) { a.o = nullptr; }},
      {"d_o is NULL; stage 09 needs it", [](auto& a) { a.d_o = nullptr; }},
      {"l is NULL; stage 09 needs it", [](auto& a) { a.l = nullptr; }},
      {"dq is NULL; stage 09 needs it", [](auto& a) { a.dq = nullptr; }},
      {"dk is NULL; stage 09 needs it", [](auto& a) { a.dk = nullptr; }},
      {"dv is NULL; stage 09 needs it", [](auto& a) { a.dv = nullptr; }},
      {"d_o is at ", [](auto& a) { a.d_o = some_memory + 8; }},
      {"dv is at ", [](auto& a) { a.dv = some_memory + 2; }},
      {"multiples of 4", [](auto& a) { a.l = reinterpret_cast<const float*>(some_memory + 2); }},
  };
  for (const Case& c : cases) {
    flashsteps_backward_args args = good_backward_args();
    c.spoil(args);
    expect_refused(flashsteps_backward(&args), FLASHSTEPS_BAD_INPUT, c.words);
  }
  expect_refused(flashsteps_backward(nullptr), FLASHSTEPS_BAD_INPUT, "args is NULL");
  flashsteps_backward_args args = good_backward_args();
  expect_refused(flashsteps_backward_workspace(&args, nullptr), FLASHSTEPS_BAD_INPUT,
                 "bytes is NULL");
  int32_t rows = 0;
  expect_refused(flashsteps_backward_tiles(&args, nullptr, &rows), FLASHSTEPS_BAD_INPUT,
                 "rows is NULL");
  flashsteps_forward_args forward = good_args();
  forward.stage = "09";
  expect_refused(flashsteps_forward(&forward), FLASHSTEPS_BAD_INPUT,
                 "stage 09 is of the backward pass; flashsteps_backward() runs it");
}

TEST(CapiBackward, NewerCallersAreUnderstood) {
  struct Newer {
    flashsteps_backward_args known;
    int64_t more;
  } newer{good_backward_args(), 0};
  newer.known.size = sizeof newer;
  uint64_t bytes = 0;
  expect_ok(flashsteps_backward_workspace(&newer.known, &bytes));
  newer.more = 1;
  expect_refused(flashsteps_backward_workspace(&newer.known, &bytes), FLASHSTEPS_BAD_INPUT,
                 "too old to know it");
}

TEST(CapiBackward, WorkspaceIsTheSumOfTheStages) {
  const Problem p = small_problem();
  for (const Stage* stage : stages_of(true)) {
    const WorkspaceList list = stage->workspaces(p);
    uint64_t sum = 0;
    for (int i = 0; i < list.size; ++i) {
      sum += (uint64_t(list.buffer[i].count) * uint64_t(size_of(list.buffer[i].dtype)) + 255) /
             256 * 256;
    }
    flashsteps_backward_args args =
        args_for(p, strides_of_its_own(p), stage->id,
                 stage->target == Target::model ? FLASHSTEPS_MODEL : FLASHSTEPS_CUDA);
    for (const int deterministic : {0, 1}) {
      args.deterministic = deterministic;
      uint64_t bytes = ~uint64_t{0};
      expect_ok(flashsteps_backward_workspace(&args, &bytes));
      EXPECT_EQ(bytes, sum) << stage->id;
    }
    EXPECT_GT(sum, 0u) << stage->id;
  }
}

TEST(CapiBackward, WithoutACardItIsUnavailable) {
#ifdef FLASHSTEPS_HAS_CUDA
  if (*why_no_cuda() == '\0') GTEST_SKIP() << "there is a card";
  const std::string why = why_no_cuda();
#else
  const std::string why = "this library was built without CUDA";
#endif
  flashsteps_backward_args args = good_backward_args();
  args.target = FLASHSTEPS_CUDA;
  expect_refused(flashsteps_backward(&args), FLASHSTEPS_UNAVAILABLE, why);
  args.stage = "08";
  expect_refused(flashsteps_backward(&args), FLASHSTEPS_BAD_INPUT,
                 "stage 08 is of the forward pass");
}

// Calls `call(args)` with the tensors of `case`, gradients poisoned before.
template <typename Call>
Gradients call_backward(const BackwardCase& c, flashsteps_backward_args args, Call&& call) {
  const Problem& p = c.problem;
  const auto poisoned = [](const TensorLayout& t) {
    return std::vector<uint16_t>(size_t(t.extent()), 0xffff);
  };
  Gradients gradients{poisoned(layout_dq(p, c.strides)), poisoned(layout_dk(p, c.strides)),
                      poisoned(layout_dv(p, c.strides))};
  args.q = c.inputs.q.data();
  args.k = c.inputs.k.data();
  args.v = c.inputs.v.data();
  args.o = c.backward.forward.o.data();
  args.d_o = c.backward.d_o.data();
  args.l = c.backward.forward.l.data();
  args.dq = gradients.dq.data();
  args.dk = gradients.dk.data();
  args.dv = gradients.dv.data();
  call(args);
  return gradients;
}

#ifdef FLASHSTEPS_HAS_MODEL

TEST(CapiBackward, EveryStageIsRightOnTheModel) {
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    const Problem p = small_problem(dtype);
    const BackwardCase c(p, strides_of_its_own(p), make_inputs(p, InputKind::moving_max, 3), 3);
    for (const Stage* stage : stages_of(true)) {
      if (stage->target != Target::model) continue;
      for (const int deterministic : {0, 1}) {
        flashsteps_backward_args args = args_for(p, c.strides, stage->id, FLASHSTEPS_MODEL);
        args.deterministic = deterministic;
        const Gradients gradients =
            call_backward(c, args, [](auto& a) { expect_ok(flashsteps_backward(&a)); });
        EXPECT_EQ(c.judge(gradients), "") << stage->id;
      }
    }
  }
}

// Strides of 0 are packed ones, whatever those of the inputs are.
TEST(CapiBackward, PackedIsTheDefault) {
  const Problem p = small_problem();
  Problem packed = p;
  set_packed_strides(packed);
  const BackwardCase c(p, strides_of_tensors(packed), make_inputs(p, InputKind::normal, 3), 3);
  flashsteps_backward_args args = args_for(p, {}, "09", FLASHSTEPS_MODEL);
  EXPECT_EQ(c.judge(call_backward(c, args, [](auto& a) { expect_ok(flashsteps_backward(&a)); })),
            "");
}

TEST(CapiBackward, TilesAreToldAndTaken) {
  const Problem p = small_problem();
  const BackwardCase c(p, InputKind::normal, 4);
  for (const Stage* stage : stages_of(true)) {
    if (stage->target != Target::model) continue;
    flashsteps_backward_args args = args_for(p, c.strides, stage->id, FLASHSTEPS_MODEL);
    int32_t rows = 0, keys = 0;
    expect_ok(flashsteps_backward_tiles(&args, &rows, &keys));
    EXPECT_EQ((Tiles{rows, keys}), stage->tiles(p));
    for (const Tiles tiles : tile_candidates(*stage, p)) {
      args.tile_rows = tiles.Br;
      args.tile_keys = tiles.Bc;
      expect_ok(flashsteps_backward_tiles(&args, &rows, &keys));
      EXPECT_EQ((Tiles{rows, keys}), tiles);
      EXPECT_EQ(
          c.judge(call_backward(c, args, [](auto& a) { expect_ok(flashsteps_backward(&a)); })), "");
    }
  }
}

TEST(CapiBackward, EmptyProblems) {
  const Problem no_queries = problem_of(2, 2, 2, 0, 5, 8), no_keys = problem_of(2, 2, 2, 5, 0, 8);
  flashsteps_backward_args args =
      args_for(no_queries, strides_of_tensors(no_queries), "09", FLASHSTEPS_MODEL);
  std::vector<uint16_t> dk(160, 0xffff), dv(160, 0xffff), dq(160, 0xffff);
  args.k = args.v = some_memory;
  args.dk = dk.data();
  args.dv = dv.data();
  expect_ok(flashsteps_backward(&args));
  EXPECT_EQ(dk, std::vector<uint16_t>(160, 0));
  EXPECT_EQ(dv, std::vector<uint16_t>(160, 0));

  args = args_for(no_keys, strides_of_tensors(no_keys), "09", FLASHSTEPS_MODEL);
  const std::vector<uint16_t> zeros(160, 0);
  const std::vector<float> l(20, -std::numeric_limits<float>::infinity());
  args.q = args.o = args.d_o = zeros.data();
  args.l = l.data();
  args.dq = dq.data();
  expect_ok(flashsteps_backward(&args));
  EXPECT_EQ(dq, zeros);
}

#endif

#ifdef FLASHSTEPS_HAS_CUDA

TEST(CapiBackward, cuda_backward) {
  std::string reason;
  Device* device = device_for(Target::cuda, &reason);
  if (!device) GTEST_SKIP() << reason;
  const Problem p = small_problem(DType::bf16);
  const BackwardCase c(p, strides_of_its_own(p), make_inputs(p, InputKind::moving_max, 7), 7);
  for (const Stage* stage : stages_of(true)) {
    if (stage->target != Target::cuda || why_not(*stage, p, device->info())) continue;
    for (const int deterministic : {0, 1}) {
      BackwardBuffers buffers(*device, *stage, p, c.strides);
      buffers.upload(c.inputs, c.backward);
      buffers.poison_outputs();
      flashsteps_backward_args args = args_for(p, c.strides, stage->id, FLASHSTEPS_CUDA);
      const BackwardArgs& its = buffers.args();
      args.q = its.Q;
      args.k = its.K;
      args.v = its.V;
      args.o = its.O;
      args.d_o = its.dO;
      args.l = its.L;
      args.dq = its.dQ;
      args.dk = its.dK;
      args.dv = its.dV;
      args.deterministic = deterministic;
      uint64_t bytes = 0;
      expect_ok(flashsteps_backward_workspace(&args, &bytes));
      const DeviceBuffer workspace(*device, "workspace", DType::fp32, int64_t(bytes / 4));
      expect_refused(flashsteps_backward(&args), FLASHSTEPS_BAD_INPUT, "the workspace has 0 bytes");
      args.workspace = workspace.data();
      args.workspace_bytes = bytes - 1;
      expect_refused(flashsteps_backward(&args), FLASHSTEPS_BAD_INPUT,
                     "needs " + std::to_string(bytes));
      args.workspace_bytes = bytes;
      expect_ok(flashsteps_backward(&args));
      device->synchronize();
      EXPECT_EQ(c.judge(buffers.download()), "") << stage->id;

      args.d_o = some_memory;
      expect_refused(flashsteps_backward(&args), FLASHSTEPS_BAD_INPUT, "d_o at ");
      expect_refused(flashsteps_backward(&args), FLASHSTEPS_BAD_INPUT, "is no memory of a card");
    }
  }
}

#endif

}  // namespace
}  // namespace flashsteps
