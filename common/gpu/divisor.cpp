#include "common/gpu/divisor.h"

#include <fmt/format.h>

#include <stdexcept>

#include "common/stage/device.h"

namespace flashsteps {

Divisor divisor_of(int64_t value) {
  if (value < 1 || value >= int64_t{1} << 31) {
    throw std::invalid_argument(fmt::format("a divisor is 1 to 2147483647; {} was given", value));
  }
  const auto d = uint64_t(value);
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < d) ++shift;
  const uint64_t magic = (((uint64_t{1} << shift) - d) << 32) / d + 1;
  return {uint32_t(d), uint32_t(magic), shift};
}

int index_count(int64_t count) {
  if (count < 0 || count >= int64_t{1} << 31) {
    throw DeviceError(fmt::format(
        "the kernel's blocks share out up to 2147483647 pieces of work; {} were given", count));
  }
  return int(count);
}

}  // namespace flashsteps
