// 09 backward: dQ, dK and dV (FlashAttention-2, algorithm 2). S and P are computed again, tile by
// tile, from Q, K and L; nothing of size N x N is stored. The outer loop goes over tiles of K and V
// and is spread over the grid, the inner one over tiles of Q and dO: a block owns the dK and dV of
// its keys, and dQ is summed over blocks, in fp32, by atomics. D = rowsum(dO o O) comes from a
// kernel before, dQ is rounded by a kernel after.

#include "common/gpu/product.h"
#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_09_backward {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kRowThreads = 256;  // of the kernels before and after
constexpr int kRowBlock = 64;     // rows that each of their blocks has
constexpr int kTurns = 8;         // turns for as many rows: one for each warp that adds to them

// ptxas finds the registers for K and V as operands, and for products unrolled in full, for compute
// capability 9.0 alone.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kManyRegisters = false;
#else
constexpr bool kManyRegisters = true;
#endif

// How a block's warps share its work. Each warp has 32 keys of S^T and dP^T, and for them 64
// columns of dV and dK: 128 registers a lane. At d = 64 that is all columns, and a warp needs
// nothing of another for dV and dK. At d = 128 two warps have the same 32 keys: each computes half
// of their queries in S^T and dP^T, and half of their columns in dV and dK.
template <int D, int kBr, int kBc>
struct Split {
  static constexpr int kHalves = D / 64;  // warps that have the same keys
  static constexpr int kWarps = kBc / 32 * kHalves;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kQueries = kBr / kHalves;  // of S^T and dP^T, for each warp
  // Whether a warp keeps its rows of K and V in registers, as operands.
  static constexpr bool kKept = kHalves == 1 && kManyRegisters;
  static constexpr int kStep = kKept ? 16 : kQueries < 32 ? kQueries : 32;  // queries at a time
  static constexpr int kRowWarps = kBr / 32;               // dQ: a warp has 32 rows
  static constexpr int kColumns = D * kRowWarps / kWarps;  // and this many columns
  static constexpr int kSmemElements = 2 * kBc * D + 4 * kBr * D + kHalves * kBr * kBc;
  static constexpr int kSmemBytes = 2 * kSmemElements + 4 * 4 * kBr;
};

// Rows of dQ_acc: those of Q, in whole fragments of 16.
__host__ __device__ constexpr int acc_rows(const Problem& p) {
  return ceil_div(p.seqlen_q, 16) * 16;
}

// dQ_acc holds the sums of dQ as mma leaves them in registers, so that a lane adds 16 bytes at a
// time, and a warp 512 neighbouring ones: this is the offset of fragment (16 rows, 8 columns), and
// each lane's four numbers follow one another.
__device__ __forceinline__ int64_t acc_fragment(const Problem& p, int bh, int row, int col) {
  return (int64_t{bh} * acc_rows(p) + row) * p.head_dim + col * 16;
}

