// The main of every test program: GoogleTest's, with two additions for ctest. A run in which every
// case was skipped exits with 77 (ctest counts it as skipped, and `./lab test` prints the reasons),
// and a run in which no case was selected fails, so that a filter that fits nothing cannot pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

namespace {

constexpr int kSkippedStatus = 77;

// Prints the reason of each skip once, on lines that `./lab test` collects.
void print_skip_reasons(const testing::UnitTest& unit) {
  std::set<std::string> reasons;
  for (int s = 0; s < unit.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *unit.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestResult& result = *suite.GetTestInfo(t)->result();
      for (int i = 0; i < result.total_part_count(); ++i) {
        const testing::TestPartResult& part = result.GetTestPartResult(i);
        if (part.skipped()) reasons.insert(part.message());
      }
    }
  }
  for (const std::string& reason : reasons) std::printf("skipped because: %s\n", reason.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const bool list = std::any_of(argv, argv + argc, [](const char* argument) {
    return std::strcmp(argument, "--gtest_list_tests") == 0;
  });
  testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  if (list) return status;
  const testing::UnitTest& unit = *testing::UnitTest::GetInstance();
  if (unit.test_to_run_count() == 0) {
    std::fprintf(stderr, "no test case was selected; see --gtest_list_tests\n");
    return 1;
  }
  if (unit.skipped_test_count() > 0) print_skip_reasons(unit);
  const bool all_skipped = unit.skipped_test_count() == unit.test_to_run_count();
  return status == 0 && all_skipped ? kSkippedStatus : status;
}
