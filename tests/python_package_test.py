"""The Python package with NumPy arrays on the CPU model: it computes what double precision and the C++ programs say, for every
type, stride and shape that it takes; everything else is refused with one line. Without NumPy or without the model it is
skipped.
"""
import concurrent.futures
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
from unittest import mock

try:
    import numpy as np
except ImportError:
    for python in (os.environ.get("PYTHON"), "/usr/bin/python3"):
        if python and subprocess.run([python, "-c", "import numpy"], capture_output=True, check=False).returncode == 0:
            os.execv(python, [python, *sys.argv])
    print("skipped because: numpy is not installed (python3-numpy)")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]
import attention_reference as reference  # noqa: E402
import flashsteps  # noqa: E402
from flashsteps import _kinds, _library, _stages, abi  # noqa: E402

DATA = ROOT / "tests/data"
PROGRAM = pathlib.Path(os.environ.get("FLASHSTEPS_BIN", ROOT / "build/model/bin")) / "attention"
LARGEST_ULP = {"fp16": 2.0**-10, "bf16": 2.0**-7}


def arrays(seed, b=1, h=2, kv=1, nq=70, nk=45, d=24, dtype=np.float16):
    """q, k, v of random normal values."""
    rng = np.random.default_rng(seed)
    made = [reference.normal(rng, b, heads, n, d) for heads, n in ((h, nq), (kv, nk), (kv, nk))]
    return [flashsteps.float32_to_bf16(x) if dtype == "bf16" else x.astype(dtype) for x in made]


def as_float(x):
    return flashsteps.bf16_to_float32(x) if x.dtype == np.uint16 else x


class Tests(unittest.TestCase):
    def assert_refused(self, kind, words, function, *arguments, **options):
        with self.assertRaises(kind) as caught:
            function(*arguments, **options)
        text = str(caught.exception)
        self.assertIn(words, text)
        self.assertNotIn("\n", text)

    def assert_right(self, q, k, v, o, lse, causal=False, scale=None, element="fp16"):
        scale = q.shape[3]**-0.5 if scale is None else scale
        q, k, v, o = (as_float(x) for x in (q, k, v, o))
        exact, rounded, true_lse = reference.forward(q, k, v, causal, scale, element)
        self.assertLessEqual(reference.worst(o, exact, rounded, element), 1)
        seen = np.isfinite(true_lse)
        np.testing.assert_array_equal(np.isneginf(lse), ~seen)
        np.testing.assert_allclose(lse[seen], true_lse[seen], rtol=0, atol=5e-5)


