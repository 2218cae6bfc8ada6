/// \file
/// The CPU model's side of common/gpu/gpu.h: what a kernel file sees when g++ compiles it for the
/// model. The names are CUDA's and those of common/gpu/cuda_device.h; each primitive ends with two
/// defaulted parameters that tell the model the line of the call, so that faults can name it and
/// mutants can skip it.
///
/// Only light headers are included: whatever a kernel file instantiates is instrumented, and would
/// be merged by the linker with the same template in the model's own, uninstrumented code.
#pragma once

#ifndef FLASHSTEPS_MODEL_TARGET
#error "for kernel files on the CPU model alone; host code includes common/model/model.h"
#endif

#include <math.h>

#include <cstdint>
#include <type_traits>

#include "common/model/float16.h"
#include "common/model/primitives.h"
#include "common/stage/stage.h"

// --- CUDA's keywords ---

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ const
#define __align__(n) __attribute__((aligned(n)))
// One copy for each OS thread, hence for each block that is running: a block never leaves its OS
// thread.
#define __shared__ static thread_local

// --- CUDA's types ---

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Vector types copy through a compiler vector, so that a copy is one access of 8 or 16 bytes, as on
// a card, and not two or four.
#define FLASHSTEPS_VECTOR_TYPE(NAME, T, SIZE, MEMBERS, PARAMS, INITS, ARGS) \
  struct alignas(SIZE) NAME {                                               \
    typedef T Vector __attribute__((vector_size(SIZE)));                    \
    union {                                                                 \
      Vector vector;                                                        \
      struct {                                                              \
        T MEMBERS;                                                          \
      };                                                                    \
    };                                                                      \
    NAME() = default;                                                       \
    NAME(const NAME& other) : vector(other.vector) {}                       \
    NAME PARAMS : INITS {}                                                  \
    NAME& operator=(const NAME& other) {                                    \
      vector = other.vector;                                                \
      return *this;                                                         \
    }                                                                       \
  };                                                                        \
  static inline NAME make_##NAME PARAMS {                                   \
    return NAME ARGS;                                                       \
  }
#define FLASHSTEPS_VECTOR_TYPES(NAME, T)                                          \
  FLASHSTEPS_VECTOR_TYPE(NAME##2, T, 8, x FLASHSTEPS_COMMA y, (T x_, T y_),       \
                         vector{x_ FLASHSTEPS_COMMA y_}, (x_, y_))                \
  FLASHSTEPS_VECTOR_TYPE(                                                         \
      NAME##4, T, 16, x FLASHSTEPS_COMMA y FLASHSTEPS_COMMA z FLASHSTEPS_COMMA w, \
      (T x_, T y_, T z_, T w_),                                                   \
      vector{x_ FLASHSTEPS_COMMA y_ FLASHSTEPS_COMMA z_ FLASHSTEPS_COMMA w_}, (x_, y_, z_, w_))
#define FLASHSTEPS_COMMA ,
FLASHSTEPS_VECTOR_TYPES(int, int)
FLASHSTEPS_VECTOR_TYPES(uint, unsigned)
FLASHSTEPS_VECTOR_TYPES(float, float)
#undef FLASHSTEPS_COMMA
#undef FLASHSTEPS_VECTOR_TYPES
#undef FLASHSTEPS_VECTOR_TYPE

/// The line of a primitive's call; defaulted parameters, evaluated where the primitive is called.
#define FLASHSTEPS_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// --- CUDA's built-in variables and functions ---

#define threadIdx (::flashsteps::model::thread_index())
#define blockIdx (::flashsteps::model::block_index())
#define blockDim (::flashsteps::model::block_dim())
#define gridDim (::flashsteps::model::grid_dim())

static __forceinline__ void __syncthreads(FLASHSTEPS_SITE) {
  flashsteps::model::block_barrier(file, line);
}
static __forceinline__ void __syncwarp(unsigned mask = 0xffffffffu, FLASHSTEPS_SITE) {
  flashsteps::model::warp_barrier(mask, file, line);
}

