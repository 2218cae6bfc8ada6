// The formulas of the lessons. Here as there: for one (batch, head), N = Nq = Nk a multiple of the
// tiles, Tr = N / Br, Tc = N / Bc, true head_dim d, tile width D.
#include "common/stage/prediction.h"

#include <algorithm>

namespace flashsteps {
namespace {

constexpr int64_t e = 2;  // bytes of a 16-bit element
constexpr int64_t f = 4;  // bytes of an fp32 element
constexpr int64_t kMultiprocessors = 3;

// Standard attention's softmax kernel: three passes over S by one warp a row; two reductions of
// five shuffles; the exponentials are computed twice, to sum them and to normalise.
void add_softmax(Ledger& p, int64_t N) {
  p.global_read["S"] += 3 * N * N * f;
  p.global_written["P"] += N * N * e;
  p.shuffles += 10 * N;
  p.exp += 2 * N * N;
  p.div += N * N;
}

Ledger predict_01(int64_t N, int64_t d, int64_t) {
  Ledger p;
  p.global_read = {
      {"Q", N * N * d * e}, {"K", N * N * d * e}, {"P", N * N * d * e}, {"V", N * N * d * e}};
  p.global_written = {{"S", N * N * f}, {"O", N * d * e}};
  add_softmax(p, N);
  p.launches = 3;
  p.grid_blocks = N * N / 256 + N / 8 + N * d / 256;
  return p;
}

// BEGIN STAGE 02a
// What the four steps have in common, of one 64 x 64 tile of S and the same of P: tiles of Q, K, V
// and P go to shared memory once.
Ledger predict_02(int64_t N, int64_t d, int64_t D) {
  const int64_t Tr = N / 64, Tc = N / 64;
  Ledger p;
  p.global_read = {
      {"Q", Tc * N * d * e}, {"K", Tr * N * d * e}, {"P", N * N * e}, {"V", Tr * N * d * e}};
  p.global_written = {{"S", N * N * f}, {"O", N * d * e}};
  add_softmax(p, N);
  p.launches = 3;
  p.barriers =
      Tr * Tc + 2 * Tr * Tc;  // one in the scores kernel, two for each tile of the output kernel
  p.shared_written = Tr * Tc * (3 * 64 * D + 64 * 64) * e;
  return p;
}

Ledger predict_02a(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_02(N, d, D);
  const int64_t tiles = (N / 64) * (N / 64);
  p.grid_blocks = tiles + N / 8 + N / 64;
  // For each of the D columns, a warp loads four times from 2 rows of Q (1 conflict) and four times
  // from 16 rows of K (15), all in the same bank; for each of 64 keys, four times from 2 rows of P.
  // Eight warps.
  p.bank_conflicts = tiles * 8 * (D * (4 * 1 + 4 * 15) + 64 * 4);
  p.shared_read = tiles * 8 * (D * 8 + 64 * (4 + D / 16)) * 32 * e;
  p.warp_exchange_bytes =
      p.shared_read * 7 /
      8;  // one of the eight warps that copied a tile reads what it copied itself
  return p;
}
// END STAGE

// BEGIN STAGE 02b
Ledger predict_02b(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_02(N, d, D);
  const int64_t tiles = (N / 64) * (N / 64);
  p.grid_blocks = tiles + N / 4 + N / 64;
  p.mma_flops = 4 * N * N * D;
  // A pair load of a fragment meets 8 rows in each bank (7 conflicts): 16 of them for each 16
  // columns of the scores, 8 for each 16 keys of P; a column of V 4 rows (3 conflicts): 4 for each
  // 8 of a warp's D / 2 columns. Four warps.
  p.bank_conflicts = tiles * 4 * (D / 16 * 16 * 7 + 4 * (8 * 7 + D / 16 * 4 * 3));
  const int64_t pairs = tiles * 4 * (D / 16 * 16 + 4 * 8) * 32 * 4,
                columns_of_V = tiles * 4 * 4 * (D / 16 * 4) * 32 * e;
  p.shared_read = pairs + columns_of_V;
  // A quarter of it the warp copied itself, but for V with 64 columns, of which a warp reads 32 and
  // copied half.
  p.warp_exchange_bytes = pairs * 3 / 4 + (D == 64 ? columns_of_V / 2 : columns_of_V * 3 / 4);
  return p;
}
// END STAGE

// BEGIN STAGE 02c
Ledger predict_02c(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_02b(N, d, D);
  p.bank_conflicts = 0;
  p.warp_exchange_bytes = p.shared_read * 3 / 4;
  return p;
}
// END STAGE

// BEGIN STAGE 02d
Ledger predict_02d(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_02c(N, d, D);
  const int64_t tiles = (N / 64) * (N / 64);
  p.barriers =
      tiles * (D / 32) + 2 * tiles;  // in the scores kernel one for each chunk of 32 columns
  p.warp_exchange_bytes = 0;         // what cp.async brings was stored by no warp
  return p;
}
// END STAGE

// BEGIN STAGE 03
Ledger predict_03(int64_t N, int64_t d, int64_t D) {
  const int64_t Br = D == 64 ? 64 : 32;
  const int64_t Tr = N / Br, Tc = N / 64, score_tiles = (N / 64) * (N / 64);
  Ledger p;
  p.global_read = {{"Q", N / 64 * N * d * e},
                   {"K", N / 64 * N * d * e},
                   {"S", N * N * f},
                   {"V", Tr * N * d * e}};
  p.global_written = {{"S", N * N * f}, {"O", N * d * e}, {"m", N * f}, {"l", N * f}};
  p.launches = 2;
  p.grid_blocks = score_tiles + Tr;
  p.barriers = score_tiles * (D / 32) + 2 * Tr * Tc;
  p.mma_flops = 4 * N * N * D;
  p.shuffles = Tr * Tc * (Br / 4) *
               6;  // a warp has 4 rows at once: three for the maximum, three for the sum
  p.exp =
      N * N + N * Tc * 8;  // each of a row's 8 lanes also computes the factor for what came before
  p.div = p.div_in_loop = N * Tc * 8;  // 1 / l in each of them, for every tile
  p.tiles_visited = Tr * Tc;
  p.shared_read = score_tiles * 4 * (D / 16 * 4) * 512 +
                  Tr * Tc * 4 * (4 * (Br / 32 + D / 32) * 512 + Br / 2 * 4 * f);
  p.shared_written = score_tiles * 2 * 64 * D * e + Tr * Tc * ((Br * 64 + 64 * D) * e + Br * f);
  // A warp reads half of the P tile, three quarters of it written by other warps; and each row's
  // factor with 4 lanes.
  p.warp_exchange_bytes = Tr * Tc * 4 * (Br / 2) * (64 * e + 4 * f) * 3 / 4;
  return p;
}
// END STAGE

// BEGIN STAGE 04
// What 04, 05 and 06 have in common: four warps split the 64 keys of a tile, 16 each, and merge
// through shared memory. In the merge every one of the 128 threads owns a part of a row.
Ledger predict_split_k(int64_t N, int64_t D) {
  const int64_t Br = D == 64 ? 64 : 32;
  const int64_t Tr = N / Br, Tc = N / 64;
  Ledger p;
  p.launches = 1;
  p.mma_flops = 4 * N * N * D;
  p.shuffles =
      Tr * Tc * 2 * Br;  // two for the maxima and two for the sums of each 8 rows, in four warps
  p.exp = N * N + Tr * Tc * 128;               // every owner computes e^(m - m_new)
  p.tiles_visited = p.tiles_masked = Tr * Tc;  // no tile is skipped, every one is masked
  // Fragments of Q (all rows), K and V (16 keys); then m and four maxima for each row with 4 lanes,
  // in four warps; then the merge: four maxima and four sums for each owner, four partial sums for
  // each element of O.
  p.shared_read =
      Tr * Tc * (4 * D / 16 * (Br / 16 + 2) * 512 + Br * 5 * 16 * 4 + 128 * 8 * f + 4 * Br * D * f);
  p.shared_written =
      Tr * Tc * (2 * 4 * Br * f + 4 * Br * D * f);  // maxima, sums and P V of each warp
  // Of all that but the fragments, a quarter was stored by the warp that reads it.
  p.warp_exchange_bytes = Tr * Tc * (Br * 5 * 16 * 4 + 128 * 8 * f + 4 * Br * D * f) * 3 / 4;
  return p;
}

Ledger predict_04(int64_t N, int64_t d, int64_t D) {
  const int64_t Br = D == 64 ? 64 : 32;
  const int64_t Tr = N / Br, Tc = N / 64;
  Ledger p = predict_split_k(N, D);
  p.global_read = {{"K", N * d * e},          {"V", N * d * e},  {"Q", Tc * N * d * e},
                   {"O_acc", Tc * N * d * f}, {"m", Tc * N * f}, {"l", Tc * N * f}};
  p.global_written = {{"O_acc", (Tc + 1) * N * d * f},
                      {"m", (Tc + 1) * N * f},
                      {"l", (Tc + 1) * N * f},
                      {"O", N * d * e}};
  p.grid_blocks = 1;
  p.barriers = 3 * Tr * Tc;
  p.shuffles += Tr * Tc * 8;              // m and l go from a row's first owner to the others
  p.div = p.div_in_loop = Tr * Tc * 128;  // 1 / l_new by every owner
  p.shared_written += Tc * (2 * 64 * D * e + Tr * (Br * D * e + Br * f));
  return p;
}
// END STAGE

// BEGIN STAGE 05
Ledger predict_05(int64_t N, int64_t d, int64_t D) {
  const int64_t Br = D == 64 ? 64 : 32;
  const int64_t Tr = N / Br, Tc = N / 64;
  Ledger p = predict_split_k(N, D);
  p.global_read = {{"Q", N * d * e}, {"K", Tr * N * d * e}, {"V", Tr * N * d * e}};
  p.global_written = {{"O", N * d * e}, {"m", N * f}, {"l", N * f}};
  p.grid_blocks = Tr;
  p.barriers = 3 * Tr * Tc;
  p.div = p.div_in_loop = Tr * Tc * 128;
  p.shared_written += Tr * (Br * D * e + Tc * 2 * 64 * D * e + (Tc + 1) * Br * f);
  return p;
}
// END STAGE

// BEGIN STAGE 06
Ledger predict_06(int64_t N, int64_t d, int64_t D) {
  const int64_t Tr = N / (D == 64 ? 64 : 32);
  Ledger p = predict_05(N, d, D);
  p.global_written = {{"O", N * d * e}, {"L", N * f}};
  p.div = Tr * 128;  // 1 / l by every owner, once
  p.div_in_loop = 0;
  return p;
}
// END STAGE

// BEGIN STAGE 07
// 07 and 08, which differ in the keys of a tile.
Ledger predict_split_q(int64_t N, int64_t d, int64_t D, int64_t Bc) {
  const int64_t Br = 128;
  const int64_t Tr = N / Br, Tc = N / Bc;
  Ledger p;
  p.global_read = {{"Q", N * d * e}, {"K", Tr * N * d * e}, {"V", Tr * N * d * e}};
  p.global_written = {{"O", N * d * e}, {"L", N * f}};
  p.launches = 1;
  p.grid_blocks = Tr;
  p.barriers = Tr * Tc * 2;  // those that guard the tiles
  p.warp_barriers = Tr * 4;  // before a warp stores its rows of O
  p.mma_flops = 4 * N * N * D;
  p.shuffles =
      Tr * (Tc + 1) * Br / 4;  // two for each 8 rows: the maxima of each tile, the sums at the end
  p.exp = N * N + Tr * Tc * 4 * Br;  // four lanes compute a row's e^(m - m_new)
  p.div = N * 4;                     // and, at the end, its 1 / l
  p.tiles_visited = p.tiles_masked = Tr * Tc;
  p.shared_read = Tr * Tc * 4 * (D / 16 * (Br / 64 + Bc / 16) + Bc / 16 * D / 16) * 512 + N * d * e;
  p.shared_written = N * D * e + Tr * Tc * 2 * Bc * D * e + N * D * e;
  return p;
}

Ledger predict_07(int64_t N, int64_t d, int64_t D) {
  return predict_split_q(N, d, D, 64);
}
// END STAGE

// BEGIN STAGE 08
Ledger predict_08(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_split_q(N, d, D, D == 64 ? 128 : 64);
  p.exp -= N * 4;      // the first tile rescales nothing
  p.tiles_masked = 0;  // without a causal mask; OfCausalTiles has the other case
  return p;
}
// END STAGE

// BEGIN STAGE 10a
// The steps of 10: W warpgroups of 64 rows each, tiles by TMA, products by WGMMA. TMA counts boxes
// of 64 columns whole in shared memory, and what lies within the tensors in global memory.
Ledger predict_10(int64_t N, int64_t d, int64_t D) {
  const int64_t Br = D == 64 ? 192 : 128, Bc = 128;
  const int64_t Tr = N / Br, Tc = N / Bc, W = Br / 64;
  Ledger p;
  p.global_read = {{"Q", N * d * e}, {"K", Tr * N * d * e}, {"V", Tr * N * d * e}};
  p.global_written = {{"O", N * d * e}, {"L", N * f}};
  p.launches = 1;
  p.grid_blocks = Tr;
  p.barriers = Tr;                 // the mbarriers are there
  p.warp_barriers = Tr * Br / 16;  // before a warp has its rows of O stored
  p.mma_flops = 4 * N * N * D;
  p.wgmma = Tr * Tc * W * (D / 16 + Bc / 16);
  // A row block's Q by warpgroups, a tile of K and one of V whole, O by warps of 16 rows.
  p.tma = Tr * (W + 2 * Tc + 4 * W) * D / 64;
  p.mbarrier_phases = Tr * (W + 2 * Tc);  // all of these but O have arrived
  // Of each 8 rows: two for the maxima of a tile, two for the sums at the end.
  p.shuffles = Tr * (Tc + 1) * Br / 4;
  p.exp = N * N + 4 * N * (Tc - 1);  // four lanes have a row's factor, but for the first tile
  p.div = N * 4;
  p.tiles_visited = Tr * Tc;
  // A warpgroup's product reads its Q and the tile of K, the other one the tile of V; TMA reads O.
  p.shared_read = Tr * Tc * W * (64 + 2 * Bc) * D * e + N * D * e;
  p.shared_written = N * D * e + Tr * Tc * 2 * Bc * D * e + N * D * e;
  return p;
}

Ledger predict_10a(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_10(N, d, D);
  p.barriers += p.tiles_visited;  // all are done with a tile
  return p;
}
// END STAGE

// BEGIN STAGE 10b
Ledger predict_10b(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_10(N, d, D);
  p.mbarrier_phases += 2 * p.tiles_visited;  // in place of the barrier, each buffer by itself
  return p;
}
// END STAGE

// BEGIN STAGE 10c
Ledger predict_10c(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_10b(N, d, D);
  const int64_t W = D == 64 ? 3 : 2;
  p.named_barriers = W * (p.tiles_visited + p.grid_blocks);  // a turn for each P V, and the first S
  return p;
}
// END STAGE

// BEGIN STAGE 10d
Ledger predict_10d(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_10b(N, d, D);
  const int64_t W = D == 64 ? 3 : 2;
  p.named_barriers = W * p.tiles_visited;  // S of a tile and P V of the one before are one turn
  p.mbarrier_phases -= p.grid_blocks;      // nobody waits for the last V's buffer
  return p;
}
// END STAGE

// BEGIN STAGE 10e
constexpr int64_t kWork = 16;      // bytes that tell a warpgroup of its row block,
constexpr int64_t kWorkAtEnd = 8;  // and those of them that it wants again when it stores O
constexpr int64_t kWarpgroup = 128;

Ledger predict_10e(int64_t N, int64_t d, int64_t D) {
  Ledger p = predict_10b(N, d, D);
  const int64_t W = D == 64 ? 3 : 2;
  p.named_barriers = W * p.tiles_visited;
  p.mbarrier_phases += p.grid_blocks * 2 * W;  // O is in the Q buffers of a row block, and left
  p.tma -= p.grid_blocks * 3 * W * D / 64;     // O goes by warpgroups
  // All lanes of a warpgroup read what the loading warp wrote.
  const int64_t read = p.grid_blocks * W * kWarpgroup * (kWork + kWorkAtEnd);
  p.shared_written += p.grid_blocks * W * kWork;
  p.shared_read += read;
  p.warp_exchange_bytes += read;
  return p;
}

// 10e is persistent: what is once for each row block above is once for each of the blocks that
// share them. Each has word that there is no more, and nobody waits for the last V's buffer.
void share_out_10e(Ledger& all, int64_t D, int64_t multiprocessors) {
  const int64_t W = D == 64 ? 3 : 2;
  all.grid_blocks = std::min(all.grid_blocks, multiprocessors);
  all.barriers = all.grid_blocks;
  all.mbarrier_phases += all.grid_blocks * (W - 1);
  const int64_t read = all.grid_blocks * W * kWarpgroup * kWork;
  all.shared_written += all.grid_blocks * W * kWork;
  all.shared_read += read;
  all.warp_exchange_bytes += read;
}
// END STAGE

struct Lesson {
  std::string_view stage;
  Ledger (*predict)(int64_t N, int64_t d, int64_t D);
  Tiles narrow, wide;  // of D = 64 and D = 128; of 01 what its launches divide N by
  // Where the blocks are fewer than the sum over (batch, head).
  void (*share_out)(Ledger& all, int64_t D, int64_t multiprocessors) = nullptr;
};

constexpr Lesson kLessons[] = {
    {"01", predict_01, {64, 64}, {64, 64}},
    // BEGIN STAGE 02a
    {"02a", predict_02a, {64, 64}, {64, 64}},
    // END STAGE
    // BEGIN STAGE 02b
    {"02b", predict_02b, {64, 64}, {64, 64}},
    // END STAGE
    // BEGIN STAGE 02c
    {"02c", predict_02c, {64, 64}, {64, 64}},
    // END STAGE
    // BEGIN STAGE 02d
    {"02d", predict_02d, {64, 64}, {64, 64}},
    // END STAGE
    // BEGIN STAGE 03
    {"03", predict_03, {64, 64}, {32, 64}},
    // END STAGE
    // BEGIN STAGE 04
    {"04", predict_04, {64, 64}, {32, 64}},
    // END STAGE
    // BEGIN STAGE 05
    {"05", predict_05, {64, 64}, {32, 64}},
    // END STAGE
    // BEGIN STAGE 06
    {"06", predict_06, {64, 64}, {32, 64}},
    // END STAGE
    // BEGIN STAGE 07
    {"07", predict_07, {128, 64}, {128, 64}},
    // END STAGE
    // BEGIN STAGE 08
    {"08", predict_08, {128, 128}, {128, 64}},
    // END STAGE
    // BEGIN STAGE 10a
    {"10a", predict_10a, {192, 128}, {128, 128}},
    // END STAGE
    // BEGIN STAGE 10b
    {"10b", predict_10b, {192, 128}, {128, 128}},
    // END STAGE
    // BEGIN STAGE 10c
    {"10c", predict_10c, {192, 128}, {128, 128}},
    // END STAGE
    // BEGIN STAGE 10d
    {"10d", predict_10d, {192, 128}, {128, 128}},
    // END STAGE
    // BEGIN STAGE 10e
    {"10e", predict_10e, {192, 128}, {128, 128}, share_out_10e},
    // END STAGE
};

const Lesson* lesson_of(std::string_view stage) {
  for (const Lesson& lesson : kLessons) {
    if (lesson.stage == stage) return &lesson;
  }
  return nullptr;
}

}  // namespace

bool has_prediction(std::string_view stage) {
  return lesson_of(stage) != nullptr;
}

std::optional<Ledger> predicted_ledger(std::string_view stage, const Problem& p) {
  const Lesson* lesson = lesson_of(stage);
  if (!lesson || p.causal || p.seqlen_q != p.seqlen_k) return std::nullopt;
  const int D = tile_width(p.head_dim);
  const Tiles tiles = D == 64 ? lesson->narrow : lesson->wide;
  const int64_t N = p.seqlen_q, n = p.batch_heads();
  if (N % tiles.Br != 0 || N % tiles.Bc != 0) return std::nullopt;
  const Ledger one = lesson->predict(N, p.head_dim, D);
  Ledger all;
  for (int64_t i = 0; i < n; ++i) all += one;
  all.launches = one.launches;
  if (lesson->share_out) lesson->share_out(all, D, kMultiprocessors);
  return all;
}

}  // namespace flashsteps
