/// \file
/// Aligned text tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashsteps::cli {

/// Columns as wide as their widest cell, two spaces apart.
class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::right;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// Cells from the left; missing ones are empty.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  /// A line of its own, below the row that was added last, indented by the first column.
  void add_note(std::string text) { rows_.push_back({kNote, std::move(text)}); }
  std::string str() const;

 private:
  static constexpr const char* kNote = "\n";
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// 2228224 as "2,228,224".
std::string with_commas(int64_t value);
/// 2228224 as "2.23 MB" (powers of 1000).
std::string human_bytes(int64_t bytes);
/// 134217728 as "134 M".
std::string human_count(int64_t count);

}  // namespace flashsteps::cli