class Forward(Tests):
    def test_types_masks_and_scales(self):
        for dtype, element in ((np.float16, "fp16"), ("bf16", "bf16")):
            q, k, v = arrays(1, dtype=dtype)
            for causal, scale in ((False, None), (True, None), (True, -0.3), (False, 0)):
                o, lse = flashsteps.attention(q, k, v, causal=causal, scale=scale, return_lse=True,
                                              dtype=element if dtype == "bf16" else None)
                self.assertEqual((o.dtype, o.shape, lse.dtype, lse.shape), (q.dtype, q.shape, np.float32, q.shape[:3]))
                self.assert_right(q, k, v, o, lse, causal, scale, element)

    def test_the_reference_is_one(self):
        """A wrong output, of each kind that the tests mean to notice, is outside of the bound."""
        q, k, v = arrays(2)
        o, lse = flashsteps.attention(q, k, v, causal=True, return_lse=True)
        without_a_key, other_head = v.copy(), o[:, ::-1]
        without_a_key[0, 0, 3] = 0
        nan = o.copy()
        nan[0, 1, -1, -1] = np.nan
        for wrong in (other_head, nan, flashsteps.attention(q, k, without_a_key, causal=True),
                      flashsteps.attention(q, k, v), flashsteps.attention(q, k, v, causal=True, scale=0.21)):
            with self.assertRaises(AssertionError):
                self.assert_right(q, k, v, wrong, lse, causal=True)
        with self.assertRaises(AssertionError):
            self.assert_right(q, k, v, o, lse * np.float32(1.4427), causal=True)

    def test_every_stage(self):
        q, k, v = arrays(3, nq=20, nk=33, d=16)
        stages = flashsteps.library().stages(abi.MODEL)
        self.assertLessEqual({"01", "02d", "08"}, set(stages))
        for stage in stages:
            o, lse = flashsteps.attention(q, k, v, stage, True, return_lse=True)
            self.assert_right(q, k, v, o, lse, causal=True)

    def test_long_types_are_rounded_when_asked(self):
        q, k, v = arrays(4, dtype=np.float64)
        for element in ("fp16", "bf16"):
            if element == "fp16":
                bits = [x.astype(np.float16) for x in (q, k, v)]
                wanted = flashsteps.attention(*bits)
            else:
                wanted = flashsteps.bf16_to_float32(flashsteps.attention(*map(flashsteps.float32_to_bf16, (q, k, v)), dtype="bf16"))
            for dtype in (np.float32, np.float64):
                o = flashsteps.attention(*(x.astype(dtype) for x in (q, k, v)), dtype=element)
                self.assertEqual(o.dtype, dtype)
                np.testing.assert_array_equal(o, wanted)

    def test_bf16_conversions(self):
        rng = np.random.default_rng(5)
        x = (rng.standard_normal(2000) * 10.0 ** rng.integers(-30, 30, 2000)).astype(np.float32)
        x = np.concatenate([x, np.float32([0, -0.0, 1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, np.inf, -np.inf])])
        bits = flashsteps.float32_to_bf16(x)
        values = flashsteps.bf16_to_float32(bits)
        with np.errstate(invalid="ignore"):
            wanted = np.where(np.isinf(x), x, reference.to_bf16(np.where(np.isinf(x), 0, x)))
        wanted[-3] = np.inf  # 3.4e38 is nearer to 2**128 than to the largest bfloat16
        np.testing.assert_array_equal(values, wanted.astype(np.float32))
        nan = np.array([0x7f800001, 0x7fffffff, 0xffffffff, 0xff800001], np.uint32).view(np.float32)
        self.assertTrue(np.isnan(flashsteps.bf16_to_float32(flashsteps.float32_to_bf16(nan))).all())

    def test_ml_dtypes(self):
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            self.skipTest("ml_dtypes is not installed")
        q, k, v = (flashsteps.bf16_to_float32(x).astype(bfloat16) for x in arrays(6, dtype="bf16"))
        o = flashsteps.attention(q, k, v)
        self.assertEqual(o.dtype, bfloat16)
        np.testing.assert_array_equal(o.view(np.uint16),
                                      flashsteps.attention(*(x.view(np.uint16) for x in (q, k, v)), dtype="bf16"))

    def test_variants(self):
        q, k, v = arrays(7, nq=20, nk=20)
        seen = []
        with mock.patch.object(flashsteps.library(), "forward", seen.append):
            flashsteps.attention(q, k, v, "05", tiles=(64, 64), one_block_per_head=True)
            flashsteps.attention(q, k, v, "8", causal=True)
        self.assertEqual([(a.stage, a.tile_rows, a.tile_keys, a.one_block_per_head, a.causal) for a in seen],
                         [(b"05", 64, 64, 1, 0), (b"8", 0, 0, 0, 1)])
        o, lse = flashsteps.attention(q, k, v, "07", tiles=(64, 64), return_lse=True)
        self.assert_right(q, k, v, o, lse)
        o, lse = flashsteps.attention(q, k, v, "05", one_block_per_head=True, return_lse=True)
        self.assert_right(q, k, v, o, lse)

    def test_threads_do_not_meet(self):
        problems = [arrays(seed, nq=20, nk=20) for seed in range(4)]
        wanted = [flashsteps.attention(*problem) for problem in problems]

        def work(at):
            for _ in range(2):
                np.testing.assert_array_equal(flashsteps.attention(*problems[at]), wanted[at])
                self.assert_refused(flashsteps.BadInput, f"'9{at}'", flashsteps.attention, *problems[at], f"9{at}")
            return True

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            self.assertEqual(list(pool.map(work, range(4))), [True] * 4)


