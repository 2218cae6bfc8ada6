// The command line: what a person types, and what comes back. Runs the built program.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "common/reference/float16.h"
#include "common/reference/npy.h"
#include "directory_test.h"

extern char** environ;

namespace flashsteps {
namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

std::string contents(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

struct Result {
  int status = -1;
  std::string out, err;
};

class CliTest : public DirectoryTest {
 protected:
  std::string path(const char* name) const { return (directory_ / name).string(); }

  // Files that the program left in the test's directory.
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_))
      names.insert(entry.path().filename().string());
    return names;
  }

  Result run(const Arguments& arguments, const char* program = "attention") const {
    const char* bin = std::getenv("FLASHSTEPS_BIN");
    if (!bin) throw std::runtime_error("FLASHSTEPS_BIN names no directory of programs");
    std::string executable = std::string(bin) + "/" + program;
    std::vector<std::string> words = arguments;
    std::vector<char*> argv = {executable.data()};
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const fs::path scratch = fs::path(directory_).concat("_output");
    fs::create_directory(scratch);
    const std::string out = (scratch / "out").string(), err = (scratch / "err").string();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t child = 0;
    const int failed =
        posix_spawn(&child, executable.c_str(), &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    Result result;
    if (failed != 0) throw std::runtime_error("cannot start " + executable);
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status)) result.status = WEXITSTATUS(status);
    result.out = contents(out);
    result.err = contents(err);
    fs::remove_all(scratch);
    return result;
  }

  // Runs, and expects a refusal: this status, one line on stderr that holds each of `told`, nothing
  // on stdout, nothing written.
  void expect_refusal(const Arguments& arguments, int status,
                      const std::vector<std::string>& told) const {
    const std::set<std::string> before = files();
    const Result result = run(arguments);
    std::string shown;
    for (const std::string& argument : arguments) shown += " " + argument;
    EXPECT_EQ(result.status, status) << shown << "\n" << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << shown << "\n"
                                                                         << result.err;
    EXPECT_EQ(result.err.find("attention: "), 0u) << shown << "\n" << result.err;
    for (const std::string& text : told)
      EXPECT_NE(result.err.find(text), std::string::npos) << shown << "\n" << result.err;
    EXPECT_EQ(result.out, "") << shown;
    EXPECT_EQ(files(), before) << shown;
  }
};

using CliBadInput = CliTest;

TEST_F(CliBadInput, Commands) {
  expect_refusal({}, 2, {"a command is missing", "list, check, count, bench, ladder"});
  expect_refusal({"chekc"}, 2, {"chekc"});
  expect_refusal({"check", "count"}, 2, {"count"});
  expect_refusal({"check", "--colour"}, 2, {"--colour"});
  expect_refusal({"check", "surplus"}, 2, {"surplus"});
  expect_refusal({"--batch", "1"}, 2, {"--batch"});
}

struct BadOption {
  Arguments arguments;
  std::vector<std::string> told;
};

TEST_F(CliBadInput, EveryOption) {
  std::vector<BadOption> cases;
  const auto add = [&](const char* option, const char* value, const char* allowed) {
    cases.push_back({{option, value}, {option, value, allowed}});
  };
  for (const char* option : {"--batch", "--heads", "--kv-heads"}) {
    for (const char* value :
         {"0", "-1", "1.5", "two", "", " 1", "1e3", "2147483648", "99999999999999999999"}) {
      add(option, value, "1 to 2147483647");
    }
  }
  for (const char* option : {"--seqlen", "--seqlen-q", "--seqlen-k"}) {
    for (const char* value : {"-1", "1.5", "x", "", "1000000001"})
      add(option, value, "0 to 1000000000");
  }
  for (const char* value : {"0", "4", "136", "-8", "x", ""}) add("--head-dim", value, "8 to 128");
  for (const char* value : {"12", "36", "100", "127"})
    add("--head-dim", value, "multiples of 8 from 8 to 128");
  for (const char* value : {"fp32", "float16", "", "FP16"}) add("--dtype", value, "fp16, bf16");
  for (const char* value : {"nan", "inf", "1e39", "x", "", "1,5"})
    add("--scale", value, "any finite number");
  add("--scale", "-inf",
      "");  // CLI11 reads this as an option, and says that --scale lacks its value
  cases.back().told = {"--scale"};
  for (const char* value : {"bhdc", "", "BSHD"}) add("--layout", value, "bhsd, bshd");
  for (const char* value : {"zeros", ""})
    add("--input", value, "normal, moving_max, large_logits, outlier_channels, uniform");
  for (const char* value : {"-1", "x", "", "18446744073709551616"})
    add("--seed", value, "0 to 2^64 - 1");
  for (const char* value : {"gpu", "cpu", ""}) add("--device", value, "model, cuda");
  for (const char* value : {"64", "64x", "x64", "64X64", "64x64x64", "0x64", "64x0", "-64x64",
                            "64 x 64", "64x+64", "99999999999x64", ""})
    add("--tiles", value, "BRxBC, as in 128x64");
  for (const char* value : {"b", "BH", "bhr", ""}) add("--grid", value, "allowed: bh");
  for (const char* value : {"-1", "262145", "99KB", "99.5", ""})
    add("--shared-memory", value, "0 to 262144");
  for (const char* value : {"99", "1", "first", "", "01,", "01,99", "all,01"})
    add("--stage", value, "allowed: all, ");
  cases.push_back({{"--batch"}, {"--batch"}});  // without its value
  cases.push_back({{"--batch", "1", "--batch", "2"}, {"--batch"}});
  cases.push_back({{"--seqlen", "8", "--seqlen-q", "8"}, {"--seqlen"}});
  cases.push_back({{"--heads", "4", "--kv-heads", "3"}, {"heads = 4", "kv_heads = 3", "multiple"}});
  cases.push_back(
      {{"--seqlen", "1000000000"}, {"batch * heads * seqlen_q * seqlen_k", "4503599627370496"}});
  for (const BadOption& bad : cases) {
    Arguments arguments = {"check", "--json", path("never.json")};
    arguments.insert(arguments.end(), bad.arguments.begin(), bad.arguments.end());
    expect_refusal(arguments, 2, bad.told);
  }
}

TEST_F(CliBadInput, EveryCommandRefusesIt) {
  for (const char* command : {"list", "check", "count", "bench", "ladder"}) {
    expect_refusal({command, "--head-dim", "36", "--json", path("never.json")}, 2,
                   {"--head-dim", "36", "multiples of 8"});
    expect_refusal({command, "--json", path("absent/a.json")}, 2,
                   {"--json", "there is no directory"});
    expect_refusal({command, "--json", directory_.string()}, 2, {"--json", "is a directory"});
  }
}

