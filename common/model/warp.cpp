// What the 32 lanes of a warp do together: shuffles, votes, ldmatrix, mma.
#include "common/model/block.h"
#include "common/model/float16.h"

namespace flashsteps::model {

void warp_barrier(unsigned mask, const char* file, int line) {
  if (skipped(SiteKind::warp_barrier, file, line)) return;
  Block& b = current_block("__syncwarp");
  struct None {
  } none;
  b.warp_together("__syncwarp", mask, none, file, line, [&](std::span<None*, 32>) {
    ++b.counts.warp_barriers;
    b.synchronise_warp(running.fiber->warp);
  });
}

uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int operand, int width,
                 const char* file, int line) {
  if (skipped(SiteKind::shuffle, file, line)) return value;
  static constexpr const char* kNames[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                           "__shfl_xor_sync"};
  const char* name = kNames[int(kind)];
  Block& b = current_block(name);
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    b.fail(FaultKind::mask,
           fmt::format("{} ({}:{}) with width {}; 1, 2, 4, 8, 16 and 32 are allowed", name, file,
                       line, width));
  }
  struct Args {
    uint64_t value;
    int operand, width;
    uint64_t result;
  } args{value, operand, width, value};
  b.warp_together(name, mask, args, file, line, [&](std::span<Args*, 32> lanes) {
    ++b.counts.shuffles;
    for (int lane = 0; lane < 32; ++lane) {
      Args& a = *lanes[lane];
      const int first = lane & ~(a.width - 1),
                last = first + a.width - 1;  // of this lane's segment
      int from = lane;
      switch (kind) {
        case Shuffle::index:
          from = first | (a.operand & (a.width - 1));
          break;
        case Shuffle::up:
          from = lane - a.operand;
          break;
        case Shuffle::down:
          from = lane + a.operand;
          break;
        case Shuffle::xor_:
          from = lane ^ a.operand;
          break;
      }
      // Out of the segment a lane gets its own value; but xor may reach back into former segments.
      const bool outside = from > last || from < (kind == Shuffle::xor_ ? 0 : first);
      a.result = lanes[outside ? lane : from]->value;
    }
  });
  return args.result;
}

unsigned vote(Vote kind, unsigned mask, bool predicate, const char* file, int line) {
  static constexpr const char* kNames[] = {"__any_sync", "__all_sync", "__ballot_sync"};
  const char* name = kNames[int(kind)];
  Block& b = current_block(name);
  if (skipped(SiteKind::shuffle, file, line)) {
    return kind == Vote::ballot ? unsigned(predicate) << running.fiber->lane : predicate;
  }
  struct Args {
    bool predicate;
    unsigned result;
  } args{predicate, 0};
  b.warp_together(name, mask, args, file, line, [&](std::span<Args*, 32> lanes) {
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) ballot |= unsigned(lanes[lane]->predicate) << lane;
    const unsigned result = kind == Vote::any   ? ballot != 0
                            : kind == Vote::all ? ballot == 0xffffffffu
                                                : ballot;
    for (Args* a : lanes) a->result = result;
  });
  return args.result;
}

