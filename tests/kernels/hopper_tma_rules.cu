// A stage that asks TMA for what it cannot take: the rule that seqlen_q numbers is broken, and none
// where there is no such rule. It computes nothing.
#include "common/gpu/hopper.h"
#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_98_tma_rules {

Tiles tiles(const Problem&) {
  return {64, 64};
}

WorkspaceList workspaces(const Problem&) {
  return {};
}

template <typename T, int D>
void forward(const Problem& p, const ForwardArgs& a, Stream) {
  const T* base = static_cast<const T*>(a.Q);
  Strides strides{.batch = 64 * 128, .head = 64 * 64, .row = 64};
  int head_dim = 64, box_cols = 64, box_rows = 64;
  switch (p.seqlen_q) {
    case 1:
      base += 4;
      break;
    case 2:
      head_dim = 0;
      break;
    case 3:
      strides.row = 68;
      break;
    case 4:
      strides.head = -8;
      break;
    case 5:
      strides.batch = int64_t{1} << 39;
      break;
    case 6:
      box_cols = 32;
      break;
    case 7:
      box_rows = 257;
      break;
  }
  make_tensor_map(base, head_dim, 64, 2, 2, strides, box_cols, box_rows);
}

FLASHSTEPS_HOPPER_STAGE("98", "tma_rules", "asks for what TMA cannot take")

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_98_tma_rules