class Programs(Tests):
    """The same bits as `attention check` computes, from the same files."""

    def setUp(self):
        if not PROGRAM.exists():
            self.skipTest(f"{PROGRAM} is not built")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def check(self, options, tensors, results):
        words = [PROGRAM, "check", "--device", "model", *options]
        for name, x in tensors.items():
            np.save(self.folder / f"{name}.npy", x)
            words += [f"--{name}", self.folder / f"{name}.npy"]
        for name in results:
            words += [f"--{name}", self.folder / f"{name}_result.npy"]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return [np.load(self.folder / f"{name}_result.npy") for name in results]

    def test_forward(self):
        tensors = {name: np.load(DATA / f"ocr1s_{name}.npy") for name in "qkv"}
        scale = "0.2581988897471611"
        for element in ("fp16", "bf16"):
            o, lse = self.check(["--stage", "08", "--dtype", element, "--scale", scale], tensors, ["out", "lse"])
            given = [x if element == "fp16" else x.astype(np.float32) for x in tensors.values()]
            ours, our_lse = flashsteps.attention(*given, scale=float(scale), return_lse=True,
                                                 dtype=element if element == "bf16" else None)
            self.assertEqual(ours.dtype, o.dtype)
            np.testing.assert_array_equal(ours, o)
            np.testing.assert_array_equal(our_lse, lse)
        np.testing.assert_allclose(flashsteps.attention(*tensors.values(), scale=float(scale)), np.load(DATA / "ocr1s_o.npy"),
                                   rtol=0, atol=5e-3)  # what the recogniser itself computed

    def test_backward(self):
        q, k, v = arrays(11, h=4, kv=2, nq=33, nk=50, d=40)
        d_o = arrays(12, h=4, nq=33, d=40)[0]
        o, lse = flashsteps.attention(q, k, v, causal=True, return_lse=True)
        wanted = self.check(["--stage", "09", "--forward-stage", "08", "--causal", "--deterministic"],
                            {"q": q, "k": k, "v": v, "do": d_o}, ["dq", "dk", "dv"])
        ours = flashsteps.attention_backward(d_o, q, k, v, o, lse, causal=True, deterministic=True)
        for x, y in zip(ours, wanted):
            np.testing.assert_array_equal(x, y)


class Backward(Tests):
    def test_gradients(self):
        for dtype, element in ((np.float16, "fp16"), ("bf16", "bf16")):
            q, k, v = arrays(21, h=4, kv=2, nq=70, nk=45, d=24, dtype=dtype)
            d_o = arrays(22, h=4, nq=70, d=24, dtype=dtype)[0]
            more = {"dtype": element} if dtype == "bf16" else {}
            for causal, deterministic in ((False, False), (True, True)):
                o, lse = flashsteps.attention(q, k, v, causal=causal, return_lse=True, **more)
                gradients = flashsteps.attention_backward(d_o, q, k, v, o, lse, causal=causal, deterministic=deterministic, **more)
                truth = reference.backward(*map(as_float, (d_o, q, k, v, o)), causal, 24**-0.5, element)
                for name, got, like, (exact, rounded, cost) in zip(("dQ", "dK", "dV"), gradients, (q, k, v), truth):
                    self.assertEqual((got.shape, got.dtype), (like.shape, like.dtype))
                    self.assertLessEqual(reference.worst(as_float(got), exact, rounded, element, cost), 1, name)
                with self.assertRaises(AssertionError):  # dK in dV's place
                    self.assertLessEqual(reference.worst(as_float(gradients[1]), *truth[2][:2], element), 1)

    def test_long_types_and_strides(self):
        q, k, v = arrays(23, nq=20, nk=20)
        d_o = arrays(24, nq=20)[0]
        o, lse = flashsteps.attention(q, k, v, return_lse=True)
        wanted = flashsteps.attention_backward(d_o, q, k, v, o, lse, deterministic=True)
        long = [x.astype(np.float32) for x in (d_o, q, k, v, o)]
        for got, same in zip(flashsteps.attention_backward(*long, lse, deterministic=True, dtype="fp16"), wanted):
            self.assertEqual(got.dtype, np.float32)
            np.testing.assert_array_equal(got, same)
        other = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (d_o, q, k, v, o)]
        constant = np.broadcast_to(np.float16(1), d_o.shape)  # as the gradient of a sum comes
        for d in (other[0], constant):
            same = flashsteps.attention_backward(np.ascontiguousarray(d), q, k, v, o, lse, deterministic=True)
            for got, wanted_here in zip(flashsteps.attention_backward(d, *other[1:], lse, deterministic=True), same):
                np.testing.assert_array_equal(got, wanted_here)

    def test_bad_input(self):
        q, k, v = arrays(25, nq=20, nk=20)
        o, lse = flashsteps.attention(q, k, v, return_lse=True)
        call = flashsteps.attention_backward
        self.assert_refused(flashsteps.BadInput, "do has shape (1, 2, 19, 24)", call, o[:, :, 1:], q, k, v, o, lse)
        self.assert_refused(flashsteps.BadInput, "o has shape", call, o, q, k, v, o[:, :1], lse)
        self.assert_refused(flashsteps.BadInput, "L has shape (1, 2, 19); (1, 2, 20) is wanted", call, o, q, k, v, o, lse[..., 1:])
        self.assert_refused(TypeError, "L is of float64; allowed: float32", call, o, q, k, v, o, lse.astype(np.float64))
        self.assert_refused(TypeError, "do is of float32", call, o.astype(np.float32), q, k, v, o, lse)
        self.assert_refused(flashsteps.BadInput, "stage 08 is of the forward pass", call, o, q, k, v, o, lse, "08")
        self.assert_refused(flashsteps.BadInput, "stage 09 is of the backward pass", flashsteps.attention, q, k, v, "09")


