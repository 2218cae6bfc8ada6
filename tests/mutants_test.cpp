// The tests' own test: takes one primitive out of a kernel at a time (a barrier, a wait, a mask, a
// shuffle …) and asks that the conformance problems notice. Primitives are skipped at run time by
// their line, so nothing is recompiled. What cannot be noticed is listed with a proof in
// tests/equivalent_mutants.md.
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "stage_suite.h"

#ifdef FLASHSTEPS_HAS_MODEL
namespace flashsteps {
namespace {

using model::Site;
using model::SiteKind;

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

std::string source_line(const std::string& file, int number) {
  std::ifstream in(file);
  std::string line;
  for (int i = 0; i < number; ++i) std::getline(in, line);
  return trimmed(line);
}

// "file | kind | source line": survives that lines move.
std::string key_of(const Site& site) {
  return site.file + " | " + to_string(site.kind) + " | " + source_line(site.file, site.line);
}

// The rows `| file | kind | `source` | proof |` of tests/equivalent_mutants.md, as keys.
std::set<std::string> equivalent_mutants() {
  std::ifstream in("tests/equivalent_mutants.md");
  EXPECT_TRUE(in) << "tests/equivalent_mutants.md is missing";
  std::set<std::string> keys;
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind("| ", 0) != 0) continue;
    const auto code = line.find('`'), end = line.rfind('`');
    if (code == std::string::npos || end == code) continue;
    std::stringstream cells(line.substr(1, code - 1));
    std::string file, kind;
    std::getline(cells, file, '|');
    std::getline(cells, kind, '|');
    keys.insert(trimmed(file) + " | " + trimmed(kind) + " | " +
                line.substr(code + 1, end - code - 1));
  }
  return keys;
}

// A problem with its inputs and right values, made once.
struct Killer {
  Problem problem;
  Inputs inputs;
  Oracle oracle;
  Killer(const Problem& p, InputKind kind)
      : problem(p), inputs(make_inputs(p, kind, 7)), oracle(make_oracle(p, inputs, all_rows(p))) {}
};

const std::vector<Killer>& killers(const Stage& stage) {
  static const std::vector<Killer> all = {
      {problem_of(1, 2, 1, 70, 150, 72, true), InputKind::moving_max},
      {problem_of(1, 1, 1, 40, 129, 64), InputKind::moving_max},
      {problem_of(1, 1, 1, 130, 70, 64, true, DType::bf16), InputKind::normal},
      {problem_of(1, 1, 1, 20, 130, 64), InputKind::large_logits},
  };
  // Stage 10 has two buffers each of K and V, and 10e three of Q, whose blocks take four row blocks
  // here: what guards a buffer that is used again shows with the third tile, or the fourth.
  static const std::vector<Killer> with_rings = [] {
    std::vector<Killer> more = all;
    more.push_back({problem_of(1, 12, 3, 20, 300, 64), InputKind::moving_max});
    return more;
  }();
  return std::string(stage.id) < "10" ? all : with_rings;
}

enum class Outcome { survived, wrong_numbers, diagnosed };

const std::vector<BackwardCase>& backward_killers() {
  static const std::vector<BackwardCase> all = {
      {problem_of(1, 2, 1, 70, 150, 72, true), InputKind::moving_max, 7},
      {problem_of(1, 1, 1, 150, 70, 64), InputKind::moving_max, 7},
      {problem_of(1, 1, 1, 130, 70, 64, true, DType::bf16), InputKind::normal, 7},
      {problem_of(1, 2, 2, 20, 130, 128), InputKind::large_logits, 7},
      // Two blocks that take turns at d = 64; whole tiles alone.
      {problem_of(1, 1, 1, 130, 140, 64), InputKind::normal, 7},
      {problem_of(1, 1, 1, 128, 128, 128), InputKind::moving_max, 7},
  };
  return all;
}

// What `check`, which runs the stage and gives a line that says what is wrong, finds.
template <typename Check>
Outcome outcome_of_one(std::string* message, Check&& check) {
  try {
    *message = check();
    return message->empty() ? Outcome::survived : Outcome::wrong_numbers;
  } catch (const model::Fault& fault) {
    *message = fault.what();
    return Outcome::diagnosed;
  }
}

