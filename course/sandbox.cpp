#include "course/sandbox.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "course/protocol.h"

namespace flashsteps::course {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
#error "the grader's sandbox knows x86-64 and AArch64"
#endif

// The lower half of argument i of a system call; both architectures are little-endian.
constexpr uint32_t argument(int i) {
  return uint32_t(offsetof(seccomp_data, args) + 8 * size_t(i));
}

class Filter {
 public:
  void load(uint32_t offset) { add(BPF_LD | BPF_W | BPF_ABS, 0, 0, offset); }
  void answer(uint32_t action) { add(BPF_RET | BPF_K, 0, 0, action); }
  // Goes on with the next `skip` instructions only where the loaded word equals `value`.
  void if_equal(uint32_t value, uint8_t skip) { add(BPF_JMP | BPF_JEQ | BPF_K, 0, skip, value); }
  // Goes on with the next `skip` instructions only where none of `bits` is set.
  void if_clear(uint32_t bits, uint8_t skip) { add(BPF_JMP | BPF_JSET | BPF_K, skip, 0, bits); }

  void allow(long number) {
    if_equal(uint32_t(number), 1);
    answer(SECCOMP_RET_ALLOW);
  }
  void fails(long number, int error) {
    if_equal(uint32_t(number), 1);
    answer(SECCOMP_RET_ERRNO | uint32_t(error));
  }
  // Of the file descriptor in argument 0 alone.
  void allow_on(long number, int descriptor) {
    if_equal(uint32_t(number), 4);
    load(argument(0));
    if_equal(uint32_t(descriptor), 1);
    answer(SECCOMP_RET_ALLOW);
    answer(SECCOMP_RET_KILL_PROCESS);
  }
  // Without PROT_EXEC in argument 2.
  void allow_data(long number) {
    if_equal(uint32_t(number), 4);
    load(argument(2));
    if_clear(PROT_EXEC, 1);
    answer(SECCOMP_RET_ALLOW);
    answer(SECCOMP_RET_KILL_PROCESS);
  }
  void install() {
    sock_fprog program{.len = static_cast<unsigned short>(code_.size()), .filter = code_.data()};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
      throw std::runtime_error("this machine's kernel has no seccomp filters");
    }
  }

 private:
  void add(int code, uint8_t yes, uint8_t no, uint32_t k) {
    code_.push_back({static_cast<uint16_t>(code), yes, no, k});
  }
  std::vector<sock_filter> code_;
};

}  // namespace

void close_sandbox() {
  prctl(PR_SET_DUMPABLE, 0);
  Filter filter;
  filter.load(offsetof(seccomp_data, arch));
  filter.if_equal(kArchitecture, 1);
  filter.load(offsetof(seccomp_data, nr));
  // Another architecture's number, still loaded where the test failed, equals none of those below
  // but by chance: the arch constants are far above every number.
  filter.allow_on(SYS_read, kRequestPipe);
  filter.allow_on(SYS_write, kResponsePipe);
  filter.allow_data(SYS_mmap);
  filter.allow_data(SYS_mprotect);
  for (const long number : {SYS_munmap, SYS_mremap, SYS_madvise, SYS_brk, SYS_futex, SYS_exit,
                            SYS_exit_group, SYS_rt_sigreturn, SYS_rt_sigprocmask, SYS_clock_gettime,
                            SYS_getrandom, SYS_sysinfo, SYS_getpid, SYS_gettid}) {
    filter.allow(number);
  }
  filter.fails(SYS_openat, EACCES);
#ifdef SYS_open
  filter.fails(SYS_open, EACCES);
#endif
  filter.answer(SECCOMP_RET_KILL_PROCESS);
  filter.install();
}

}  // namespace flashsteps::course