namespace flashsteps::model {
template <typename T>
__forceinline__ T shuffle_value(Shuffle kind, unsigned mask, T value, int operand, int width,
                                const char* file, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles values of 4 or 8 bytes");
  if constexpr (sizeof(T) == 4) {
    const uint64_t bits = __builtin_bit_cast(uint32_t, value);
    return __builtin_bit_cast(
        T, static_cast<uint32_t>(shuffle(kind, mask, bits, operand, width, file, line)));
  } else {
    const uint64_t bits = __builtin_bit_cast(uint64_t, value);
    return __builtin_bit_cast(T, shuffle(kind, mask, bits, operand, width, file, line));
  }
}
}  // namespace flashsteps::model

template <typename T>
static __forceinline__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32,
                                     FLASHSTEPS_SITE) {
  using namespace flashsteps::model;
  return shuffle_value(Shuffle::index, mask, value, lane, width, file, line);
}
template <typename T>
static __forceinline__ T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32,
                                        FLASHSTEPS_SITE) {
  using namespace flashsteps::model;
  return shuffle_value(Shuffle::up, mask, value, delta, width, file, line);
}
template <typename T>
static __forceinline__ T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32,
                                          FLASHSTEPS_SITE) {
  using namespace flashsteps::model;
  return shuffle_value(Shuffle::down, mask, value, delta, width, file, line);
}
template <typename T>
static __forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                                         FLASHSTEPS_SITE) {
  using namespace flashsteps::model;
  return shuffle_value(Shuffle::xor_, mask, value, lane_mask, width, file, line);
}

static __forceinline__ int __any_sync(unsigned mask, int predicate, FLASHSTEPS_SITE) {
  using namespace flashsteps::model;
  return static_cast<int>(vote(Vote::any, mask, predicate != 0, file, line));
}
static __forceinline__ int __all_sync(unsigned mask, int predicate, FLASHSTEPS_SITE) {
  using namespace flashsteps::model;
  return static_cast<int>(vote(Vote::all, mask, predicate != 0, file, line));
}
static __forceinline__ unsigned __ballot_sync(unsigned mask, int predicate, FLASHSTEPS_SITE) {
  using namespace flashsteps::model;
  return vote(Vote::ballot, mask, predicate != 0, file, line);
}

static __forceinline__ float atomicAdd(float* address, float value, FLASHSTEPS_SITE) {
  return flashsteps::model::atomic_add(address, value, file, line);
}
static __forceinline__ int atomicAdd(int* address, int value, FLASHSTEPS_SITE) {
  return flashsteps::model::atomic_add(address, value, file, line);
}
static __forceinline__ unsigned atomicAdd(unsigned* address, unsigned value, FLASHSTEPS_SITE) {
  return flashsteps::model::atomic_add(address, value, file, line);
}

static __forceinline__ unsigned __float_as_uint(float x) {
  return __builtin_bit_cast(unsigned, x);
}
static __forceinline__ int __float_as_int(float x) {
  return __builtin_bit_cast(int, x);
}
static __forceinline__ float __uint_as_float(unsigned x) {
  return __builtin_bit_cast(float, x);
}
static __forceinline__ float __int_as_float(int x) {
  return __builtin_bit_cast(float, x);
}

// Of one type each: a call that mixes types is ambiguous here, where CUDA would pick for you.
#define FLASHSTEPS_MIN_MAX(T)                        \
  static constexpr __forceinline__ T min(T a, T b) { \
    return b < a ? b : a;                            \
  }                                                  \
  static constexpr __forceinline__ T max(T a, T b) { \
    return a < b ? b : a;                            \
  }
FLASHSTEPS_MIN_MAX(int)
FLASHSTEPS_MIN_MAX(unsigned)
FLASHSTEPS_MIN_MAX(long)
FLASHSTEPS_MIN_MAX(unsigned long)
FLASHSTEPS_MIN_MAX(long long)
FLASHSTEPS_MIN_MAX(unsigned long long)
#undef FLASHSTEPS_MIN_MAX
static __forceinline__ float min(float a, float b) {
  return fminf(a, b);
}
static __forceinline__ float max(float a, float b) {
  return fmaxf(a, b);
}

