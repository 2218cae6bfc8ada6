/// \file
/// The C interface of libflashsteps.so: the forward pass and the backward pass of any stage, for
/// other languages. Plain C (C99), without any other header of the project.
///
/// Every function may be called from any thread at any time, and no C++ exception leaves it. What
/// can fail returns a flashsteps_status; flashsteps_last_error() then says why, in one line.
///
/// \code{.c}
/// flashsteps_forward_args args = {
///     .size = sizeof args, .stage = "08", .target = FLASHSTEPS_CUDA, .dtype = FLASHSTEPS_BF16,
///     .batch = 2, .heads = 16, .kv_heads = 16, .seqlen_q = 4096, .seqlen_k = 4096,
///     .head_dim = 128, .scale = 0.0883883476f, .causal = 1,
///     .q = q, .k = k, .v = v, .o = o, .l = l, .stream = stream};
/// if (flashsteps_forward(&args) != FLASHSTEPS_OK) puts(flashsteps_last_error());
/// \endcode
#ifndef FLASHSTEPS_H
#define FLASHSTEPS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Marks what the library exports.
#define FLASHSTEPS_API __attribute__((visibility("default")))

/// The version of this header, 10000 * major + 100 * minor + patch. A library whose
/// flashsteps_version() has the same major number and is not older has all that this header says.
#define FLASHSTEPS_VERSION 200

/// What functions return; the same numbers as the exit status of the project's programs.
typedef enum flashsteps_status {
  FLASHSTEPS_OK = 0,
  FLASHSTEPS_FAILED = 1,       ///< a kernel broke, or the CPU model found it at fault
  FLASHSTEPS_BAD_INPUT = 2,    ///< what was given is not allowed; nothing was launched
  FLASHSTEPS_UNAVAILABLE = 3,  ///< the device cannot do it: no card, too old, too little memory
} flashsteps_status;

/// Element type of Q, K, V and O.
typedef enum flashsteps_dtype {
  FLASHSTEPS_FP16 = 0,
  FLASHSTEPS_BF16 = 1,
} flashsteps_dtype;

/// Where a stage runs.
typedef enum flashsteps_target {
  FLASHSTEPS_MODEL = 0,  ///< the CPU model of the GPU, where the library has it: on host pointers
  FLASHSTEPS_CUDA = 1,   ///< a card: on device pointers
} flashsteps_target;

/// Element (b, h, i, c) of a tensor lies at `b * batch + h * head + i * row + c`, in elements. All
/// three 0: packed, in the order (batch, heads, seqlen, head_dim).
typedef struct flashsteps_strides {
  int64_t batch;
  int64_t head;
  int64_t row;
} flashsteps_strides;

/// One forward pass: S = scale Q K^T, P = softmax(S) by rows, O = P V, L = log sum exp(S).
///
/// Set `size` to sizeof(flashsteps_forward_args) and every member that is not named to 0. A library
/// that is newer than its caller takes the members that the caller does not know as 0; one that is
/// older refuses those that it does not know, unless they are 0.
typedef struct flashsteps_forward_args {
  uint64_t size;      ///< of this struct, in bytes
  const char* stage;  ///< "02b", "08"; a number without a letter means the last step of that stage
  int32_t target;     ///< flashsteps_target
  int32_t dtype;      ///< flashsteps_dtype

  int32_t batch;     ///< 1 or more
  int32_t heads;     ///< of Q and O, a multiple of kv_heads
  int32_t kv_heads;  ///< of K and V: query head h reads KV head h / (heads / kv_heads)
  int32_t seqlen_q;  ///< Nq, 0 or more
  int32_t seqlen_k;  ///< Nk, 0 or more
  int32_t head_dim;  ///< d, a multiple of 8 from 8 to 128
  float scale;       ///< any finite number, usually 1 / sqrt(d); 0 is 0, and no default
  int32_t causal;    ///< 0, or 1: query i sees key j when j <= i + Nk - Nq

  /// Q and O have shape (batch, heads, seqlen_q, head_dim), K and V (batch, kv_heads, seqlen_k,
  /// head_dim), with the strides below. Aligned to 16 bytes; a tensor without elements may be NULL.
  /// A query that sees no key has O = 0 and L = -inf.
  const void* q;
  const void* k;  ///< see q
  const void* v;  ///< see q
  void* o;        ///< see q; no two rows may overlap
  /// L: fp32, (batch, heads, seqlen_q), packed, natural logarithm. Stages 01 to 05 compute it with
  /// a kernel of its own, and leave that out where L is NULL; the others need it.
  float* l;

  /// Multiples of 8. Along a dimension with more than one entry they are at least head_dim.
  flashsteps_strides q_strides;
  flashsteps_strides k_strides;  ///< see q_strides
  flashsteps_strides v_strides;  ///< see q_strides
  flashsteps_strides o_strides;  ///< see q_strides

  void* stream;  ///< a cudaStream_t of the card that holds the tensors; NULL: the default stream
  /// On a card: at least as many bytes of its memory as flashsteps_forward_workspace() says,
  /// aligned to 256, and in use until the stream has done its work. NULL where none are needed, and
  /// on the CPU model, which brings its own.
  void* workspace;
  uint64_t workspace_bytes;  ///< that `workspace` has

  /// Tile sizes Br and Bc, for stages that are built for several; 0 and 0: the stage's choice.
  int32_t tile_rows;
  int32_t tile_keys;           ///< see tile_rows
  int32_t one_block_per_head;  ///< 1: stage 05 keeps the grid of 04 (`--grid bh`)
  int32_t reserved;            ///< 0
} flashsteps_forward_args;