TEST_F(CliBadInput, OptionsThatContradict) {
  const std::string q = "tests/data/ocr1s_q.npy", k = "tests/data/ocr1s_k.npy",
                    v = "tests/data/ocr1s_v.npy";
  expect_refusal({"check", "--q", q}, 2, {"--q, --k and --v", "together"});
  expect_refusal({"check", "--k", k, "--v", v}, 2, {"--q, --k and --v", "together"});
  expect_refusal({"check", "--q", q, "--k", k, "--v", v, "--input", "normal"}, 2, {"--input"});
  expect_refusal({"check", "--expect-o", "tests/data/ocr1s_o.npy"}, 2, {"--expect-o", "missing"});
  expect_refusal({"check", "--out", path("o.npy")}, 2, {"--out", "one stage", "all"});
  expect_refusal({"check", "--stage", "01,03", "--lse", path("l.npy")}, 2,
                 {"--lse", "one stage", "01,03"});
  expect_refusal({"check", "--stage", "01", "--out", path("a"), "--lse", path("a")}, 2,
                 {"--out and --lse", "same file"});
  for (const Arguments& option : {Arguments{"--batch", "2"},
                                  {"--heads", "3"},
                                  {"--kv-heads", "1"},
                                  {"--seqlen-q", "7"},
                                  {"--seqlen-k", "7"},
                                  {"--head-dim", "8"}}) {
    Arguments arguments = {"check", "--q", q, "--k", k, "--v", v};
    arguments.insert(arguments.end(), option.begin(), option.end());
    expect_refusal(arguments, 2, {option[0] + " is " + option[1], "but"});
  }
  expect_refusal({"bench", "--sweep", "--seqlen", "512"}, 2, {"--sweep", "leave out"});
  expect_refusal({"bench", "--sweep", "--head-dim", "24"}, 2,
                 {"--head-dim", "24", "divisors of 2048"});
}

TEST_F(CliBadInput, VariantsThatAStageDoesNotHave) {
  const Arguments json = {"--json", path("never.json")};
  const auto refuse = [&](Arguments arguments, const std::vector<std::string>& told) {
    arguments.insert(arguments.end(), json.begin(), json.end());
    expect_refusal(arguments, 2, told);
  };
  for (const char* command : {"check", "count", "bench"}) {
    refuse({command, "--stage", "04", "--grid", "bh"}, {"--grid bh is for stage 05", "stage 04"});
    refuse({command, "--grid", "bh"}, {"--grid bh is for stage 05", "stage 01"});
    refuse({command, "--stage", "05,06", "--grid", "bh"}, {"--grid bh", "stage 06", "05,06"});
  }
  for (const char* command : {"list", "ladder"}) {
    refuse({command, "--stage", "05", "--grid", "bh"}, {"--grid"});
    refuse({command, "--tiles", "64x64"}, {"--tiles"});
    refuse({command, "--card", "H200"}, {"--card"});
  }
  for (const char* command : {"check", "list", "bench", "ladder"})
    refuse({command, "--card", "H200"}, {"--card"});
  for (const char* wrong : {"H300", "", "A10", "RTX 4090"}) {
    refuse({"count", "--card", wrong},
           {std::string("--card is '") + wrong + "'", "allowed: H200, H100, A100, RTX4090, T4"});
  }
  refuse({"count", "--shared-memory", "101376", "--device", "cuda"}, {"--shared-memory", "cuda"});
  refuse({"bench", "--shared-memory", "101376"}, {"--shared-memory"});
  refuse({"bench", "--tune", "--sweep"}, {"--tune and --sweep"});
  refuse({"bench", "--tune", "--tiles", "64x64"}, {"--tune", "leave out --tiles"});
  for (const char* command : {"check", "count", "ladder", "list"})
    refuse({command, "--tune"}, {"--tune"});
}

TEST_F(CliTest, ListsStages) {
  const Result result = run({"list", "--device", "model", "--json", path("list.json")});
  ASSERT_EQ(result.status, 0) << result.err;
  const auto report = nlohmann::json::parse(contents(path("list.json")));
  std::vector<std::string> ids;
  for (const auto& stage : report["stages"]) {
    ids.push_back(stage["stage"]);
    EXPECT_NE(result.out.find(stage["name"].get<std::string>()), std::string::npos);
    EXPECT_NE(result.out.find(stage["summary"].get<std::string>()), std::string::npos);
    EXPECT_TRUE(fs::exists(stage["file"].get<std::string>()));
  }
  EXPECT_TRUE(std::is_sorted(ids.begin(), ids.end()));
  for (const char* id : {"01", "02a", "02b", "02c", "02d", "03"}) {
    EXPECT_NE(std::find(ids.begin(), ids.end(), id), ids.end()) << id;
  }
}

