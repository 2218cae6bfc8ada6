// Recorded times: read from the files as the programs write them, and matched with what was
// counted.
#include "common/cli/recorded.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "directory_test.h"

namespace flashsteps::cli {
namespace {

namespace fs = std::filesystem;

class RecordedTest : public DirectoryTest {
 protected:
  void write(const char* name, const std::string& text) const {
    std::ofstream(directory_ / name) << text;
  }
  std::vector<RecordedTime> read(const char* card = "H200") const {
    return read_recorded(directory_, find_card(card));
  }
  std::string refusal() const {
    try {
      read();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "accepted";
  }
};

const std::string kDevice = R"("device": {"name": "NVIDIA H200"}, "commit": "abc")";
const std::string kSizes =
    R"("batch": 3, "heads": 4, "kv_heads": 2, "seqlen_q": 100, "seqlen_k": 300, "head_dim": 64,
       "dtype": "bf16", "causal": true)";

TEST_F(RecordedTest, ReadsWhatBenchPeersWrites) {
  write("peers.json", "{" + kDevice + R"(, "cells": [{"problem": {)" + kSizes + R"(}, "runs": [
      {"name": "05:bh", "stage": "05", "tiles": {"Br": 64, "Bc": 32}, "median_ms": 0.25},
      {"name": "09:det", "stage": "09", "deterministic": true, "median_ms": 2},
      {"name": "08", "stage": "08"},
      {"name": "flash", "median_ms": 0.125}]}, {"problem": {)" +
                          kSizes + R"(}, "runs": []}]})");
  const auto times = read();
  ASSERT_EQ(times.size(), 2u);  // one run is of no stage, another was not timed
  EXPECT_EQ(times[0].file, "peers.json");
  EXPECT_EQ(times[0].commit, "abc");
  EXPECT_EQ(times[0].stage, "05");
  EXPECT_EQ(times[0].tiles, (Tiles{64, 32}));
  EXPECT_TRUE(times[0].one_block_per_head);
  EXPECT_FALSE(times[0].deterministic);
  EXPECT_DOUBLE_EQ(times[0].median_us, 250);
  EXPECT_EQ(times[0].problem.batch, 3);
  EXPECT_EQ(times[0].problem.heads, 4);
  EXPECT_EQ(times[0].problem.kv_heads, 2);
  EXPECT_EQ(times[0].problem.seqlen_q, 100);
  EXPECT_EQ(times[0].problem.seqlen_k, 300);
  EXPECT_EQ(times[0].problem.head_dim, 64);
  EXPECT_EQ(times[0].problem.dtype, DType::bf16);
  EXPECT_TRUE(times[0].problem.causal);
  EXPECT_EQ(times[1].stage, "09");
  EXPECT_TRUE(times[1].deterministic);
  EXPECT_EQ(times[1].tiles, Tiles{});
}

TEST_F(RecordedTest, ReadsWhatTheProgramsWrite) {
  write("ladder.json", "{" + kDevice + R"(, "problem": {)" + kSizes + R"(}, "stages": [
      {"stage": "01", "time": {"median_ms": 4}},
      {"stage": "05", "grid": "bh", "time": {"median_ms": 3}},
      {"stage": "07", "time": {"median_ms": 2, "host_bound": true}},
      {"stage": "08", "check": {"ok": false}}],
      "backward": [{"stage": "09", "deterministic": false, "time": {"median_ms": 8}}]})");
  write("sweep.json", "{" + kDevice + R"(, "sweep": [{"problem": {)" + kSizes +
                          R"(}, "stages": [{"stage": "02a", "time": {"median_ms": 5}}]}]})");
  write("other.txt", "no JSON");
  const auto times = read();
  ASSERT_EQ(times.size(), 4u);  // 07's was slowed by the host, 08 was not timed
  EXPECT_EQ(times[0].stage, "01");
  EXPECT_EQ(times[0].median_us, 4000);
  EXPECT_FALSE(times[0].one_block_per_head);
  EXPECT_EQ(times[1].stage, "05");
  EXPECT_TRUE(times[1].one_block_per_head);
  EXPECT_EQ(times[2].stage, "09");
  EXPECT_EQ(times[2].file, "ladder.json");
  EXPECT_EQ(times[3].stage, "02a");
  EXPECT_EQ(times[3].file, "sweep.json");
}

