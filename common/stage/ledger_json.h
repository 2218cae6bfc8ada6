/// \file
/// The ledger as JSON, under the names of docs/method.md.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "common/stage/ledger.h"

namespace flashsteps {

/// For nlohmann::ordered_json: `json["counts"] = ledger`.
void to_json(nlohmann::ordered_json& json, const Ledger& ledger);

}  // namespace flashsteps
