/// \file
/// What the model supplies to kernels: the functions behind CUDA's built-ins and behind the
/// wrappers of common/gpu. device.h gives them their CUDA names; common/model/*.cpp define them.
/// `file` and `line` are those of the call in the kernel, for messages and mutants.
#pragma once

#include <cstdint>

struct uint3 {
  unsigned x, y, z;
};

namespace flashsteps::model {

// The same throughout a thread's life, so the compiler may ask once.
[[gnu::const]] uint3 thread_index() noexcept;
[[gnu::const]] uint3 block_index() noexcept;
[[gnu::const]] uint3 block_dim() noexcept;
[[gnu::const]] uint3 grid_dim() noexcept;

enum class Shuffle { index, up, down, xor_ };
enum class Vote { any, all, ballot };
enum class Type16 { fp16, bf16 };

void block_barrier(const char* file, int line);
void warp_barrier(unsigned mask, const char* file, int line);
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int operand, int width,
                 const char* file, int line);
unsigned vote(Vote kind, unsigned mask, bool predicate, const char* file, int line);

float atomic_add(float* address, float value, const char* file, int line);
int atomic_add(int* address, int value, const char* file, int line);
unsigned atomic_add(unsigned* address, unsigned value, const char* file, int line);
void atomic_add_quad(float* address, const float* values, const char* file, int line);
void turn_wait(const int* turn, int value, const char* file, int line);
void turn_pass(int* turn, const char* file, int line);

float exponential(float x, const char* file, int line);
float exponential2(float x, const char* file, int line);
float divide(float a, float b, const char* file, int line);
bool mask(bool condition, const char* file, int line);
void note_tile(bool masked);
void note_tiles_done();
void not_implemented(const char* what, const char* file, int line);

void* dynamic_shared_memory();
/// Names bytes [offset, offset + count * element_size) of dynamic shared memory, and checks that
/// the launch asked for that much.
void* take_shared_memory(const char* name, int64_t offset, int64_t count, int element_size,
                         const char* file, int line);

void ldmatrix(uint32_t* registers, const void* row, bool transposed, const char* file, int line);
void mma_m16n8k16(Type16 type, float* d, const uint32_t* a, uint32_t b0, uint32_t b1,
                  const char* file, int line);
void cp_async(void* to_shared, const void* from_global, bool fetch, const char* file, int line);
void cp_async_commit(const char* file, int line);
void cp_async_wait(int pending, const char* file, int line);

/// One launch: `body` calls the kernel with the parameters that lie in [parameters, parameters +
/// size).
struct Launch {
  const void* kernel;
  int64_t grid;
  int block;
  int64_t dynamic_shared_memory;
  void (*body)(const void* parameters);
  const void* parameters;
  int64_t parameters_size;
};

/// Runs the launch to its end.
/// \throws Fault (common/model/model.h) where the kernel does what it may not
/// \throws DeviceError (common/stage/device.h) where CUDA would refuse the launch
void run(const Launch& launch);

}  // namespace flashsteps::model
