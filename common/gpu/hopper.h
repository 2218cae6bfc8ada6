/// \file
/// What a kernel file may use of compute capability 9.0 alone, beside gpu.h, for the same two
/// targets. Both declare the same names, below `namespace flashsteps::inline FLASHSTEPS_TARGET`:
/// mbarriers, TMA, named barriers, setmaxnreg and wgmma, each as PTX has it.
#pragma once

#include "common/gpu/gpu.h"
#ifdef FLASHSTEPS_MODEL_TARGET
#include "common/model/hopper_device.h"
#else
#include "common/gpu/cuda_hopper.h"
#endif
#include "common/gpu/hopper_tile.h"
