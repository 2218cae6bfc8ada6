/// \file
/// Everything that a kernel file may use of the GPU, for two targets: nvcc compiles it for a card
/// (cuda_device.h), g++ for the CPU model of one (common/model/device.h). Both declare the same
/// names, below `namespace flashsteps::inline FLASHSTEPS_TARGET`:
///
/// | what | names |
/// |---|---|
/// | CUDA as it is | `__global__ __device__ __shared__ threadIdx blockIdx blockDim gridDim dim3
/// float2 float4 uint2 uint4` | | barriers | `__syncthreads() __syncwarp()` | | votes, shuffles |
/// `__shfl_sync __shfl_xor_sync __shfl_down_sync __any_sync __all_sync __ballot_sync`, `kFullMask`
/// | | atomics | `atomicAdd` on float and int in global memory, `atomic_add_quad` | | an order
/// between blocks | `turn_wait(turn, value) turn_pass(turn)` | | 16-bit types | `fp16_t bf16_t
/// to_float(x) from_float<T>(x) pack2<T>(lo, hi)` | | counted arithmetic | `fast_exp(x)
/// fast_exp2(x) natural_log(x) divide(a, b)` | | dynamic shared memory | `dynamic_smem<T>()`, or in
/// named parts `SharedMemory::take<T>("Q_smem", n)` | | tensor cores | `ldmatrix_x4
/// ldmatrix_x4_trans mma_m16n8k16<T>` | | asynchronous copies | `cp_async_16 cp_async_16_if
/// cp_async_commit cp_async_wait<N>` | | launch | `launch(kernel, {grid, block, smem, stream},
/// args…)`, always checked | | the ledger, the mutants | `note_tile(masked) note_tiles_done()
/// mask_if(condition)`: nothing on a card | | labs | `not_implemented("what is missing")` |
///
/// It holds what is the same in every stage and is not the lesson: no softmax, no merge, no loop
/// over K and V.
#pragma once

#include <cstdint>

/// \def FLASHSTEPS_TARGET
/// The inline namespace of everything that is compiled for both targets, so that one program may
/// hold both.
#ifdef FLASHSTEPS_MODEL_TARGET
#define FLASHSTEPS_TARGET model_target
#include "common/model/device.h"
#else
#define FLASHSTEPS_TARGET cuda_target
#include "common/gpu/cuda_device.h"
#endif

#include "common/gpu/tile.h"
