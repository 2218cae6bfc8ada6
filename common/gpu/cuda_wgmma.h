/// \file
/// wgmma on a card: the instruction wants each of its up to 128 sums as an operand of its own, so
/// that its text is put together here, for each width that the stages use.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/gpu/cuda_device.h"

namespace flashsteps {

/// How an operand of wgmma lies in shared memory: along k (the dimension that is summed over), or
/// along m or n.
enum class Major { k, mn };

inline namespace cuda_target {

/// \cond the text of the instructions

// The numbers of the operands, ten at a time: FLASHSTEPS_TEN(3) is "%30, %31, …, %39".
#define FLASHSTEPS_FIRST_TEN "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9"
#define FLASHSTEPS_TWO(t) ", %" #t "0, %" #t "1"
#define FLASHSTEPS_FOUR(t) FLASHSTEPS_TWO(t) ", %" #t "2, %" #t "3"
#define FLASHSTEPS_SIX(t) FLASHSTEPS_FOUR(t) ", %" #t "4, %" #t "5"
#define FLASHSTEPS_EIGHT(t) FLASHSTEPS_SIX(t) ", %" #t "6, %" #t "7"
#define FLASHSTEPS_TEN(t) FLASHSTEPS_EIGHT(t) ", %" #t "8, %" #t "9"
#define FLASHSTEPS_30 FLASHSTEPS_FIRST_TEN FLASHSTEPS_TEN(1) FLASHSTEPS_TEN(2)
#define FLASHSTEPS_40 FLASHSTEPS_30 FLASHSTEPS_TEN(3)
#define FLASHSTEPS_60 FLASHSTEPS_40 FLASHSTEPS_TEN(4) FLASHSTEPS_TEN(5)
#define FLASHSTEPS_80 FLASHSTEPS_60 FLASHSTEPS_TEN(6) FLASHSTEPS_TEN(7)
#define FLASHSTEPS_120 \
  FLASHSTEPS_80 FLASHSTEPS_TEN(8) FLASHSTEPS_TEN(9) FLASHSTEPS_TEN(10) FLASHSTEPS_TEN(11)
// The sums themselves, from those of columns 8 n on.
#define FLASHSTEPS_SUMS_4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FLASHSTEPS_SUMS_8(n) FLASHSTEPS_SUMS_4(n), FLASHSTEPS_SUMS_4(n + 1)
#define FLASHSTEPS_SUMS_16(n) FLASHSTEPS_SUMS_8(n), FLASHSTEPS_SUMS_8(n + 2)
#define FLASHSTEPS_SUMS_32(n) FLASHSTEPS_SUMS_16(n), FLASHSTEPS_SUMS_16(n + 4)
#define FLASHSTEPS_SUMS_64(n) FLASHSTEPS_SUMS_32(n), FLASHSTEPS_SUMS_32(n + 8)

// A and B by descriptors. P, A, B, TA, TB: the operands' numbers, which follow the sums'.
#define FLASHSTEPS_WGMMA_SS(N, TYPE, REGISTERS, A, B, P, TA, TB, ...)                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                        \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS \
               "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}\n"                       \
               : __VA_ARGS__                                                                  \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kMajorA)), "n"(int(kMajorB)))
// A in registers.
#define FLASHSTEPS_WGMMA_RS(N, TYPE, REGISTERS, A0, A1, A2, A3, B, P, TB, ...)                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                         \
               ", 0;\n"                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS  \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #TB ";\n}\n" \
               : __VA_ARGS__                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),     \
                 "n"(int(kMajorB)))

#define FLASHSTEPS_WGMMA_TYPES(KIND, ...)               \
  if constexpr (std::is_same_v<T, fp16_t>) {            \
    FLASHSTEPS_WGMMA_EXPAND(KIND, "f16", __VA_ARGS__);  \
  } else {                                              \
    FLASHSTEPS_WGMMA_EXPAND(KIND, "bf16", __VA_ARGS__); \
  }