void ldmatrix(uint32_t* registers, const void* row, bool transposed, const char* file, int line) {
  if (skipped(SiteKind::ldmatrix, file, line)) return;
  Block& b = current_block("ldmatrix");
  struct Args {
    uint32_t* registers;
    const uint16_t* row;
    size_t offset;
  } args{registers, static_cast<const uint16_t*>(row), 0};
  const auto address = reinterpret_cast<uintptr_t>(row);
  if (!b.find_shared(address, 16, "ldmatrix reads", args.offset)) {
    b.fail(FaultKind::host_memory,
           fmt::format("ldmatrix ({}:{}) reads {:#x}, which is not shared memory", file, line,
                       address));
  }
  b.note_local_write(registers, 16);
  if (address % 16 != 0) {
    b.fail(FaultKind::misaligned,
           fmt::format("ldmatrix ({}:{}) reads a row at {}, which is not at a multiple of 16 "
                       "bytes",
                       file, line, b.name_of_shared(args.offset)));
  }
  b.warp_together("ldmatrix", 0xffffffffu, args, file, line, [&](std::span<Args*, 32> lanes) {
    ++b.counts.ldmatrix;
    const int first = running.fiber->warp * 32;
    for (int lane = 0; lane < 32; ++lane) {
      b.shared_warp_read(b.fiber(first + lane), lanes[lane]->offset);
    }
    // 8 lanes at a time, the rows of one matrix: as 16-byte loads.
    uint32_t addresses[32];
    uint8_t all_lanes[32];
    for (int lane = 0; lane < 32; ++lane) {
      addresses[lane] = uint32_t(reinterpret_cast<uintptr_t>(lanes[lane]->row));
      all_lanes[lane] = uint8_t(lane);
    }
    b.counts.bank_conflicts += bank_conflicts(addresses, all_lanes, 4);
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i) {
          const int r = transposed ? 2 * (lane % 4) + i : lane / 4;
          const int c = transposed ? lane / 4 : 2 * (lane % 4) + i;
          pair[i] = lanes[matrix * 8 + r]->row[c];
        }
        lanes[lane]->registers[matrix] = pair[0] | uint32_t{pair[1]} << 16;
      }
    }
  });
}

namespace {

struct MmaArgs {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

#if defined(__x86_64__)
#define FLASHSTEPS_WIDE [[gnu::target_clones("arch=x86-64-v3", "default")]]
#else
#define FLASHSTEPS_WIDE
#endif

template <typename Convert>
[[gnu::always_inline]] inline void multiply(MmaArgs* const* lanes, Convert convert) {
  alignas(64) uint16_t a16[16 * 16], b16[16 * 8];
  alignas(64) float a[16 * 16], b[16 * 8], d[16 * 8];  // by rows
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const MmaArgs& m = *lanes[lane];
    for (int r = 0; r < 4; ++r) {
      a16[(g + r % 2 * 8) * 16 + 2 * t + r / 2 * 8] = uint16_t(m.a[r]);
      a16[(g + r % 2 * 8) * 16 + 2 * t + r / 2 * 8 + 1] = uint16_t(m.a[r] >> 16);
      d[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = m.d[r];
    }
    for (int r = 0; r < 2; ++r) {
      b16[(2 * t + r * 8) * 8 + g] = uint16_t(m.b[r]);
      b16[(2 * t + r * 8 + 1) * 8 + g] = uint16_t(m.b[r] >> 16);
    }
  }
  for (int i = 0; i < 256; ++i) a[i] = convert(a16[i]);
  for (int i = 0; i < 128; ++i) b[i] = convert(b16[i]);
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) d[i * 8 + n] += a[i * 16 + k] * b[k * 8 + n];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) lanes[lane]->d[r] = d[(g + r / 2 * 8) * 8 + 2 * t + r % 2];
  }
}

FLASHSTEPS_WIDE void multiply_fp16(MmaArgs* const* lanes) {
  multiply(lanes, [](uint16_t x) { return half_to_float(x); });
}
FLASHSTEPS_WIDE void multiply_bf16(MmaArgs* const* lanes) {
  multiply(lanes, [](uint16_t x) { return bfloat_to_float(x); });
}

}  // namespace

void mma_m16n8k16(Type16 type, float* d, const uint32_t* a, uint32_t b0, uint32_t b1,
                  const char* file, int line) {
  if (skipped(SiteKind::mma, file, line)) return;
  Block& block = current_block("mma");
  MmaArgs args{d, a, {b0, b1}};
  block.note_local_write(d, 16);
  block.warp_together(type == Type16::fp16 ? "mma (fp16)" : "mma (bf16)", 0xffffffffu, args, file,
                      line, [&](std::span<MmaArgs*, 32> lanes) {
                        ++block.counts.mma;
                        type == Type16::fp16 ? multiply_fp16(lanes.data())
                                             : multiply_bf16(lanes.data());
                      });
}

}  // namespace flashsteps::model
