#include "common/attention/work.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace flashsteps {

float default_scale(int head_dim) {
  return float(1.0 / std::sqrt(double(head_dim)));
}

int64_t visible_pairs(const Problem& p) {
  const int64_t Nq = p.seqlen_q, Nk = p.seqlen_k;
  if (!p.causal) return Nq * Nk;
  // The last query sees all Nk keys and each one before it one key less. The rows that see a key
  // therefore see Nk, Nk - 1, …, Nk - rows + 1.
  const int64_t rows = std::min(Nq, Nk);
  return rows * Nk - rows * (rows - 1) / 2;
}

int64_t forward_flops(const Problem& p) {
  return 4 * p.batch_heads() * p.head_dim * visible_pairs(p);
}

int64_t backward_flops(const Problem& p) {
  return 10 * p.batch_heads() * p.head_dim * visible_pairs(p);
}

TileCounts skipping_tile_counts(const Problem& p, int Br, int Bc) {
  if (Br <= 0 || Bc <= 0) throw std::invalid_argument("tile counts need tiles of at least 1 x 1");
  const int64_t Nq = p.seqlen_q, Nk = p.seqlen_k;
  const int64_t Tr = (Nq + Br - 1) / Br, Tc = (Nk + Bc - 1) / Bc;
  TileCounts head;
  if (!p.causal) {
    head = {.visited = Tr * Tc, .masked = Nk % Bc == 0 ? 0 : Tr};
  } else {
    for (int64_t i = 0; i < Tr; ++i) {
      // Keys that the block's last row sees, and that its first row sees; a row that sees none
      // counts as 0.
      const int64_t last = visible_keys(p, std::min((i + 1) * Br, Nq) - 1);
      const int64_t first = visible_keys(p, i * Br);
      const int64_t visited = (last + Bc - 1) / Bc;
      head.visited += visited;
      head.masked += visited - std::min(first / Bc, visited);
    }
  }
  return {.visited = head.visited * p.batch_heads(), .masked = head.masked * p.batch_heads()};
}

}  // namespace flashsteps
