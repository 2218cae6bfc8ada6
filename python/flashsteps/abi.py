"""libflashsteps.so from Python: the C interface of common/capi/flashsteps.h, by ctypes and nothing else.

    library = Library("build/cuda/lib/libflashsteps.so")
    args = ForwardArgs(stage=b"08", target=CUDA, dtype=BF16, batch=…, q=q.data_ptr(), q_strides=Strides(…), …)
    library.forward(args)

BackwardArgs and library.backward() likewise. Shapes, strides, units and errors are those of the header.
"""
import ctypes
import pathlib

OK, FAILED, BAD_INPUT, UNAVAILABLE = range(4)  # flashsteps_status
FP16, BF16 = range(2)  # flashsteps_dtype
MODEL, CUDA = range(2)  # flashsteps_target
VERSION = 200  # that this file was written for


class Error(RuntimeError):
    """What the library refused. `status` is a flashsteps_status, the text is one line."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class BadInput(Error, ValueError):
    """What was given is not allowed (status BAD_INPUT)."""

    def __init__(self, message):
        super().__init__(BAD_INPUT, message)


class Unavailable(Error):
    """It cannot be done here: no card, one that lacks what the stage needs, or no such library (status UNAVAILABLE)."""

    def __init__(self, message):
        super().__init__(UNAVAILABLE, message)


def error_of(status, message):
    """The exception for a flashsteps_status other than OK."""
    kinds = {BAD_INPUT: BadInput, UNAVAILABLE: Unavailable}
    return kinds[status](message) if status in kinds else Error(status, message)


class Strides(ctypes.Structure):
    """flashsteps_strides: batch, head and row stride, in elements."""
    _fields_ = [("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]


# What the arguments of both passes begin with. A list, and no base class with fields: in Python 3.11 the fields of a
# derived structure take the places at which it keeps alive what the base's point to, here the stage's name.
_BOTH = [
    ("size", ctypes.c_uint64), ("stage", ctypes.c_char_p), ("target", ctypes.c_int32), ("dtype", ctypes.c_int32),
    ("batch", ctypes.c_int32), ("heads", ctypes.c_int32), ("kv_heads", ctypes.c_int32),
    ("seqlen_q", ctypes.c_int32), ("seqlen_k", ctypes.c_int32), ("head_dim", ctypes.c_int32),
    ("scale", ctypes.c_float), ("causal", ctypes.c_int32),
    ("q", ctypes.c_void_p), ("k", ctypes.c_void_p), ("v", ctypes.c_void_p), ("o", ctypes.c_void_p),
]


class _Args(ctypes.Structure):
    """The arguments of a pass. What is not named is 0."""

    def __init__(self, **members):
        super().__init__(size=ctypes.sizeof(self), **members)


class ForwardArgs(_Args):
    """flashsteps_forward_args."""
    _fields_ = _BOTH + [
        ("l", ctypes.c_void_p),
        ("q_strides", Strides), ("k_strides", Strides), ("v_strides", Strides), ("o_strides", Strides),
        ("stream", ctypes.c_void_p), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_uint64),
        ("tile_rows", ctypes.c_int32), ("tile_keys", ctypes.c_int32), ("one_block_per_head", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class BackwardArgs(_Args):
    """flashsteps_backward_args."""
    _fields_ = _BOTH + [
        ("d_o", ctypes.c_void_p), ("l", ctypes.c_void_p),
        ("dq", ctypes.c_void_p), ("dk", ctypes.c_void_p), ("dv", ctypes.c_void_p),
        ("q_strides", Strides), ("k_strides", Strides), ("v_strides", Strides), ("o_strides", Strides),
        ("d_o_strides", Strides), ("dq_strides", Strides), ("dk_strides", Strides), ("dv_strides", Strides),
        ("stream", ctypes.c_void_p), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_uint64),
        ("tile_rows", ctypes.c_int32), ("tile_keys", ctypes.c_int32), ("deterministic", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class Library:
    """The library in one file. Raises BadInput where it is not there or not ours. Its methods may be called from any
    thread; Python's other threads run meanwhile."""

    def __init__(self, path):
        self.path = pathlib.Path(path).resolve()
        try:
            self._library = ctypes.CDLL(str(self.path))
            functions = [("last_error", [], ctypes.c_char_p), ("stages", [ctypes.c_int32], ctypes.c_char_p),
                         ("backward_stages", [ctypes.c_int32], ctypes.c_char_p),
                         ("version", [], ctypes.c_int32), ("commit", [], ctypes.c_char_p)]
            for name, args in (("forward", ForwardArgs), ("backward", BackwardArgs)):
                functions += [(name, [ctypes.POINTER(args)], ctypes.c_int),
                              (f"{name}_workspace", [ctypes.POINTER(args), ctypes.POINTER(ctypes.c_uint64)], ctypes.c_int),
                              (f"{name}_tiles", [ctypes.POINTER(args)] + 2 * [ctypes.POINTER(ctypes.c_int32)],
                               ctypes.c_int)]
            for name, arguments, result in functions:
                function = getattr(self._library, f"flashsteps_{name}")
                function.argtypes, function.restype = arguments, result
        except (OSError, AttributeError) as error:
            raise BadInput(f"{path} cannot be loaded: {error}") from None
        self.version = self._library.flashsteps_version()
        if self.version < VERSION:
            raise BadInput(f"{path} is version {self.version}; {VERSION} or newer is needed")
        self.commit = self._library.flashsteps_commit().decode()

    def _check(self, status):
        if status != OK:
            raise error_of(status, self._library.flashsteps_last_error().decode(errors="replace"))

    def forward(self, args):
        """Queues the forward pass on args.stream (or runs it, on the CPU model)."""
        self._check(self._library.flashsteps_forward(args))

    def backward(self, args):
        """Queues the backward pass, likewise."""
        self._check(self._library.flashsteps_backward(args))

    def _of_pass(self, args, name):
        """The function of this name for the pass that the arguments are of."""
        return getattr(self._library, f"flashsteps_{'backward' if isinstance(args, BackwardArgs) else 'forward'}_{name}")

    def workspace_bytes(self, args):
        """What args.workspace must hold."""
        answer = ctypes.c_uint64()
        self._check(self._of_pass(args, "workspace")(args, answer))
        return answer.value

    def tiles(self, args):
        """(Br, Bc) that forward() or backward() uses; (0, 0) for a stage without tiles."""
        rows, keys = ctypes.c_int32(), ctypes.c_int32()
        self._check(self._of_pass(args, "tiles")(args, rows, keys))
        return rows.value, keys.value

    def stages(self, target):
        """The ids of the stages of the forward pass for MODEL or CUDA."""
        return self._ids(self._library.flashsteps_stages(target))

    def backward_stages(self, target):
        """The same of the backward pass."""
        return self._ids(self._library.flashsteps_backward_stages(target))

    @staticmethod
    def _ids(answer):
        ids = answer.decode()
        return ids.split(",") if ids else []
