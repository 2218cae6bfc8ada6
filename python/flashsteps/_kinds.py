"""What a call's arrays are, NumPy's or torch's, and what the C interface must know of them.

A kind is one of these two with its module, which is imported already where an array of it is there.
"""
import sys
from typing import NamedTuple

from . import abi

DTYPES = {"fp16": abi.FP16, "bf16": abi.BF16}
ALIGNMENT = 16  # bytes, of a tensor's first element
STEP = 8  # elements, what strides are multiples of


def float32_to_bf16(x):
    """The bits of x rounded to bfloat16 (to nearest, ties to even): a NumPy array of uint16, of x's shape. x: a NumPy array;
    of more than 32 bits it is rounded to float32 first. NaN stays NaN, what is too large becomes an infinity."""
    import numpy as np
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7fff + ((bits >> 16) & 1))) >> 16
    return np.where((bits & 0x7fffffff) > 0x7f800000, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def bf16_to_float32(bits):
    """The values of bfloat16 bits: a NumPy array of float32, of the shape of `bits`, an array of uint16."""
    import numpy as np
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


class Tensor(NamedTuple):
    """A tensor as the C interface takes it, and the array that keeps its memory alive."""
    array: object
    pointer: int
    strides: abi.Strides


def usable_strides(shape, strides, pointer):
    """The batch, head and row stride for the C interface of an array (batch, heads, seqlen, head_dim) with these strides in
    elements; None where a copy is needed: strides that are no multiples of 8 or smaller than head_dim (as after
    broadcasting), head_dim not contiguous, or a first element that is not aligned to 16 bytes."""
    head_dim = shape[3]
    if 0 in shape:
        return abi.Strides()
    if strides[3] != 1 and head_dim > 1 or pointer % ALIGNMENT != 0:
        return None
    usable = []
    for size, stride in zip(shape[:3], strides):
        if size == 1:
            stride = head_dim  # never stepped over
        elif stride % STEP != 0 or stride < head_dim:
            return None
        usable.append(stride)
    return abi.Strides(*usable)


class NumpyKind:
    """NumPy arrays: host memory, the CPU model."""
    target = abi.MODEL
    name = "a NumPy array"

    def __init__(self, numpy):
        self.np = numpy

    @staticmethod
    def where(_array):
        return "the host"

    def check_device(self, arrays):
        """All arrays are in host memory."""

    def element(self, array, name, wanted):
        """"fp16" or "bf16": what an array is computed in; `wanted` is the call's dtype. Raises TypeError."""
        np, given = self.np, array.dtype
        if given == np.float16 or given.name == "bfloat16":
            own = "fp16" if given == np.float16 else "bf16"
            if wanted not in (None, own):
                raise TypeError(f"dtype is {wanted!r} and {name} is of {given}; convert it, or leave dtype out")
            return own
        if given == np.uint16:
            if wanted != "bf16":
                raise TypeError(f"{name} is of uint16; bits of bfloat16 are taken with dtype='bf16' alone")
            return wanted
        if given in (np.float32, np.float64):
            if wanted is None:
                raise TypeError(f"{name} is of {given}; stages compute in 16 bits: convert it to float16, or give dtype='fp16' "
                                "or dtype='bf16' to have it rounded")
            return wanted
        raise TypeError(f"{name} is of {given}; allowed: float16, ml_dtypes' bfloat16, uint16 as bits of bfloat16 with "
                        "dtype='bf16', float32 and float64 with dtype")

    def rounded(self, array, element):
        """The array with 16-bit elements, itself where it has."""
        if array.dtype.itemsize == 2:
            return array
        return array.astype(self.np.float16) if element == "fp16" else float32_to_bf16(array)

    def returned(self, array, element, like):
        """A result, in the type of what was given."""
        if like.dtype.itemsize == 2:
            return array
        return (array if element == "fp16" else bf16_to_float32(array)).astype(like.dtype)

    def tensor(self, array):
        """The array for the C interface, copied only where usable_strides() says so."""
        strides = self._usable(array)
        if strides is None:
            array = self._packed(array)
            strides = self._usable(array) or abi.Strides()  # a head_dim that no strides help: the library tells
        return Tensor(array, self.pointer(array), strides)

    @staticmethod
    def _usable(array):
        if any(step % array.itemsize for step in array.strides):
            return None
        return usable_strides(array.shape, [step // array.itemsize for step in array.strides], array.ctypes.data)

    def _packed(self, array):
        np = self.np
        memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % ALIGNMENT
        copy = memory[begin:begin + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def empty_like(self, tensor):
        """Memory for a result of this tensor's shape, in its order of the axes."""
        return self.tensor(self.np.empty_like(tensor.array, subok=False))

    def empty_lse(self, shape, _like):
        return self.np.empty(shape, self.np.float32)

    def lse(self, array, shape):
        """L for the C interface: fp32, packed. Raises TypeError, abi.BadInput."""
        if array.dtype != self.np.float32:
            raise TypeError(f"L is of {array.dtype}; allowed: float32")
        if array.shape != shape:
            raise abi.BadInput(f"L has shape {array.shape}; {shape} is wanted")
        return self.np.ascontiguousarray(array)

    @staticmethod
    def pointer(array):
        return array.ctypes.data if array.size else None

    @staticmethod
    def stream(_array):
        return None


class TorchKind:
    """torch tensors: on a card in its memory and on torch's current stream; those of the CPU on the CPU model."""
    name = "a torch tensor"

    def __init__(self, torch, on_card):
        self.torch = torch
        self.target = abi.CUDA if on_card else abi.MODEL

    @staticmethod
    def where(array):
        return str(array.device)

    def check_device(self, arrays):
        """Raises abi.BadInput where the tensors are not on one device, a card or the CPU."""
        first_name, first = next(iter(arrays.items()))
        for name, array in arrays.items():
            if array.layout != self.torch.strided:
                raise abi.BadInput(f"{name} is {array.layout}; allowed: dense tensors")
            if array.device.type not in ("cuda", "cpu"):
                raise abi.BadInput(f"{name} is on {array.device}; allowed: cuda, and cpu for the CPU model")
            if array.device != first.device:
                raise abi.BadInput(f"{name} is on {array.device} and {first_name} on {first.device}; one device is wanted")

    def element(self, array, name, wanted):
        """As NumpyKind.element()."""
        torch = self.torch
        if array.dtype in (torch.float16, torch.bfloat16):
            own = "fp16" if array.dtype == torch.float16 else "bf16"
            if wanted not in (None, own):
                raise TypeError(f"dtype is {wanted!r} and {name} is of {array.dtype}; convert it, or leave dtype out")
            return own
        if array.dtype in (torch.float32, torch.float64):
            if wanted is None:
                raise TypeError(f"{name} is of {array.dtype}; stages compute in 16 bits: convert it with .half() or "
                                ".bfloat16(), or give dtype='fp16' or dtype='bf16' to have it rounded")
            return wanted
        raise TypeError(f"{name} is of {array.dtype}; allowed: float16, bfloat16, float32 and float64 with dtype")

    def rounded(self, array, element):
        """As NumpyKind.rounded(); torch differentiates through it."""
        return array.to(self.torch.float16 if element == "fp16" else self.torch.bfloat16)

    def returned(self, array, _element, like):
        return array.to(like.dtype)

    def tensor(self, array):
        """As NumpyKind.tensor()."""
        strides = usable_strides(array.shape, array.stride(), array.data_ptr())
        if strides is None:
            array = array.detach().clone(memory_format=self.torch.contiguous_format)
            strides = usable_strides(array.shape, array.stride(), array.data_ptr()) or abi.Strides()
        return Tensor(array, self.pointer(array), strides)

    def empty_like(self, tensor):
        return self.tensor(self.torch.empty_like(tensor.array))

    def empty_lse(self, shape, like):
        return self.torch.empty(shape, dtype=self.torch.float32, device=like.device)

    def lse(self, array, shape):
        """As NumpyKind.lse()."""
        if array.dtype != self.torch.float32:
            raise TypeError(f"L is of {array.dtype}; allowed: torch.float32")
        if tuple(array.shape) != shape:
            raise abi.BadInput(f"L has shape {tuple(array.shape)}; {shape} is wanted")
        return array.contiguous()

    @staticmethod
    def pointer(array):
        return array.data_ptr() if array.numel() else None

    def stream(self, array):
        return self.torch.cuda.current_stream(array.device).cuda_stream if self.target == abi.CUDA else None

    def workspace(self, count, like):
        """Memory of the card. torch gives it out again in the order of the current stream, so it may be let go once the
        kernels are queued."""
        return self.torch.empty(count, dtype=self.torch.uint8, device=like.device)


def kind_of(arrays):
    """The kind of {name: array}, all of one. Raises TypeError, and abi.BadInput for tensors of several devices."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    found = {}
    for name, array in arrays.items():
        if torch is not None and isinstance(array, torch.Tensor):
            found[name] = "a torch tensor"
        elif numpy is not None and isinstance(array, numpy.ndarray) and type(array).__name__ != "MaskedArray":
            found[name] = "a NumPy array"
        else:
            raise TypeError(f"{name} is of {type(array).__name__}; allowed: NumPy arrays and torch tensors")
    first = next(iter(found))
    for name, what in found.items():
        if what != found[first]:
            raise TypeError(f"{name} is {what} and {first} {found[first]}; all of one kind are wanted")
    kind = NumpyKind(numpy) if found[first] == "a NumPy array" else TorchKind(torch, arrays[first].device.type == "cuda")
    kind.check_device(arrays)
    return kind