TEST_F(CliTest, HelpExitsWithZero) {
  for (const Arguments& arguments : {Arguments{"--help"}, {"check", "--help"}, {"bench", "-h"}}) {
    const Result result = run(arguments);
    EXPECT_EQ(result.status, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_NE(result.out.find("Usage:"), std::string::npos);
  }
}

// Writes tensors that a problem of these sizes takes: (batch, heads, seqlen, head_dim).
void write_tensor(const std::string& path, std::array<int64_t, 4> shape, bool half,
                  double factor = 1) {
  const size_t count = size_t(shape[0] * shape[1] * shape[2] * shape[3]);
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = float(factor * std::sin(0.7 * double(i) + 0.3));
  if (!half) return write_npy(path, shape, std::span<const float>(values));
  std::vector<uint16_t> bits(count);
  for (size_t i = 0; i < count; ++i) bits[i] = to_bits(values[i], DType::fp16);
  write_npy(path, shape, std::span<const uint16_t>(bits));
}

TEST_F(CliBadInput, Files) {
  const std::string q = path("q.npy"), k = path("k.npy"), v = path("v.npy");
  write_tensor(q, {1, 4, 5, 16}, true);
  write_tensor(k, {1, 2, 7, 16}, true);
  write_tensor(v, {1, 2, 7, 16}, true);
  const auto refuse = [&](const std::string& q, const std::string& k, const std::string& v,
                          const std::vector<std::string>& told, const Arguments& more = {}) {
    Arguments arguments = {"check", "--stage",        "01", "--q", q, "--k", k, "--v", v,
                           "--out", path("never.npy")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_refusal(arguments, 2, told);
  };
  refuse(path("absent.npy"), k, v, {"absent.npy: there is no such file"});
  refuse(q, k, directory_.string(), {"is not a regular file"});
  refuse(q, "", v, {"--k"});
  std::ofstream(path("text.npy")) << "1 2 3 4 5 6 7";
  refuse(q, path("text.npy"), v, {"text.npy: is not a .npy file"});

  const auto write_bytes = [&](const char* name, const std::string& dictionary, size_t data) {
    std::string header = dictionary + "\n";
    std::string bytes = std::string("\x93NUMPY\1\0", 8) + char(header.size() & 0xff) +
                        char(header.size() >> 8) + header;
    bytes.append(data, '\0');
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  };
  const auto dictionary = [](const char* descr, const char* order, const char* shape) {
    return std::string("{'descr': '") + descr + "', 'fortran_order': " + order +
           ", 'shape': " + shape + ", }";
  };
  const char* shape = "(1, 2, 7, 16)";
  refuse(q, write_bytes("bad.npy", dictionary("<f8", "False", shape), 1792), v,
         {"bad.npy", "float64", "float16, float32"});
  refuse(q, write_bytes("bad.npy", dictionary("<i2", "False", shape), 448), v,
         {"bad.npy", "int16", "float16, float32"});
  refuse(q, write_bytes("bad.npy", dictionary(">f2", "False", shape), 448), v,
         {"bad.npy", "big-endian", "little-endian"});
  refuse(q, write_bytes("bad.npy", dictionary("<f2", "True", shape), 448), v,
         {"bad.npy", "Fortran order", "C order"});
  refuse(q, write_bytes("bad.npy", dictionary("<f2", "False", "(2, 7, 16)"), 448), v,
         {"has 3 dimensions", "needed: 4"});
  refuse(q, write_bytes("bad.npy", dictionary("<f2", "False", shape), 447), v,
         {"is truncated", "448", "447"});
  refuse(q, write_bytes("bad.npy", dictionary("<f2", "False", shape), 449), v,
         {"trailing bytes", "448", "449"});
  refuse(q,
         write_bytes("bad.npy", dictionary("<f2", "False", shape) + std::string(20000, ' '), 448),
         v, {"header of 20", "up to 10000"});
  refuse(q,
         write_bytes("bad.npy", dictionary("<f2", "False", "(4611686018427387904, 4, 7, 16)"), 448),
         v, {"overflows"});

  // Files that are right, and do not fit together or are no problem.
  write_tensor(path("other.npy"), {1, 2, 8, 16}, true);
  refuse(q, k, path("other.npy"), {"--v has shape (1, 2, 8, 16)", "(1, 2, 7, 16)"});
  write_tensor(path("other.npy"), {2, 2, 7, 16}, true);
  refuse(q, path("other.npy"), path("other.npy"),
         {"--k has shape (2, 2, 7, 16)", "batch and head_dim"});
  write_tensor(path("other.npy"), {1, 2, 7, 24}, true);
  refuse(q, path("other.npy"), path("other.npy"),
         {"--k has shape (1, 2, 7, 24)", "batch and head_dim"});
  write_tensor(path("other.npy"), {1, 3, 7, 16}, true);
  refuse(q, path("other.npy"), path("other.npy"), {"heads = 4", "kv_heads = 3"});
  write_tensor(path("other.npy"), {1, 4, 5, 20}, true);
  refuse(path("other.npy"), path("other.npy"), path("other.npy"),
         {"head_dim is 20", "multiples of 8"});
  write_tensor(path("other.npy"), {0, 4, 5, 16}, true);
  refuse(path("other.npy"), path("other.npy"), path("other.npy"), {"batch is 0"});
  write_tensor(path("other.npy"), {1, 2, 7, 16}, false, 1e5);
  refuse(q, path("other.npy"), v, {"--k", "allowed in fp16: finite values up to 65504"});
  write_tensor(path("other.npy"), {1, 2, 7, 16}, false, NAN);
  refuse(q, k, path("other.npy"), {"--v", "nan", "finite"}, {"--dtype", "bf16"});
  write_tensor(path("other.npy"), {1, 4, 6, 16}, false);
  refuse(q, k, v, {"--expect-o has shape (1, 4, 6, 16)", "needed: (1, 4, 5, 16)"},
         {"--expect-o", path("other.npy")});
  refuse(q, k, v, {"has 4 dimensions", "needed: 3"}, {"--expect-lse", path("other.npy")});
  refuse(q, k, v, {"--lse", "there is no directory"}, {"--lse", path("absent/l.npy")});
}

#ifdef FLASHSTEPS_HAS_MODEL

// On the model, with a problem that takes it no time.
Arguments small(const char* command, const Arguments& more = {}) {
  Arguments arguments = {command,   "--device", "model",      "--seqlen", "40",
                         "--heads", "2",        "--head-dim", "16"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST_F(CliTest, CheckPassesEveryStage) {
  const Result result =
      run(small("check", {"--json", path("r.json"), "--causal", "--dtype", "bf16"}));
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_EQ(result.err, "");
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  EXPECT_EQ(report["device"]["target"], "model");
  EXPECT_EQ(report["problem"]["seqlen_q"], 40);
  EXPECT_EQ(report["problem"]["dtype"], "bf16");
  EXPECT_EQ(report["problem"]["causal"], true);
  EXPECT_EQ(report["problem"]["visible_pairs"], 820);
  EXPECT_EQ(report["problem"]["flops"], 4 * 2 * 16 * 820);
  ASSERT_GE(report["stages"].size(), 6u);
  for (const auto& stage : report["stages"]) {
    EXPECT_EQ(stage["check"]["ok"], true) << stage;
    const auto expect_checked = [](const auto& check) {
      EXPECT_LE(check["max_abs_err"], 1.0);
      EXPECT_EQ(check["rows"], 80);
      EXPECT_GT(check["bound"], 0.0);
    };
    if (stage.value("pass", "") == "backward") {
      for (const char* tensor : {"dQ", "dK", "dV"}) expect_checked(stage["check"][tensor]);
      EXPECT_FALSE(stage["check"].contains("bound"));
      EXPECT_EQ(stage["flops"], 10 * 2 * 16 * 820);
    } else {
      expect_checked(stage["check"]);
    }
    EXPECT_FALSE(stage.contains("counts"));  // absent, not zero: check does not count
    EXPECT_FALSE(stage.contains("time"));
    EXPECT_NE(result.out.find(stage["name"].get<std::string>()), std::string::npos);
  }
}

TEST_F(CliTest, CountGivesTheLedger) {
  const Result result = run(small("count", {"--stage", "01,02", "--json", path("r.json")}));
  EXPECT_EQ(result.status, 0) << result.err;
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  ASSERT_EQ(report["stages"].size(), 2u);
  EXPECT_EQ(report["stages"][0]["stage"], "01");
  EXPECT_EQ(report["stages"][1]["stage"], "02d");  // the last step
  for (const auto& stage : report["stages"]) {
    EXPECT_GT(stage["counts"]["global_read"]["Q"], 0);
    EXPECT_GT(stage["counts"]["global_written"]["S"], 0);
    EXPECT_GT(stage["counts"]["exp"], 0);
    EXPECT_GT(stage["lse_counts"]["global_read"]["S"], 0);
    EXPECT_EQ(stage["lse_counts"]["global_written"]["L"], 4 * 2 * 40);
    EXPECT_FALSE(stage["counts"]["global_written"].contains("L"));
    EXPECT_FALSE(stage.contains("check"));
    EXPECT_FALSE(stage.contains("time"));
  }
  EXPECT_NE(result.out.find("bank conflicts"), std::string::npos);
}

TEST_F(CliTest, LadderChecksAndCounts) {
  const Result result = run(small("ladder", {"--stage", "01,03", "--json", path("r.json")}));
  EXPECT_EQ(result.status, 0) << result.err;
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  for (const auto& stage : report["stages"]) {
    EXPECT_EQ(stage["check"]["ok"], true);
    EXPECT_GT(stage["counts"]["exp"], 0);
    EXPECT_FALSE(stage.contains("time"));  // what runs on the model is never called a time
  }
}

TEST_F(CliTest, SameSeedSameRun) {
  for (const char* seed : {"1", "2"}) {
    const Arguments arguments = small("ladder", {"--stage", "03", "--seed", seed});
    EXPECT_EQ(run(arguments).out, run(arguments).out);
  }
  EXPECT_NE(run(small("check", {"--stage", "03", "--seed", "1"})).out,
            run(small("check", {"--stage", "03", "--seed", "2"})).out);
}

TEST_F(CliTest, RealTensorsAgreeWithTheirFiles) {
  const auto file = [](const char* name) {
    return std::string("tests/data/ocr1s_") + name + ".npy";
  };
  const Arguments right = {"check",       "--device",     "model",   "--stage",      "03",
                           "--q",         file("q"),      "--k",     file("k"),      "--v",
                           file("v"),     "--expect-o",   file("o"), "--expect-lse", file("lse"),
                           "--json",      path("r.json"), "--out",   path("o.npy"),  "--lse",
                           path("l.npy"), "--scale"};
  Arguments arguments = right;
  arguments.push_back("0.2581988897471611");
  EXPECT_EQ(run(arguments).status, 0);
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  EXPECT_EQ(report["stages"][0]["check_expected"]["ok"], true);
  const NpyArray o = read_npy(path("o.npy"), 4), wanted = read_npy(file("o"), 4);
  ASSERT_EQ(o.shape, wanted.shape);
  EXPECT_EQ(o.dtype, DType::fp16);
  for (int64_t i = 0; i < o.size(); ++i) ASSERT_NEAR(o.value(i), wanted.value(i), 5e-3);
  EXPECT_EQ(read_npy(path("l.npy"), 3).shape, (std::vector<int64_t>{1, 2, 161}));

  // Another scale agrees with the reference, which is told of it, and not with the files: a failed
  // check.
  arguments = right;
  arguments.push_back("0.25");
  const Result wrong = run(arguments);
  EXPECT_EQ(wrong.status, 1);
  EXPECT_NE(wrong.out.find("against the files: "), std::string::npos) << wrong.out;
  EXPECT_EQ(nlohmann::json::parse(contents(path("r.json")))["stages"][0]["check"]["ok"], true);
}

TEST_F(CliTest, FilesInBothLayoutsAndTypes) {
  // The same tensors with their axes in either order give the same O, in the order asked for.
  constexpr int64_t B = 2, H = 4, Hkv = 2, S = 9, D = 8;
  const auto value = [](int64_t tensor, int64_t b, int64_t h, int64_t s, int64_t d) {
    return float(std::cos(double(tensor * 31 + b * 17 + h * 7 + s * 3 + d)));
  };
  const auto write = [&](const std::string& to, int64_t tensor, int64_t heads, bool bshd) {
    std::vector<float> values;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t x = 0; x < (bshd ? S : heads); ++x) {
        for (int64_t y = 0; y < (bshd ? heads : S); ++y) {
          for (int64_t d = 0; d < D; ++d)
            values.push_back(value(tensor, b, bshd ? y : x, bshd ? x : y, d));
        }
      }
    }
    write_npy(to, std::array<int64_t, 4>{B, bshd ? S : heads, bshd ? heads : S, D},
              std::span<const float>(values));
  };
  for (const char* dtype : {"fp16", "bf16"}) {
    std::array<NpyArray, 2> O;
    for (const bool bshd : {false, true}) {
      write(path("q.npy"), 0, H, bshd);
      write(path("k.npy"), 1, Hkv, bshd);
      write(path("v.npy"), 2, Hkv, bshd);
      const Result result =
          run({"check", "--device", "model", "--stage", "03", "--q", path("q.npy"), "--k",
               path("k.npy"), "--v", path("v.npy"), "--layout", bshd ? "bshd" : "bhsd", "--dtype",
               dtype, "--out", path("o.npy")});
      EXPECT_EQ(result.status, 0) << result.out << result.err;
      O[bshd] = read_npy(path("o.npy"), 4);
    }
    EXPECT_EQ(O[0].shape, (std::vector<int64_t>{B, H, S, D}));
    EXPECT_EQ(O[1].shape, (std::vector<int64_t>{B, S, H, D}));
    EXPECT_EQ(O[0].dtype, std::string(dtype) == "fp16" ? DType::fp16 : DType::fp32);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t s = 0; s < S; ++s) {
          for (int64_t d = 0; d < D; ++d) {
            ASSERT_EQ(O[0].value(((b * H + h) * S + s) * D + d),
                      O[1].value(((b * S + s) * H + h) * D + d));
          }
        }
      }
    }
  }
}