#define FLASHSTEPS_WGMMA_EXPAND(KIND, TYPE, N, ...) FLASHSTEPS_WGMMA_##KIND(N, TYPE, __VA_ARGS__)

/// \endcond

/// D = A B, or D += A B where `accumulate`: 64 x 16 times 16 x kN for one warpgroup, started here
/// and done after the wgmma_wait that covers it (PTX ISA, wgmma.mma_async). A and B lie in shared
/// memory as their descriptors say (matrix_descriptor). Warp w of the four has rows 16 w to 16 w +
/// 15 of D, as the D fragment of mma.m16n8k16 has them.
template <typename T, int kN, Major kMajorA = Major::k, Major kMajorB = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[kN / 8][4], uint64_t a, uint64_t b,
                                      bool accumulate) {
  if constexpr (kN == 64) {
    FLASHSTEPS_WGMMA_TYPES(SS, 64, FLASHSTEPS_30 FLASHSTEPS_TWO(3), 32, 33, 34, 35, 36,
                           FLASHSTEPS_SUMS_32(0))
  } else if constexpr (kN == 80) {
    FLASHSTEPS_WGMMA_TYPES(SS, 80, FLASHSTEPS_40, 40, 41, 42, 43, 44, FLASHSTEPS_SUMS_32(0),
                           FLASHSTEPS_SUMS_8(8))
  } else if constexpr (kN == 96) {
    FLASHSTEPS_WGMMA_TYPES(SS, 96, FLASHSTEPS_40 FLASHSTEPS_EIGHT(4), 48, 49, 50, 51, 52,
                           FLASHSTEPS_SUMS_32(0), FLASHSTEPS_SUMS_16(8))
  } else if constexpr (kN == 112) {
    FLASHSTEPS_WGMMA_TYPES(SS, 112, FLASHSTEPS_40 FLASHSTEPS_TEN(4) FLASHSTEPS_SIX(5), 56, 57, 58,
                           59, 60, FLASHSTEPS_SUMS_32(0), FLASHSTEPS_SUMS_16(8),
                           FLASHSTEPS_SUMS_8(12))
  } else if constexpr (kN == 128) {
    FLASHSTEPS_WGMMA_TYPES(SS, 128, FLASHSTEPS_60 FLASHSTEPS_FOUR(6), 64, 65, 66, 67, 68,
                           FLASHSTEPS_SUMS_64(0))
  } else if constexpr (kN == 160) {
    FLASHSTEPS_WGMMA_TYPES(SS, 160, FLASHSTEPS_80, 80, 81, 82, 83, 84, FLASHSTEPS_SUMS_64(0),
                           FLASHSTEPS_SUMS_16(16))
  } else if constexpr (kN == 176) {
    FLASHSTEPS_WGMMA_TYPES(SS, 176, FLASHSTEPS_80 FLASHSTEPS_EIGHT(8), 88, 89, 90, 91, 92,
                           FLASHSTEPS_SUMS_64(0), FLASHSTEPS_SUMS_16(16), FLASHSTEPS_SUMS_8(20))
  } else if constexpr (kN == 192) {
    FLASHSTEPS_WGMMA_TYPES(SS, 192, FLASHSTEPS_80 FLASHSTEPS_TEN(8) FLASHSTEPS_SIX(9), 96, 97, 98,
                           99, 100, FLASHSTEPS_SUMS_64(0), FLASHSTEPS_SUMS_32(16))
  } else {
    static_assert(kN == 256, "instantiate the width here");
    FLASHSTEPS_WGMMA_TYPES(SS, 256, FLASHSTEPS_120 FLASHSTEPS_EIGHT(12), 128, 129, 130, 131, 132,
                           FLASHSTEPS_SUMS_64(0), FLASHSTEPS_SUMS_64(16))
  }
}

