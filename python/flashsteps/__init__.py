"""Every stage of FlashSteps from Python: NumPy arrays on the CPU model of the GPU, torch tensors on a card.

    import numpy as np, flashsteps
    q, k, v = (np.random.randn(1, 2, 100, 64).astype(np.float16) for _ in range(3))
    o, lse = flashsteps.attention(q, k, v, stage="03", causal=True, return_lse=True)

attention() and attention_backward() have the project's layout, (batch, heads, seqlen, head_dim); flash_attn_func() and its
packed variants have the layout, the signature and the gradients of the flash-attn package. Neither NumPy nor torch is imported
here: whichever the caller's arrays are of is there already. docs/python.md is the guide.
"""
from ._attention import attention, attention_backward
from ._library import library
from ._stages import default_stage, set_default_stage
from ._kinds import bf16_to_float32, float32_to_bf16
from .abi import BadInput, Error, Unavailable
from .flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

__version__ = "0.2.0"
__all__ = [
    "BadInput", "Error", "Unavailable", "attention", "attention_backward", "bf16_to_float32", "default_stage",
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "float32_to_bf16", "library",
    "set_default_stage",
]