TEST_F(CliTest, EmptyProblems) {  // P14
  for (const Arguments& lengths : {Arguments{"--seqlen-q", "3", "--seqlen-k", "0"},
                                   {"--seqlen-q", "0", "--seqlen-k", "3"},
                                   {"--seqlen", "0"},
                                   {"--seqlen-q", "0", "--seqlen-k", "3", "--causal"},
                                   {"--seqlen-q", "3", "--seqlen-k", "0", "--causal"}}) {
    for (const char* command : {"check", "count", "ladder", "list"}) {
      Arguments arguments = {command, "--device", "model"};
      arguments.insert(arguments.end(), lengths.begin(), lengths.end());
      const Result result = run(arguments);
      EXPECT_EQ(result.status, 0) << command << " " << lengths[0] << result.out << result.err;
    }
  }
}

TEST_F(CliBadInput, TilesThatAStageIsNotBuiltFor) {
  const auto refuse = [&](const Arguments& more, const std::vector<std::string>& told) {
    for (const char* command : {"check", "count"}) {
      Arguments arguments = {command, "--device", "model", "--json", path("never.json")};
      arguments.insert(arguments.end(), more.begin(), more.end());
      expect_refusal(arguments, 2, told);
    }
  };
  refuse({"--stage", "07", "--head-dim", "128", "--tiles", "32x32"},
         {"stage 07 at head_dim 128 is built for ", "; 32x32 was given"});
  refuse({"--stage", "08", "--head-dim", "64", "--tiles", "64x128"},
         {"stage 08 at head_dim 64 is built for ", ", 64x64", "; 64x128 was given"});
  refuse({"--stage", "05", "--head-dim", "128", "--tiles", "64x64"},
         {"stage 05 at head_dim 128 is built for 32x64; 64x64 was given"});
  // Smaller on a card with less shared memory.
  refuse({"--stage", "05", "--head-dim", "128", "--tiles", "32x64", "--shared-memory", "101376"},
         {"is built for 16x64; 32x64 was given"});
  refuse({"--stage", "01", "--tiles", "64x64"}, {"stage 01 has no tiles to choose"});
  refuse({"--tiles", "64x64"}, {"stage 01 has no tiles to choose"});
  refuse({"--stage", "06,07,08", "--tiles", "128x128"}, {"stage 06", "is built for 64x64"});
}