namespace flashsteps::inline model_target {

constexpr Target kTarget = Target::model;
constexpr unsigned kFullMask = 0xffffffffu;

/// threadIdx.x; on a card, read anew so that it holds no register across a loop.
static __forceinline__ int fresh_thread_index() {
  return int(threadIdx.x);
}

// --- 16-bit types ---

/// IEEE binary16, as bits.
struct fp16_t {
  uint16_t bits;
};

/// bfloat16: the upper half of a binary32, as bits.
struct bf16_t {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(fp16_t x) {
  return model::half_to_float(x.bits);
}
__device__ __forceinline__ float to_float(bf16_t x) {
  return model::bfloat_to_float(x.bits);
}

/// Rounds to nearest even. NaN becomes 0x7fff, as on a card.
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  static_assert(std::is_same_v<T, fp16_t> || std::is_same_v<T, bf16_t>, "fp16_t or bf16_t");
  return T{std::is_same_v<T, fp16_t> ? model::float_to_half(x) : model::float_to_bfloat(x)};
}

/// Two elements in one register, `lo` in the lower half (the lower address).
template <typename T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  return from_float<T>(lo).bits | static_cast<uint32_t>(from_float<T>(hi).bits) << 16;
}

// --- counted arithmetic ---

/// 2^x; 0 for -inf.
__device__ __forceinline__ float fast_exp2(float x, FLASHSTEPS_SITE) {
  return model::exponential2(x, file, line);
}

/// e^x; 0 for -inf.
__device__ __forceinline__ float fast_exp(float x, FLASHSTEPS_SITE) {
  return model::exponential(x, file, line);
}

/// ln x; -inf for 0.
__device__ __forceinline__ float natural_log(float x) {
  return logf(x);
}

/// a / b.
__device__ __forceinline__ float divide(float a, float b, FLASHSTEPS_SITE) {
  return model::divide(a, b, file, line);
}

// --- global memory, shared between blocks ---

/// Adds four neighbouring numbers in global memory, each atomically; the address is a multiple of
/// 16.
__device__ __forceinline__ void atomic_add_quad(float* address, const float (&x)[4],
                                                FLASHSTEPS_SITE) {
  model::atomic_add_quad(address, x, file, line);
}

/// Waits until *turn is `value`. Called by a whole warp; what other warps did before their
/// turn_pass is then seen by all of its lanes. The warps that *turn waits for must be of blocks
/// that have started.
__device__ __forceinline__ void turn_wait(const int* turn, int value, FLASHSTEPS_SITE) {
  model::turn_wait(turn, value, file, line);
}

/// Adds 1 to *turn, after all that the warp's lanes did before. Called by a whole warp, which has
/// the turn.
__device__ __forceinline__ void turn_pass(int* turn, FLASHSTEPS_SITE) {
  model::turn_pass(turn, file, line);
}

// --- dynamic shared memory ---

/// The dynamic shared memory of the block, 128-byte aligned.
template <typename T>
__device__ __forceinline__ T* dynamic_smem() {
  return static_cast<T*>(model::dynamic_shared_memory());
}

/// Hands out dynamic shared memory in named parts, each 128-byte aligned. A part that does not fit
/// into what the launch asked for is a fault.
class SharedMemory {
 public:
  template <typename T>
  __device__ __forceinline__ T* take(const char* name, int count, FLASHSTEPS_SITE) {
    void* part = model::take_shared_memory(name, used_, count, int(sizeof(T)), file, line);
    used_ += (count * int(sizeof(T)) + 127) / 128 * 128;
    return static_cast<T*>(part);
  }

 private:
  int used_ = 0;
};

// --- tensor cores ---

template <typename T>
constexpr model::Type16 kType16 =
    std::is_same_v<T, fp16_t> ? model::Type16::fp16 : model::Type16::bf16;

/// Loads four 8x8 matrices of 16-bit elements; lane 8i+r gives the address of row r of matrix i,
/// and lane t receives in r[i] elements (t/4, 2(t%4)) and the next of matrix i (PTX ISA, ldmatrix).
template <typename T>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const T* row_smem, FLASHSTEPS_SITE) {
  model::ldmatrix(r, row_smem, false, file, line);
}

/// As ldmatrix_x4, with each matrix transposed on the way: lane t receives (2(t%4), t/4) and the
/// one below.
template <typename T>
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const T* row_smem,
                                                  FLASHSTEPS_SITE) {
  model::ldmatrix(r, row_smem, true, file, line);
}

