#include "common/gpu/tma_rules.h"

#include <fmt/format.h>

#include <tuple>
#include <utility>

namespace flashsteps {

std::string why_not_tma(const void* base, int head_dim, int rows, int heads, int batch,
                        const Strides& strides, int box_cols, int box_rows) {
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0)
    return "TMA needs a tensor that is aligned to 16 bytes";
  for (const auto& [name, extent] : {std::pair{"head_dim", head_dim}, std::pair{"row", rows},
                                     std::pair{"head", heads}, std::pair{"batch", batch}}) {
    if (extent < 1)
      return fmt::format("TMA needs at least one entry along {}; {} were given", name, extent);
  }
  for (const auto& [name, extent, stride] :
       {std::tuple{"row", rows, strides.row}, std::tuple{"head", heads, strides.head},
        std::tuple{"batch", batch, strides.batch}}) {
    if (extent == 1) continue;  // never used
    if (stride % 8 != 0 || stride < 0 || stride >= int64_t{1} << 39) {
      return fmt::format(
          "TMA needs a {} stride that is a multiple of 8 elements, from 0 to 2^39; {} was given",
          name, stride);
    }
  }
  if (box_cols != 64)
    return fmt::format("the 128-byte swizzle needs boxes of 64 columns; {} were given", box_cols);
  if (box_rows < 1 || box_rows > 256)
    return fmt::format("TMA copies boxes of 1 to 256 rows; {} were given", box_rows);
  return "";
}

}  // namespace flashsteps