// What is printed is what ran: the ledger shows the grid and the tiles.
TEST_F(CliTest, TilesAndGridAreThoseAskedFor) {
  const auto counted = [&](const Arguments& more) {
    Arguments arguments = {"count", "--device", "model", "--batch", "1",           "--heads",
                           "2",     "--seqlen", "192",   "--json",  path("r.json")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result result = run(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    const auto report = nlohmann::json::parse(contents(path("r.json")));
    for (const auto& stage : report["stages"]) {
      const std::string tiles = std::to_string(stage["tiles"]["Br"].get<int>()) + "x" +
                                std::to_string(stage["tiles"]["Bc"].get<int>());
      EXPECT_NE(result.out.find(tiles), std::string::npos) << result.out;
    }
    return report["stages"];
  };
  const auto tiles = [](int Br, int Bc) { return nlohmann::json{{"Br", Br}, {"Bc", Bc}}; };
  for (const auto& stage : counted({"--stage", "06,07,08", "--tiles", "64x64"})) {
    EXPECT_EQ(stage["tiles"], tiles(64, 64));
    EXPECT_EQ(stage["counts"]["grid_blocks"], 2 * 3);
    EXPECT_EQ(stage["counts"]["tiles_visited"], 2 * 3 * 3);
  }
  for (const auto& stage : counted({"--stage", "07,08"})) {  // their own choice is a larger tile
    EXPECT_GT(stage["tiles"]["Br"], 64);
    const int Br = stage["tiles"]["Br"];
    EXPECT_EQ(stage["counts"]["grid_blocks"], 2 * ((192 + Br - 1) / Br));
  }
  for (const bool small : {false, true}) {
    const int Br = small ? 16 : 32;
    const auto stage = counted(
        {"--stage", "05", "--head-dim", "128", "--shared-memory", small ? "101376" : "166912"})[0];
    EXPECT_EQ(stage["tiles"], tiles(Br, 64));
    EXPECT_EQ(stage["counts"]["grid_blocks"], 2 * 192 / Br);
    EXPECT_FALSE(stage.contains("grid"));
  }
  const auto grids = counted({"--stage", "05", "--grid", "bh"});
  EXPECT_EQ(grids[0]["grid"], "bh");
  EXPECT_EQ(grids[0]["counts"]["grid_blocks"], 2);
  EXPECT_EQ(counted({"--stage", "05"})[0]["counts"]["global_read"],
            grids[0]["counts"]["global_read"]);  // the traffic is the same
  const Result check = run({"check", "--device", "model", "--stage", "07,08", "--tiles", "64x64",
                            "--seqlen", "70", "--json", path("check.json")});
  EXPECT_EQ(check.status, 0) << check.out;
  EXPECT_NE(check.out.find("64x64"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(contents(path("check.json")))["stages"][0]["tiles"],
            tiles(64, 64));
  const Result own =
      run({"check", "--device", "model", "--grid", "bh", "--seqlen", "70"}, "05_fa2_loop_swap");
  EXPECT_EQ(own.status, 0) << own.out << own.err;
}

TEST_F(CliTest, ListNamesEveryTileSize) {
  const Result result = run({"list", "--device", "model", "--stage", "01,05,07", "--head-dim",
                             "128", "--shared-memory", "101376", "--json", path("r.json")});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.out.find("16x64"), std::string::npos) << result.out;
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  EXPECT_EQ(report["device"]["shared_memory_per_block"], 101376);
  EXPECT_FALSE(report["stages"][0].contains("candidates"));
  EXPECT_EQ(report["stages"][1]["candidates"].size(), 1u);
  ASSERT_GE(report["stages"][2]["candidates"].size(), 2u);
  EXPECT_EQ(report["stages"][2]["candidates"][0], report["stages"][2]["tiles"]);
  std::string names;  // all of them in one cell
  for (const auto& tiles : report["stages"][2]["candidates"]) {
    names += (names.empty() ? "" : ", ") + std::to_string(tiles["Br"].get<int>()) + "x" +
             std::to_string(tiles["Bc"].get<int>());
  }
  EXPECT_NE(result.out.find(names), std::string::npos) << result.out;
}

TEST_F(CliTest, CountShowsABoundForACard) {
  const Result result =
      run(small("count", {"--stage", "02a,04,08", "--card", "h100", "--json", path("r.json")}));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.out.find("H100 SXM 80 GB: a bound from datasheet figures, not a time"),
            std::string::npos)
      << result.out;
  EXPECT_NE(result.out.find("set by"), std::string::npos);
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  EXPECT_EQ(report["card"]["name"], "H100");
  EXPECT_EQ(report["card"]["memory_gb_per_s"], 3350);
  EXPECT_EQ(report["device"]["target"], "model");
  ASSERT_EQ(report["stages"].size(), 3u);
  for (const auto& stage : report["stages"]) {
    const auto& bound = stage["bound"];
    EXPECT_EQ(bound["card"], "H100");
    EXPECT_FALSE(stage.contains("time"));
    const double largest =
        std::max({bound["memory_us"].get<double>(), bound["mma_us"].get<double>(),
                  bound["fma_us"].get<double>(), bound["exp_us"].get<double>()});
    EXPECT_GT(largest, 0);
    EXPECT_EQ(bound["us"], largest);
    EXPECT_EQ(bound["multiprocessors"],
              std::min<int64_t>(132, stage["counts"]["grid_blocks"].get<int64_t>()));
    // Of these three only 08 asks for each byte once (at this length, one tile).
    EXPECT_EQ(bound["requested_bytes_us"] == bound["memory_us"], stage["stage"] == "08");
    EXPECT_GE(bound["requested_bytes_us"].get<double>(), bound["memory_us"].get<double>());
    EXPECT_EQ(bound["mma_us"] == 0, stage["counts"]["mma_flops"] == 0);
    EXPECT_EQ(bound["fma_us"] == 0, stage["counts"]["mma_flops"] != 0);
  }
  // Without --card there is no bound.
  const Result plain = run(small("count", {"--stage", "08", "--json", path("r.json")}));
  EXPECT_EQ(plain.out.find("bound"), std::string::npos);
  EXPECT_FALSE(nlohmann::json::parse(contents(path("r.json")))["stages"][0].contains("bound"));
}

// Times recorded on the card stand beside bounds of the problems that were timed, each named for
// what it is.
TEST_F(CliTest, CountShowsRecordedTimesBesideBounds) {
  const fs::path results = directory_ / "results";
  fs::create_directory(results);
  const auto write = [&](const char* name, const nlohmann::json& json) {
    std::ofstream(results / name) << json.dump();
  };
  nlohmann::json problem = {{"batch", 6},      {"heads", 2},     {"kv_heads", 2},
                            {"seqlen_q", 40},  {"seqlen_k", 40}, {"head_dim", 16},
                            {"dtype", "fp16"}, {"causal", false}};
  const auto counted = [&](const Arguments& more) {
    Arguments arguments = small("count", {"--json", path("r.json")});
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result result = run(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    return std::pair(result.out, nlohmann::json::parse(contents(path("r.json"))));
  };
  // What the recorded problem's own bound is: that of 12 heads, counted.
  const auto large = counted(
      {"--stage", "06,08", "--card", "H200", "--batch", "6", "--results", results.string()});
  EXPECT_EQ(large.first.find("recorded / bound"), std::string::npos);
  EXPECT_NE(large.first.find("no recorded time in " + results.string() +
                             " of 06, 08 on NVIDIA H200 with seqlen 40 x 40, head_dim 16, fp16, no "
                             "mask"),
            std::string::npos)
      << large.first;
  EXPECT_FALSE(large.second["stages"][0].contains("recorded"));

  const auto tiles = large.second["stages"][1]["tiles"];
  const double bound = large.second["stages"][1]["bound"]["us"];
  const double us = 1.5 * bound;
  nlohmann::json run_of_08 = {
      {"name", "08"}, {"stage", "08"}, {"tiles", tiles}, {"median_ms", us / 1000}};
  nlohmann::json report = {{"device", {{"name", "NVIDIA H200"}}}, {"commit", "abc"}};
  report["cells"] = {{{"problem", problem}, {"runs", {run_of_08}}}};
  write("timed.json", report);
  report["device"]["name"] = "NVIDIA H100 80GB HBM3";
  write("elsewhere.json", report);
  const auto [text, json] =
      counted({"--stage", "06,08", "--card", "H200", "--results", results.string()});
  EXPECT_NE(text.find("NVIDIA H200: times recorded in " + results.string() +
                      ", each beside the bound of its own batch and heads"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("bound, us  recorded, us  recorded / bound  file"), std::string::npos)
      << text;
  const size_t line = text.find("\n08 ", text.find("recorded / bound"));
  ASSERT_NE(line, std::string::npos) << text;
  std::istringstream cells(text.substr(line));
  std::string stage, batch, heads, bound_cell, us_cell, ratio, file;
  cells >> stage >> batch >> heads >> bound_cell >> us_cell >> ratio >> file;
  EXPECT_EQ(batch, "6");
  EXPECT_EQ(heads, "2");
  EXPECT_NEAR(std::stod(bound_cell), bound, 1e-3 * bound);
  EXPECT_NEAR(std::stod(us_cell), us, 1e-3 * us);
  EXPECT_EQ(ratio, "1.50");
  EXPECT_EQ(file, "timed.json");
  EXPECT_EQ(text.find("elsewhere.json"), std::string::npos);
  EXPECT_NE(text.find("no recorded time in " + results.string() + " of 06 on NVIDIA H200"),
            std::string::npos)
      << text;
  EXPECT_FALSE(json["stages"][0].contains("recorded"));
  ASSERT_EQ(json["stages"][1]["recorded"].size(), 1u);
  const auto& recorded = json["stages"][1]["recorded"][0];
  EXPECT_EQ(recorded["file"], "timed.json");
  EXPECT_EQ(recorded["commit"], "abc");
  EXPECT_EQ(recorded["batch"], 6);
  EXPECT_EQ(recorded["heads"], 2);
  EXPECT_DOUBLE_EQ(recorded["us"].get<double>(), us);
  EXPECT_NEAR(recorded["bound_us"].get<double>(), bound, 1e-9 * bound);
  EXPECT_FALSE(json["stages"][1].contains("time"));  // nothing was timed here

  // Another length of the same stage: what there is of it is told.
  const Result other = run({"count", "--device", "model", "--stage", "08", "--seqlen", "33",
                            "--head-dim", "16", "--card", "H200", "--results", results.string()});
  EXPECT_NE(other.out.find("recorded of it: fp16; head_dim 16; seqlen 40"), std::string::npos)
      << other.out;
  // By default the repository's own results are read; without a card none.
  const Result own = run(small("count", {"--stage", "08", "--card", "H200"}));
  EXPECT_NE(own.out.find("no recorded time in docs/results of 08 on NVIDIA H200"),
            std::string::npos)
      << own.out;
  EXPECT_EQ(run(small("count", {"--stage", "08"})).out.find("record"), std::string::npos);

  const Arguments asked = small("count", {"--stage", "08", "--card", "H200", "--results"});
  const auto with = [&](const std::string& directory) {
    Arguments arguments = asked;
    arguments.push_back(directory);
    return arguments;
  };
  expect_refusal(with(path("nowhere")), 2, {"--results is '", "a directory of recorded results"});
  expect_refusal(with(""), 2, {"--results"});
  expect_refusal(small("count", {"--results", results.string()}), 2, {"--results", "--card"});
  std::ofstream(results / "timed.json") << "{";
  expect_refusal(with(results.string()), 2, {"timed.json is no file of results"});
}

// Counts of Hopper's instructions are in the table where a stage has any, under the model's
// numbers.
TEST_F(CliTest, CountShowsHoppersInstructions) {
  const std::pair<const char*, const char*> rows[] = {
      {"named barriers (completed)", "named_barriers"},
      {"mbarrier phases (ended)", "mbarrier_phases"},
      {"wgmma (warpgroups)", "wgmma"},
      {"TMA (boxes)", "tma"}};
  const Result result = run(small("count", {"--stage", "08,10a,10c", "--json", path("r.json")}));
  EXPECT_EQ(result.status, 0) << result.err;
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  const auto with_commas = [](int64_t value) {
    std::string digits = std::to_string(value);
    for (int i = int(digits.size()) - 3; i > 0; i -= 3) digits.insert(size_t(i), ",");
    return digits;
  };
  for (const auto& [title, name] : rows) {
    const size_t at = result.out.find(title);
    ASSERT_NE(at, std::string::npos) << title << "\n" << result.out;
    std::istringstream cells(result.out.substr(at + std::string(title).size()));
    for (const auto& stage : report["stages"]) {
      std::string cell;
      cells >> cell;
      EXPECT_EQ(cell, with_commas(stage["counts"][name].get<int64_t>()))
          << title << " of " << stage["stage"];
    }
    EXPECT_EQ(report["stages"][0]["counts"][name], 0) << name;
    EXPECT_GT(report["stages"][2]["counts"][name], 0) << name;
  }
  // A table without such a stage stays as narrow as it was.
  const Result before = run(small("count", {"--stage", "08"}));
  for (const auto& [title, name] : rows)
    EXPECT_EQ(before.out.find(title), std::string::npos) << title;
  EXPECT_NE(before.out.find("barriers (blocks)"), std::string::npos);
}

TEST_F(CliTest, TheModelImitatesTheCardOfTheBound) {
  const auto counted = [&](const char* card, const Arguments& more = {}) {
    Arguments arguments =
        small("count", {"--stage", "05", "--card", card, "--json", path("r.json")});
    arguments[std::find(arguments.begin(), arguments.end(), "--head-dim") - arguments.begin() + 1] =
        "128";
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(run(arguments).status, 0);
    return nlohmann::json::parse(contents(path("r.json")));
  };
  const auto consumer = counted("RTX4090"), hopper = counted("H200");
  EXPECT_EQ(consumer["device"]["shared_memory_per_block"], 99 * 1024);
  EXPECT_EQ(consumer["device"]["capability"], "8.9");
  EXPECT_EQ(consumer["stages"][0]["tiles"]["Br"], 16);
  EXPECT_EQ(hopper["stages"][0]["tiles"]["Br"], 32);
  EXPECT_EQ(counted("RTX4090", {"--shared-memory", "232448"})["stages"][0]["tiles"]["Br"], 32);
}

TEST_F(CliTest, AnOldCardHasNoBoundForNewInstructions) {
  const Result result = run(
      small("count", {"--stage", "01,02a,02b,02d,07", "--card", "T4", "--json", path("r.json")}));
  EXPECT_EQ(result.status, 0) << result.err;
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  for (const auto& stage : report["stages"]) {
    const std::string id = stage["stage"];
    EXPECT_TRUE(stage.contains("counts")) << id;
    EXPECT_EQ(stage.contains("bound"), id == "01" || id == "02a") << id;
    EXPECT_EQ(stage.contains("no_bound"), id >= "02b") << id;
  }
  EXPECT_NE(result.out.find("no bound: 02b cannot run on T4: mma.m16n8k16 needs compute capability "
                            "8.0, it has 7.5"),
            std::string::npos)
      << result.out;
  EXPECT_NE(result.out.find("no bound: 07 cannot run on T4: cp.async"), std::string::npos);
}

TEST_F(CliTest, BenchOnTheModelPointsToCount) {
  expect_refusal({"bench", "--device", "model", "--tune"}, 3, {"not timed", "count"});
  expect_refusal({"bench", "--device", "model", "--json", path("never.json")}, 3, {"count"});
  expect_refusal({"bench", "--device", "model", "--sweep"}, 3, {"count"});
}

TEST_F(CliTest, CountOnACardIsRefused) {
  expect_refusal({"count", "--device", "cuda"}, 3, {"only the CPU model counts"});
}

TEST_F(CliTest, AStagesOwnProgram) {
  const Result list = run({"list", "--device", "model", "--json", path("list.json")}, "01_naive");
  EXPECT_EQ(list.status, 0);
  const auto report = nlohmann::json::parse(contents(path("list.json")));
  ASSERT_EQ(report["stages"].size(), 1u);
  EXPECT_EQ(report["stages"][0]["stage"], "01");
  EXPECT_EQ(run(small("check"), "01_naive").status, 0);
  const Result other = run(small("check", {"--stage", "03"}), "01_naive");
  EXPECT_EQ(other.status, 2);
  EXPECT_EQ(other.err, "01_naive: --stage is '03': there is no stage '03'; allowed: all, 01\n");
}

// --- the backward pass
// ------------------------------------------------------------------------------------

TEST_F(CliTest, CheckOfTheBackwardPass) {
  for (const bool deterministic : {false, true}) {
    Arguments arguments = small("check", {"--stage", "08,09", "--heads", "4", "--kv-heads", "2",
                                          "--json", path("r.json"), "--forward-stage", "06"});
    arguments.erase(arguments.begin() + 5, arguments.begin() + 7);  // small()'s own --heads
    if (deterministic) arguments.push_back("--deterministic");
    const Result result = run(arguments);
    ASSERT_EQ(result.status, 0) << result.out << result.err;
    EXPECT_NE(result.out.find("O and L  for the backward pass by stage 06"), std::string::npos)
        << result.out;
    for (const char* title : {"O error", "dQ error", "dK error", "dV error"})
      EXPECT_NE(result.out.find(title), std::string::npos) << result.out;
    const auto report = nlohmann::json::parse(contents(path("r.json")));
    const auto &forward = report["stages"][0], &backward = report["stages"][1];
    EXPECT_FALSE(forward.contains("deterministic"));
    EXPECT_EQ(backward["deterministic"], deterministic);
    EXPECT_EQ(backward["check"]["forward"], "06");
    EXPECT_EQ(backward["check"]["dQ"]["rows"], 4 * 40);
    EXPECT_EQ(backward["check"]["dK"]["rows"], 2 * 40);
    EXPECT_EQ(backward["check"]["dV"]["rows"], 2 * 40);
  }
}

// A program of one stage has no forward stage to ask.
TEST_F(CliTest, TheBackwardStagesOwnProgram) {
  const Result result = run(small("check", {"--causal", "--json", path("r.json")}), "09_backward");
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("O and L  for the backward pass by the reference"), std::string::npos)
      << result.out;
  EXPECT_EQ(result.out.find("O error"), std::string::npos) << result.out;
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  EXPECT_EQ(report["stages"][0]["check"]["forward"], "reference");
  for (const char* command : {"list", "count", "ladder"})
    EXPECT_EQ(run(small(command), "09_backward").status, 0) << command;
}

// dQ, dK and dV go to files, and agree with files: the same from both layouts, each held on its
// own.
TEST_F(CliTest, GradientsAndFiles) {
  constexpr int64_t B = 2, H = 4, Hkv = 2, Nq = 9, Nk = 7, D = 8;
  const auto write = [&](const char* name, int64_t tensor, int64_t heads, int64_t seqlen,
                         bool bshd) {
    std::vector<float> values;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t x = 0; x < (bshd ? seqlen : heads); ++x) {
        for (int64_t y = 0; y < (bshd ? heads : seqlen); ++y) {
          for (int64_t d = 0; d < D; ++d) {
            const int64_t h = bshd ? y : x, s = bshd ? x : y;
            values.push_back(float(std::cos(double(tensor * 31 + b * 17 + h * 7 + s * 3 + d))));
          }
        }
      }
    }
    write_npy(path(name),
              std::array<int64_t, 4>{B, bshd ? seqlen : heads, bshd ? heads : seqlen, D},
              std::span<const float>(values));
  };
  NpyArray dk[2];
  for (const bool bshd : {false, true}) {
    write("q.npy", 0, H, Nq, bshd);
    write("k.npy", 1, Hkv, Nk, bshd);
    write("v.npy", 2, Hkv, Nk, bshd);
    write("do.npy", 3, H, Nq, bshd);
    const Arguments given = {"check",
                             "--device",
                             "model",
                             "--stage",
                             "09",
                             "--q",
                             path("q.npy"),
                             "--k",
                             path("k.npy"),
                             "--v",
                             path("v.npy"),
                             "--do",
                             path("do.npy"),
                             "--layout",
                             bshd ? "bshd" : "bhsd",
                             "--deterministic"};
    Arguments arguments = given;
    for (const char* name : {"dq", "dk", "dv"}) {
      arguments.push_back(std::string("--") + name);
      arguments.push_back(path((std::string(name) + ".npy").c_str()));
    }
    Result result = run(arguments);
    ASSERT_EQ(result.status, 0) << result.out << result.err;
    EXPECT_NE(result.out.find("dO " + path("do.npy")), std::string::npos) << result.out;
    dk[bshd] = read_npy(path("dk.npy"), 4);
    EXPECT_EQ(dk[bshd].dtype, DType::fp16);
    EXPECT_EQ(read_npy(path("dq.npy"), 4).shape,
              (bshd ? std::vector<int64_t>{B, Nq, H, D} : std::vector<int64_t>{B, H, Nq, D}));

    // The files that it wrote are what it expects; dK in the place of dV is not.
    arguments = given;
    for (const char* name : {"dq", "dk", "dv"}) {
      arguments.push_back(std::string("--expect-") + name);
      arguments.push_back(path((std::string(name) + ".npy").c_str()));
    }
    arguments.insert(arguments.end(), {"--json", path("r.json")});
    result = run(arguments);
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    auto stage = nlohmann::json::parse(contents(path("r.json")))["stages"][0];
    for (const char* tensor : {"dQ", "dK", "dV"})
      EXPECT_EQ(stage["check_expected"][tensor]["max_abs_err"], 0) << stage;
    for (std::string& argument : arguments) {
      if (argument == path("dv.npy")) argument = path("dk.npy");
    }
    result = run(arguments);
    EXPECT_EQ(result.status, 1);
    EXPECT_NE(result.out.find("against the files: dV: "), std::string::npos) << result.out;
    stage = nlohmann::json::parse(contents(path("r.json")))["stages"][0];
    EXPECT_EQ(stage["check"]["ok"], true);
    EXPECT_EQ(stage["check_expected"]["ok"], false);
  }
  EXPECT_EQ(dk[0].shape, (std::vector<int64_t>{B, Hkv, Nk, D}));
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < Hkv; ++h) {
      for (int64_t s = 0; s < Nk; ++s) {
        for (int64_t d = 0; d < D; ++d) {
          ASSERT_EQ(dk[0].value(((b * Hkv + h) * Nk + s) * D + d),
                    dk[1].value(((b * Nk + s) * Hkv + h) * D + d));
        }
      }
    }
  }
}