// D = rowsum(dO o O), and L_log2 = log2(e) L; dQ_acc = 0, turns = 0. In a row that sees no key, or
// is none, L_log2 = inf, so that P = 2^(S - inf) = 0.
template <typename T, int D>
__global__ void __launch_bounds__(kRowThreads)
    preprocess_kernel(const T* __restrict__ O, const T* __restrict__ dO,
                      const float* __restrict__ L, float* __restrict__ L_log2,
                      float* __restrict__ D_sum, float* __restrict__ dQ_acc,
                      int* __restrict__ turns, int* __restrict__ ticket, Problem p,
                      Strides dO_strides) {
  constexpr int kChunks = D / 8;  // threads that share a row
  const int blocks = ceil_div(p.seqlen_q, kRowBlock);
  const int bh = blockIdx.x / blocks, i0 = blockIdx.x % blocks * kRowBlock;
  const int b = bh / p.heads, h = bh % p.heads;
  const int col = threadIdx.x % kChunks * 8;
#pragma unroll
  for (int x = 0; x < kRowBlock; x += kRowThreads / kChunks) {
    const int i = i0 + x + threadIdx.x / kChunks;
    float sum = 0.f;
    // BEGIN SOLUTION: D: the sum of dO o O over this row, in all lanes that share it
    if (i < p.seqlen_q && col < p.head_dim) {
      alignas(16) T o[8], d_o[8];
      *reinterpret_cast<uint4*>(o) = *reinterpret_cast<const uint4*>(O + p.o.offset(b, h, i) + col);
      *reinterpret_cast<uint4*>(d_o) =
          *reinterpret_cast<const uint4*>(dO + dO_strides.offset(b, h, i) + col);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum = fmaf(to_float(d_o[c]), to_float(o[c]), sum);
    }
#pragma unroll
    for (int other = 1; other < kChunks; other *= 2) sum += __shfl_xor_sync(kFullMask, sum, other);
    // END SOLUTION
    if (col == 0) {
      const float l = i < p.seqlen_q ? L[int64_t{bh} * p.seqlen_q + i] : -INFINITY;
      const int64_t at = int64_t{blockIdx.x} * kRowBlock + x + threadIdx.x / kChunks;
      L_log2[at] = l == -INFINITY ? INFINITY : l * kLog2e;
      D_sum[at] = sum;
    }
    if (i < acc_rows(p) && col < p.head_dim) {
      float* const acc = dQ_acc + (int64_t{bh} * acc_rows(p) + i) * p.head_dim + col;
      store_quad(acc, {});
      store_quad(acc + 4, {});
    }
  }
  if (turns) {
    if (threadIdx.x < kTurns) turns[int64_t{blockIdx.x} * kTurns + threadIdx.x] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) *ticket = 0;
  }
}

