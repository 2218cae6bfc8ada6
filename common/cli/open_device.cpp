#include <algorithm>

#include "common/cli/task.h"
#include "common/gpu/cuda_support.h"

#ifdef FLASHSTEPS_HAS_MODEL
#include "common/model/model.h"
#endif

namespace flashsteps::cli {
namespace {

OpenedDevice open_cuda() {
#ifdef FLASHSTEPS_HAS_CUDA
  OpenedDevice opened;
  opened.device = make_cuda_device();
  opened.info = opened.device->info();
  return opened;
#else
  throw DeviceError(why_no_cuda());
#endif
}

OpenedDevice open_model(const Options& options, std::string why) {
#ifdef FLASHSTEPS_HAS_MODEL
  model::Options settings = model::options();
  settings.seed = options.seed;
  if (options.card) {
    settings.shared_memory_per_block = options.card->shared_memory_per_block;
    settings.multiprocessors = options.card->multiprocessors;  // its bound counts SMs with a block
    // A stage's kernels are those for 8.0 even where the bound is for an older card.
    settings.capability = std::max(options.card->capability, kOldestCapability);
  }
  if (options.shared_memory) settings.shared_memory_per_block = *options.shared_memory;
  model::set_options(settings);
  OpenedDevice opened;
  opened.device = make_model_device();
  opened.info = opened.device->info();
  opened.why = std::move(why);
  return opened;
#else
  (void)options;
  std::string message =
      "this program was built without the CPU model: it needs g++ and Boost.Context at build time";
  if (!why.empty()) message += "; " + why;
  throw DeviceError(message);
#endif
}

}  // namespace

OpenedDevice open_device(const Options& options) {
  if (options.device == Target::cuda) return open_cuda();
  if (options.device == Target::model) return open_model(options, "");
  if (options.shared_memory) return open_model(options, "--shared-memory was given");
  const std::string no_cuda = why_no_cuda();
  if (!no_cuda.empty()) return open_model(options, no_cuda);
  OpenedDevice opened = open_cuda();
  opened.why = "there is a usable card";
  return opened;
}

OpenedDevice open_model(const Options& options) {
  if (options.device == Target::cuda)
    throw DeviceError("only the CPU model counts; use --device model, or bench on a card");
  return open_model(options, "");
}

}  // namespace flashsteps::cli