// The ladder is the forward pass; the backward pass has a table, and in JSON a list, of its own.
TEST_F(CliTest, LadderShowsTheBackwardPassApart) {
  const Result result = run(small("ladder", {"--stage", "04,08,09", "--json", path("r.json")}));
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  ASSERT_EQ(report["stages"].size(), 2u);
  ASSERT_EQ(report["backward"].size(), 1u);
  EXPECT_EQ(report["backward"][0]["stage"], "09");
  EXPECT_EQ(report["backward"][0]["check"]["ok"], true);
  EXPECT_GT(report["backward"][0]["counts"]["atomic_bytes"], 0);
  EXPECT_LT(result.out.find("\n08 "), result.out.find("\nthe backward pass\n"));
  EXPECT_LT(result.out.find("\nthe backward pass\n"), result.out.find("\n09 "));
  const Result forward = run(small("ladder", {"--stage", "04,08", "--json", path("r.json")}));
  EXPECT_EQ(forward.out.find("backward"), std::string::npos) << forward.out;
  EXPECT_FALSE(nlohmann::json::parse(contents(path("r.json"))).contains("backward"));
}

TEST_F(CliTest, CountOfTheBackwardPass) {
  const auto counts = [&](const Arguments& more) {
    Arguments arguments =
        small("count", {"--stage", "09", "--card", "H200", "--json", path("r.json")});
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result result = run(arguments);
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    return nlohmann::json::parse(contents(path("r.json")))["stages"][0];
  };
  const auto stage = counts({});
  const int64_t tensor = 2 * 40 * 16 * 2;  // bytes of each of the 16-bit tensors
  for (const char* name : {"dQ", "dK", "dV"})
    EXPECT_EQ(stage["counts"]["global_written"][name], tensor) << name;
  EXPECT_EQ(stage["counts"]["global_read"]["O"], tensor);
  EXPECT_GT(stage["bound"]["memory_us"], 0);
  EXPECT_EQ(counts({"--deterministic"})["deterministic"], true);
}