class Strides(Tests):
    def setUp(self):
        self.q, self.k, self.v = arrays(31, b=2, h=2, kv=2, nq=20, nk=20)
        self.wanted = flashsteps.attention(self.q, self.k, self.v)

    def taken(self, array):
        return _kinds.NumpyKind(np).tensor(array).array

    def test_without_a_copy(self):
        packed = np.stack([x.swapaxes(1, 2) for x in (self.q, self.k, self.v)], axis=2)  # (b, n, 3, h, d)
        cases = {"packed": (self.q, self.k, self.v),
                 "(b, n, h, d)": [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (self.q, self.k, self.v)],
                 "slices": [packed[:, :, i].swapaxes(1, 2) for i in range(3)],
                 "a part of the rows": [np.pad(x, [(0, 0), (0, 0), (0, 3), (0, 8)])[:, :, :20, :24]
                                        for x in (self.q, self.k, self.v)],
                 "one of many batches": [np.concatenate([x] * 2)[::2][:1] for x in (self.q, self.k, self.v)]}
        for name, given in cases.items():
            with self.subTest(name):
                for x in given:
                    self.assertIs(self.taken(x), x)
                o = flashsteps.attention(*given)
                np.testing.assert_array_equal(o, self.wanted[:o.shape[0]])
        o = flashsteps.attention(*cases["(b, n, h, d)"])
        self.assertEqual(np.argsort(o.strides).tolist(), np.argsort(cases["(b, n, h, d)"][0].strides).tolist())

    def test_with_a_copy(self):
        wide = [np.pad(x, [(0, 0)] * 3 + [(0, 4)])[..., :24] for x in (self.q, self.k, self.v)]  # rows 56 bytes apart
        bytes_of = lambda x: np.frombuffer(b"." * 2 + x.tobytes(), np.uint8)[2:].view(np.float16).reshape(x.shape)  # unaligned
        cases = {"odd rows": wide, "unaligned": [bytes_of(x) for x in (self.q, self.k, self.v)],
                 "columns apart": [np.repeat(x, 2, axis=3)[..., ::2] for x in (self.q, self.k, self.v)],
                 "backwards": [x[:, :, ::-1].copy()[:, :, ::-1] for x in (self.q, self.k, self.v)],
                 "Fortran order": [np.asfortranarray(x) for x in (self.q, self.k, self.v)]}
        for name, given in cases.items():
            with self.subTest(name):
                before = [x.copy() for x in given]
                for x in given:
                    self.assertIsNot(self.taken(x), x)
                np.testing.assert_array_equal(flashsteps.attention(*given), self.wanted)
                for x, y in zip(given, before):
                    np.testing.assert_array_equal(x, y)
        shared = np.broadcast_to(self.k[:, :1], self.k.shape)
        np.testing.assert_array_equal(flashsteps.attention(self.q, shared, shared),
                                      flashsteps.attention(self.q, self.k[:, :1], self.k[:, :1]))
        self.assertFalse(np.shares_memory(self.taken(shared), shared))

    def test_elements_of_three_bytes(self):
        """Rows of 48 bytes are 24 elements of 16 bits, but head_dim is not contiguous."""
        whole = [x[..., :16] for x in (self.q, self.k, self.v)]
        fields = [np.zeros(x.shape, [("x", "f2"), ("y", "u1")]) for x in whole]
        for field, x in zip(fields, whole):
            field["x"] = x
        np.testing.assert_array_equal(flashsteps.attention(*(field["x"] for field in fields)), flashsteps.attention(*whole))

    def test_read_only(self):
        for x in (self.q, self.k, self.v):
            x.flags.writeable = False
        np.testing.assert_array_equal(flashsteps.attention(self.q, self.k, self.v), self.wanted)


