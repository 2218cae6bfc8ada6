"""The Python package with torch tensors, against autograd in double precision: those of the CPU on the CPU model where the
library has it, those of a card where there is one. Skipped without torch.

The rule is flash-attn's: an error is at most twice that of attention whose every operation is rounded to 16 bits, plus 1e-5. On a
card the parameters are those that flash-attn's own tests run and stages support: both types, equal, grouped and single KV heads,
masks, head dimensions up to 128 that are no multiples of 8 too, lengths that fill no tile, few queries, more queries than keys,
packed and not, either order of summing dQ. Some of them are drawn; FLASHSTEPS_FULL=1 runs all.
"""
import itertools
import os
import pathlib
import random
import shutil
import subprocess
import sys
import unittest
from unittest import mock

try:
    import torch
except ImportError as error:
    there = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    for python in (os.environ.get("PYTHON"), "python3", "/usr/bin/python3"):
        if python and shutil.which(python) and "FLASHSTEPS_TORCH_PYTHON" not in os.environ and \
                subprocess.run([python, "-c", there], capture_output=True, check=False).returncode == 0:
            os.execve(shutil.which(python), [python, *sys.argv], {**os.environ, "FLASHSTEPS_TORCH_PYTHON": python})
    print(f"skipped because: torch is not installed for $PYTHON or python3 ({error})")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
import flashsteps  # noqa: E402
from flashsteps import abi  # noqa: E402

FULL = os.environ.get("FLASHSTEPS_FULL") == "1"
FACTOR, ALLOWANCE = 2, 1e-5  # times the error of 16 bits; where that is none
LENGTHS = ((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
           (2048, 2048), (1, 239), (3, 799), (127, 512), (127, 513), (203, 113))
PACKED_LENGTHS = (97, 128, 200, 384, 768, 1024, 1025, 2048)
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128)
TYPES = (torch.float16, torch.bfloat16)
KV_HEADS = {6: "mha", 2: "gqa", 1: "mqa"}


