#include "common/cli/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

namespace flashsteps::cli {

std::string Table::str() const {
  std::vector<size_t> width;
  for (const Column& column : columns_) width.push_back(column.title.size());
  for (const auto& row : rows_) {
    if (row.front() == kNote) continue;
    for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string text;
  const auto add_line = [&](const auto& cell_of) {
    std::string line;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const bool left = columns_[c].align == Align::left;
      line += fmt::format(fmt::runtime(left ? "{:<{}}  " : "{:>{}}  "), cell_of(c), width[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  };
  add_line([&](size_t c) { return columns_[c].title; });
  for (const auto& row : rows_) {
    if (row.front() == kNote) {
      text += fmt::format("{:{}}{}\n", "", width[0] + 2, row[1]);
    } else {
      add_line([&](size_t c) { return c < row.size() ? row[c] : std::string(); });
    }
  }
  return text;
}

std::string with_commas(int64_t value) {
  const std::string digits = std::to_string(std::abs(value));
  std::string text = value < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

namespace {

// Three digits: "1.00 MB", "12.3 MB", "123 MB".
std::string human(double value, const char* unit) {
  const char* const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  int step = 0;
  for (; std::abs(value) >= 999.5 && step < 6; ++step) value /= 1000;
  const int decimals = step == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f} {}{}", value, decimals, prefixes[step], unit);
}

}  // namespace

std::string human_bytes(int64_t bytes) {
  return human(double(bytes), "B");
}

std::string human_count(int64_t count) {
  std::string text = human(double(count), "");
  if (text.back() == ' ') text.pop_back();
  return text;
}

}  // namespace flashsteps::cli
