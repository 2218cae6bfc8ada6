/// \file
/// Kernels that behave badly or take a known time, for the tests of the CUDA runtime and of the
/// timings. Only for a card.
#pragma once

#include <cstdint>

/// Writes four bytes to an address, from one thread.
void store_to(void* address);
/// Runs for so many nanoseconds by the card's own clock, in one thread.
void busy_for(int64_t nanoseconds);
/// Launches a kernel that declares 1024 bytes of shared memory and asks for more.
void launch_with(int64_t grid, int block, int dynamic_smem);
