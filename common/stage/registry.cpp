#include "common/stage/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <stdexcept>

namespace flashsteps {
namespace {

// Stages register themselves before main begins, in no particular order: this must be there before
// the first.
constinit Stage* first_stage = nullptr;

}  // namespace

Stage* register_stage(Stage* stage) {
  stage->next = first_stage;
  first_stage = stage;
  return stage;
}

Stage* first_registered_stage() {
  return first_stage;
}

const char* name_of(Target target) {
  return target == Target::model ? "model" : "cuda";
}

std::vector<const Stage*> stages_for(Target target) {
  std::vector<const Stage*> stages;
  for (const Stage* stage = first_stage; stage; stage = stage->next) {
    if (stage->target == target) stages.push_back(stage);
  }
  std::sort(stages.begin(), stages.end(),
            [](const Stage* a, const Stage* b) { return std::string_view(a->id) < b->id; });
  return stages;
}

std::vector<std::string> stage_ids() {
  std::set<std::string> ids;
  for (const Stage* stage = first_stage; stage; stage = stage->next) ids.insert(stage->id);
  return {ids.begin(), ids.end()};
}

const Stage* find_stage(std::string_view id, Target target) {
  for (const Stage* stage = first_stage; stage; stage = stage->next) {
    if (stage->target == target && stage->id == id) return stage;
  }
  return nullptr;
}

std::vector<std::string> select_stages(std::string_view selection) {
  const std::vector<std::string> ids = stage_ids();
  if (selection == "all") return ids;
  std::set<std::string> selected;
  for (size_t begin = 0; begin <= selection.size();) {
    const size_t end = std::min(selection.find(',', begin), selection.size());
    const std::string_view wanted = selection.substr(begin, end - begin);
    begin = end + 1;
    const std::string* found = nullptr;
    for (const std::string& id : ids) {
      // The number alone also finds its steps, "02" "02a"; the last one stays.
      const bool is_step = wanted.size() == 2 && id.size() == 3 && id.starts_with(wanted);
      if (id == wanted || is_step) found = &id;
    }
    if (!found) {
      throw std::invalid_argument(
          fmt::format("there is no stage '{}'; allowed: all, {}", wanted, fmt::join(ids, ", ")));
    }
    selected.insert(*found);
  }
  return {selected.begin(), selected.end()};
}

}  // namespace flashsteps
