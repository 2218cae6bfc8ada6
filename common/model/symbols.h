/// \file
/// Names from the program's own symbol table: of kernels, and of their static shared arrays, which
/// are thread-local variables here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace flashsteps::model {

/// A static `__shared__` array of a kernel.
struct StaticArray {
  std::string name;
  size_t offset = 0;  ///< in the thread-local block of the module
  size_t bytes = 0;
};

/// What the symbol table knows of a kernel.
struct KernelSymbols {
  std::string name;                 ///< without namespaces, template arguments and parameters
  std::vector<StaticArray> arrays;  ///< in order of offset
};

/// \param kernel the kernel's entry
/// \throws DeviceError when the program has no symbol table (it was stripped)
KernelSymbols find_kernel(const void* kernel);

/// [begin, end) of memory.
struct AddressRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool contains(uintptr_t a) const { return a >= begin && a < end; }
};

/// The thread-local block of the module that holds the kernels, for the calling OS thread.
AddressRange thread_local_block();

/// The parts of loaded modules that cannot be written: constants that kernels may read.
const std::vector<AddressRange>& read_only_memory();

/// Reads the program's symbol table now, not at the first launch: for a program that will not be
/// able to open its own file later.
void load_symbols();

}  // namespace flashsteps::model
