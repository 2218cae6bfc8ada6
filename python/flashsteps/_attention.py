"""attention() and attention_backward(): the C interface's two passes on arrays."""
import functools
import math
from typing import NamedTuple

from . import abi
from ._kinds import DTYPES, kind_of
from ._library import library
from ._stages import id_of

LARGEST = 2**31 - 1  # of a size in the C interface


class How(NamedTuple):
    """A call but for its arrays."""
    stage: bytes
    backward_stage: bytes
    element: str
    causal: bool
    scale: float
    tiles: tuple
    one_block_per_head: bool
    deterministic: bool


def _shape(arrays):
    """(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim) of q, k and v. Raises abi.BadInput."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise abi.BadInput(f"{name} has shape {shape}; (batch, heads, seqlen, head_dim) is wanted")
        if max(shape) > LARGEST:
            raise abi.BadInput(f"{name} has shape {shape}; allowed: sizes up to {LARGEST}")
    q, k, v = shapes["q"], shapes["k"], shapes["v"]
    if k != v:
        raise abi.BadInput(f"k has shape {k} and v {v}; they must be equal")
    if q[0] != k[0] or q[3] != k[3]:
        raise abi.BadInput(f"q has shape {q} and k {k}; batch and head_dim must be equal")
    return q[0], q[1], k[1], q[2], k[2], q[3]


def _flag(name, value):
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool_", "bool"):  # NumPy's
        return bool(value)
    raise TypeError(f"{name} is {value!r}; allowed: True, False")


def _scale(scale, head_dim):
    if scale is None:
        return 1 / math.sqrt(head_dim) if head_dim > 0 else 1.0
    try:
        return float(scale)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"scale is {scale!r}; allowed: a number, or None for 1 / sqrt(head_dim)") from None


def _tiles(tiles):
    if tiles is None:
        return 0, 0
    if not (isinstance(tiles, (tuple, list)) and len(tiles) == 2 and all(type(n) is int and 0 < n < LARGEST for n in tiles)):
        raise TypeError(f"tiles is {tiles!r}; allowed: (Br, Bc), two positive integers")
    return tuple(tiles)


def _element(kind, arrays, dtype):
    """What all arrays are computed in. Raises TypeError."""
    if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):
        raise TypeError(f"dtype is {dtype!r}; allowed: {', '.join(map(repr, DTYPES))}")
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        element = kind.element(array, name, dtype)
        if array.dtype != first.dtype:
            raise TypeError(f"{name} is of {array.dtype} and {first_name} of {first.dtype}; they must be equal")
    return element


def _arguments(kind, how, shape, tensors, backward):
    """The arguments of one pass."""
    members = dict(zip(("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim"), shape))
    for name, tensor in tensors.items():
        members[name] = tensor.pointer
        members[f"{name}_strides"] = tensor.strides
    if backward:
        args = abi.BackwardArgs(stage=how.backward_stage, deterministic=how.deterministic, **members)
    else:
        args = abi.ForwardArgs(stage=how.stage, one_block_per_head=how.one_block_per_head, **members)
    args.target, args.dtype = kind.target, DTYPES[how.element]
    args.causal, args.scale = how.causal, how.scale
    args.tile_rows, args.tile_keys = how.tiles
    return args


def _launch(kind, args, like):
    """Runs a pass, or queues it on the current stream of the card."""
    call = library().backward if isinstance(args, abi.BackwardArgs) else library().forward
    workspace = None
    if kind.target == abi.CUDA:
        args.stream = kind.stream(like)
        needed = library().workspace_bytes(args)
        if needed:
            workspace = kind.workspace(needed, like)
            args.workspace, args.workspace_bytes = workspace.data_ptr(), needed
    call(args)


def forward_pass(kind, how, q, k, v):
    """O and L of arrays with 16-bit elements; and the tensors that they were computed from, for a backward pass."""
    shape = _shape({"q": q, "k": k, "v": v})
    tensors = {name: kind.tensor(array) for name, array in zip("qkv", (q, k, v))}
    tensors["o"] = kind.empty_like(tensors["q"])
    lse = kind.empty_lse((shape[0], shape[1], shape[3]), q)
    args = _arguments(kind, how, shape, tensors, backward=False)
    args.l = kind.pointer(lse)
    _launch(kind, args, q)
    return tensors["o"].array, lse


def backward_pass(kind, how, d_o, q, k, v, o, lse):
    """dQ, dK and dV of arrays with 16-bit elements."""
    shape = _shape({"q": q, "k": k, "v": v})
    for name, array in (("do", d_o), ("o", o)):
        if tuple(array.shape) != tuple(q.shape):
            raise abi.BadInput(f"{name} has shape {tuple(array.shape)} and q {tuple(q.shape)}; they must be equal")
    tensors = {name: kind.tensor(array) for name, array in zip(("q", "k", "v", "o", "d_o"), (q, k, v, o, d_o))}
    for name, of in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        tensors[name] = kind.empty_like(tensors[of])
    lse = kind.lse(lse, (shape[0], shape[1], shape[3]))
    args = _arguments(kind, how, shape, tensors, backward=True)
    args.l = kind.pointer(lse)
    _launch(kind, args, q)
    return tuple(tensors[name].array for name in ("dq", "dk", "dv"))


@functools.lru_cache(maxsize=None)
def _autograd_function():
    """The pass as torch differentiates it; made when torch is there."""
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, kind, how, q, k, v):
            o, lse = forward_pass(kind, how, q, k, v)
            ctx.kind, ctx.how = kind, how
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.mark_non_differentiable(lse)
            return o, lse

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, d_o, _d_lse):
            q, k, v, o, lse = ctx.saved_tensors
            how = ctx.how._replace(tiles=(0, 0))  # those of the call are the forward pass's
            return None, None, *backward_pass(ctx.kind, how, d_o, q, k, v, o, lse)

    return Attention


def attention(q, k, v, stage=None, causal=False, scale=None, *, return_lse=False, dtype=None, tiles=None,
              one_block_per_head=False, backward_stage=None, deterministic=False):
    """O = softmax(scale Q K^T) V, computed by a stage.

    q: (batch, heads, seqlen_q, head_dim); k, v: (batch, kv_heads, seqlen_k, head_dim), all NumPy arrays or all torch tensors on
        one device, of one type. heads is a multiple of kv_heads; query head h reads KV head h // (heads // kv_heads).
        head_dim is a multiple of 8 up to 128; seqlen_q and seqlen_k may be 0.
    stage: "08", "02b"; a number without a letter means the last step of that stage. None: default_stage().
    causal: query i sees key j when j <= i + seqlen_k - seqlen_q.
    scale: any finite number; None: 1 / sqrt(head_dim).
    return_lse: returns (O, L) in place of O.
    dtype: "fp16" or "bf16": inputs of float32 or float64 are rounded to it. Arrays of uint16 are bits of bfloat16, and
        dtype="bf16" must say so.
    tiles: (Br, Bc), for stages that are built for several; None: the stage's choice.
    one_block_per_head: stage 05 keeps the grid of 04.
    backward_stage, deterministic: where torch differentiates O: the stage of the backward pass (None:
        default_stage("backward")), and whether dQ is summed in a fixed order.

    Returns O, of q's shape and type (float32 where float32 was rounded); L is float32, (batch, heads, seqlen_q), log sum exp of
    the scaled scores, natural logarithm. A query that sees no key has O = 0 and L = -inf.

    NumPy arrays, and torch tensors of the CPU, are computed by the CPU model of the GPU: right, counted, and slow. Tensors on a
    card are computed there; the kernels are queued on torch's current stream, and this returns. torch differentiates O by
    q, k and v, once; L has no gradient.

    Without a copy: head_dim contiguous, the other strides multiples of 8 elements and at least head_dim (an axis of one entry
    may have any), and the first element aligned to 16 bytes. So both orders of heads and seqlen, and slices of packed QKV, run
    as they are. Anything else is copied first, as what np.broadcast_to or Tensor.expand made, or rows that are no multiple of 16
    bytes apart. O lies in memory in the order of q's axes.

    Raises TypeError for a wrong type; BadInput, a ValueError, for whatever is not allowed, in one line that says what is wrong,
    what was given and what is allowed; Unavailable where it cannot be done here; Error where a kernel broke."""
    arrays = {"q": q, "k": k, "v": v}
    kind = kind_of(arrays)
    shape = _shape(arrays)
    how = How(id_of(stage, "forward"), id_of(backward_stage, "backward"), _element(kind, arrays, dtype), _flag("causal", causal),
              _scale(scale, shape[5]), _tiles(tiles), _flag("one_block_per_head", one_block_per_head),
              _flag("deterministic", deterministic))
    given = [kind.rounded(array, how.element) for array in (q, k, v)]
    run = forward_pass if kind.name == "a NumPy array" else _autograd_function().apply
    o, lse = run(kind, how, *given)
    o = kind.returned(o, how.element, q)
    return (o, lse) if _flag("return_lse", return_lse) else o


def attention_backward(do, q, k, v, o, L, stage=None, causal=False, scale=None, *, deterministic=False, dtype=None, tiles=None):
    """(dQ, dK, dV): the gradients of a loss by Q, K and V, from the gradient `do` by O.

    do, o: of q's shape and type; q, k, v: as of attention(). o and L are what attention(..., return_lse=True) gave for the
        same q, k, v, causal and scale; L is float32, (batch, heads, seqlen_q).
    stage: of the backward pass, "09"; None: default_stage("backward").
    deterministic: dQ is summed in a fixed order, so that its bits are the same in every run; those of dK and dV always are.
    dtype, tiles: as of attention().

    Returns dQ, dK and dV of the shapes and types of q, k and v; dK and dV of a KV head are summed over its query heads. What is
    copied and what is raised is as of attention()."""
    arrays = {"q": q, "k": k, "v": v, "o": o, "do": do}
    kind = kind_of({**arrays, "L": L})
    shape = _shape({name: arrays[name] for name in "qkv"})
    how = How(b"", id_of(stage, "backward"), _element(kind, arrays, dtype), _flag("causal", causal), _scale(scale, shape[5]),
              _tiles(tiles), False, _flag("deterministic", deterministic))
    rounded = {name: kind.rounded(array, how.element) for name, array in arrays.items()}
    gradients = backward_pass(kind, how, rounded["do"], rounded["q"], rounded["k"], rounded["v"], rounded["o"], L)
    return tuple(kind.returned(x, how.element, q) for x in gradients)
