#include "common/cli/commit.h"

#include "flashsteps_commit.inc"  // generated at build time by commit.cmake

namespace flashsteps::cli {

std::string build_commit() {
  return FLASHSTEPS_COMMIT;
}

}  // namespace flashsteps::cli