// kInOrder: dQ is summed in a fixed order. Without kMask there is nothing to mask, and with kWhole
// all tiles are whole: a kernel of their own for what is common, so that its loop has no code for
// what is not.
template <typename T, int D, int kBr, int kBc, bool kInOrder, bool kMask, bool kWhole>
__global__ void __launch_bounds__(Split<D, kBr, kBc>::kThreads, 256 / Split<D, kBr, kBc>::kThreads)
    backward_kernel(const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
                    const T* __restrict__ dO, const float* __restrict__ L_log2,
                    const float* __restrict__ D_sum, float* __restrict__ dQ_acc,
                    int* __restrict__ turns, int* __restrict__ ticket, T* __restrict__ dK,
                    T* __restrict__ dV, Problem p, GradientStrides strides) {
  using W = Split<D, kBr, kBc>;
  constexpr int kThreads = W::kThreads, kStep = W::kStep;
  // What a block has to know of its turn takes the registers for V.
  constexpr bool kKeptV = W::kKept && !kInOrder;
  // How much of the products is unrolled: all of it where there are the registers.
  constexpr int kUnroll = kManyRegisters && kWhole ? D / 16 : D / 32;  // S^T and dP^T
  constexpr int kUnroll_dQ = kManyRegisters && kWhole && !kInOrder ? kBc / 16 : kBc / 32;
  if constexpr (kWhole) p.head_dim = D;
  const int tiles_q = ceil_div(p.seqlen_q, kBr), tiles_k = ceil_div(p.seqlen_k, kBc);

  SharedMemory smem;
  T* K_smem = smem.take<T>("K_smem", kBc * D);
  T* V_smem = smem.take<T>("V_smem", kBc * D);
  T* Q_smem = smem.take<T>("Q_smem", 2 * kBr * D);
  T* dO_smem = smem.take<T>("dO_smem", 2 * kBr * D);
  T* dS_smem = smem.take<T>("dS_smem", kBr * kBc);                            // transposed: by keys
  T* P_smem = W::kHalves == 1 ? nullptr : smem.take<T>("P_smem", kBr * kBc);  // likewise
  float* stats_smem = smem.take<float>("stats_smem", 2 * 2 * kBr);            // L_log2 and D

  // In order, a block waits for those before it. So its number must come from when it starts:
  // CUDA does not promise that blocks start in the order of blockIdx.
  int block = blockIdx.x;
  if constexpr (kInOrder) {
    int* const block_smem = reinterpret_cast<int*>(stats_smem);
    if (threadIdx.x == 0) *block_smem = atomicAdd(ticket, 1);
    __syncthreads();  // the number has arrived
    block = *block_smem;
    __syncthreads();  // all have read it; stats_smem is used again
  }
  // Tiles of the first keys first: with a causal mask they see the most queries. In order, from the
  // diagonal on: the last keys first, and of the queries the first, so that a block follows the
  // one before it a tile behind, and none waits for the longest.
  const int tile_k = kInOrder ? tiles_k - 1 - block % tiles_k : block % tiles_k;
  const int j0 = tile_k * kBc;
  const int bkv = block / tiles_k;
  const int b = bkv / p.kv_heads, kv_head = bkv % p.kv_heads;
  const int first_h = kv_head * (p.heads / p.kv_heads);
  const int end_h = first_h + p.heads / p.kv_heads;
  // Queries before tile_first do not see the tile's first key.
  const int hidden = kMask && p.causal ? j0 - (p.seqlen_k - p.seqlen_q) : 0;
  const int tile_first = hidden > 0 ? hidden / kBr : 0;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;                // PTX's names: a fragment's row and pair
  const int key0 = warp / W::kHalves * 32;             // the warp's keys
  const int query0 = warp % W::kHalves * W::kQueries;  // its queries in S^T and dP^T
  const int col0 = warp % W::kHalves * 64;             // its columns of dV and dK

  const int rows = ceil_div(p.seqlen_q, kRowBlock) * kRowBlock;  // of L_log2 and D of a head
  const auto load_tile = [&](int h, int tile, int buffer) {
    const bool fetch = h < end_h;
    const int i0 = tile * kBr;
    const T* const Q_gmem = Q + p.q.offset(b, h, i0);
    const T* const dO_gmem = dO + strides.d_o.offset(b, h, i0);
    T* const Q_tile = Q_smem + buffer * kBr * D;
    T* const dO_tile = dO_smem + buffer * kBr * D;
    if constexpr (kWhole) {
      copy_whole_tile_async<kBr, D, kThreads>(fetch, Q_tile, Q_gmem, p.q.row);
      copy_whole_tile_async<kBr, D, kThreads>(fetch, dO_tile, dO_gmem, strides.d_o.row);
    } else if (fetch) {
      const int valid = p.seqlen_q - i0;
      copy_tile_async<kBr, D, kThreads>(Q_tile, Q_gmem, p.q.row, valid, p.head_dim);
      copy_tile_async<kBr, D, kThreads>(dO_tile, dO_gmem, strides.d_o.row, valid, p.head_dim);
    }
    const int x = fresh_thread_index() * 4;
    cp_async_16_if(fetch && x < 2 * kBr, stats_smem + buffer * 2 * kBr + x,
                   (x < kBr ? L_log2 : D_sum) + (int64_t{b} * p.heads + h) * rows + i0 + x % kBr);
    cp_async_commit();
  };

  // In order, one tile of keys after another adds to a tile of dQ. Each warp adds to a part of its
  // own, so that it takes turns with the same warp of other blocks, and waits for no other.
  const auto turn_at = [&](int h, int tile) {
    static_assert(W::kWarps * (kRowBlock / kBr) <= kTurns);
    // 32 bits are enough: dQ_acc has 256 bytes and more for each turn.
    return turns + (unsigned(b * p.heads + h) * unsigned(ceil_div(p.seqlen_q, kRowBlock) * kTurns) +
                    tile * W::kWarps + unsigned(fresh_thread_index()) / 32);
  };

  int h = tiles_q > 0 ? first_h : end_h, tile_q = kInOrder ? tile_first : tiles_q - 1;
  if (tiles_q > 0) {
    copy_tile_async<kBc, D, kThreads>(K_smem, K + p.k.offset(b, kv_head, j0), p.k.row,
                                      p.seqlen_k - j0, p.head_dim);
    copy_tile_async<kBc, D, kThreads>(V_smem, V + p.v.offset(b, kv_head, j0), p.v.row,
                                      p.seqlen_k - j0, p.head_dim);
    load_tile(h, tile_q, 0);
  }

  uint32_t K_rmem[2][D / 16][4], V_rmem[2][D / 16][4];
  if constexpr (W::kKept) {
    cp_async_wait<0>();
    __syncthreads();  // K and V have arrived
    if (tiles_q > 0) {
      load_operand(K_rmem, K_smem, key0);
      if constexpr (kKeptV) load_operand(V_rmem, V_smem, key0);
    }
  }

  float dK_rmem[2][8][4] = {}, dV_rmem[2][8][4] = {};
  int buffer = 0;
#pragma unroll 1
  while (h < end_h) {
    const int i0 = tile_q * kBr;
    // Computed anew where it is used: no register is left to keep it.
    const auto masked = [&] { return kMask && p.last_key(i0) < j0 + kBc - 1; };
    note_tile(masked());
    const T* const Q_tile = Q_smem + buffer * kBr * D;
    const T* const dO_tile = dO_smem + buffer * kBr * D;
    const float* const L_tile = stats_smem + buffer * 2 * kBr;
    const float* const D_tile = L_tile + kBr;
    cp_async_wait<0>();
    // Q, dO, L and D of this tile have arrived (at first K and V, too); all are done with the other
    // buffer, with P and with dS.
    __syncthreads();
    const bool same_h = kInOrder ? tile_q < tiles_q - 1 : tile_q > tile_first;
    const int next_h = same_h ? h : h + 1;
    const int next_tile_q =
        kInOrder ? (same_h ? tile_q + 1 : tile_first) : (same_h ? tile_q - 1 : tiles_q - 1);
    buffer ^= 1;
    if constexpr (kStep < W::kQueries) load_tile(next_h, next_tile_q, buffer);

#pragma unroll 1
    for (int q0 = query0; q0 < query0 + W::kQueries; q0 += kStep) {
      // BEGIN SOLUTION: P_rmem = S^T = K Q^T, a row for each key
      // HANDOUT: float P_rmem[2][kStep / 8][4] = {};
      // S^T = K Q^T
      float P_rmem[2][kStep / 8][4] = {};
      if constexpr (W::kKept) {
        multiply_by_transposed(P_rmem, K_rmem, Q_tile, q0);
      } else {
        multiply_by_transposed<D, kUnroll>(P_rmem, K_smem, key0, Q_tile, q0);
      }
      // END SOLUTION
      // Here, where the tensor cores have both products to do: before them they would wait.
      if constexpr (kStep == W::kQueries) load_tile(next_h, next_tile_q, buffer);
      // BEGIN SOLUTION: dS_rmem = dP^T - D = V dO^T - D
      // HANDOUT: float dS_rmem[2][kStep / 8][4] = {};
      // dP^T - D = V dO^T - D, the subtraction first: the sums start from -D. Before P is needed,
      // so that the tensor cores have this to do while the exponentials are computed.
      float dS_rmem[2][kStep / 8][4];
#pragma unroll
      for (int k = 0; k < kStep / 8; ++k) {
        float D_rmem[2];
        load_pair(D_rmem, D_tile + q0 + k * 8 + 2 * t);
#pragma unroll
        for (int e = 0; e < 8; ++e) dS_rmem[e / 4][k][e % 4] = -D_rmem[e % 2];
      }
      if constexpr (kKeptV) {
        multiply_by_transposed(dS_rmem, V_rmem, dO_tile, q0);
      } else {
        multiply_by_transposed<D, kUnroll>(dS_rmem, V_smem, key0, dO_tile, q0);
      }
      // END SOLUTION
      // BEGIN SOLUTION: P_rmem = P^T, from S^T and what L_tile has of each query
      // P^T = 2^(scale log2(e) S^T - log2(e) L). P is at most 1; what rounding makes more of it in
      // huge scores is cut off.
#pragma unroll
      for (int k = 0; k < kStep / 8; ++k) {
        float L_rmem[2];
        load_pair(L_rmem, L_tile + q0 + k * 8 + 2 * t);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& P = P_rmem[e / 4][k][e % 4];
          P = fast_exp2(fminf(fmaf(P, p.scale * kLog2e, -L_rmem[e % 2]), 0.f));
        }
      }
      // END SOLUTION
      if (masked()) {
#pragma unroll
        for (int k = 0; k < kStep / 8; ++k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int last = p.last_key(i0 + q0 + k * 8 + 2 * t + e % 2) - j0 - key0 - g;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              if (mask_if(r * 16 + e / 2 * 8 > last)) P_rmem[r][k][e] = 0.f;
            }
          }
        }
      }
      // BEGIN SOLUTION: add to dV and dK; leave dS^T (and P^T) to other warps
      multiply<D>(dV_rmem, P_rmem, dO_tile, q0, col0);  // dV += P^T dO
      if constexpr (W::kHalves > 1) store_rounded<kBr>(P_smem, key0, q0, P_rmem);

        // dS^T = P^T o (dP^T - D)