/// Computes O and L.
///
/// On a card it queues kernels on the stream and returns; it neither allocates nor waits, so a
/// kernel that breaks while it runs shows in a later CUDA call. The tensors decide which card it
/// is; the caller's current device stays as it is. On the CPU model it returns when all is done:
/// the tensors are in host memory there, and stream and workspace are not used. Calls on the model
/// take turns.
///
/// \returns FLASHSTEPS_BAD_INPUT for whatever the members above do not allow, a stage that there is
/// not, a workspace that is too small, or a pointer that CUDA does not know as device memory;
/// FLASHSTEPS_UNAVAILABLE where the library has no such target, there is no card that it can use,
/// or the card lacks what the stage needs; FLASHSTEPS_FAILED where a kernel broke
FLASHSTEPS_API flashsteps_status flashsteps_forward(const flashsteps_forward_args* args);

/// How many bytes of workspace the stage needs for this problem: those of S, P, O_acc, m, l, …,
/// each rounded up to 256. Pointers, stream and workspace are not looked at, and no card is needed.
///
/// \param args the problem
/// \param[out] bytes 0 for a stage that keeps everything on the chip
/// \returns FLASHSTEPS_BAD_INPUT as flashsteps_forward() does
FLASHSTEPS_API flashsteps_status flashsteps_forward_workspace(const flashsteps_forward_args* args,
                                                              uint64_t* bytes);

/// The tile sizes that flashsteps_forward() would use on the current card. Pointers, stream and
/// workspace are not looked at.
///
/// \param args the problem
/// \param[out] rows Br, rows of Q; 0 for a stage without tiles
/// \param[out] keys Bc, rows of K
/// \returns FLASHSTEPS_UNAVAILABLE where there is no card to choose tiles for
FLASHSTEPS_API flashsteps_status flashsteps_forward_tiles(const flashsteps_forward_args* args,
                                                          int32_t* rows, int32_t* keys);

