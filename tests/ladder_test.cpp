// What only all stages together can show.
#include <array>

#include "stage_suite.h"

#ifdef FLASHSTEPS_HAS_MODEL
namespace flashsteps {
namespace {

// Each of the first changes saves traffic: bytes of global memory, read and written, fall from 01
// to 05.
TEST(Ladder, TotalBytesFall) {
  constexpr std::array kIds = {"01", "02d", "03", "04", "05"};  // of those that have been written
  for (const int d : {64, 128}) {
    const Problem p = problem_of(1, 1, 1, 512, 512, d);
    const Inputs inputs = make_inputs(p, InputKind::normal, 1);
    int64_t before = INT64_MAX;
    int stages = 0;
    for (const char* id : kIds) {
      const Stage* stage = find_stage(id, Target::model);
      if (!stage) continue;
      const Ledger ledger = *run_forward(*device_for(Target::model), *stage, p, inputs).ledger;
      const int64_t bytes =
          Ledger::total(ledger.global_read) + Ledger::total(ledger.global_written);
      EXPECT_LT(bytes, before) << "stage " << id << " d " << d;
      before = bytes;
      ++stages;
    }
    EXPECT_GE(stages, 3) << "01, 02d and 03 are to be linked into this test";
  }
}

// O and L of every forward stage serve the backward pass, and the gradients are those of attention
// itself: as near to them as the roundings of O, P and dS allow.
TEST(Ladder, EveryForwardStageFeedsTheBackwardPass) {
  const Problem p = problem_of(1, 4, 2, 100, 150, 64, true);
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::moving_max, 3);
  BackwardInputs backward{.d_o = make_d_o(p, strides, 3), .forward = {}};
  const RowStatistics exact =
      row_statistics(p, strides, backward.d_o, make_oracle(p, inputs, all_rows(p)));
  const GradientOracles truth =
      make_gradient_oracles(p, strides, inputs, backward.d_o, exact, all_gradient_rows(p));
  Device& device = *device_for(Target::model);
  int pairs = 0;
  for (const Stage* stage : stages_for(Target::model)) {
    if (!is_backward(*stage)) continue;
    for (const Stage* forward : stages_for(Target::model)) {
      if (is_backward(*forward)) continue;
      SCOPED_TRACE(testing::Message() << forward->id << " before " << stage->id);
      backward.forward = run_forward(device, *forward, p, inputs).outputs;
      const Gradients gradients =
          run_backward(device, *stage, p, strides, inputs, backward).gradients;
      EXPECT_EQ(
          compare(p, strides,
                  make_gradient_oracles(p, strides, inputs, backward.d_o,
                                        row_statistics(p, strides, backward), all_gradient_rows(p)),
                  gradients)
              .describe(),
          "");
      // Against the truth: rounding O moves D by some 1e-3, and dQ and dK by a part of that.
      const GradientComparison beside = compare(p, strides, truth, gradients);
      EXPECT_LE(beside.dq.max_abs_error, 2 * beside.dq.bound + 4e-3);
      EXPECT_LE(beside.dk.max_abs_error, 2 * beside.dk.bound + 4e-3);
      EXPECT_TRUE(beside.dv.ok) << beside.dv.describe();  // dV takes L alone
      ++pairs;
    }
  }
  EXPECT_GE(pairs, 11) << "every stage of the ladder is to be linked into this test";
}

}  // namespace
}  // namespace flashsteps
#endif