#pragma unroll
      for (int k = 0; k < kStep / 8; ++k) {
#pragma unroll
        for (int e = 0; e < 8; ++e) dS_rmem[e / 4][k][e % 4] *= P_rmem[e / 4][k][e % 4];
      }
      store_rounded<kBr>(dS_smem, key0, q0, dS_rmem);
      multiply<D>(dK_rmem, dS_rmem, Q_tile, q0, col0);  // dK += dS^T Q
      // END SOLUTION
    }
    const int thread = fresh_thread_index();
    // A turn that was not passed on at once (below): its sums have long been under way, so that
    // nobody waits for them to arrive.
    if constexpr (kInOrder && W::kHalves == 1) {
      if (h > first_h || tile_q > tile_first) {
        turn_pass(tile_q > tile_first ? turn_at(h, tile_q - 1) : turn_at(h - 1, tiles_q - 1));
      }
    }
    __syncthreads();  // dS (and P) of all keys have arrived

    // dQ of these keys is added to that of the others.
    const int dQ_row0 = thread / 32 % W::kRowWarps * 32;
    const int dQ_col0 = thread / 32 / W::kRowWarps * W::kColumns;
    float dQ_rmem[2][W::kColumns / 8][4] = {};
    // BEGIN SOLUTION: the part of dQ that these keys give: dS K
    multiply_transposed<kBc, kBr, D, kUnroll_dQ>(dQ_rmem, dS_smem, dQ_row0, K_smem, dQ_col0,
                                                 thread);
    // END SOLUTION
    if constexpr (kInOrder) {
      // The blocks with later keys that see the tile were here before.
      const int last_tile = p.last_key(i0 + kBr - 1) / kBc;
      turn_wait(turn_at(h, tile_q), last_tile - tile_k);
    }
    const int bh = b * p.heads + h;
    // BEGIN SOLUTION: add it in dQ_acc to that of other blocks, where there are rows and columns
    float* const acc = dQ_acc + acc_fragment(p, bh, i0 + dQ_row0, dQ_col0) + thread % 32 * 4;
    const int acc_row = 16 * p.head_dim;
    const int valid_rows = p.seqlen_q - i0 - dQ_row0, valid_cols = p.head_dim - dQ_col0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < W::kColumns / 8; ++c) {
        if (kWhole || (r * 16 < valid_rows && c * 8 < valid_cols)) {
          atomic_add_quad(acc + r * acc_row + c * 128, dQ_rmem[r][c]);
        }
      }
    }
    // END SOLUTION
    if constexpr (W::kHalves > 1) {
      // BEGIN SOLUTION: the same sums over the queries of the warp that has the same keys
      // The same, of the queries of the warp that has the same keys.
      const int q0 = W::kQueries - query0;
      multiply_tiles<W::kQueries, kBr, D>(dV_rmem, P_smem, key0, dO_tile, q0, col0, thread);
      multiply_tiles<W::kQueries, kBr, D>(dK_rmem, dS_smem, key0, Q_tile, q0, col0, thread);
      // END SOLUTION
    }
    // The sums have been under way for the products above.
    if constexpr (kInOrder && W::kHalves > 1) turn_pass(turn_at(h, tile_q));
    h = next_h;
    tile_q = next_tile_q;
  }
  note_tiles_done();
  if constexpr (kInOrder && W::kHalves == 1) {
    if (tiles_q > 0) turn_pass(turn_at(end_h - 1, tiles_q - 1));
  }
  __syncthreads();  // all are done with K

  // dK and dV go through the warp's own part of K_smem and V_smem, so that they are stored 16 bytes
  // at a time.
