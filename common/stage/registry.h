/// \file
/// Finding the stages that are linked into this program.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common/stage/stage.h"

namespace flashsteps {

const char* name_of(Target target);  ///< "model", "cuda"

/// The stages for one target, by id.
std::vector<const Stage*> stages_for(Target target);

/// The ids of all stages, for whatever target, ascending: "01", "02a", ….
std::vector<std::string> stage_ids();

/// The stage with this id for this target; nullptr where it was not built for it.
const Stage* find_stage(std::string_view id, Target target);

/// The ids that a selection means, ascending, each once: "all", or ids between commas. A number
/// without a letter means the last step of that stage: "02" is "02d".
///
/// \throws std::invalid_argument that lists the stages there are
std::vector<std::string> select_stages(std::string_view selection);

}  // namespace flashsteps
