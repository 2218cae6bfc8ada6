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

}  // namespace
}  // namespace flashsteps
#endif