class Shapes(Tests):
    def test_empty(self):
        for nq, nk in ((0, 5), (5, 0), (0, 0)):
            q, k, v = arrays(41, nq=nq, nk=nk)
            o, lse = flashsteps.attention(q, k, v, return_lse=True)
            self.assertEqual((o.shape, lse.shape), (q.shape, q.shape[:3]))
            self.assertTrue((o == 0).all() and np.isneginf(lse).all())
            gradients = flashsteps.attention_backward(o, q, k, v, o, lse)
            for gradient, x in zip(gradients, (q, k, v)):
                self.assertEqual(gradient.shape, x.shape)
                self.assertTrue((gradient == 0).all())

    def test_rows_that_see_no_key(self):
        q, k, v = arrays(42, nq=30, nk=10)
        o, lse = flashsteps.attention(q, k, v, causal=True, return_lse=True)
        self.assertTrue((o[:, :, :20] == 0).all() and np.isneginf(lse[:, :, :20]).all() and np.isfinite(lse[:, :, 20:]).all())
        self.assert_right(q, k, v, o, lse, causal=True)

    def test_bad_shapes(self):
        q, k, v = arrays(43, h=4, kv=2, nq=10, nk=10)
        wrong = {"q has shape (4, 10, 24); (batch, heads, seqlen, head_dim) is wanted": (q[0], k, v),
                 "k has shape (1, 2, 10, 24) and v (1, 2, 9, 24); they must be equal": (q, k, v[:, :, 1:]),
                 "batch and head_dim must be equal": (np.concatenate([q, q]), k, v),
                 "q has shape (1, 4, 10, 16) and k (1, 2, 10, 24)": (q[..., :16], k, v),
                 "heads = 3 is not a multiple of kv_heads = 2": (q[:, 1:], k, v),
                 "head_dim is 12; allowed: multiples of 8 from 8 to 128": (q[..., :12], k[..., :12], v[..., :12]),
                 "head_dim is 136": [np.zeros((1, 1, 3, 136), np.float16)] * 3,
                 "head_dim is 0": (q[..., :0], k[..., :0], v[..., :0]),
                 "batch is 0": (q[:0], k[:0], v[:0]),
                 "kv_heads is 0": (q, k[:, :0], v[:, :0]),
                 "allowed: sizes up to 2147483647": [np.broadcast_to(q[:, :, :1], (1, 4, 2**31, 24)), k, v]}
        for words, given in wrong.items():
            with self.subTest(words):
                self.assert_refused(flashsteps.BadInput, words, flashsteps.attention, *given)
                self.assertRaises(ValueError, flashsteps.attention, *given)

    def test_bad_types(self):
        q, k, v = arrays(44, nq=10, nk=10)
        call, long = flashsteps.attention, [x.astype(np.float32) for x in (q, k, v)]
        bits = [x.view(np.uint16) for x in (q, k, v)]
        self.assert_refused(TypeError, "q is of float32; stages compute in 16 bits: convert it to float16, or give dtype=",
                            call, *long)
        self.assert_refused(TypeError, "bits of bfloat16 are taken with dtype='bf16' alone", call, *bits)
        self.assert_refused(TypeError, "bits of bfloat16 are taken with", call, *bits, dtype="fp16")
        self.assert_refused(TypeError, "q is of int16; allowed: float16, ", call, *(x.view(np.int16) for x in (q, k, v)))
        self.assert_refused(TypeError, "q is of >f2", call, *(x.astype(">f2") for x in (q, k, v)))
        self.assert_refused(TypeError, "dtype is 'bf16' and q is of float16", call, q, k, v, dtype="bf16")
        self.assert_refused(TypeError, "dtype is 'fp8'; allowed: 'fp16', 'bf16'", call, q, k, v, dtype="fp8")
        self.assert_refused(TypeError, "dtype is ", call, *long, dtype=np.float16)
        self.assert_refused(TypeError, "k is of float32", call, q, long[1], v)
        self.assert_refused(TypeError, "v is of float64 and q of float32", call, long[0], long[1], v.astype(float), dtype="fp16")
        self.assert_refused(TypeError, "k is of list; allowed: NumPy arrays and torch tensors", call, q, k.tolist(), v)
        self.assert_refused(TypeError, "v is of MaskedArray", call, q, k, np.ma.masked_array(v, v > 0))
        self.assert_refused(TypeError, "causal is 2; allowed: True, False", call, q, k, v, causal=2)
        self.assert_refused(TypeError, "scale is 'x'; allowed: a number", call, q, k, v, scale="x")
        self.assert_refused(flashsteps.BadInput, "scale is nan; allowed: any finite number", call, q, k, v, scale=float("nan"))
        self.assert_refused(flashsteps.BadInput, "scale is inf", call, q, k, v, scale=1e300)
        self.assert_refused(TypeError, "stage is 8; allowed: a string, as in '08'", call, q, k, v, 8)
        self.assert_refused(flashsteps.BadInput, "there is no stage 'Ä9'", call, q, k, v, "Ä9")
        self.assert_refused(flashsteps.BadInput, "one stage is allowed", call, q, k, v, "01,02")
        self.assert_refused(TypeError, "tiles is 64; allowed: (Br, Bc)", call, q, k, v, tiles=64)
        self.assert_refused(flashsteps.BadInput, "; 32x32 was given", call, q, k, v, tiles=(32, 32))
        self.assert_refused(flashsteps.BadInput, "stage 08 has one grid", call, q, k, v, one_block_per_head=True)

    def test_other_devices(self):
        """Tensors elsewhere, by a stand-in for torch: what python_torch_test.py can only see with a card."""
        class Tensor:
            layout = "dense"

            def __init__(self, device):
                self.device = device

        class Device(str):
            type = property(lambda self: self.split(":")[0])

        torch = mock.Mock(Tensor=Tensor, strided="dense")
        q, k, v = (Tensor(Device(name)) for name in ("cuda:0", "cuda:1", "meta"))
        with mock.patch.dict(sys.modules, torch=torch):
            call, array = flashsteps.attention, arrays(45)[0]
            self.assert_refused(flashsteps.BadInput, "k is on cuda:1 and q on cuda:0; one device is wanted", call, q, k, q)
            self.assert_refused(flashsteps.BadInput, "v is on meta; allowed: cuda, and cpu for the CPU model", call, q, q, v)
            self.assert_refused(TypeError, "k is a NumPy array and q a torch tensor; all of one kind", call, q, array, q)