/// One backward pass, from O and L of a forward pass and the gradient dO of its output: with
/// P = exp(S - L) and D = rowsum(dO o O), dV = P^T dO, dS = P o (dO V^T - D), dQ = scale dS K and
/// dK = scale dS^T Q; dK and dV of a KV head are summed over the query heads that read it.
///
/// Set `size` to sizeof(flashsteps_backward_args) and every member that is not named to 0, as for
/// flashsteps_forward_args.
typedef struct flashsteps_backward_args {
  uint64_t size;      ///< of this struct, in bytes
  const char* stage;  ///< "09"; a number without a letter means the last step of that stage
  int32_t target;     ///< flashsteps_target
  int32_t dtype;      ///< flashsteps_dtype

  int32_t batch;     ///< as in flashsteps_forward_args
  int32_t heads;     ///< see batch
  int32_t kv_heads;  ///< see batch
  int32_t seqlen_q;  ///< see batch
  int32_t seqlen_k;  ///< see batch
  int32_t head_dim;  ///< see batch
  float scale;       ///< that of the forward pass
  int32_t causal;    ///< that of the forward pass

  /// Q, O, dO and dQ have shape (batch, heads, seqlen_q, head_dim), K, V, dK and dV (batch,
  /// kv_heads, seqlen_k, head_dim), with the strides below. Aligned to 16 bytes; a tensor without
  /// elements may be NULL.
  const void* q;
  const void* k;    ///< see q
  const void* v;    ///< see q
  const void* o;    ///< see q; of the forward pass
  const void* d_o;  ///< see q; the gradient of the loss by O
  const float* l;   ///< L of the forward pass: fp32, (batch, heads, seqlen_q), packed
  void* dq;         ///< see q; no two rows may overlap. 0 where a query sees no key
  void* dk;         ///< see q; no two rows may overlap
  void* dv;         ///< see q; no two rows may overlap

  /// Multiples of 8. Along a dimension with more than one entry they are at least head_dim.
  flashsteps_strides q_strides;
  flashsteps_strides k_strides;    ///< see q_strides
  flashsteps_strides v_strides;    ///< see q_strides
  flashsteps_strides o_strides;    ///< see q_strides
  flashsteps_strides d_o_strides;  ///< see q_strides
  flashsteps_strides dq_strides;   ///< see q_strides
  flashsteps_strides dk_strides;   ///< see q_strides
  flashsteps_strides dv_strides;   ///< see q_strides

  void* stream;              ///< as in flashsteps_forward_args
  void* workspace;           ///< likewise, with flashsteps_backward_workspace()
  uint64_t workspace_bytes;  ///< that `workspace` has

  /// Tile sizes Br and Bc, for stages that are built for several; 0 and 0: the stage's choice.
  int32_t tile_rows;
  int32_t tile_keys;  ///< see tile_rows
  /// 1: dQ is summed in a fixed order, so that its bits are the same in every run; 0: in whatever
  /// order blocks finish. Those of dK and dV are the same in every run in any case.
  int32_t deterministic;
  int32_t reserved;  ///< 0
} flashsteps_backward_args;

/// Computes dQ, dK and dV, as flashsteps_forward() computes O and L.
///
/// \returns as flashsteps_forward()
FLASHSTEPS_API flashsteps_status flashsteps_backward(const flashsteps_backward_args* args);

/// How many bytes of workspace the backward pass needs for this problem: those of D, dQ_acc, …, as
/// flashsteps_forward_workspace() counts them. They do not depend on `deterministic`.
///
/// \param args the problem
/// \param[out] bytes as flashsteps_forward_workspace()
/// \returns FLASHSTEPS_BAD_INPUT as flashsteps_backward() does
FLASHSTEPS_API flashsteps_status flashsteps_backward_workspace(const flashsteps_backward_args* args,
                                                               uint64_t* bytes);

/// The tile sizes that flashsteps_backward() would use, as flashsteps_forward_tiles().
///
/// \param args the problem
/// \param[out] rows Br, rows of Q; 0 for a stage without tiles
/// \param[out] keys Bc, rows of K
/// \returns FLASHSTEPS_UNAVAILABLE where there is no card to choose tiles for
FLASHSTEPS_API flashsteps_status flashsteps_backward_tiles(const flashsteps_backward_args* args,
                                                           int32_t* rows, int32_t* keys);

/// Why the last call on this thread did not return FLASHSTEPS_OK, in one line: what is wrong, what
/// was given, what is allowed. "" where it did. Valid until the next call on this thread.
FLASHSTEPS_API const char* flashsteps_last_error(void);

/// The ids of the stages of the forward pass that the library has for a flashsteps_target,
/// ascending, with commas between them; "" where it has none.
FLASHSTEPS_API const char* flashsteps_stages(int32_t target);

/// The same of the stages of the backward pass.
FLASHSTEPS_API const char* flashsteps_backward_stages(int32_t target);

/// The library's version, as FLASHSTEPS_VERSION is the header's.
FLASHSTEPS_API int32_t flashsteps_version(void);

/// The commit that the library was built from: 40 digits, with "-dirty" where files differed from
/// it; "" where that was not known.
FLASHSTEPS_API const char* flashsteps_commit(void);

#ifdef __cplusplus
}
#endif

#endif  // FLASHSTEPS_H
