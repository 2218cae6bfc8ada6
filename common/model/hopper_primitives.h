/// \file
/// What the model supplies to kernels for Hopper: the functions behind the names of
/// common/model/hopper_device.h. mbarrier.cpp, tma.cpp and wgmma.cpp define them.
#pragma once

#include <cstdint>

#include "common/attention/problem.h"
#include "common/model/primitives.h"

namespace flashsteps::model {

/// A tensor of 16-bit elements as TMA sees it, and the box that one copy moves. Trivially copyable:
/// kernels take it by value.
struct TensorMap {
  uintptr_t base = 0;
  int64_t row_bytes = 0, head_bytes = 0, batch_bytes = 0;  // strides
  int cols = 0, rows = 0, heads = 0, batch = 0;            // extents
  int box_cols = 0, box_rows = 0;
};

/// \throws DeviceError where cuTensorMapEncodeTiled would refuse
TensorMap make_tensor_map(const void* base, int head_dim, int rows, int heads, int batch,
                          const Strides& strides, int box_cols, int box_rows);

void mbarrier_init(uint64_t* bar, int arrivals, const char* file, int line);
void fence_mbarrier_init(const char* file, int line);
void mbarrier_arrive(uint64_t* bar, const char* file, int line);
void mbarrier_arrive_expect_tx(uint64_t* bar, int bytes, const char* file, int line);
void mbarrier_wait(uint64_t* bar, int parity, const char* file, int line);

void tma_load(void* to_shared, const TensorMap& map, uint64_t* bar, int col, int row, int head,
              int batch, const char* file, int line);
void tma_store(const TensorMap& map, const void* from_shared, int col, int row, int head, int batch,
               const char* file, int line);
void tma_store_commit(const char* file, int line);
/// \param read_only the source may be overwritten; else the destination is written, too
void tma_store_wait(int pending, bool read_only, const char* file, int line);
void fence_proxy_async(const char* file, int line);

void named_barrier_sync(int id, int threads, const char* file, int line);
void named_barrier_arrive(int id, int threads, const char* file, int line);

void set_registers(int registers, bool grow, const char* file, int line);
int warp_uniform(int x, const char* file, int line);

/// One wgmma m64nNk16 as one thread sees it.
struct Wgmma {
  Type16 type = Type16::fp16;
  int n = 0;                    // columns of D
  bool a_mn = false;            // A is stored along m, not along k
  bool b_mn = false;            // B is stored along n, not along k
  float* d = nullptr;           // n / 2 sums of this thread
  const uint32_t* a = nullptr;  // this thread's 4 registers of A; null: A is in shared memory
  uint64_t a_descriptor = 0, b_descriptor = 0;
  bool accumulate = false;
  bool taken_out = false;  // by a mutant: all but the sums is as if it were there
};

uint64_t matrix_descriptor(const void* smem, int leading_bytes, int stride_bytes, const char* file,
                           int line);
void wgmma(const Wgmma& product, const char* file, int line);
void wgmma_fence(const char* file, int line);
void wgmma_commit(const char* file, int line);
/// Sums that a wait hands back: they begin at `d`.
struct WgmmaSums {
  const float* d[3] = {};
  int count = 0;
};
void wgmma_wait(int pending, const WgmmaSums& sums, const char* file, int line);

}  // namespace flashsteps::model