class Choices(Tests):
    def setUp(self):
        self.given = arrays(51, nq=10, nk=10)
        self.addCleanup(flashsteps.set_default_stage)

    def stages(self, **options):
        seen = []
        with mock.patch.object(flashsteps.library(), "forward", seen.append):
            flashsteps.attention(*self.given, **options)
        with mock.patch.object(flashsteps.library(), "backward", seen.append):
            q, k, v = self.given
            flashsteps.attention_backward(q, q, k, v, q, np.zeros(q.shape[:3], np.float32))
        return [args.stage.decode() for args in seen]

    def test_order_of_choices(self):
        with mock.patch.dict(os.environ):
            for name in ("FLASHSTEPS_STAGE", "FLASHSTEPS_BACKWARD_STAGE"):
                os.environ.pop(name, None)
            self.assertEqual(self.stages(), ["08", "09"])
            os.environ["FLASHSTEPS_STAGE"], os.environ["FLASHSTEPS_BACKWARD_STAGE"] = "06", "9x"
            self.assertEqual(self.stages(), ["06", "9x"])
            flashsteps.set_default_stage("03", backward="09")
            self.assertEqual(self.stages(), ["03", "09"])
            self.assertEqual(self.stages(stage="04"), ["04", "09"])
            self.assertEqual((flashsteps.default_stage(), flashsteps.default_stage("backward")), ("03", "09"))
            flashsteps.set_default_stage()
            self.assertEqual(self.stages(), ["06", "9x"])
            os.environ["FLASHSTEPS_STAGE"] = "99"
            self.assert_refused(flashsteps.BadInput, "there is no stage '99'", flashsteps.attention, *self.given)

    def test_the_order_of_dq(self):
        seen, (q, k, v) = [], self.given
        with mock.patch.object(flashsteps.library(), "backward", seen.append):
            for deterministic in (False, True):
                flashsteps.attention_backward(q, q, k, v, q, np.zeros(q.shape[:3], np.float32), deterministic=deterministic)
        self.assertEqual([args.deterministic for args in seen], [0, 1])

    def test_bad_choices_change_nothing(self):
        flashsteps.set_default_stage("02")  # the last step of 02
        self.assert_refused(flashsteps.BadInput, "there is no stage '99' of the forward pass; there are 01, ",
                            flashsteps.set_default_stage, "99")
        self.assert_refused(flashsteps.BadInput, "there is no stage '08' of the backward pass; there are 09",
                            flashsteps.set_default_stage, "03", backward="08")
        self.assert_refused(flashsteps.BadInput, "there is no stage 8", flashsteps.set_default_stage, 8)
        self.assertEqual(_stages.default_stage(), "02")


