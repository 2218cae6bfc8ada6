// What only all stages together can show.
#include <array>

#include "stage_suite.h"

namespace flashsteps {
namespace {

#ifdef FLASHSTEPS_HAS_MODEL

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
#endif

// Case P20 for a whole step of training, on a card with more blocks than multiprocessors: a forward
// pass and the backward pass on what it left, 100 times, give the same bits of O, L, dK and dV, and
// of dQ where it is summed in a fixed order.
TEST(Ladder, cuda_forward_and_backward_are_bitwise_equal) {
  std::string reason;
  Device* const device = device_for(Target::cuda, &reason);
  if (!device) GTEST_SKIP() << reason;
  int pairs = 0;
  for (const int head_dim : {64, 128}) {
    const Problem p = problem_of(3, 8, 4, 1000, 1100, head_dim, head_dim == 64, DType::bf16);
    const GradientStrides strides = strides_of_tensors(p);
    const Inputs inputs = make_inputs(p, InputKind::moving_max, 9);
    const Stage* const forward = last_forward_stage(p, device->info());
    ASSERT_TRUE(forward);
    for (const Stage* stage : stages_for(Target::cuda)) {
      if (!is_backward(*stage) || why_not(*stage, p, device->info())) continue;
      ForwardBuffers there(*device, *forward, p);
      there.upload(inputs);
      for (const Variant& variant : kBackwardVariants) {
        SCOPED_TRACE(testing::Message() << forward->id << " before " << stage->id << " d "
                                        << head_dim << ", dQ " << name_of_variant(variant));
        BackwardBuffers back(*device, *stage, p, strides, variant);
        BackwardInputs given{.d_o = make_d_o(p, strides, 9), .forward = {}};
        const auto step = [&] {
          there.poison_outputs();
          forward->forward(p, there.args(), nullptr);
          if (forward->lse) forward->lse(p, there.args(), nullptr);
          device->synchronize();
          given.forward = there.download();
          back.upload(inputs, given);
          back.poison_outputs();
          stage->backward(p, strides, back.args(), nullptr);
          device->synchronize();
          return back.download();
        };
        const Gradients first = step();
        const Outputs first_forward = given.forward;
        const GradientOracles oracles =
            make_gradient_oracles(p, strides, inputs, given.d_o, row_statistics(p, strides, given),
                                  affordable_gradient_rows(p, 9));
        EXPECT_EQ(compare(p, strides, oracles, first).describe(), "");
        for (int i = 1; i < 100; ++i) {
          const Gradients again = step();
          // No EXPECT_EQ: it would print millions of elements.
          ASSERT_TRUE(given.forward.o == first_forward.o) << "O of step " << i;
          ASSERT_TRUE(given.forward.l == first_forward.l) << "L of step " << i;
          ASSERT_TRUE(again.dk == first.dk) << "dK of step " << i;
          ASSERT_TRUE(again.dv == first.dv) << "dV of step " << i;
          if (variant.deterministic) {
            ASSERT_TRUE(again.dq == first.dq) << "dQ of step " << i;
          }
        }
        ++pairs;
      }
    }
  }
  EXPECT_GE(pairs, 4) << "a stage of the backward pass is to be linked into this test";
}

}  // namespace
}  // namespace flashsteps