#pragma unroll
  for (int c = 0; c < 8; ++c) {
#pragma unroll
    for (int e = 0; e < 8; ++e) dK_rmem[e / 4][c][e % 4] *= p.scale;
  }
  store_rounded<D>(K_smem, key0, col0, dK_rmem);
  store_rounded<D>(V_smem, key0, col0, dV_rmem);
  __syncwarp();  // all lanes have left their part of the warp's keys
#pragma unroll
  for (int x = 0; x < 8; ++x) {
    const int row = key0 + x * 4 + lane / 8, col = col0 + lane % 8 * 8;
    if (j0 + row < p.seqlen_k && col < p.head_dim) {
      *reinterpret_cast<uint4*>(dK + strides.d_k.offset(b, kv_head, j0 + row) + col) =
          *reinterpret_cast<const uint4*>(K_smem + swizzle<D>(row, col));
      *reinterpret_cast<uint4*>(dV + strides.d_v.offset(b, kv_head, j0 + row) + col) =
          *reinterpret_cast<const uint4*>(V_smem + swizzle<D>(row, col));
    }
  }
}

// dQ = scale dQ_acc, rounded.
template <typename T, int D>
__global__ void __launch_bounds__(kRowThreads)
    postprocess_kernel(const float* __restrict__ dQ_acc, T* __restrict__ dQ, Problem p,
                       Strides dQ_strides) {
  constexpr int kChunks = D / 8;
  const int blocks = ceil_div(p.seqlen_q, kRowBlock);
  const int bh = blockIdx.x / blocks, i0 = blockIdx.x % blocks * kRowBlock;
  const int b = bh / p.heads, h = bh % p.heads;
  const int col = threadIdx.x % kChunks * 8;
#pragma unroll
  for (int x = 0; x < kRowBlock; x += kRowThreads / kChunks) {
    const int i = i0 + x + threadIdx.x / kChunks;
    if (i < p.seqlen_q && col < p.head_dim) {
      // Columns 2 t and 2 t + 1 of this row are with lane 4 g + t of the fragment.
      const float* const from =
          dQ_acc + acc_fragment(p, bh, i / 16 * 16, col) + i % 8 * 16 + i / 8 % 2 * 2;
      uint4 packed;
      uint32_t* const pairs = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float pair[2];
        load_pair(pair, from + t * 4);
        pairs[t] = pack2<T>(pair[0] * p.scale, pair[1] * p.scale);
      }
      *reinterpret_cast<uint4*>(dQ + dQ_strides.offset(b, h, i) + col) = packed;
    }
  }
}

