// A build without CUDA measures nothing, and says so.
#include "common/timing/timing.h"

#ifndef FLASHSTEPS_HAS_CUDA

#include "common/gpu/cuda_support.h"

namespace flashsteps {

namespace {
[[noreturn]] void refuse() {
  throw DeviceError(std::string("timing needs a card: ") + why_no_cuda());
}
}  // namespace

TimeResult time_forward(Device&, const Stage&, const Problem&, const TimingOptions&,
                        const Variant&) {
  refuse();
}
std::optional<TimeResult> time_lse(Device&, const Stage&, const Problem&, const TimingOptions&) {
  refuse();
}
InterleavedResult time_forward_interleaved(Device&, const std::vector<const Stage*>&,
                                           const Problem&, const TimingOptions&,
                                           const std::vector<Variant>&) {
  refuse();
}
InterleavedResult time_backward_interleaved(Device&, const std::vector<const Stage*>&,
                                            const Problem&, const Stage*, const TimingOptions&,
                                            const std::vector<Variant>&) {
  refuse();
}
TimeResult time_backward(Device&, const Stage&, const Problem&, const Stage*, const TimingOptions&,
                         const Variant&) {
  refuse();
}
Ceilings measure_ceilings(Device&, const TimingOptions&) {
  refuse();
}

}  // namespace flashsteps

#endif