TEST_F(CliBadInput, OfTheBackwardPass) {
  const auto refuse = [&](const Arguments& more, const std::vector<std::string>& told) {
    Arguments arguments = {"check", "--device", "model", "--seqlen", "16"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_refusal(arguments, 2, told);
  };
  const Arguments tensors = {"--q", "tests/data/ocr1s_q.npy", "--k", "tests/data/ocr1s_k.npy",
                             "--v", "tests/data/ocr1s_v.npy"};
  refuse({"--stage", "08", "--deterministic"},
         {"--deterministic is of the backward pass; --stage 08 means no stage of it"});
  refuse({"--stage", "08", "--forward-stage", "07"},
         {"--forward-stage is of the backward pass; --stage 08 means no stage of it"});
  refuse({"--stage", "08", "--dq", path("dq.npy")},
         {"--dq, --dk and --dv are of the backward pass"});
  refuse({"--stage", "09", "--out", path("o.npy")}, {"--out and --lse are of the forward pass"});
  refuse({"--dv", path("dv.npy")}, {"--dq, --dk and --dv write one stage's result; --stage all"});
  refuse({"--stage", "09", "--dq", path("x.npy"), "--dv", path("x.npy")},
         {"--dq and --dv name the same file"});
  refuse({"--stage", "09", "--do", "tests/data/ocr1s_o.npy"}, {"--do belongs to given tensors"});
  for (const char* value : {"", "99", "all", "01,02", "x"})
    refuse({"--stage", "09", "--forward-stage", value}, {"--forward-stage is '"});
  refuse({"--stage", "09", "--forward-stage", "09"},
         {"--forward-stage is '09': it is of the backward pass"});
  refuse({"--stage", "09", "--grid", "bh"}, {"--grid bh is for stage 05 alone"});
  refuse({"--stage", "09", "--tiles", "16x16"}, {"stage 09", "16x16 was given"});
  Arguments given = {"check", "--device", "model", "--stage", "09"};
  given.insert(given.end(), tensors.begin(), tensors.end());
  const auto refuse_given = [&](const Arguments& more, const std::vector<std::string>& told) {
    Arguments arguments = given;
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_refusal(arguments, 2, told);
  };
  refuse_given({"--do", "tests/data/none.npy"}, {"tests/data/none.npy"});
  refuse_given({"--do", "tests/data/ocr1_q.npy"}, {"--do has shape (", "needed: ("});
  refuse_given({"--expect-dq", "tests/data/ocr1s_q.npy"}, {"--expect-dq", "--do is missing"});
  refuse_given({"--expect-o", "tests/data/ocr1s_o.npy"},
               {"--expect-o and --expect-lse are of the forward pass"});
  refuse_given({"--do", "tests/data/ocr1s_o.npy", "--expect-dk", "tests/data/ocr1_k.npy"},
               {"--expect-dk has shape ("});
}

#endif

TEST_F(CliTest, WithoutACardStagesAreListed) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  const Result result = run({"list", "--json", path("list.json")});
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(result.status, 0) << result.err;
  const auto report = nlohmann::json::parse(contents(path("list.json")));
  EXPECT_GE(report["stages"].size(), 11u);
#ifdef FLASHSTEPS_HAS_MODEL
  EXPECT_EQ(report["device"]["target"], "model");
#else
  EXPECT_EQ(report["device"]["target"], "none");
  EXPECT_NE(result.out.find("device   none: "), std::string::npos);
#endif
}

