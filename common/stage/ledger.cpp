#include "common/stage/ledger.h"

#include <nlohmann/json.hpp>

#include "common/stage/ledger_json.h"

namespace flashsteps {
namespace {

// Every count of the ledger with its name, in the order of the struct: the one list that addition
// and JSON share.
template <typename Visit>
void for_each_table(Visit&& visit) {
  visit("global_read", &Ledger::global_read);
  visit("global_written", &Ledger::global_written);
  visit("global_unique_read", &Ledger::global_unique_read);
}

template <typename Visit>
void for_each_count(Visit&& visit) {
  visit("atomic_bytes", &Ledger::atomic_bytes);
  visit("shared_read", &Ledger::shared_read);
  visit("shared_written", &Ledger::shared_written);
  visit("warp_exchange_bytes", &Ledger::warp_exchange_bytes);
  visit("bank_conflicts", &Ledger::bank_conflicts);
  visit("barriers", &Ledger::barriers);
  visit("warp_barriers", &Ledger::warp_barriers);
  visit("shuffles", &Ledger::shuffles);
  visit("ldmatrix", &Ledger::ldmatrix);
  visit("mma", &Ledger::mma);
  visit("mma_flops", &Ledger::mma_flops);
  visit("cp_async", &Ledger::cp_async);
  visit("named_barriers", &Ledger::named_barriers);
  visit("mbarrier_phases", &Ledger::mbarrier_phases);
  visit("tma", &Ledger::tma);
  visit("wgmma", &Ledger::wgmma);
  visit("exp", &Ledger::exp);
  visit("div", &Ledger::div);
  visit("div_in_loop", &Ledger::div_in_loop);
  visit("grid_blocks", &Ledger::grid_blocks);
  visit("launches", &Ledger::launches);
  visit("tiles_visited", &Ledger::tiles_visited);
  visit("tiles_masked", &Ledger::tiles_masked);
}

}  // namespace

Ledger& Ledger::operator+=(const Ledger& other) {
  for_each_table([&](const char*, BytesByTensor Ledger::*table) {
    for (const auto& [name, bytes] : other.*table) (this->*table)[name] += bytes;
  });
  for_each_count([&](const char*, int64_t Ledger::*count) { this->*count += other.*count; });
  return *this;
}

int64_t Ledger::total(const BytesByTensor& bytes) {
  int64_t sum = 0;
  for (const auto& [name, count] : bytes) sum += count;
  return sum;
}

void to_json(nlohmann::ordered_json& json, const Ledger& ledger) {
  json = nlohmann::ordered_json::object();
  for_each_table(
      [&](const char* name, BytesByTensor Ledger::*table) { json[name] = ledger.*table; });
  for_each_count([&](const char* name, int64_t Ledger::*count) { json[name] = ledger.*count; });
}

}  // namespace flashsteps