TEST_F(RecordedTest, OfThisCardAlone) {
  write("a.json", "{" + kDevice + R"(, "problem": {)" + kSizes +
                      R"(}, "stages": [{"stage": "01", "time": {"median_ms": 4}}]})");
  write("b.json", R"({"device": {"name": "NVIDIA H200 NVL"}, "stages": "of another card"})");
  write("c.json", R"({"command": "counters, without a card's name", "stages": []})");
  EXPECT_EQ(read().size(), 1u);
  EXPECT_EQ(read("H100").size(), 0u);
}

TEST_F(RecordedTest, RefusesWhatItCannotRead) {
  const auto refused = [&](const std::string& text, const char* told) {
    write("a.json", text);
    const std::string why = refusal();
    EXPECT_NE(why.find((directory_ / "a.json").string() + " is no file of results: "),
              std::string::npos)
        << why;
    EXPECT_NE(why.find(told), std::string::npos) << why;
    EXPECT_EQ(why.find('\n'), std::string::npos) << why;
  };
  const auto with = [&](const std::string& sizes, const std::string& stage) {
    return "{" + kDevice + R"(, "problem": {)" + sizes + R"(}, "stages": [)" + stage + "]}";
  };
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string sizes = kSizes;
    return sizes.replace(sizes.find(from), from.size(), to);
  };
  const std::string good = R"({"stage": "01", "time": {"median_ms": 4}})";
  refused("", "parse error");
  refused("{\n\n\"device\": \n}", "parse error");
  refused(with(replaced(R"("seqlen_k": 300,)", ""), good), "seqlen_k");
  refused(with(replaced("bf16", "fp8"), good), "dtype is fp8");
  refused(with(replaced(R"("kv_heads": 2)", R"("kv_heads": 3)"), good), "kv_heads");
  refused(with(replaced(R"("kv_heads": 2)", R"("kv_heads": 0)"), good), "kv_heads");
  refused(with(kSizes, R"({"stage": "01", "time": {"median_ms": 0}})"), "a median of 0 ms");
  refused(with(kSizes, R"({"stage": "01", "time": {"median_ms": -1}})"), "a median of -1 ms");
  refused(with(kSizes, R"({"stage": "01", "time": {"median_ms": "fast"}})"), "");
  refused(with(kSizes, R"({"stage": "01", "tiles": {"Br": 64}, "time": {"median_ms": 4}})"), "Bc");
  write("a.json", with(kSizes, good));
  EXPECT_EQ(refusal(), "accepted");
  fs::remove_all(directory_);
  EXPECT_NE(refusal().find(directory_.string() + " cannot be read: "), std::string::npos);
}

TEST(RecordedTimes, MatchInAllButBatchAndHeads) {
  Problem p;
  p.batch = 1;
  p.heads = 2;
  p.kv_heads = 1;
  p.seqlen_q = 100;
  p.seqlen_k = 300;
  p.head_dim = 64;
  p.dtype = DType::bf16;
  p.causal = true;
  Stage stage{};
  stage.id = "05";
  const Tiles tiles = {64, 32};
  RecordedTime time;
  time.stage = "05";
  time.tiles = tiles;
  time.problem = p;
  time.problem.batch = 7;
  time.problem.heads = 8;
  time.problem.kv_heads = 4;
  time.median_us = 1;
  const auto matches = [&](const Variant& variant = {}) {
    return matching({time}, stage, p, tiles, variant).size() == 1;
  };
  EXPECT_TRUE(matches());
  const auto differs = [&](auto&& change) {
    const RecordedTime before = time;
    change();
    EXPECT_FALSE(matches());
    time = before;
  };
  differs([&] { time.stage = "06"; });
  differs([&] { time.tiles = {64, 64}; });
  differs([&] { time.tiles = {}; });
  differs([&] { time.one_block_per_head = true; });
  differs([&] { time.deterministic = true; });
  differs([&] { time.problem.seqlen_q = 101; });
  differs([&] { time.problem.seqlen_k = 301; });
  differs([&] { time.problem.head_dim = 72; });
  differs([&] { time.problem.dtype = DType::fp16; });
  differs([&] { time.problem.causal = false; });
  differs([&] { time.problem.kv_heads = 8; });
  EXPECT_FALSE(matches({.tiles = {}, .one_block_per_head = true}));
  time.one_block_per_head = true;
  EXPECT_TRUE(matches({.tiles = {}, .one_block_per_head = true}));
}

// The repository's own files: this test runs in its root, and lies in a directory below it.
TEST(RecordedTimes, OfThisRepository) {
  const auto results = find_results();
  ASSERT_TRUE(results.has_value());
  if (!fs::exists("docs/results/peers_h200.json")) GTEST_SKIP() << "no file of an H200 here";
  ASSERT_TRUE(fs::equivalent(*results, "docs/results"));
  const auto times = read_recorded(*results, find_card("H200"));
  // In the papers' 24 cells each of 08 and 10e was timed once beside its peers.
  for (const char* stage : {"08", "10e"}) {
    int cells = 0;
    for (const RecordedTime& time : times)
      cells += time.file == "peers_h200.json" && time.stage == stage;
    EXPECT_EQ(cells, 24) << stage;
  }
  for (const RecordedTime& time : times) {
    EXPECT_GT(time.median_us, 1) << time.file;
    EXPECT_LT(time.median_us, 1e6) << time.file;
    EXPECT_FALSE(time.commit.empty()) << time.file;
  }
}

}  // namespace
}  // namespace flashsteps::cli