// What the problems find, the first that finds something ending the search; `message` says what.
Outcome outcome_of(const Stage& stage, std::string* message) {
  if (is_backward(stage)) {
    for (const BackwardCase& killer : backward_killers()) {
      for (const Variant& variant : kBackwardVariants) {
        const Outcome outcome = outcome_of_one(
            message, [&] { return killer.judge(killer.run(stage, variant).gradients); });
        if (outcome != Outcome::survived) return outcome;
      }
    }
    return Outcome::survived;
  }
  for (const Killer& killer : killers(stage)) {
    const Outcome outcome = outcome_of_one(message, [&] {
      const ForwardRun run =
          run_forward(*device_for(Target::model), stage, killer.problem, killer.inputs);
      return compare(killer.problem, killer.oracle, run.outputs).describe();
    });
    if (outcome != Outcome::survived) return outcome;
  }
  return Outcome::survived;
}

bool is_synchronisation(SiteKind kind) {
  switch (kind) {
    case SiteKind::barrier:
    case SiteKind::warp_barrier:
    case SiteKind::commit:
    case SiteKind::wait:
    case SiteKind::copy:
    case SiteKind::mbarrier_init:
    case SiteKind::arrive:
    case SiteKind::expect:
    case SiteKind::named_barrier:
    case SiteKind::fence:
      return true;
    default:
      return false;
  }
}

class Mutants : public StageTest {
 protected:
  void SetUp() override {
    StageTest::SetUp();
    if (stage().target != Target::model) GTEST_SKIP() << "mutants run on the model";
    before_ = model::options();
  }
  void TearDown() override {
    model::skip_site(std::nullopt);
    model::record_sites(false);
    if (stage().target == Target::model) model::set_options(before_);
  }
  static void set_seed(uint64_t seed) {
    model::Options options = model::options();
    options.seed = seed;
    model::set_options(options);
  }

 private:
  model::Options before_;
};

// In the fast tier the first site of each kind at one seed; in the full tier every site, and what
// synchronises at 20 seeds, each time diagnosed: the fault is named, not only seen in wrong
// numbers.
TEST_P(Mutants, AreNoticed) {
  std::string message;
  model::record_sites(true);
  ASSERT_EQ(outcome_of(stage(), &message), Outcome::survived) << message;
  model::record_sites(false);

  const std::set<std::string> equivalent = equivalent_mutants();
  std::set<SiteKind> kinds_tried;
  int tried = 0;
  for (const Site& site : model::sites()) {
    if (site.file.rfind("common/stage/", 0) == 0)
      continue;  // the kernel that gives L has a test of its own
    if (!full_tier() && !kinds_tried.insert(site.kind).second) continue;
    ++tried;
    const bool listed = equivalent.count(key_of(site)) > 0;
    const int seeds = full_tier() && is_synchronisation(site.kind) ? 20 : 1;
    model::skip_site(site);
    for (int seed = 1; seed <= seeds; ++seed) {
      set_seed(seed);
      const Outcome outcome = outcome_of(stage(), &message);
      if (listed) {
        EXPECT_EQ(outcome, Outcome::survived)
            << key_of(site) << "\nis listed as equivalent, yet: " << message;
        continue;
      }
      EXPECT_NE(outcome, Outcome::survived)
          << "not noticed: " << key_of(site) << " (line " << site.line << ", seed " << seed << ")";
      if (is_synchronisation(site.kind)) {
        EXPECT_EQ(outcome, Outcome::diagnosed)
            << "noticed, but not named: " << key_of(site) << " (line " << site.line << ", seed "
            << seed << ")\n"
            << message;
      }
    }
    model::skip_site(std::nullopt);
  }
  EXPECT_GT(tried, 0);
}

// The common kernel that gives L: from S, or from m and l.
TEST_P(Mutants, OfTheKernelThatGivesLAreNoticed) {
  if (!stage().lse) GTEST_SKIP() << "no L by the common kernel";
  std::string message;
  model::record_sites(true);
  ASSERT_EQ(outcome_of(stage(), &message), Outcome::survived) << message;
  model::record_sites(false);
  for (const Site& site : model::sites()) {
    if (site.file.rfind("common/stage/", 0) != 0) continue;
    model::skip_site(site);
    EXPECT_NE(outcome_of(stage(), &message), Outcome::survived) << "not noticed: " << key_of(site);
    model::skip_site(std::nullopt);
  }
}

// A clean kernel raises no alarm, whatever the order of its threads.
TEST_P(Mutants, ACleanKernelRaisesNoAlarm) {
  for (int seed = 1; seed <= (full_tier() ? 50 : 3); ++seed) {
    set_seed(seed);
    std::string message;
    EXPECT_EQ(outcome_of(stage(), &message), Outcome::survived)
        << "seed " << seed << ": " << message;
  }
}

FLASHSTEPS_FOR_ALL_STAGES(Mutants);

}  // namespace
}  // namespace flashsteps
#endif