/// D += A B for one warp, A 16x16 by rows, B 16x8 by columns, D 16x8 fp32 (PTX ISA, mma.m16n8k16).
/// With g = lane/4 and t = lane%4: a[0], a[1], a[2], a[3] hold (g, 2t), (g+8, 2t), (g, 2t+8), (g+8,
/// 2t+8) and the next column; b[0], b[1] hold (2t, g), (2t+8, g) and the next row; d holds (g, 2t),
/// (g, 2t+1), (g+8, 2t), (g+8, 2t+1). The model adds the 16 products to D in order of k, each sum
/// rounded to fp32.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, FLASHSTEPS_SITE) {
  static_assert(std::is_same_v<T, fp16_t> || std::is_same_v<T, bf16_t>,
                "mma takes fp16_t or bf16_t");
  model::mma_m16n8k16(kType16<T>, d, a, b0, b1, file, line);
}

// --- asynchronous copies ---

/// Starts copying 16 bytes from global to shared memory; zeros instead where `fetch` is false
/// (global memory is then not touched). Both addresses are 16-byte aligned.
template <typename T>
__device__ __forceinline__ void cp_async_16(T* to_smem, const T* from_gmem, bool fetch,
                                            FLASHSTEPS_SITE) {
  model::cp_async(to_smem, from_gmem, fetch, file, line);
}

/// Starts copying 16 bytes as cp_async_16 does where `condition` holds, and does nothing elsewhere.
template <typename T>
__device__ __forceinline__ void cp_async_16_if(bool condition, T* to_smem, const T* from_gmem,
                                               FLASHSTEPS_SITE) {
  if (condition) model::cp_async(to_smem, from_gmem, true, file, line);
}

/// Closes a group of the copies that this thread has started since the last commit.
__device__ __forceinline__ void cp_async_commit(FLASHSTEPS_SITE) {
  model::cp_async_commit(file, line);
}

/// Waits until at most kPending of this thread's latest groups are still in flight. Other threads
/// see the data after a barrier that follows.
template <int kPending>
__device__ __forceinline__ void cp_async_wait(FLASHSTEPS_SITE) {
  model::cp_async_wait(kPending, file, line);
}

// --- the ledger, and what mutants switch off ---

/// Marks that the block starts on a tile of keys, and whether it masks it.
__device__ __forceinline__ void note_tile(bool masked) {
  model::note_tile(masked);
}
/// Marks the end of the loop over tiles.
__device__ __forceinline__ void note_tiles_done() {
  model::note_tiles_done();
}
/// The condition itself; marks it as a mask, so that a mutant can switch it off.
__device__ __forceinline__ bool mask_if(bool condition, FLASHSTEPS_SITE) {
  return model::mask(condition, file, line);
}

// --- labs ---

/// Where a lab leaves out what the student is to write: stops the kernel with a message that says
/// what is missing.
__device__ __forceinline__ void not_implemented(const char* what, FLASHSTEPS_SITE) {
  model::not_implemented(what, file, line);
}

// --- launch ---

/// Dynamic shared memory that a block may ask for on the imitated card, in bytes. Host only.
int shared_memory_per_block();

/// Where and how a kernel runs.
struct LaunchConfig {
  int64_t grid = 0;  ///< blocks; 0 launches nothing
  int block = 0;     ///< threads
  int smem = 0;      ///< bytes of dynamic shared memory
  Stream stream = nullptr;
};

/// Runs the kernel to its end. Throws model::Fault where the kernel did what it may not, and
/// DeviceError where CUDA would refuse the launch.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Args... args) {
  if (config.grid == 0) return;
  auto call = [kernel, ... params = static_cast<Params>(args)] { kernel(params...); };
  model::run({reinterpret_cast<const void*>(kernel), config.grid, config.block, config.smem,
              [](const void* parameters) {
                (*static_cast<decltype(call)*>(const_cast<void*>(parameters)))();
              },
              &call, int64_t{sizeof(call)}});
}

}  // namespace flashsteps::inline model_target

#undef FLASHSTEPS_SITE