/// Likewise, with A in registers: warp w has rows 16 w to 16 w + 15, as the A fragment of
/// mma.m16n8k16. They must not change before the wgmma_wait.
template <typename T, int kN, Major kMajorB = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  if constexpr (kN == 64) {
    FLASHSTEPS_WGMMA_TYPES(RS, 64, FLASHSTEPS_30 FLASHSTEPS_TWO(3), 32, 33, 34, 35, 36, 37, 38,
                           FLASHSTEPS_SUMS_32(0))
  } else if constexpr (kN == 80) {
    FLASHSTEPS_WGMMA_TYPES(RS, 80, FLASHSTEPS_40, 40, 41, 42, 43, 44, 45, 46, FLASHSTEPS_SUMS_32(0),
                           FLASHSTEPS_SUMS_8(8))
  } else if constexpr (kN == 96) {
    FLASHSTEPS_WGMMA_TYPES(RS, 96, FLASHSTEPS_40 FLASHSTEPS_EIGHT(4), 48, 49, 50, 51, 52, 53, 54,
                           FLASHSTEPS_SUMS_32(0), FLASHSTEPS_SUMS_16(8))
  } else if constexpr (kN == 112) {
    FLASHSTEPS_WGMMA_TYPES(RS, 112, FLASHSTEPS_40 FLASHSTEPS_TEN(4) FLASHSTEPS_SIX(5), 56, 57, 58,
                           59, 60, 61, 62, FLASHSTEPS_SUMS_32(0), FLASHSTEPS_SUMS_16(8),
                           FLASHSTEPS_SUMS_8(12))
  } else if constexpr (kN == 128) {
    FLASHSTEPS_WGMMA_TYPES(RS, 128, FLASHSTEPS_60 FLASHSTEPS_FOUR(6), 64, 65, 66, 67, 68, 69, 70,
                           FLASHSTEPS_SUMS_64(0))
  } else if constexpr (kN == 160) {
    FLASHSTEPS_WGMMA_TYPES(RS, 160, FLASHSTEPS_80, 80, 81, 82, 83, 84, 85, 86,
                           FLASHSTEPS_SUMS_64(0), FLASHSTEPS_SUMS_16(16))
  } else if constexpr (kN == 176) {
    FLASHSTEPS_WGMMA_TYPES(RS, 176, FLASHSTEPS_80 FLASHSTEPS_EIGHT(8), 88, 89, 90, 91, 92, 93, 94,
                           FLASHSTEPS_SUMS_64(0), FLASHSTEPS_SUMS_16(16), FLASHSTEPS_SUMS_8(20))
  } else if constexpr (kN == 192) {
    FLASHSTEPS_WGMMA_TYPES(RS, 192, FLASHSTEPS_80 FLASHSTEPS_TEN(8) FLASHSTEPS_SIX(9), 96, 97, 98,
                           99, 100, 101, 102, FLASHSTEPS_SUMS_64(0), FLASHSTEPS_SUMS_32(16))
  } else {
    static_assert(kN == 256, "instantiate the width here");
    FLASHSTEPS_WGMMA_TYPES(RS, 256, FLASHSTEPS_120 FLASHSTEPS_EIGHT(12), 128, 129, 130, 131, 132,
                           133, 134, FLASHSTEPS_SUMS_64(0), FLASHSTEPS_SUMS_64(16))
  }
}

#undef FLASHSTEPS_FIRST_TEN
#undef FLASHSTEPS_TWO
#undef FLASHSTEPS_FOUR
#undef FLASHSTEPS_SIX
#undef FLASHSTEPS_EIGHT
#undef FLASHSTEPS_TEN
#undef FLASHSTEPS_30
#undef FLASHSTEPS_40
#undef FLASHSTEPS_60
#undef FLASHSTEPS_80
#undef FLASHSTEPS_120
#undef FLASHSTEPS_SUMS_4
#undef FLASHSTEPS_SUMS_8
#undef FLASHSTEPS_SUMS_16
#undef FLASHSTEPS_SUMS_32
#undef FLASHSTEPS_SUMS_64
#undef FLASHSTEPS_WGMMA_SS
#undef FLASHSTEPS_WGMMA_RS
#undef FLASHSTEPS_WGMMA_TYPES
#undef FLASHSTEPS_WGMMA_EXPAND

}  // namespace cuda_target
}  // namespace flashsteps
