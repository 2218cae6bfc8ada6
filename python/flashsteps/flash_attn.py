"""The functions of the flash-attn package that these stages can take the place of: its layout, signatures and semantics.

    from flashsteps import flash_attn_func      # in place of: from flash_attn import flash_attn_func

They are written to that package's documented interface; what is not supported raises NotImplementedError with the option's
name. Two things differ: a query that sees no key has a log-sum-exp of -inf (there +inf), and S_dmask is None, as there is no
dropout.
"""
from . import abi
from ._attention import attention
from ._kinds import kind_of

MOST_HEAD_DIM = 128


def _window(window_size, causal):
    """Whether this window is the causal mask (True) or none (False)."""
    try:
        left, right = (int(size) for size in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window_size!r}; allowed: (-1, -1)") from None
    if left < 0 and (right < 0 or causal or right == 0):  # under the causal mask nothing is to the right
        return causal or right == 0
    raise NotImplementedError(f"window_size={(left, right)}: stages have no sliding window; allowed: (-1, -1), and (-1, 0), "
                              "which is causal=True")


def _refuse_options(dropout_p, softcap, alibi_slopes):
    for name, value, none in (("dropout_p", dropout_p, 0), ("softcap", softcap, 0)):
        if value != none:
            raise NotImplementedError(f"{name}={value}: stages have no {name.removesuffix('_p')}; allowed: {none}")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: stages have no ALiBi; allowed: None")


def _swapped(array):
    """(batch, seqlen, heads, head_dim) as (batch, heads, seqlen, head_dim), or back; a view."""
    return array.transpose(1, 2) if kind_of({"q": array}).name == "a torch tensor" else array.swapaxes(1, 2)


def _padded(array, more):
    """With `more` zeros behind each row: a copy."""
    if kind_of({"q": array}).name == "a torch tensor":
        import torch
        return torch.nn.functional.pad(array, (0, more))
    import numpy as np
    return np.concatenate([array, np.zeros((*array.shape[:3], more), array.dtype)], axis=3)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False, *, stage=None, backward_stage=None):
    """Attention as flash-attn's function of this name has it.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, kv_heads, head_dim), of float16 or bfloat16: torch tensors on a
        card, or of the CPU for the CPU model, differentiated by torch; or NumPy arrays of float16, on the CPU model. head_dim is
        at most 128; where it is no multiple of 8 it is padded, which copies.
    softmax_scale: None: 1 / sqrt(head_dim).
    causal: aligned at the bottom right.
    deterministic: the backward pass sums dQ in a fixed order.
    return_attn_probs: returns (out, softmax_lse, None), softmax_lse of shape (batch, heads, seqlen_q) and float32.
    stage, backward_stage: as of attention(); None: set_default_stage() and the environment decide.
    dropout_p, window_size, softcap, alibi_slopes: what is not their default raises NotImplementedError; a window of (-1, 0) is
        causal=True.

    Returns out, of q's shape and type. Copies, and further errors, are those of attention()."""
    _refuse_options(dropout_p, softcap, alibi_slopes)
    causal = _window(window_size, causal)
    arrays = {"q": q, "k": k, "v": v}
    kind_of(arrays)
    for name, array in arrays.items():
        if array.ndim != 4:
            raise abi.BadInput(f"{name} has shape {tuple(array.shape)}; (batch, seqlen, heads, head_dim) is wanted")
    head_dim = q.shape[3]
    if head_dim > MOST_HEAD_DIM:
        raise NotImplementedError(f"head_dim={head_dim}: stages are built for at most {MOST_HEAD_DIM}")
    if softmax_scale is None and head_dim > 0:
        softmax_scale = head_dim**-0.5  # of the true one
    if k.shape[3] == v.shape[3] == head_dim and head_dim % 8:
        arrays = {name: _padded(array, -head_dim % 8) for name, array in arrays.items()}
    out, lse = attention(*(_swapped(array) for array in arrays.values()), stage, causal, softmax_scale, return_lse=True,
                         backward_stage=backward_stage, deterministic=deterministic)
    out = _swapped(out)[..., :head_dim]
    return (out, lse, None) if return_attn_probs else out


def _unpacked(name, packed, count):
    """The `count` parts of a packed array along its third axis, as views."""
    kind_of({name: packed})
    if packed.ndim != 5 or packed.shape[2] != count:
        raise abi.BadInput(f"{name} has shape {tuple(packed.shape)}; (batch, seqlen, {count}, heads, head_dim) is wanted")
    return [packed[:, :, part] for part in range(count)]


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False, *, stage=None,
                             backward_stage=None):
    """flash_attn_func() with K and V in one array, kv: (batch, seqlen_k, 2, kv_heads, head_dim)."""
    return flash_attn_func(q, *_unpacked("kv", kv, 2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs, stage=stage, backward_stage=backward_stage)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False, *, stage=None,
                              backward_stage=None):
    """flash_attn_func() with Q, K and V in one array, qkv: (batch, seqlen, 3, heads, head_dim)."""
    return flash_attn_func(*_unpacked("qkv", qkv, 3), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs, stage=stage, backward_stage=backward_stage)
