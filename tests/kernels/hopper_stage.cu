// A stage for Hopper alone, as those of stage 10 register themselves; it computes nothing.
#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_99_for_hopper {

Tiles tiles(const Problem&) {
  return {64, 64};
}

WorkspaceList workspaces(const Problem&) {
  return {};
}

template <typename T, int D>
void forward(const Problem&, const ForwardArgs&, Stream) {}

FLASHSTEPS_HOPPER_STAGE("99", "for_hopper", "registers itself")

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_99_for_hopper
