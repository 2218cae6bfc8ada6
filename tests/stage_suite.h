// What the tests that go over the registered stages have in common: which stages there are, on
// which devices, and how one is held to the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "common/attention/layout.h"
#include "common/attention/work.h"
#include "common/reference/compare.h"
#include "common/reference/gradients.h"
#include "common/reference/inputs.h"
#include "common/reference/reference.h"
#include "common/stage/device.h"
#include "common/stage/registry.h"
#include "common/stage/run.h"
#ifdef FLASHSTEPS_HAS_MODEL
#include "common/model/model.h"
#endif

namespace flashsteps {

inline bool full_tier() {
  const char* full = std::getenv("FLASHSTEPS_FULL");
  return full && std::string(full) == "1";
}

// One device of each kind for the whole process; nullptr with a reason where there is none.
inline Device* device_for(Target target, std::string* why_not = nullptr) {
  static std::unique_ptr<Device> devices[2];
  static std::string reasons[2];
  const int slot = target == Target::cuda;
  if (!devices[slot] && reasons[slot].empty()) {
    try {
#ifdef FLASHSTEPS_HAS_MODEL
      if (target == Target::model) devices[slot] = make_model_device();
#endif
#ifdef FLASHSTEPS_HAS_CUDA
      if (target == Target::cuda) devices[slot] = make_cuda_device();
#endif
      if (!devices[slot]) reasons[slot] = "not built for this target";
    } catch (const DeviceError& error) {
      reasons[slot] = std::string("no usable card: ") + error.what();
    }
  }
  if (why_not) *why_not = reasons[slot];
  return devices[slot].get();
}

// Every stage that is linked in, for every target.
inline std::vector<const Stage*> all_stages() {
  std::vector<const Stage*> stages;
  for (Target target : {Target::model, Target::cuda}) {
    for (const Stage* stage : stages_for(target)) stages.push_back(stage);
  }
  return stages;
}

// Of these, the ones of the forward pass, or those of the backward pass.
inline std::vector<const Stage*> stages_of(bool backward) {
  std::vector<const Stage*> stages = all_stages();
  std::erase_if(stages, [=](const Stage* stage) { return is_backward(*stage) != backward; });
  return stages;
}

inline std::string stage_label(const Stage& stage) {
  return std::string(stage.id) + "_" + name_of(stage.target);
}

// A problem with packed strides and the default scale.
inline Problem problem_of(int batch, int heads, int kv_heads, int seqlen_q, int seqlen_k,
                          int head_dim, bool causal = false, DType dtype = DType::fp16) {
  Problem p;
  p.batch = batch;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.head_dim = head_dim;
  p.causal = causal;
  p.dtype = dtype;
  p.scale = default_scale(head_dim);
  set_packed_strides(p);
  return p;
}

// Puts a row of padding, a gap between heads and a gap between batches into a tensor's strides.
inline Strides with_gaps(const Strides& packed) {
  return {packed.batch * 2 + 64, packed.head * 2 + 16, packed.row * 2};
}

// Runs the stage and compares every row of O and L with the oracle. Empty when all is right, else
// one line.
inline std::string verdict(const Stage& stage, const Problem& problem, const Inputs& inputs,
                           const Oracle& oracle) {
  try {
    const ForwardRun run = run_forward(*device_for(stage.target), stage, problem, inputs);
    return compare(problem, oracle, run.outputs).describe();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

inline void expect_right(const Stage& stage, const Problem& problem, const Inputs& inputs) {
  const Oracle oracle = make_oracle(problem, inputs, all_rows(problem));
  EXPECT_EQ(verdict(stage, problem, inputs, oracle), "") << stage_label(stage);
}

// A backward pass with its inputs and right values. O and L are those of the reference: the tests
// of a stage link no other.
struct BackwardCase {
  Problem problem;
  GradientStrides strides;
  Inputs inputs;
  BackwardInputs backward;
  GradientOracles oracles;

  BackwardCase(const Problem& p, InputKind kind, uint64_t seed)
      : BackwardCase(p, strides_of_tensors(p), make_inputs(p, kind, seed), seed) {}
  BackwardCase(const Problem& p, const GradientStrides& its_strides, Inputs its_inputs,
               uint64_t seed)
      : BackwardCase(p, its_strides, std::move(its_inputs), make_d_o(p, its_strides, seed)) {}
  BackwardCase(const Problem& p, const GradientStrides& its_strides, Inputs its_inputs,
               std::vector<uint16_t> d_o)
      : problem(p), strides(its_strides), inputs(std::move(its_inputs)) {
    backward = {.d_o = std::move(d_o), .forward = reference_outputs(p, inputs)};
    oracles = make_gradient_oracles(p, strides, inputs, backward.d_o,
                                    row_statistics(p, strides, backward), all_gradient_rows(p));
  }

  // Empty when the gradients are right, else one line.
  std::string judge(const Gradients& gradients) const {
    return compare(problem, strides, oracles, gradients).describe();
  }
  BackwardRun run(const Stage& stage, const Variant& variant = {}) const {
    return run_backward(*device_for(stage.target), stage, problem, strides, inputs, backward,
                        variant);
  }
  // Runs the stage and compares every row of dQ, dK and dV with the oracle.
  std::string verdict(const Stage& stage, const Variant& variant = {}) const {
    try {
      return judge(run(stage, variant).gradients);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
  }
};

// How a backward stage sums dQ: as blocks happen to finish, or in a fixed order.
inline constexpr Variant kBackwardVariants[] = {{}, {.deterministic = true}};

inline const char* name_of_variant(const Variant& variant) {
  return variant.deterministic ? "deterministic" : "by atomics";
}

// A test over one stage on one target; skipped where the target has no device here.
class StageTest : public testing::TestWithParam<const Stage*> {
 protected:
  void SetUp() override {
    std::string reason;
    if (!device_for(GetParam()->target, &reason)) GTEST_SKIP() << reason;
    device_ = device_for(GetParam()->target);
    if (const auto why = why_not(*GetParam(), problem_of(1, 1, 1, 16, 16, 64), device_->info())) {
      GTEST_SKIP() << *why;
    }
  }
  const Stage& stage() const { return *GetParam(); }
  Device& device() const { return *device_; }

 private:
  Device* device_ = nullptr;
};

#define FLASHSTEPS_FOR_STAGES(SUITE, STAGES)                                           \
  INSTANTIATE_TEST_SUITE_P(stage, SUITE, testing::ValuesIn(STAGES),                    \
                           [](const auto& info) { return stage_label(*info.param); }); \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SUITE)
#define FLASHSTEPS_FOR_ALL_STAGES(SUITE) FLASHSTEPS_FOR_STAGES(SUITE, all_stages())
#define FLASHSTEPS_FOR_FORWARD_STAGES(SUITE) FLASHSTEPS_FOR_STAGES(SUITE, stages_of(false))
#define FLASHSTEPS_FOR_BACKWARD_STAGES(SUITE) FLASHSTEPS_FOR_STAGES(SUITE, stages_of(true))

}  // namespace flashsteps
