#include "common/model/bank_conflicts.h"

#include <algorithm>
#include <array>
#include <map>

namespace flashsteps::model {
namespace {

constexpr int kBanks = 32;

/// The most distinct words that are wanted of one bank.
class Wavefronts {
 public:
  void add(uint32_t word) {
    const int bank = word % kBanks;
    for (int i = 0; i < count_[bank]; ++i) {
      if (words_[bank][i] == word) return;  // the same word is broadcast
    }
    words_[bank][count_[bank]++] = word;
    most_ = std::max<int>(most_, count_[bank]);
  }
  int most() const { return most_; }

 private:
  uint8_t count_[kBanks] = {};
  uint32_t words_[kBanks][32];
  int most_ = 0;
};

}  // namespace

int64_t bank_conflicts(std::span<const uint32_t> addresses, std::span<const uint8_t> lanes,
                       int log2_size) {
  const int words = log2_size <= 2 ? 1 : 1 << (log2_size - 2);
  const int group = 32 / words;
  int64_t conflicts = 0;
  for (size_t begin = 0, end; begin < addresses.size(); begin = end) {
    // Mostly, every lane has banks of its own, or all want the same word.
    uint32_t taken = 0, clash = 0;
    bool same = true;
    for (end = begin; end < addresses.size() && lanes[end] / group == lanes[begin] / group; ++end) {
      const uint32_t banks = ((1u << words) - 1) << (addresses[end] / 4 % kBanks);
      clash |= taken & banks;
      taken |= banks;
      same &= addresses[end] == addresses[begin];
    }
    if (clash == 0 || same) continue;
    Wavefronts wavefronts;
    for (size_t i = begin; i < end; ++i) {
      for (int w = 0; w < words; ++w) wavefronts.add(addresses[i] / 4 + w);
    }
    conflicts += wavefronts.most() - 1;
  }
  return conflicts;
}

int64_t settle_bank_conflicts(std::span<AccessLog* const, 32> logs) {
  std::array<uint8_t, 32> lanes;
  std::array<uint32_t, 32> addresses;
  int active = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (!logs[lane]->empty()) lanes[active++] = uint8_t(lane);
  }
  if (active == 0) return 0;

  int64_t conflicts = 0;
  const AccessLog& first = *logs[lanes[0]];
  const auto same_calls = [&](uint8_t lane) {
    const AccessLog& log = *logs[lane];
    return log.size() == first.size() &&
           std::equal(
               log.begin(), log.end(), first.begin(),
               [](const SharedAccess& a, const SharedAccess& b) { return a.call == b.call; });
  };
  if (std::all_of(lanes.begin() + 1, lanes.begin() + active, same_calls)) {
    for (size_t n = 0; n < first.size(); ++n) {
      for (int i = 0; i < active; ++i) addresses[i] = (*logs[lanes[i]])[n].address();
      conflicts += bank_conflicts({addresses.data(), size_t(active)},
                                  {lanes.data(), size_t(active)}, first[n].log2_size());
    }
  } else {  // lanes went different ways
    struct Lanes {
      std::vector<uint32_t> addresses;
      std::vector<uint8_t> lanes;
      int log2_size;
    };
    std::map<std::pair<uint32_t, int>, Lanes>
        accesses;  // by call, and how often the lane had made it before
    for (int i = 0; i < active; ++i) {
      std::map<uint32_t, int> made;
      for (const SharedAccess& a : *logs[lanes[i]]) {
        Lanes& of = accesses[{a.call, made[a.call]++}];
        of.addresses.push_back(a.address());
        of.lanes.push_back(lanes[i]);
        of.log2_size = a.log2_size();
      }
    }
    for (const auto& [call, of] : accesses)
      conflicts += bank_conflicts(of.addresses, of.lanes, of.log2_size);
  }
  for (int i = 0; i < active; ++i) logs[lanes[i]]->clear();
  return conflicts;
}

}  // namespace flashsteps::model