TileList candidates(const Problem& p) {
  TileList list;
  const auto add = [&](Tiles tiles, int smem_bytes) {
    if (shared_memory_per_block() >= smem_bytes) list.tiles[list.size++] = tiles;
  };
  if (tile_width(p.head_dim) == 64) {
    add({64, 128}, Split<64, 64, 128>::kSmemBytes);
  } else {
    add({64, 128}, Split<128, 64, 128>::kSmemBytes);
    add({32, 64}, Split<128, 32, 64>::kSmemBytes);
  }
  return list;
}

// The larger tiles where they fit the card's shared memory.
Tiles tiles(const Problem& p) {
  return candidates(p).tiles[0];
}

WorkspaceList workspaces(const Problem& p) {
  const int64_t row_blocks = p.batch_heads() * ceil_div(p.seqlen_q, kRowBlock);
  return {4,
          {{"L_log2", DType::fp32, row_blocks * kRowBlock},
           {"D", DType::fp32, row_blocks * kRowBlock},
           {"dQ_acc", DType::fp32, p.batch_heads() * acc_rows(p) * p.head_dim},
           {"turns", DType::fp32, row_blocks * kTurns + 1}}};
}

template <typename T, int D, int kBr, int kBc>
void run(const Problem& p, const GradientStrides& strides, const BackwardArgs& a, Stream stream) {
  const T* Q = static_cast<const T*>(a.Q);
  const T* K = static_cast<const T*>(a.K);
  const T* V = static_cast<const T*>(a.V);
  const T* O = static_cast<const T*>(a.O);
  const T* dO = static_cast<const T*>(a.dO);
  float* L_log2 = static_cast<float*>(a.workspace[0]);
  float* D_sum = static_cast<float*>(a.workspace[1]);
  float* dQ_acc = static_cast<float*>(a.workspace[2]);
  const int64_t row_blocks = p.batch_heads() * ceil_div(p.seqlen_q, kRowBlock);
  // Where there is no query, nothing clears the turns, and nothing needs them.
  const bool in_order = a.deterministic && p.seqlen_q > 0;
  int* turns = in_order ? static_cast<int*>(a.workspace[3]) : nullptr;
  int* ticket = in_order ? turns + row_blocks * kTurns : nullptr;
  using W = Split<D, kBr, kBc>;
  launch(preprocess_kernel<T, D>, {row_blocks, kRowThreads, 0, stream}, O, dO, a.L, L_log2, D_sum,
         dQ_acc, turns, ticket, p, strides.d_o);
  const auto launch_main = [&](auto ordered, auto mask, auto whole) {
    launch(backward_kernel<T, D, kBr, kBc, ordered.value, mask.value, whole.value>,
           {int64_t{p.batch} * p.kv_heads * ceil_div(p.seqlen_k, kBc), W::kThreads, W::kSmemBytes,
            stream},
           Q, K, V, dO, static_cast<const float*>(L_log2), static_cast<const float*>(D_sum), dQ_acc,
           turns, ticket, static_cast<T*>(a.dK), static_cast<T*>(a.dV), p, strides);
  };
  const bool whole = p.seqlen_q % kBr == 0 && p.seqlen_k % kBc == 0 && p.head_dim == D &&
                     std::max(p.q.row, strides.d_o.row) < INT32_MAX / kBr;
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if (in_order) {  // of two kinds only: fewer kernels to build
    whole ? launch_main(yes, yes, yes) : launch_main(yes, yes, no);
  } else if (whole) {
    p.causal ? launch_main(no, yes, yes) : launch_main(no, no, yes);
  } else {
    launch_main(no, yes, no);
  }
  launch(postprocess_kernel<T, D>, {row_blocks, kRowThreads, 0, stream},
         static_cast<const float*>(dQ_acc), static_cast<T*>(a.dQ), p, strides.d_q);
}

template <typename T, int D>
void backward(const Problem& p, const GradientStrides& strides, const BackwardArgs& a,
              Stream stream) {
  [[maybe_unused]] const Tiles chosen = a.tiles == Tiles{} ? tiles(p) : a.tiles;
  if constexpr (D == 64) {
    run<T, D, 64, 128>(p, strides, a, stream);
  } else {
    chosen.Br == 32 ? run<T, D, 32, 64>(p, strides, a, stream)
                    : run<T, D, 64, 128>(p, strides, a, stream);
  }
}

FLASHSTEPS_BACKWARD_STAGE("09", "backward",
                          "dQ, dK, dV: S and P computed again, K/V outer, dQ summed by atomics")

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_09_backward
