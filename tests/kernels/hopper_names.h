/// \file
/// The names of Hopper's primitives for test kernels, and FLASHSTEPS_HOPPER where this target has
/// them.
#pragma once

#include "common/gpu/gpu.h"

#ifdef FLASHSTEPS_MODEL_TARGET
#include "common/model/hopper_device.h"
#define FLASHSTEPS_HOPPER
#elif __has_include("common/gpu/cuda_hopper.h")
#include "common/gpu/cuda_hopper.h"
#define FLASHSTEPS_HOPPER
#endif
