#include "common/model/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

#include "common/stage/device.h"

namespace flashsteps::model {
namespace {

constinit thread_local char touched = 0;  // makes sure that the thread-local block exists
const char anchor = 0;  // lies in the module that holds the model, hence the kernels

struct Symbol {
  std::string name;  // mangled
  uintptr_t value;   // relative to the module's load address, or to its thread-local block
  size_t bytes;
  int file;  // of a local symbol: the number of its source file; else 0
};

/// The module (program or shared library) that this code is part of.
struct Module {
  uintptr_t load_address = 0;
  std::string path;
  std::vector<Symbol> functions;
  std::vector<Symbol> thread_locals;
};

template <typename F>
void for_each_module(F&& f) {
  dl_iterate_phdr([](dl_phdr_info* info, size_t,
                     void* data) { return (*static_cast<F*>(data))(*info) ? 1 : 0; },
                  &f);
}

bool holds(const dl_phdr_info& info, const void* pointer) {
  const auto a = reinterpret_cast<uintptr_t>(pointer);
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr)& p = info.dlpi_phdr[i];
    if (p.p_type == PT_LOAD && a - (info.dlpi_addr + p.p_vaddr) < p.p_memsz) return true;
  }
  return false;
}

void read_symbols(Module& module) {
  std::ifstream file(module.path, std::ios::binary);
  const std::string image(std::istreambuf_iterator<char>(file), {});
  const auto at = [&](size_t offset, size_t bytes) -> const char* {
    return offset <= image.size() && bytes <= image.size() - offset ? image.data() + offset
                                                                    : nullptr;
  };
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(at(0, sizeof(ElfW(Ehdr))));
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return;
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(
      at(header->e_shoff, size_t{header->e_shnum} * sizeof(ElfW(Shdr))));
  if (!sections) return;
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB || sections[i].sh_link >= header->e_shnum) continue;
    const ElfW(Shdr)& names = sections[sections[i].sh_link];
    const auto* symbols =
        reinterpret_cast<const ElfW(Sym)*>(at(sections[i].sh_offset, sections[i].sh_size));
    const char* strings = at(names.sh_offset, names.sh_size);
    if (!symbols || !strings) continue;
    int file = 0;
    for (size_t k = 0; k < sections[i].sh_size / sizeof(ElfW(Sym)); ++k) {
      const ElfW(Sym)& s = symbols[k];
      const int type = ELF64_ST_TYPE(s.st_info);
      if (type == STT_FILE) ++file;  // the local symbols that follow are this file's
      if (s.st_shndx == SHN_UNDEF || s.st_name >= names.sh_size) continue;
      const int local = ELF64_ST_BIND(s.st_info) == STB_LOCAL ? file : 0;
      const Symbol symbol{strings + s.st_name, s.st_value, s.st_size, local};
      if (type == STT_FUNC) module.functions.push_back(symbol);
      if (type == STT_TLS) module.thread_locals.push_back(symbol);
    }
  }
  const auto by_value = [](const Symbol& a, const Symbol& b) { return a.value < b.value; };
  std::sort(module.functions.begin(), module.functions.end(), by_value);
  std::sort(module.thread_locals.begin(), module.thread_locals.end(), by_value);
}

const Module& module() {
  static const Module found = [] {
    Module m;
    for_each_module([&](const dl_phdr_info& info) {
      if (!holds(info, &anchor)) return false;
      m.load_address = info.dlpi_addr;
      m.path = info.dlpi_name && *info.dlpi_name ? info.dlpi_name : "/proc/self/exe";
      return true;
    });
    read_symbols(m);
    return m;
  }();
  return found;
}

std::string demangle(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? text.get() : name;
}

/// "void a::b<c, 64>(int)" to "b".
std::string short_function_name(std::string name) {
  for (size_t at; (at = name.find("(anonymous namespace)::")) != std::string::npos;)
    name.erase(at, 23);
  int depth = 0;
  size_t begin = 0, end = name.size();
  for (size_t i = 0; i < name.size() && end == name.size(); ++i) {
    if (name[i] == '<' && depth++ == 0 && i > begin) end = i;
    if (name[i] == '>') --depth;
    if (name[i] == '(') end = i;
    if (name[i] == ':' || name[i] == ' ') begin = i + 1;
  }
  return name.substr(begin, end - begin);
}

}  // namespace

void load_symbols() {
  module();
  read_only_memory();
}

KernelSymbols find_kernel(const void* kernel) {
  const Module& m = module();
  const uintptr_t value = reinterpret_cast<uintptr_t>(kernel) - m.load_address;
  auto f = std::lower_bound(m.functions.begin(), m.functions.end(), value,
                            [](const Symbol& s, uintptr_t v) { return s.value < v; });
  if (f == m.functions.end() || f->value != value) {
    throw DeviceError(
        "the CPU model finds kernels and their shared arrays in the program's symbol table, and "
        "this kernel "
        "is not there; use a program that is not stripped, with its kernels linked in");
  }
  KernelSymbols found{short_function_name(demangle(f->name)), {}};
  // A variable `v` of function _Z<f> is mangled as _ZZ<f>E<v>.
  const std::string prefix = "_ZZ" + f->name.substr(f->name.rfind("_Z", 0) == 0 ? 2 : 0) + "E";
  for (const Symbol& s : m.thread_locals) {
    if (s.name.rfind(prefix, 0) != 0 || s.file != f->file || s.bytes == 0) continue;
    const std::string full = demangle(s.name);
    const size_t colon = full.rfind("::");
    found.arrays.push_back(
        {colon == std::string::npos ? full : full.substr(colon + 2), s.value, s.bytes});
  }
  return found;
}

AddressRange thread_local_block() {
  // Volatile, so that the touch is not left out: a shared library's block is made on first use.
  const_cast<volatile char&>(touched) = 1;
  AddressRange range;
  for_each_module([&](const dl_phdr_info& info) {
    if (!holds(info, &anchor)) return false;
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      if (info.dlpi_phdr[i].p_type != PT_TLS || !info.dlpi_tls_data) continue;
      range.begin = reinterpret_cast<uintptr_t>(info.dlpi_tls_data);
      range.end = range.begin + info.dlpi_phdr[i].p_memsz;
    }
    return true;
  });
  return range;
}

const std::vector<AddressRange>& read_only_memory() {
  static const std::vector<AddressRange> ranges = [] {
    std::vector<AddressRange> found;
    for_each_module([&](const dl_phdr_info& info) {
      for (int i = 0; i < info.dlpi_phnum; ++i) {
        const ElfW(Phdr)& p = info.dlpi_phdr[i];
        const bool constant =
            (p.p_type == PT_LOAD && !(p.p_flags & PF_W)) || p.p_type == PT_GNU_RELRO;
        if (constant)
          found.push_back({info.dlpi_addr + p.p_vaddr, info.dlpi_addr + p.p_vaddr + p.p_memsz});
      }
      return false;
    });
    return found;
  }();
  return ranges;
}

}  // namespace flashsteps::model