def reference(q, k, v, causal, scale, work, store=None):
    """Attention in flash-attn's layout by torch's own operations in the type `work`, each result rounded to `store`."""
    rounded = (lambda x: x.to(store).to(work)) if store else (lambda x: x)
    q, k, v = (x.to(work) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = rounded(rounded(q * scale) @ k.transpose(2, 3))
    nq, nk = scores.shape[2:]
    hidden = torch.zeros(nq, nk, dtype=torch.bool, device=q.device)
    if causal:
        hidden = torch.ones_like(hidden).triu(nk - nq + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    empty = hidden.all(dim=1)[:, None]
    p = rounded(torch.softmax(scores.masked_fill(empty, 0.0), dim=3)).masked_fill(empty, 0.0)
    return rounded(p @ v).transpose(1, 2)


class OnADevice:
    """What is the same on a card and on the CPU model."""
    device = "cpu"
    lengths, packed_lengths, head_dims, stages = ((113, 203), (1, 239), (90, 60)), (97,), (40, 59), (("08", "09"),)

    def tensors(self, seed, b=1, nq=20, nk=20, h=2, kv=1, d=24, dtype=torch.float16):
        """q, k, v in flash-attn's layout, and a gradient of the output."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        made = [torch.randn(b, n, heads, d, generator=generator, device=self.device).to(dtype)
                for n, heads in ((nq, h), (nk, kv), (nk, kv), (nq, h))]
        return [x.requires_grad_() for x in made[:3]], made[3]

    def assert_within(self, mine, exact, rounded, what):
        error, allowed = (float((x.double() - exact).abs().max()) for x in (mine, rounded))
        self.assertTrue(error <= FACTOR * allowed + ALLOWANCE, f"{what}: error {error:.3e}, 16 bits have {allowed:.3e}")

    def compare(self, call, given, d_o, causal):
        """The output and the gradients of call(q, k, v) against autograd in double precision."""
        scale = given[0].shape[3]**-0.5
        out = call(*given)
        doubles = [x.detach().double().requires_grad_() for x in given]
        exact = reference(*doubles, causal, scale, torch.float64)
        rounded = reference(*given, causal, scale, torch.float32, given[0].dtype)
        self.assertEqual((out.shape, out.dtype), (given[0].shape, given[0].dtype))
        self.assert_within(out, exact, rounded, "O")
        gradients = [torch.autograd.grad(x, given, d_o.to(x.dtype)) for x in (out, rounded)]
        truth = torch.autograd.grad(exact, doubles, d_o.double())
        for name, mine, exact_one, rounded_one in zip(("dQ", "dK", "dV"), gradients[0], truth, gradients[1]):
            self.assert_within(mine, exact_one, rounded_one, name)

    def parameters(self):
        """What flash-attn's tests vary: type, KV heads, mask, head_dim, lengths, packed K and V, order of dQ."""
        return itertools.product(TYPES, KV_HEADS, (False, True), self.head_dims, self.lengths, (False, True), (False, True))

    def packed_parameters(self):
        """The same of packed QKV: type, mask, head_dim, length, order of dQ."""
        return itertools.product(TYPES, (False, True), self.head_dims, self.packed_lengths, (False, True))

    def test_flash_attn_func(self):
        for stage, backward_stage in self.stages:
            for at, (dtype, kv, causal, d, (nq, nk), packed, deterministic) in enumerate(self.parameters()):
                with self.subTest(stage=stage, dtype=dtype, heads=KV_HEADS[kv], causal=causal, d=d, nq=nq, nk=nk, packed=packed,
                                  deterministic=deterministic):
                    given, d_o = self.tensors(at, self.batch, nq, nk, 6, kv, d, dtype)
                    options = dict(causal=causal, deterministic=deterministic, stage=stage, backward_stage=backward_stage)

                    def call(q, k, v, packed=packed, options=options):
                        if packed:
                            return flashsteps.flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), **options)
                        return flashsteps.flash_attn_func(q, k, v, **options)

                    self.compare(call, given, d_o, causal)

    def test_packed(self):
        for stage, backward_stage in self.stages:
            for at, (dtype, causal, d, n, deterministic) in enumerate(self.packed_parameters()):
                with self.subTest(stage=stage, dtype=dtype, causal=causal, d=d, n=n, deterministic=deterministic):
                    given, d_o = self.tensors(at, self.batch, n, n, self.heads, self.heads, d, dtype)
                    options = dict(causal=causal, deterministic=deterministic, stage=stage, backward_stage=backward_stage)

                    def call(q, k, v, options=options):
                        return flashsteps.flash_attn_qkvpacked_func(torch.stack([q, k, v], dim=2), **options)

                    self.compare(call, given, d_o, causal)

    def test_gradient_of_packed(self):
        given, d_o = self.tensors(1, nq=113, nk=113, h=2, kv=2, d=32)
        qkv = torch.stack(given, dim=2).detach().requires_grad_()
        packed = torch.autograd.grad(flashsteps.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True), qkv, d_o)[0]
        apart = torch.autograd.grad(flashsteps.flash_attn_func(*given, causal=True, deterministic=True), given, d_o)
        self.assertTrue(torch.equal(packed, torch.stack(apart, dim=2)))

    def test_rule_notices(self):
        """The rule refuses a mask that is off by one, another scale, and one head in place of another."""
        given, d_o = self.tensors(2, nq=113, nk=203, h=2)
        for wrong in (lambda q, k, v: flashsteps.flash_attn_func(q, k, v, causal=True)[:, list(range(1, 113)) + [0]],
                      lambda q, k, v: flashsteps.flash_attn_func(q, k, v, softmax_scale=0.22, causal=True),
                      lambda q, k, v: flashsteps.flash_attn_func(q, k, v, causal=True).flip(2),
                      lambda q, k, v: flashsteps.flash_attn_func(q.detach(), k, v, causal=True) + 0 * q):
            with self.assertRaises(AssertionError):
                self.compare(wrong, given, d_o, True)

    def test_more_queries_than_keys(self):
        """Rows that see no key: zero, with a gradient of zero."""
        given, d_o = self.tensors(3, nq=150, nk=100, d=32)
        out, lse, dropped = flashsteps.flash_attn_func(*given, causal=True, return_attn_probs=True)
        self.assertIsNone(dropped)
        self.assertFalse(lse.requires_grad)
        self.assertTrue(bool((out[:, :50] == 0).all()) and bool(torch.isneginf(lse[..., :50]).all()))
        self.assertTrue(bool(torch.isfinite(lse[..., 50:]).all()))
        self.assertTrue(bool((torch.autograd.grad(out, given, d_o)[0][:, :50] == 0).all()))
        self.compare(lambda q, k, v: flashsteps.flash_attn_func(q, k, v, causal=True), given, d_o, True)

    def test_empty(self):
        for nq, nk in ((0, 20), (20, 0)):
            given, d_o = self.tensors(4, nq=nq, nk=nk)
            out = flashsteps.flash_attn_func(*given)
            self.assertTrue(out.shape == given[0].shape and bool((out == 0).all()))
            for gradient, x in zip(torch.autograd.grad(out, given, d_o), given):
                self.assertTrue(gradient.shape == x.shape and bool((gradient == 0).all()))

    def test_autograd(self):
        given, d_o = self.tensors(5, h=2, kv=2)
        q, k, v = (x.transpose(1, 2) for x in given)
        out, lse = flashsteps.attention(q, k, v, return_lse=True, deterministic=True)
        by_hand = flashsteps.attention_backward(d_o.transpose(1, 2), q.detach(), k.detach(), v.detach(), out.detach(), lse,
                                                deterministic=True)
        for mine, same in zip(torch.autograd.grad(out, given, d_o.transpose(1, 2)), by_hand):
            self.assertTrue(torch.equal(mine, same.transpose(1, 2)))
        # One gradient alone; the gradient of a sum, whose strides are 0; and a second one, which there is not.
        alone = given[1].detach().requires_grad_()
        out = flashsteps.flash_attn_func(given[0].detach(), alone, given[2].detach())
        out.sum().backward()
        full = torch.autograd.grad(flashsteps.flash_attn_func(*given), given, torch.ones_like(d_o))
        self.assertTrue(torch.equal(alone.grad, full[1]))
        first = torch.autograd.grad(flashsteps.flash_attn_func(*given), given, d_o.requires_grad_(), create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
            (first[0] * given[0]).float().sum().backward()  # not as if dQ were a constant
        with torch.no_grad():
            self.assertFalse(flashsteps.flash_attn_func(*given).requires_grad)
        with torch.inference_mode():
            self.assertTrue(torch.equal(flashsteps.flash_attn_func(*given), flashsteps.flash_attn_func(*given)))

    def test_what_the_backward_pass_is_told(self):
        given, d_o = self.tensors(14)
        options = dict(stage="07", backward_stage="09", causal=True, softmax_scale=0.3, deterministic=True)
        seen = []
        with mock.patch.object(flashsteps.library(), "backward", seen.append):
            torch.autograd.grad(flashsteps.flash_attn_func(*given, **options), given, d_o)
        args = seen[0]
        self.assertEqual((args.stage, args.causal, args.deterministic), (b"09", 1, 1))
        self.assertAlmostEqual(args.scale, 0.3, 6)

    def test_strides(self):
        given, _ = self.tensors(6)
        q, k, v = (x.detach().transpose(1, 2) for x in given)
        wanted = flashsteps.attention(q, k, v)
        self.assertEqual(wanted.stride(), q.stride())
        wide = [torch.nn.functional.pad(x, (0, 4))[..., :24] for x in (q, k, v)]  # rows 56 bytes apart
        unaligned = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in (q, k, v)]
        columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]  # head_dim is not contiguous
        for others in ([x.contiguous() for x in (q, k, v)], wide, unaligned, columns):
            self.assertTrue(torch.equal(flashsteps.attention(*others), wanted))
        self.assertTrue(torch.equal(flashsteps.attention(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)), wanted))

    def test_rounding_when_asked(self):
        given, d_o = self.tensors(7, dtype=torch.float32)
        q, k, v = given
        with self.assertRaisesRegex(TypeError, "q is of torch.float32; stages compute in 16 bits"):
            flashsteps.flash_attn_func(q, k, v)
        swapped = [x.transpose(1, 2) for x in given]
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            out = flashsteps.attention(*swapped, dtype=name)
            self.assertEqual(out.dtype, torch.float32)
            self.assertTrue(torch.equal(out, flashsteps.attention(*(x.to(dtype) for x in swapped)).float()))
            for gradient in torch.autograd.grad(out, given, d_o.transpose(1, 2)):
                self.assertEqual(gradient.dtype, torch.float32)

    def test_bad_input(self):
        q, k, v = (x.detach() for x in self.tensors(8)[0])
        call = flashsteps.flash_attn_func
        for kind, words, given in ((TypeError, "q is of torch.int16", [x.to(torch.int16) for x in (q, k, v)]),
                                   (TypeError, "k is of torch.bfloat16 and q of torch.float16", (q, k.bfloat16(), v)),
                                   (flashsteps.BadInput, "k is on meta", (q, k.to("meta"), v)),
                                   (TypeError, "k is of list", (q, k.tolist(), v)),
                                   (flashsteps.BadInput, "allowed: dense tensors", (q, k, v.to_sparse())),
                                   (flashsteps.BadInput, "must be equal", (q, k, v[:, 1:])),
                                   (flashsteps.BadInput, "there is no stage '99'", None)):
            with self.subTest(words), self.assertRaisesRegex(kind, words):
                call(*given) if given else call(q, k, v, stage="99")