class FlashAttn(Tests):
    """flash-attn's layout and options; the gradients are python_torch_test.py's."""

    def setUp(self):
        self.q, self.k, self.v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays(61, b=2, h=4, kv=2, nq=20, nk=30))

    def test_arguments(self):
        """Positions and defaults that callers of flash-attn rely on."""
        options = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
                   "return_attn_probs"]
        for function, arrays_of in ((flashsteps.flash_attn_func, ["q", "k", "v"]),
                                    (flashsteps.flash_attn_kvpacked_func, ["q", "kv"]),
                                    (flashsteps.flash_attn_qkvpacked_func, ["qkv"])):
            given = inspect.signature(function).parameters
            by_position = [name for name, parameter in given.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
            self.assertEqual(by_position, arrays_of + options)
            self.assertEqual([given[name].default for name in options], [0.0, None, False, (-1, -1), 0.0, None, False, False])

    def test_layout(self):
        wanted, lse = flashsteps.attention(*(x.swapaxes(1, 2) for x in (self.q, self.k, self.v)), causal=True, return_lse=True)
        for options in ({"causal": True}, {"window_size": (-1, 0)}, {"causal": True, "window_size": (-1, 7)}):
            out, softmax_lse, dropped = flashsteps.flash_attn_func(self.q, self.k, self.v, return_attn_probs=True, **options)
            self.assertEqual(out.shape, self.q.shape)
            np.testing.assert_array_equal(out, wanted.swapaxes(1, 2))
            np.testing.assert_array_equal(softmax_lse, lse)
            self.assertIsNone(dropped)
        out = flashsteps.flash_attn_func(self.q, self.k, self.v, 0.0, 0.125, stage="03")
        np.testing.assert_array_equal(out, flashsteps.attention(*(x.swapaxes(1, 2) for x in (self.q, self.k, self.v)), "03",
                                                                scale=0.125).swapaxes(1, 2))

    def test_packed(self):
        wanted = flashsteps.flash_attn_func(self.q, self.k, self.v, causal=True)
        kv = np.stack([self.k, self.v], 2)
        np.testing.assert_array_equal(flashsteps.flash_attn_kvpacked_func(self.q, kv, causal=True), wanted)
        qkv = np.stack([self.k, self.v, self.k], 2)
        np.testing.assert_array_equal(flashsteps.flash_attn_qkvpacked_func(qkv, softmax_scale=0.3),
                                      flashsteps.flash_attn_func(self.k, self.v, self.k, softmax_scale=0.3))
        self.assert_refused(flashsteps.BadInput, "(batch, seqlen, 3, heads, head_dim) is wanted",
                            flashsteps.flash_attn_qkvpacked_func, qkv[:, :, :2])
        self.assert_refused(flashsteps.BadInput, "(batch, seqlen, 2, heads, head_dim) is wanted",
                            flashsteps.flash_attn_kvpacked_func, self.q, self.k)

    def test_padded(self):
        """A head_dim that is no multiple of 8: the scale is of the true one."""
        q, k, v = (x[..., :19] for x in (self.q, self.k, self.v))
        out, lse, _ = flashsteps.flash_attn_func(q, k, v, return_attn_probs=True)
        self.assertEqual(out.shape, q.shape)
        self.assert_right(*(x.swapaxes(1, 2) for x in (q, k, v, out)), lse)

    def test_not_supported(self):
        call = flashsteps.flash_attn_func
        for options, words in (({"dropout_p": 0.1}, "dropout_p=0.1"), ({"window_size": (16, 0)}, "window_size=(16, 0)"),
                               ({"window_size": (-1, 5)}, "window_size=(-1, 5)"), ({"softcap": 30.0}, "softcap=30.0"),
                               ({"alibi_slopes": np.ones(4)}, "alibi_slopes")):
            self.assert_refused(NotImplementedError, words, call, self.q, self.k, self.v, **options)
        wide = np.zeros((1, 2, 1, 192), np.float16)
        self.assert_refused(NotImplementedError, "head_dim=192", call, wide, wide, wide)
        self.assert_refused(TypeError, "window_size is None", call, self.q, self.k, self.v, window_size=None)
        self.assert_refused(flashsteps.BadInput, "(batch, seqlen, heads, head_dim) is wanted", call, self.q[0], self.k, self.v)
        self.assert_refused(flashsteps.BadInput, "batch and head_dim must be equal", call, self.q[..., :19], self.k, self.v)
        self.assert_refused(TypeError, "q is of float32", call, *(x.astype(np.float32) for x in (self.q, self.k, self.v)))


class TheLibrary(Tests):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def copied_package(self):
        """The package in a source tree of its own, without a library."""
        shutil.copytree(ROOT / "python/flashsteps", self.folder / "python/flashsteps", ignore=shutil.ignore_patterns("__pycache__"))
        (self.folder / "common/capi").mkdir(parents=True)
        (self.folder / "common/capi/flashsteps.h").touch()
        return self.folder / "python/flashsteps"

    def found(self, python="python", **environment):
        """What a fresh interpreter finds with the package in this folder: the path, or the error in one line."""
        code = "import flashsteps\ntry: print(flashsteps.library().path)\nexcept flashsteps.Error as e: print(type(e).__name__, e)"
        clean = {key: value for key, value in os.environ.items() if key != "FLASHSTEPS_LIBRARY"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                              env={**clean, **environment, "PYTHONPATH": str(self.folder / python)})
        self.assertEqual((done.returncode, done.stderr, done.stdout.count("\n")), (0, "", 1), done.stderr)
        return done.stdout.strip()

    def test_where_it_is_found(self):
        package = self.copied_package()
        missing = self.found()
        self.assertIn("Unavailable libflashsteps.so was not found; build it with 'cmake --preset model && ", missing)
        self.assertIn(str(self.folder), missing)
        real = flashsteps.library().path
        for place in ("build/zz/lib", "build/model/lib", "build/full/lib", "build/cuda/lib", "python/flashsteps"):
            target = self.folder / place / "libflashsteps.so"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(real, target)
            self.assertEqual(self.found(), str(target.resolve()))
        self.assertEqual(self.found(FLASHSTEPS_LIBRARY=str(real)), str(real))
        (package / "libflashsteps.so").write_bytes(b"no library")
        self.assertIn("BadInput", self.found())
        self.assertIn("cannot be loaded", self.found())
        self.assertEqual(self.found(FLASHSTEPS_LIBRARY="/none/x.so"),
                         "Unavailable FLASHSTEPS_LIBRARY is /none/x.so; there is no such file")

    def test_an_older_library_is_refused(self):
        with mock.patch.object(abi, "VERSION", 10**6):
            self.assert_refused(abi.BadInput, "1000000 or newer is needed", abi.Library, flashsteps.library().path)

    def test_an_installation_remembers_the_source_tree(self):
        target = self.folder / "build/model/lib/libflashsteps.so"
        target.parent.mkdir(parents=True)
        shutil.copy(flashsteps.library().path, target)
        site = self.folder / "a/b/site"
        shutil.move(self.copied_package(), site / "flashsteps")
        self.assertIn("was not found", self.found("a/b/site"))
        (site / "flashsteps/_source_tree.py").write_text(f"SOURCE_TREE = {str(self.folder)!r}\n")
        self.assertEqual(self.found("a/b/site"), str(target.resolve()))

    def test_versions_agree(self):
        cmake = re.search(r"project\(FlashSteps VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
        pyproject = re.search(r'^version = "([\d.]+)"', (ROOT / "python/pyproject.toml").read_text(), re.M)[1]
        self.assertEqual((flashsteps.__version__, pyproject), (cmake, cmake))
        major, minor, patch = map(int, cmake.split("."))
        self.assertEqual(flashsteps.library().version, 10000 * major + 100 * minor + patch)

    def test_numpy_and_torch_are_not_imported(self):
        code = "import flashsteps, sys; flashsteps.library(); print({'numpy', 'torch'} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
        self.assertEqual(done.stdout.strip(), "set()")

    def test_the_guide(self):
        """The Python in docs/python.md that is for NumPy runs as it stands."""
        text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
        blocks = [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", text, re.S) if "torch" not in block]
        self.assertTrue(blocks)
        for block in blocks:
            exec(compile(block, "docs/python.md", "exec"), {})  # pylint: disable=exec-used


if __name__ == "__main__":
    try:
        if not flashsteps.library().stages(abi.MODEL):
            print("skipped because: the library was built without the CPU model")
            sys.exit(77)
    except flashsteps.Error as error:
        print(f"no library: {error}")
        sys.exit(1)
    unittest.main()
