#!/usr/bin/env python3
"""Runs python/bench_peers.py without a card: bench_peers_standin.py LIBRARY FAULT ARGUMENT…

A stand-in for torch, of NumPy arrays, takes the place of the real one, and the stages run on the CPU model, on the arrays'
memory; so all of the benchmark is run but for the card. Its times mean nothing. FAULT is "none", or "wrong" to spoil the
stages' output, "nan" to leave out its last row, "lse" to spoil L, "flash" for a torch without that backend; of the backward
pass "dq", "dk" or "dv" to spoil that gradient, and "nan" likewise. fp16 alone.
"""
import contextlib
import pathlib
import sys
import time
import types

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
import bench_peers  # noqa: E402
from bench_peers import abi  # noqa: E402

library_path, fault, *arguments = sys.argv[1:]


class Tensor(np.ndarray):
    """An array with the methods of torch.Tensor that the benchmark uses. What attention() gave keeps how, in views too."""
    def __array_finalize__(self, base):
        self.is_causal, self.scale = getattr(base, "is_causal", None), getattr(base, "scale", None)

    def stride(self): return tuple(step // self.itemsize for step in self.strides)
    def data_ptr(self): return self.ctypes.data
    def numel(self): return self.size
    def float(self): return self.astype(np.float32)
    def to(self, dtype): return self.astype(dtype)
    def abs(self): return np.abs(self)
    def amax(self, dim): return np.max(self, axis=dim).view(Tensor)
    def transpose(self, a, b): return np.swapaxes(self, a, b)
    def clamp(self, min): return np.maximum(self, min)  # noqa: A002
    def triu_(self, k): self[...] = np.triu(self, k); return self
    def fill_(self, value): self[...] = value; return self
    def sub_(self, other): self[...] -= other; return self
    def exp_(self): np.exp(self, out=self); return self
    def detach(self): return self
    def requires_grad_(self): return self
    def sum(self, dim=None, **more): return np.ndarray.sum(self, axis=more.pop("axis", dim), **more)
    def masked_fill_(self, mask, value): self[np.broadcast_to(mask, self.shape)] = value; return self


def made(array):
    return np.asarray(array).view(Tensor)


def empty_strided(shape, strides, dtype, device):
    del device
    whole = np.zeros(sum((n - 1) * s for n, s in zip(shape, strides)) + 1, dtype)
    return made(np.lib.stride_tricks.as_strided(whole, shape, [s * whole.itemsize for s in strides]))


class Generator:
    def __init__(self, device): del device
    def manual_seed(self, seed): self.numbers = np.random.default_rng(seed); return self


class Event:
    def __init__(self, enable_timing): assert enable_timing
    def record(self): self.at = time.perf_counter()
    def query(self): return False
    def synchronize(self): pass
    def elapsed_time(self, other): return 1e3 * (other.at - self.at)


def softmax_of(q, k, is_causal, scale):
    scores = (q.float() @ k.float().transpose(-1, -2)) * np.float32(scale)
    if is_causal:
        scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def attention(q, k, v, is_causal, scale):
    """What a backend of scaled_dot_product_attention gives."""
    output = made((softmax_of(q, k, is_causal, scale) @ v.float()).astype(q.dtype))
    output.is_causal, output.scale = is_causal, scale
    return output


def gradients(output, leaves, d_o, retain_graph):
    """What torch.autograd.grad gives for an output of attention()."""
    assert retain_graph
    q, k, v = leaves
    p, of_o = softmax_of(q, k, output.is_causal, output.scale), d_o.float()
    d_s = p * (of_o @ v.float().transpose(-1, -2) - (of_o * output.float()).sum(axis=-1, keepdims=True))
    d_q = d_s @ k.float() * np.float32(output.scale)
    d_k = d_s.transpose(-1, -2) @ q.float() * np.float32(output.scale)
    return tuple(made(x.astype(q.dtype)) for x in (d_q, d_k, p.transpose(-1, -2) @ of_o))


@contextlib.contextmanager
def sdpa_kernel(backends):
    if fault == "flash" and backends == ["flash"]:
        raise RuntimeError("No available kernel. Aborting execution.\nsecond line")
    yield


torch = types.ModuleType("torch")
torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.bool = np.float16, None, np.float32, np.uint8, np.bool_
torch.__version__ = "stand-in"
torch.version = types.SimpleNamespace(cuda="none")
torch.backends = types.SimpleNamespace(
    cudnn=types.SimpleNamespace(version=lambda: 0),
    cuda=types.SimpleNamespace(allow_fp16_bf16_reduction_math_sdp=lambda on: None))
torch.manual_seed = torch.set_float32_matmul_precision = lambda value: None
torch.no_grad = contextlib.nullcontext
torch.autograd = types.SimpleNamespace(grad=gradients)
torch.Generator = Generator
torch.randn = lambda *shape, device, dtype, generator: made(generator.numbers.standard_normal(shape).astype(dtype))
torch.empty = lambda shape, dtype, device: made(np.zeros(shape, dtype))
torch.empty_strided = empty_strided
torch.ones = lambda *shape, dtype, device: made(np.ones(shape, dtype))
torch.ones_like = lambda x: made(np.ones_like(x))
torch.tensor = lambda values, device: made(values)
torch.logsumexp = lambda x, dim: made(np.logaddexp.reduce(x, axis=dim))
torch.where = lambda condition, a, b: made(np.where(condition, a, b))
torch.isinf, torch.isfinite, torch.frexp, torch.ldexp = np.isinf, np.isfinite, np.frexp, np.ldexp
torch.cuda = types.SimpleNamespace(
    is_available=lambda: True, synchronize=lambda: None, empty_cache=lambda: None, _sleep=lambda cycles: None, Event=Event,
    OutOfMemoryError=MemoryError, mem_get_info=lambda: (2**33, 2**33),
    current_stream=lambda: types.SimpleNamespace(cuda_stream=0),
    get_device_properties=lambda index: types.SimpleNamespace(
        name="stand-in", major=0, minor=0, multi_processor_count=1, total_memory=0, L2_cache_size=2**16))
functional = types.ModuleType("torch.nn.functional")
functional.scaled_dot_product_attention = attention
functional.pad = lambda x, pad: made(np.pad(x, [(0, 0), (pad[2], pad[3]), (pad[0], pad[1])]))
backends_of = types.ModuleType("torch.nn.attention")
backends_of.SDPBackend = types.SimpleNamespace(MATH="math", FLASH_ATTENTION="flash", CUDNN_ATTENTION="cudnn",
                                               EFFICIENT_ATTENTION="efficient")
backends_of.sdpa_kernel = sdpa_kernel
torch.nn = types.ModuleType("torch.nn")
torch.nn.functional, torch.nn.attention = functional, backends_of
sys.modules.update({"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": functional, "torch.nn.attention": backends_of})


class Library(abi.Library):
    """The library on the CPU model, with the fault."""

    def forward(self, args):
        super().forward(args)
        rows = args.batch * args.heads * args.seqlen_q
        o = np.ctypeslib.as_array((abi.ctypes.c_uint16 * (rows * args.head_dim)).from_address(args.o))
        if fault == "wrong":
            o[...] ^= 1 << 9  # a bit of the largest exponent
        if fault == "nan":
            o[-args.head_dim:] = 0x7fff
        if fault == "lse" and args.l:
            np.ctypeslib.as_array((abi.ctypes.c_float * rows).from_address(args.l))[0] += 0.001


    def backward(self, args):
        super().backward(args)
        count = args.batch * args.heads * args.seqlen_q * args.head_dim
        for name in ("dq", "dk", "dv"):
            gradient = np.ctypeslib.as_array((abi.ctypes.c_uint16 * count).from_address(getattr(args, name)))
            if fault == name:
                gradient[...] ^= 1 << 11  # a bit of the exponent
            if fault == "nan":
                gradient[-args.head_dim:] = 0x7fff


# What --peer-module may name: flash-attn's layout, and L beside O, as some have it; and modules that are of no use.
peer = types.ModuleType("standin_peer")
peer.__version__ = "1.2"


def flash_attn_func(q, k, v, softmax_scale, causal):
    assert q.shape[1] != q.shape[2], "the benchmark's heads and lengths differ, so that a layout can be told"
    if fault == "peer":
        raise NotImplementedError("no kernel for this card\nsecond line")
    output = attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, scale=softmax_scale)
    return output.transpose(1, 2), None


peer.flash_attn_func = flash_attn_func
sys.modules.update({"standin_peer": peer, "standin_without": types.ModuleType("standin_without")})

abi.CUDA = abi.MODEL
abi.Library = Library
bench_peers.WARMUP_MS = 0
bench_peers.measure_ceilings = lambda *_: {"copy_tb_per_s": 1.0, "matmul_tflops": 1000.0}
bench_peers.main(["--library", library_path, "--dtype", "fp16", *arguments])