// On a card: every tile size is timed, and what it takes is told.
TEST_F(CliTest, cuda_tune_times_every_tile_size) {
  const Result result = run({"bench", "--device", "cuda", "--tune", "--stage", "07,08", "--seqlen",
                             "512", "--json", path("r.json")});
  if (result.status == 3) GTEST_SKIP() << "no usable card: " << result.err;
  ASSERT_EQ(result.status, 0) << result.err;
  const auto report = nlohmann::json::parse(contents(path("r.json")));
  ASSERT_EQ(report["stages"].size(), 2u);
  for (const auto& stage : report["stages"]) {
    ASSERT_GE(stage["candidates"].size(), 2u);
    bool fastest_is_one = false;
    for (const auto& candidate : stage["candidates"]) {
      EXPECT_GT(candidate["time"]["median_ms"], 0);
      EXPECT_LE(candidate["time"]["speed_of_fastest"], 1);
      EXPECT_GT(candidate["kernel"]["registers_per_thread"], 0);
      EXPECT_EQ(candidate["kernel"]["local_bytes_per_thread"], 0);
      EXPECT_GT(candidate["kernel"]["shared_memory"], 0);
      EXPECT_GE(candidate["kernel"]["blocks_per_multiprocessor"], 1);
      fastest_is_one |= candidate["tiles"] == stage["fastest"];
    }
    EXPECT_TRUE(fastest_is_one);
    EXPECT_NE(result.out.find("fastest here: "), std::string::npos);
  }
  expect_refusal({"bench", "--device", "cuda", "--tune", "--stage", "05"}, 2,
                 {"--tune: stage 05 is built for one tile size"});
}

TEST_F(CliTest, WithoutACardCudaIsRefusedWithAdvice) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  expect_refusal({"check", "--device", "cuda", "--json", path("never.json")}, 3, {});
  expect_refusal({"bench", "--device", "cuda"}, 3, {});
  unsetenv("CUDA_VISIBLE_DEVICES");
}

}  // namespace
}  // namespace flashsteps