@unittest.skipUnless(flashsteps.library().stages(abi.MODEL), "the library was built without the CPU model")
class OnTheModel(OnADevice, unittest.TestCase):
    batch, heads = 1, 2

    def parameters(self):
        """Few: the model is slow."""
        return random.Random(2).sample(list(super().parameters()), 24 if FULL else 4)

    def packed_parameters(self):
        return random.Random(1).sample(list(super().packed_parameters()), 6 if FULL else 1)

    def test_numpy_gives_the_same(self):
        q, k, v = (x.detach().transpose(1, 2) for x in self.tensors(9)[0])
        self.assertEqual(flashsteps.attention(q, k, v).numpy().tobytes(),
                         flashsteps.attention(q.numpy(), k.numpy(), v.numpy()).tobytes())


def why_no_card():
    if not torch.cuda.is_available():
        return "torch sees no CUDA card"
    return "" if flashsteps.library().stages(abi.CUDA) else "the library was built without CUDA"


@unittest.skipIf(why_no_card(), why_no_card())
class OnACard(OnADevice, unittest.TestCase):
    device, batch, heads = "cuda", 4, 9
    lengths, packed_lengths, head_dims = LENGTHS, PACKED_LENGTHS, HEAD_DIMS

    @property
    def stages(self):
        hopper = torch.cuda.get_device_capability() == (9, 0) and "10e" in flashsteps.library().stages(abi.CUDA)
        return (("08", "09"), ("10e", "09")) if hopper else (("08", "09"),)

    def parameters(self):
        every = list(super().parameters())
        return every if FULL else random.Random(1).sample(every, 60)

    def packed_parameters(self):
        every = list(super().packed_parameters())
        return every if FULL else random.Random(1).sample(every, 20)

    def test_the_current_stream(self):
        """The kernels run on torch's current stream: behind what was queued there before them."""
        given, _ = self.tensors(10, nq=300, nk=300)
        wanted = flashsteps.flash_attn_func(*given).detach()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        late = [torch.zeros_like(x) for x in given]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # about 0.1 s; the inputs are only written after it
            for x, y in zip(late, given):
                x.copy_(y.detach())
            out = flashsteps.flash_attn_func(*late)
            self.assertFalse(stream.query(), "the call waited for the card")
        stream.synchronize()
        self.assertTrue(torch.equal(out, wanted))

    def test_stages_with_workspaces(self):
        given, d_o = self.tensors(11, nq=113, nk=203, d=64)
        for stage in flashsteps.library().stages(abi.CUDA):
            with self.subTest(stage):
                try:
                    self.compare(lambda q, k, v, stage=stage: flashsteps.flash_attn_func(q, k, v, stage=stage), given, d_o, False)
                except flashsteps.Unavailable as error:  # a stage of another card
                    self.assertIn("needs", str(error))

    def test_other_devices(self):
        q, k, v = (x.detach() for x in self.tensors(12)[0])
        with self.assertRaisesRegex(flashsteps.BadInput, "k is on cpu and q on cuda:0; one device is wanted"):
            flashsteps.flash_attn_func(q, k.cpu(), v)

    def test_deterministic_bits(self):
        given, d_o = self.tensors(13, b=4, nq=1024, nk=1024, h=6, kv=2, d=64, dtype=torch.bfloat16)
        out = flashsteps.flash_attn_func(*given, causal=True, deterministic=True)
        first = torch.autograd.grad(out, given, d_o, retain_graph=True)
        for _ in range(20):
            for x, y in zip(first, torch.autograd.grad(out, given, d_o, retain_graph=True)):
                self.assertTrue(torch.equal(x, y))


if __name__ == "__main__":
    if why_no_card() and not flashsteps.library().stages(abi.MODEL):
        print(f"skipped because: {why_no_card()}, and the library was built without the CPU model")
        sys.exit(77)
    unittest.main()
