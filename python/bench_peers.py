#!/usr/bin/env python3
"""Times stages beside PyTorch's attention, on one card in one run.

    python3 python/bench_peers.py --json peers.json --svg peers.svg          08 beside FlashAttention-2 and cuDNN, 24 cells
    python3 python/bench_peers.py --ladder --json steps.json                 03 to 08, each beside the one before
    python3 python/bench_peers.py --math                                     02d and 08 beside PyTorch's math attention
    python3 python/bench_peers.py --pass bwd                                 the backward pass: 09, and 09 deterministic
    python3 python/bench_peers.py --pass both                                08, 10e and 09 beside their peers in one run
    python3 python/bench_peers.py --peer-module flash_attn                   another module's flash_attn_func as one more column

A stage is called through libflashsteps.so, on torch's tensors and stream. `--stage` takes ids between commas, each with a
variant if wanted: `07:64x64` is 07 with these tiles, `05:bh` is 05 with the grid of 04, `09:det` is 09 with dQ summed in a
fixed order. Peers are backends of
scaled_dot_product_attention: `flash` (FlashAttention-2), `cudnn`, `efficient` (memory-efficient attention), `math` as it comes
(it computes 16-bit inputs in fp32), `math16` (all of it in 16 bits). With `--peer-module` they are also modules that have
flash-attn's `flash_attn_func(q, k, v, softmax_scale=…, causal=…)` on tensors (batch, seqlen, heads, head_dim). A peer that cannot
be imported, or that does not run a cell, is marked absent, with the reason, in the table and in the JSON file.

The method is that of docs/method.md: device events around launches back to back behind a spinning kernel, warm, on random
normal inputs that rotate through more than the L2 cache; rounds that time everybody in turn; a ratio is the median over the
rounds of the ratio of milliseconds. Before it is timed, every output is compared with attention that torch computes in
fp32: for each (batch, head) and block of 64 rows the largest error is at most twice that of the same arithmetic with P and O
rounded to 16 bits, plus two units in the last place; of long sequences whole random heads are compared. FLOPs are
4 · batch · heads · d · pairs, with N (N + 1) / 2 pairs under the causal mask.

With `--pass bwd` the backward pass is timed, alone: O and L are computed before, those of 09 by the last forward stage of the
library, those of a peer by its own forward pass, and a peer is torch.autograd.grad with the graph kept. dQ, dK and dV are
compared likewise (rounded are P, dS, O in rowsum(dO ∘ O), and the gradients), and FLOPs are 2.5 times those of the forward pass.

Exit status: 0 all right, 1 a stage gave wrong values, 2 bad input, 3 no torch, no card or nothing that can run on it.
"""
import argparse
import contextlib
import copy
import importlib
import json
import math
import pathlib
import random
import re
import shlex
import statistics
import subprocess
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import plot_peers  # noqa: E402
import whole_file  # noqa: E402
from flashsteps import abi  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ("flash", "cudnn", "efficient", "math", "math16")
HEAD_DIMS = (64, 128)
MASKS = ("none", "causal")
PERSISTENT = ("10e",)  # stages with at most one block for each multiprocessor
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

MOST_LAUNCHES = 256  # of one measurement: what a stream queues without making the host wait
WARMUP_MS = 30
REPS = 3  # measurements of a round, fewer where they take long
ROUND_MS = 60  # that they may take
LONGEST_SPIN_US = 20_000
FP32_ERROR = 2**-20  # of dP - D, in units of |dO| (|V| + |O|): docs/method.md
CHECKED_PAIRS = 2**30  # (query, key) pairs of the heads that are compared
CHUNK_PAIRS = 2**28  # at once: 1 GiB of scores in fp32


def refuse(message, status=2):
    print(f"bench_peers.py: {message}", file=sys.stderr)
    sys.exit(status)


def torch_with_a_card(refuse):
    """The module torch. Where it is not there, or sees no card, refuse(message, status) ends the program."""
    try:
        import torch
    except ImportError:
        refuse("torch is not installed for this python3", 3)
    if not torch.cuda.is_available():
        refuse("torch sees no CUDA card", 3)
    return torch


# --- what is timed ---------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One problem."""
    setting: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool

    def pairs(self):
        """Visible (query, key) pairs of one head."""
        return self.seqlen * (self.seqlen + 1) // 2 if self.causal else self.seqlen**2

    def flops(self, backward=False):
        return (10 if backward else 4) * self.batch * self.heads * self.head_dim * self.pairs()


class Run(NamedTuple):
    """A stage in one of its variants, or a peer (then tiles and bh say nothing)."""
    name: str
    stage: str = ""
    tiles: tuple = (0, 0)
    bh: bool = False
    backward: bool = False
    deterministic: bool = False


# What a setting fixes: lengths, head dimensions, masks; batch and heads by length and head dimension.
SETTINGS = {
    # The papers': batch · N = 16384, heads · d = 2048.
    "course": (LENGTHS, HEAD_DIMS, MASKS, lambda n, h: max(1, 16384 // n), lambda d: max(1, 2048 // d)),
    # One block for each (batch, head) fills the card: four blocks for each of 132 SMs.
    "full": ((1024, 4096), HEAD_DIMS, MASKS, lambda n, h: -(-528 // h), lambda d: max(1, 2048 // d)),
    # One block for each (batch, head) leaves nearly all of the card idle.
    "few": ((16384,), HEAD_DIMS, MASKS, lambda n, h: 1, lambda d: 8),
    "math": ((2048,), (128,), ("none",), lambda n, h: 4, lambda d: 16),
}


def cells_of(setting, seqlens=None, head_dims=None, masks=None, batch=None, heads=None):
    """The cells of a setting, in order of head dimension, mask and length; what is given takes the setting's place."""
    default_seqlens, default_dims, default_masks, batch_of, heads_of = SETTINGS[setting]
    cells = []
    for d in head_dims or default_dims:
        for mask in masks or default_masks:
            for n in seqlens or default_seqlens:
                h = heads or heads_of(d)
                cells.append(Cell(setting, batch or batch_of(n, h), h, n, d, mask == "causal"))
    return cells


def parse_runs(text, tiles=None, bh=False, backward=False):
    """The runs of one pass that --stage, --tiles and --grid bh mean. Raises ValueError."""
    runs = []

    def add(run):
        if run not in runs:
            runs.append(run)

    for word in text.split(","):
        match = re.fullmatch(r"(\d\d[a-z]?)(?::(?:(bh)|(\d+)x(\d+)))?(:det)?", word)
        if not match:
            raise ValueError(f"{word!r} is no stage; allowed: ids as in 08 or 02d, with :BRxBC, :bh or :det behind them")
        stage, grid, rows, keys, deterministic = match.groups()
        variant = grid or rows
        if backward:
            if grid:
                raise ValueError(f"{word!r}: :bh is for 05, which is of the forward pass")
            chosen = (int(rows), int(keys)) if rows else tiles or (0, 0)
            name = f"{stage}:{chosen[0]}x{chosen[1]}{deterministic or ''}" if chosen[0] else word
            add(Run(name, stage, chosen, backward=True, deterministic=deterministic is not None))
        elif deterministic:
            raise ValueError(f"{word!r}: :det is for the backward pass; --pass is fwd")
        elif variant == "bh":
            add(Run(word, stage, bh=True))
        elif variant:
            add(Run(word, stage, (int(rows), int(keys))))
        elif tiles and stage >= "07":
            add(Run(f"{stage}:{tiles[0]}x{tiles[1]}", stage, tiles))
        else:
            if stage == "05" and bh:
                add(Run("05:bh", "05", bh=True))
            add(Run(stage, stage))
    return runs


def ladder_runs(runs, cell, tiles_of):
    """The runs of a cell of the ladder: what changes two things at once is also timed with one of them. 05 in the grid of
    04 comes between the two, and from 07 on each stage in the tiles of the one before, where it is built for them.
    `tiles_of` gives a run's (Br, Bc), or None."""
    ladder = []
    for before, run in zip([None] + runs, runs):
        if run.name == "05" and before and before.name == "04" and cell.setting != "course":
            ladder.append(Run("05:bh", "05", bh=True))
        if run.name == run.stage and run.stage >= "07" and before and tiles_of(before) != tiles_of(run):
            tiles = tiles_of(before)
            same = Run(f"{run.stage}:{tiles[0]}x{tiles[1]}", run.stage, tiles)
            if tiles_of(same):
                ladder.append(same)
        ladder.append(run)
    return list(dict.fromkeys(ladder))


def problem_args(run, cell, dtype):
    """The call of a run, without tensors."""
    args = abi.BackwardArgs(deterministic=run.deterministic) if run.backward else abi.ForwardArgs(one_block_per_head=run.bh)
    for name, value in dict(
            stage=run.stage.encode(), target=abi.CUDA, dtype=abi.FP16 if dtype == "fp16" else abi.BF16, batch=cell.batch,
            heads=cell.heads, kv_heads=cell.heads, seqlen_q=cell.seqlen, seqlen_k=cell.seqlen, head_dim=cell.head_dim,
            scale=1 / math.sqrt(cell.head_dim), causal=cell.causal, tile_rows=run.tiles[0], tile_keys=run.tiles[1]).items():
        setattr(args, name, value)
    return args


def multiprocessors(torch):
    return torch.cuda.get_device_properties(0).multi_processor_count


def grid_blocks(run, cell, tiles, at_once):
    """Blocks of the kernel that writes O, or dK and dV; None for a stage without tiles. at_once: multiprocessors."""
    if tiles[0] == 0:
        return None
    if run.backward:
        return cell.batch * cell.heads * -(-cell.seqlen // tiles[1])
    one_block = run.bh or run.stage == "04"
    row_blocks = cell.batch * cell.heads * (1 if one_block else -(-cell.seqlen // tiles[0]))
    return min(row_blocks, at_once) if run.stage in PERSISTENT else row_blocks


def writes_lse_apart(stage):
    """Whether the small common kernel computes L, which is not part of the stage's time (docs/method.md)."""
    return stage < "06"


# --- statistics ------------------------------------------------------------------------------------------------


def median_ratio(numerator, denominator):
    """The median over the rounds of numerator[r] / denominator[r]."""
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(f"ratio of {len(numerator)} rounds to {len(denominator)}: give as many of each, 1 or more")
    return statistics.median(a / b for a, b in zip(numerator, denominator))


def plan_launches(one_ms, measurement_ms):
    """Launches of a measurement, and measurements of a round, from an estimate of one launch."""
    one_ms = max(one_ms, 5e-4)  # below the resolution of events an estimate says nothing
    launches = max(1, min(MOST_LAUNCHES, math.ceil(measurement_ms / one_ms)))
    return launches, max(1, min(REPS, int(ROUND_MS / (launches * one_ms))))


def rotating_sets(input_bytes, set_bytes, cache_bytes, memory_bytes):
    """Sets of tensors to rotate over: their inputs exceed the cache; at least 2, at most 64; fewer where memory is short."""
    return max(1, min(max(2, cache_bytes // max(1, input_bytes) + 1), 64, memory_bytes // max(1, set_bytes)))


def sampled_heads(cell, seed):
    """Indices b * heads + h of the heads that are compared: all of them, or the first, the last and random ones."""
    total = cell.batch * cell.heads
    count = max(4, CHECKED_PAIRS // cell.seqlen**2)
    if count >= total:
        return list(range(total))
    return sorted({0, total - 1} | set(random.Random(seed).sample(range(total), count - 2)))


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(value) for value in values))


# --- the card --------------------------------------------------------------------------------------------------


class Stopwatch:
    """Milliseconds of one call of `launch(i)`; i counts on, so that inputs rotate."""

    def __init__(self, torch):
        self.torch = torch
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.spin_us = 100
        self.next = 0
        self.host_bound = False

    def measure(self, launch, launches):
        """One measurement. The clock starts when a spinning kernel ends that was queued first; where that was before all
        was queued, so that the card may have waited for the host, it is made again behind a longer one."""
        torch = self.torch
        while True:
            spin_us = min(self.spin_us + 5 * launches, LONGEST_SPIN_US)
            torch.cuda._sleep(int(spin_us * 2000))  # cycles, at about 2 GHz
            self.start.record()
            for _ in range(launches):
                launch(self.next)
                self.next += 1
            self.stop.record()
            hidden = not self.start.query()
            self.stop.synchronize()
            if hidden or spin_us >= LONGEST_SPIN_US:
                self.host_bound |= not hidden
                return self.start.elapsed_time(self.stop) / launches
            self.spin_us *= 2

    def warm_up(self, launch, measurement_ms):
        """Runs until code is loaded and clocks have risen; returns plan_launches()."""
        launch(0)
        self.torch.cuda.synchronize()
        one = self.measure(launch, 1)
        spent = one
        while spent < WARMUP_MS:
            launches, _ = plan_launches(one, measurement_ms)
            one = self.measure(launch, launches)
            spent += max(one * launches, 0.1)
        self.host_bound = False
        return plan_launches(one, measurement_ms)


class Contender:
    """A run in one cell: `launch(i)` queues it on input set i."""

    def __init__(self, run, launch, context=contextlib.nullcontext):
        self.run, self.launch, self.context = run, launch, context
        self.plan, self.round_ms, self.host_bound, self.facts = None, [], False, {}


def backend_of(torch, name):
    """The backend of scaled_dot_product_attention that a peer is, and the context in which its forward pass runs. Raises
    RuntimeError."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backend = {"math": SDPBackend.MATH, "math16": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
               "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}[name]
    allow = getattr(torch.backends.cuda, "allow_fp16_bf16_reduction_math_sdp", None)
    if name == "math16" and not allow:
        raise RuntimeError(f"torch {torch.__version__} has no such mode; its math computes in 16 bits")

    @contextlib.contextmanager
    def context():
        if allow:
            allow(name == "math16")
        with sdpa_kernel([backend]):
            yield

    return context


def import_peers(names):
    """The modules of --peer-module: ({name: its flash_attn_func}, {name: why it is absent}, {name: its version, where it tells}).
    Raises ValueError for a module that has no such function."""
    functions, absent, versions = {}, {}, {}
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # pylint: disable=broad-except  (whatever a module does while it is imported)
            absent[name] = first_line(error)
            continue
        functions[name] = getattr(module, "flash_attn_func", None)
        if not callable(functions[name]):
            raise ValueError(f"module {name} has no flash_attn_func")
        if getattr(module, "__version__", None):
            versions[name] = str(module.__version__)
    return functions, absent, versions


def first_line(error):
    """What an exception says, in one line; where it says nothing, its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Bench:
    """One cell on the card: tensors, contenders, checks and times."""

    TENSORS_OF_A_SET, INPUTS_OF_A_SET = 5, 3  # as large as Q: what rotates, and what of it is read

    def __init__(self, torch, library, options, cell):
        self.torch, self.library, self.options, self.cell = torch, library, options, cell
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
        self.scale = 1 / math.sqrt(cell.head_dim)
        tensor_bytes = 2 * cell.batch * cell.heads * cell.seqlen * cell.head_dim
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
        free, _ = torch.cuda.mem_get_info()
        count = rotating_sets(self.INPUTS_OF_A_SET * tensor_bytes, self.TENSORS_OF_A_SET * tensor_bytes, cache, free // 4)
        self.generator = torch.Generator(device="cuda").manual_seed(options.seed)
        self.sets = [tuple(self.tensor() for _ in range(3)) for _ in range(count)]
        self.outputs = [torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="cuda") for q, _, _ in self.sets]
        self.lse = torch.empty((cell.batch, cell.heads, cell.seqlen), dtype=torch.float32, device="cuda")
        self.workspace = None
        self.heads = sampled_heads(cell, options.seed)
        self.truth = None
        self.left_out, self.absent = {}, dict(options.absent)

    def tensor(self):
        """Random normal values, as a tensor (batch, heads, seqlen, head_dim) that lies in memory as --layout says."""
        cell = self.cell
        order = (cell.batch, cell.heads, cell.seqlen) if self.options.layout == "bhsd" else (
            cell.batch, cell.seqlen, cell.heads)
        made = self.torch.randn(*order, cell.head_dim, device="cuda", dtype=self.dtype, generator=self.generator)
        return made if self.options.layout == "bhsd" else made.transpose(1, 2)

    # --- stages ---

    def stage_args(self, run, number, with_lse):
        args = problem_args(run, self.cell, self.options.dtype)
        for name, tensor in zip("qkvo", (*self.sets[number], self.outputs[number])):
            setattr(args, name, tensor.data_ptr())
            setattr(args, f"{name}_strides", abi.Strides(*tensor.stride()[:3]))
        args.l = self.lse.data_ptr() if with_lse else None
        args.stream = self.torch.cuda.current_stream().cuda_stream
        if self.workspace is not None:
            args.workspace, args.workspace_bytes = self.workspace.data_ptr(), self.workspace.numel()
        return args

    def make_workspace(self, runs):
        """One for all of them: what a stage reads there it has written before. Returns the runs that it is enough for."""
        torch, needs = self.torch, {}
        for run in runs:
            needs[run] = self.library.workspace_bytes(problem_args(run, self.cell, self.options.dtype))
        free = torch.cuda.mem_get_info()[0] * 9 // 10
        fitting = [run for run in runs if needs[run] <= free]
        for run in runs:
            if run not in fitting:
                self.left_out[run.name] = f"needs {needs[run] / 2**30:.1f} GiB beside the tensors; {free / 2**30:.1f} are free"
        most = max((needs[run] for run in fitting), default=0)
        if most > 0:
            self.workspace = torch.empty(most, dtype=torch.uint8, device="cuda")
        return fitting

    def stage(self, run):
        """The stage's contender, its output checked."""
        for filled in (*self.outputs, self.lse):
            filled.fill_(math.nan)
        if self.workspace is not None:
            self.workspace.fill_(0xFF)
        tiles = self.library.tiles(problem_args(run, self.cell, self.options.dtype))
        self.library.forward(self.stage_args(run, 0, True))
        self.torch.cuda.synchronize()
        with_lse = not writes_lse_apart(run.stage)
        args = [self.stage_args(run, number, with_lse) for number in range(len(self.sets))]
        forward = self.library.forward
        contender = Contender(run, lambda i: forward(args[i % len(args)]))
        contender.facts["stage"] = run.stage
        if tiles[0]:
            contender.facts["tiles"] = {"Br": tiles[0], "Bc": tiles[1]}
            contender.facts["grid_blocks"] = grid_blocks(run, self.cell, tiles, multiprocessors(self.torch))
        contender.facts["check"] = self.check(self.outputs[0], self.lse)
        return contender

    # --- peers ---

    def peer_call(self, run):
        """A peer's forward pass on tensors (batch, heads, seqlen, head_dim), and the context in which it runs. Raises
        RuntimeError where torch has no such backend."""
        causal, scale, function = self.cell.causal, self.scale, self.options.functions.get(run.name)
        if function is None:
            from torch.nn.functional import scaled_dot_product_attention
            return (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale),
                    backend_of(self.torch, run.name))

        def call(q, k, v):
            swapped = (x.transpose(1, 2) for x in (q, k, v))
            output = function(*swapped, softmax_scale=scale, causal=causal)
            return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)  # some return L, too

        return call, contextlib.nullcontext

    def peer(self, run):
        """The contender of a peer. Raises whatever the peer raises where it cannot run."""
        torch = self.torch
        call, forward_context = self.peer_call(run)

        @contextlib.contextmanager
        def context():
            with torch.no_grad(), forward_context():
                yield

        def launch(i):
            return call(*self.sets[i % len(self.sets)])

        contender = Contender(run, launch, context)
        with context():
            contender.facts["check"] = self.check(launch(0))
        return contender

    # --- checks ---

    def reference(self):
        """For chunks of the sampled heads: their indices, O in fp32, its bound for each block of 64 rows, L and its bound."""
        if self.truth is not None:
            return self.truth
        torch, n, self.truth = self.torch, self.cell.seqlen, []
        q, k, v = (tensor.reshape(-1, n, self.cell.head_dim) for tensor in self.sets[0])
        hidden = torch.ones(n, n, dtype=torch.bool, device="cuda").triu_(1) if self.cell.causal else None
        step = max(1, CHUNK_PAIRS // n**2)
        for begin in range(0, len(self.heads), step):
            at = torch.tensor(self.heads[begin:begin + step], device="cuda")
            values = v[at].float()
            scores = (q[at].float() @ k[at].float().transpose(1, 2)) * self.scale
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            lse = torch.logsumexp(scores, dim=2)
            largest = max(1.0, float(torch.where(torch.isinf(scores), 0.0, scores).abs().max()))
            p = scores.sub_(lse[..., None]).exp_()
            o = p @ values
            rounded = (p.to(self.dtype).float() @ values).to(self.dtype).float()
            bound = 2 * self.block_max(rounded - o) + 2 * self.ulp(self.block_max(o))
            self.truth.append((at, o, bound, lse, 1e-5 * largest))
        return self.truth

    def block_max(self, x):
        """The largest |x| of each block of 64 rows: (heads, n, d) to (heads, blocks)."""
        heads, n, d = x.shape
        padded = self.torch.nn.functional.pad(x.abs(), (0, 0, 0, -n % 64))
        return padded.reshape(heads, -1, 64 * d).amax(dim=2)

    def ulp(self, x):
        """The unit in the last place of x in the 16-bit type."""
        torch = self.torch
        bits, smallest = (10, -14) if self.dtype == torch.float16 else (7, -126)
        exponent = torch.where(x > 0, torch.frexp(x)[1] - 1, smallest).clamp(min=smallest)
        return torch.ldexp(torch.ones_like(x), exponent - bits)

    def check(self, output, lse=None):
        """Compares with reference(). NaN is an error: all comparisons are of the form 'error <= bound'."""
        torch, n, d = self.torch, self.cell.seqlen, self.cell.head_dim
        finite = bool(torch.isfinite(output).all())
        ok = finite
        flat = output.reshape(-1, n, d)
        flat_lse = None if lse is None else lse.reshape(-1, n)
        worst, max_error, lse_error, lse_bound = 0.0, 0.0, 0.0, 0.0
        for at, o, bound, true_lse, allowed in self.reference():
            error = self.block_max(flat[at].float() - o)
            ok = ok and bool((error <= bound).all())
            worst = max(worst, float((error / bound).max()))
            max_error = max(max_error, float(error.max()))
            if flat_lse is not None:
                difference = (flat_lse[at] - true_lse).abs()
                ok = ok and bool((difference <= allowed).all())
                lse_error, lse_bound = max(lse_error, float(difference.max())), max(lse_bound, allowed)
        result = {"ok": ok, "finite": finite, "max_abs_err": min(max_error, 1e9), "share_of_bound": min(worst, 1e9),
                  "heads": len(self.heads)}
        if lse is not None:
            result.update(lse_max_abs_err=lse_error, lse_bound=lse_bound)
        return result

    # --- times ---

    def run(self, stopwatch, runs, progress):
        """Checks and times everybody; returns the contenders that were timed. `left_out` and `absent` say why others were
        not: the first of what could have been timed in another cell or on another card, the second of peers that are not
        there."""
        torch, stages = self.torch, self.make_workspace([run for run in runs if run.stage])
        contenders = []
        for run in runs:
            if run.name in self.absent or (run.stage and run not in stages):
                continue
            try:
                contender = self.stage(run) if run.stage else self.peer(run)
                if run.stage and not contender.facts["check"]["ok"]:
                    self.left_out[run.name] = f"WRONG VALUES: {json.dumps(contender.facts['check'])}"
                    continue
                with contender.context():
                    contender.plan = stopwatch.warm_up(contender.launch, self.options.measurement_ms)
                contenders.append(contender)
            except Exception as error:  # pylint: disable=broad-except  (a peer may raise anything)
                if run.stage and not (isinstance(error, abi.Error) and error.status == abi.UNAVAILABLE):
                    raise
                why = self.left_out if run.stage or isinstance(error, torch.cuda.OutOfMemoryError) else self.absent
                why[run.name] = first_line(error)
                torch.cuda.empty_cache()
        self.truth = None  # its memory is not needed any more
        for number in range(self.options.rounds):
            # There and back: nobody always follows the same one.
            for contender in contenders[::1 if number % 2 == 0 else -1]:
                launches, reps = contender.plan
                with contender.context():
                    times = [stopwatch.measure(contender.launch, launches) for _ in range(reps)]
                contender.round_ms.append(statistics.median(times))
                contender.host_bound |= stopwatch.host_bound
                stopwatch.host_bound = False
            progress(f"round {number + 1} of {self.options.rounds}")
        return contenders


class BackwardBench(Bench):
    """The same of the backward pass: O and L are computed before, and not timed."""

    TENSORS_OF_A_SET, INPUTS_OF_A_SET = 9, 5

    def __init__(self, torch, library, options, cell):
        super().__init__(torch, library, options, cell)
        self.gradients_of_o = [self.tensor() for _ in self.sets]
        self.lses = [torch.empty((cell.batch, cell.heads, cell.seqlen), dtype=torch.float32, device="cuda") for _ in self.sets]
        # Of one set; the rotation is for what is read.
        self.gradients = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in self.sets[0])
        self.forward_done = False

    def run_forward(self):
        """O and L of every set, by the last forward stage of the library."""
        if self.forward_done:
            return
        stage = self.library.stages(abi.CUDA)[-1]
        workspace = self.workspace
        bytes_needed = self.library.workspace_bytes(problem_args(Run(stage, stage), self.cell, self.options.dtype))
        if bytes_needed:
            self.workspace = self.torch.empty(bytes_needed, dtype=self.torch.uint8, device="cuda")
        for number, lse in enumerate(self.lses):
            self.lse = lse
            self.library.forward(super().stage_args(Run(stage, stage), number, True))
        self.torch.cuda.synchronize()
        self.workspace, self.forward_done = workspace, True

    def stage_args(self, run, number, with_lse=True):
        args = problem_args(run, self.cell, self.options.dtype)
        tensors = {**dict(zip("qkv", self.sets[number])), "o": self.outputs[number], "d_o": self.gradients_of_o[number],
                   **dict(zip(("dq", "dk", "dv"), self.gradients))}
        for name, tensor in tensors.items():
            setattr(args, name, tensor.data_ptr())
            setattr(args, f"{name}_strides", abi.Strides(*tensor.stride()[:3]))
        args.l = self.lses[number].data_ptr()
        args.stream = self.torch.cuda.current_stream().cuda_stream
        if self.workspace is not None:
            args.workspace, args.workspace_bytes = self.workspace.data_ptr(), self.workspace.numel()
        return args

    def stage(self, run):
        self.run_forward()
        for filled in self.gradients:
            filled.fill_(math.nan)
        if self.workspace is not None:
            self.workspace.fill_(0xFF)
        tiles = self.library.tiles(problem_args(run, self.cell, self.options.dtype))
        args = [self.stage_args(run, number) for number in range(len(self.sets))]
        backward = self.library.backward
        backward(args[0])
        self.torch.cuda.synchronize()
        contender = Contender(run, lambda i: backward(args[i % len(args)]))
        contender.facts.update(stage=run.stage, deterministic=run.deterministic)
        if tiles[0]:
            contender.facts["tiles"] = {"Br": tiles[0], "Bc": tiles[1]}
            contender.facts["grid_blocks"] = grid_blocks(run, self.cell, tiles, multiprocessors(self.torch))
        contender.facts["check"] = self.check(self.gradients)
        return contender

    def peer(self, run):
        torch, graphs = self.torch, []
        call, forward_context = self.peer_call(run)
        with forward_context():
            for tensors in self.sets:
                leaves = tuple(x.detach().requires_grad_() for x in tensors)
                graphs.append((call(*leaves), leaves))

        def launch(i):
            output, leaves = graphs[i % len(graphs)]
            return torch.autograd.grad(output, leaves, self.gradients_of_o[i % len(graphs)], retain_graph=True)

        contender = Contender(run, launch)
        contender.facts["check"] = self.check(launch(0))
        return contender

    def reference(self):
        """For chunks of the sampled heads: their indices, and for dQ, dK and dV the gradient in fp32 and its bound for each
        block of 64 rows."""
        if self.truth is not None:
            return self.truth
        torch, n, self.truth = self.torch, self.cell.seqlen, []
        q, k, v, d_o = (x.reshape(-1, n, self.cell.head_dim) for x in (*self.sets[0], self.gradients_of_o[0]))
        hidden = torch.ones(n, n, dtype=torch.bool, device="cuda").triu_(1) if self.cell.causal else None
        step = max(1, CHUNK_PAIRS // (2 * n**2))  # P and dS at a time
        norm = lambda x: (x * x).sum(dim=2) ** 0.5
        for begin in range(0, len(self.heads), step):
            at = torch.tensor(self.heads[begin:begin + step], device="cuda")
            queries, keys, values, of_o = (x[at].float() for x in (q, k, v, d_o))
            p = (queries @ keys.transpose(1, 2)) * self.scale
            if hidden is not None:
                p.masked_fill_(hidden, -math.inf)
            p.sub_(torch.logsumexp(p, dim=2)[..., None]).exp_()
            o = p @ values
            d_p = of_o @ values.transpose(1, 2)
            exact_d = (of_o * o).sum(dim=2)
            rounded_d = (of_o * o.to(self.dtype).float()).sum(dim=2)
            # What dP - D may be off because both are summed in fp32, carried through (docs/method.md).
            error = p * (norm(values)[:, None, :] + norm(o)[..., None]) * (norm(of_o) * FP32_ERROR * self.scale)[..., None]
            errors = (self.row_block_max(error.sum(dim=2)) * float(keys.abs().max()),
                      self.row_block_max(error.sum(dim=1)) * float(queries.abs().max()), 0.0)
            del error

            def gradients(weights, d_s, queries=queries, keys=keys, of_o=of_o):
                return ((d_s @ keys) * self.scale, (d_s.transpose(1, 2) @ queries) * self.scale,
                        weights.transpose(1, 2) @ of_o)

            exact = gradients(p, p * (d_p - exact_d[..., None]))
            rounded = gradients(p.to(self.dtype).float(), (p * (d_p - rounded_d[..., None])).to(self.dtype).float())
            bounds = [2 * self.block_max(r.to(self.dtype).float() - x) + 2 * self.ulp(self.block_max(x)) + e
                      for r, x, e in zip(rounded, exact, errors)]
            self.truth.append((at, list(zip(exact, bounds))))
        return self.truth

    def row_block_max(self, x):
        """block_max() of one number a row."""
        return self.block_max(x[..., None])

    def check(self, gradients):
        torch, n, d = self.torch, self.cell.seqlen, self.cell.head_dim
        finite = all(bool(torch.isfinite(x).all()) for x in gradients)
        result = {"ok": finite, "finite": finite, "share_of_bound": 0.0, "heads": len(self.heads)}
        for number, (name, gradient) in enumerate(zip(("dQ", "dK", "dV"), gradients)):
            flat, ok, worst, max_error = gradient.reshape(-1, n, d), True, 0.0, 0.0
            for at, tensors in self.reference():
                wanted, bound = tensors[number]
                error = self.block_max(flat[at].float() - wanted)
                ok = ok and bool((error <= bound).all())
                worst, max_error = max(worst, float((error / bound).max())), max(max_error, float(error.max()))
            result[name] = {"ok": ok, "max_abs_err": min(max_error, 1e9), "share_of_bound": min(worst, 1e9)}
            result["ok"] = result["ok"] and ok
            result["share_of_bound"] = max(result["share_of_bound"], result[name]["share_of_bound"])
        return result


def measure_ceilings(torch, stopwatch, options):
    """What this card reaches on random data, measured as stages are: a copy in TB/s (bytes read and written), a bf16 product
    of 8192 x 8192 matrices in TFLOP/s."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.randn(2**28, device="cuda")  # 1 GiB
    target = torch.empty_like(source)
    results = {}
    for name, launch, amount in (("copy_tb_per_s", lambda i: target.copy_(source), 2 * source.numel() * 4 / 1e9),
                                 ("matmul_tflops", lambda i: torch.matmul(a, b, out=c), 2 * n**3 / 1e9)):
        launches, reps = stopwatch.warm_up(launch, options.measurement_ms)
        times = [stopwatch.measure(launch, launches) for _ in range(reps * options.rounds)]
        results[name] = amount / statistics.median(times)
    del a, b, c, source, target
    torch.cuda.empty_cache()
    return results


def describe_card(torch):
    properties = torch.cuda.get_device_properties(0)
    card = {"name": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory,
            "torch": torch.__version__, "torch_cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], timeout=30,
                                capture_output=True, text=True, check=True).stdout.split()
        card.update(driver=driver[0] if driver else None)
    return card


# --- the report ------------------------------------------------------------------------------------------------


def cell_report(cell, contenders, left_out, absent, options, ceilings):
    """The cell's part of the JSON file."""
    report = {"setting": cell.setting,
              "problem": {"batch": cell.batch, "heads": cell.heads, "kv_heads": cell.heads, "seqlen_q": cell.seqlen,
                          "seqlen_k": cell.seqlen, "head_dim": cell.head_dim, "dtype": options.dtype,
                          "causal": cell.causal, "layout": options.layout, "pass": options.direction,
                          "flops": cell.flops(options.backward)},
              "runs": [], "speedups": {}, "left_out": left_out, "absent": absent}
    for contender in contenders:
        ms = statistics.median(contender.round_ms)
        tflops = cell.flops(options.backward) / ms / 1e9
        entry = {"name": contender.run.name, **contender.facts, "round_ms": contender.round_ms, "median_ms": ms,
                 "tflops": tflops, "launches": contender.plan[0], "reps": contender.plan[1]}
        entry["percent_of_ceiling"] = 100 * tflops / ceilings["matmul_tflops"]
        if contender.host_bound:
            entry["host_bound"] = True
        report["runs"].append(entry)
    for mine in report["runs"]:
        if "stage" in mine:  # how many times as fast as the other
            report["speedups"][mine["name"]] = {
                other["name"]: median_ratio(other["round_ms"], mine["round_ms"])
                for other in report["runs"] if other is not mine}
    return report


def time_cell(torch, library, stopwatch, options, cell, ceilings, progress):
    """Checks and times a cell; its report."""

    def tiles_of(run):
        try:
            return library.tiles(problem_args(run, cell, options.dtype))
        except abi.Error as error:
            if error.status != abi.BAD_INPUT:
                raise
            return None

    bench, contenders, absent = None, [], dict(options.absent)
    try:
        runs = ladder_runs(options.runs, cell, tiles_of) if options.ladder else options.runs
        runs = runs + [Run(name) for name in options.peers]
        bench = (BackwardBench if options.backward else Bench)(torch, library, options, cell)
        contenders = bench.run(stopwatch, runs, progress)
        left_out, absent = bench.left_out, bench.absent
    except abi.Error as error:
        refuse(str(error), error.status)
    except torch.cuda.OutOfMemoryError as error:
        left_out = {"all": first_line(error)}
    except RuntimeError as error:  # of CUDA: nothing more can be run on the card
        refuse(first_line(error), 1)
    report = cell_report(cell, contenders, left_out, absent, options, ceilings)
    # Memory goes back to the card: the next cell's workspaces are large.
    del bench, contenders
    torch.cuda.empty_cache()
    return report


def problem_name(problem):
    return (f"batch {problem['batch']}, heads {problem['heads']}, N {problem['seqlen_q']}, d {problem['head_dim']}, "
            f"{'causal' if problem['causal'] else 'no mask'}")


def notes(report, told=()):
    """What must be said beside a cell's figures, but for the absence of the peers that was told before."""
    for run in report["runs"]:
        if not run["check"]["ok"]:
            yield f"{run['name']}: its error is {run['check']['share_of_bound']:.1f} of the bound"
        if run["percent_of_ceiling"] > 100:
            yield f"{run['name']}: above the measured ceiling; do not trust it before it is explained"
        if run.get("host_bound"):
            yield f"{run['name']}: the host's own time may be part of it"
    for name, reason in report["left_out"].items():
        yield f"{name}: left out: {reason}"
    for name, reason in report["absent"].items():
        if name not in told:
            yield f"{name}: absent: {reason}"


class BesideTable:
    """Peers: a line for each cell, a column for each run, then how many times as fast each stage is as each peer."""

    def __init__(self, names, peers):
        self.names, self.pairs = names, [(name, peer) for name in names if name not in peers for peer in peers]
        print(f"\n{'d':>4} {'mask':6} {'N':>6} {'batch':>5} {'heads':>5}"
              + "".join(f"{' ' + name + ' ms':>13}{'TFLOP/s':>8}" for name in names)
              + "".join(f"{' ' + stage + '/' + peer:>18}" for stage, peer in self.pairs), flush=True)

    def add(self, report):
        problem, runs = report["problem"], {run["name"]: run for run in report["runs"]}
        line = (f"{problem['head_dim']:4} {'causal' if problem['causal'] else 'none':6} {problem['seqlen_q']:6} "
                f"{problem['batch']:5} {problem['heads']:5}")
        for name in self.names:
            width = max(13, len(name) + 4)
            if name in runs:
                line += f"{runs[name]['median_ms']:{width}.4f}{runs[name]['tflops']:8.1f}"
            else:
                line += f"{'absent' if name in report['absent'] else '-':>{width}}{'-':>8}"
        for stage, peer in self.pairs:
            width, ratio = max(18, len(stage) + len(peer) + 2), report["speedups"].get(stage, {}).get(peer)
            line += f"{ratio:{width}.3f}" if ratio else f"{'-':>{width}}"
        print(line, flush=True)

    def end(self, reports):
        for stage, peer in self.pairs:
            ratios = [r for r in (report["speedups"].get(stage, {}).get(peer) for report in reports) if r]
            if ratios:
                print(f"{stage} is {geometric_mean(ratios):.3f} times as fast as {peer} (geometric mean of {len(ratios)} "
                      f"cells; least {min(ratios):.3f}, most {max(ratios):.3f})")


class LadderTable:
    """The ladder: for each cell a line for each run."""

    @staticmethod
    def anchor(report):
        """The run that all are compared with: 04, where FlashAttention begins, or the first."""
        names = [run["name"] for run in report["runs"]]
        return "04" if "04" in names else names[0]

    def add(self, report):
        print(f"\n{report['setting']}: {problem_name(report['problem'])}")
        print(f"  {'stage':10}{'tiles':>9}{'blocks':>9}{'ms':>11}{'TFLOP/s':>9}{'% of ceiling':>14}{'x before':>10}"
              f"{'x ' + self.anchor(report):>9}")
        before = []
        for run in report["runs"]:
            name, speedups = run["name"], report["speedups"].get(run["name"])
            tiles = f"{run['tiles']['Br']}x{run['tiles']['Bc']}" if "tiles" in run else "-"
            line = (f"  {name:10}{tiles:>9}{run.get('grid_blocks') or '-':>9}{run['median_ms']:11.4f}{run['tflops']:9.1f}"
                    f"{run['percent_of_ceiling']:14.1f}")
            if before and speedups:
                line += f"{speedups[before[-1]]:10.3f}"
                line += f"{speedups[self.anchor(report)]:9.2f}" if name != self.anchor(report) else ""
            before.append(name)
            print(line, flush=True)

    def end(self, reports):
        steps = {}
        for report in reports:
            names = [run["name"] for run in report["runs"]]
            where = f"{report['setting']}, {'causal' if report['problem']['causal'] else 'no mask'}"
            for before, name in [*zip(names, names[1:]), (self.anchor(report), names[-1])]:
                if before in report["speedups"].get(name, {}):
                    step = steps.setdefault((where, before, name), [])
                    step.append((report["speedups"][name][before], problem_name(report["problem"])))
        print()
        for (where, before, name), step in steps.items():
            ratios = [ratio for ratio, _ in step]
            print(f"{where}: {name} is {geometric_mean(ratios):.3f} times as fast as {before} (geometric mean of {len(step)} "
                  f"cells; most {max(ratios):.3f}; least {min(ratios):.3f}, at {min(step)[1]})")


# --- the command line ------------------------------------------------------------------------------------------


def a_list(kind, allowed=None):
    """A converter for values between commas."""

    def convert(text):
        values = []
        for word in text.split(","):
            try:
                value = kind(word)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{word!r} is no number") from None
            if allowed and value not in allowed:
                raise argparse.ArgumentTypeError(f"there is no {word!r}; there are {', '.join(allowed)}")
            if kind is int and value < 1:
                raise argparse.ArgumentTypeError(f"{value} is given; 1 or more is allowed")
            values.append(value)
        return list(dict.fromkeys(values))

    return convert


def positive(kind):
    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is given; more than 0 is allowed")
        return value

    return convert


def tile_sizes(text):
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is given; BRxBC is allowed, as in 64x64")
    return int(match[1]), int(match[2])


class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(message.removeprefix("argument "))


def defaults(options):
    """What a mode and a pass mean: settings, stages, peers, and the layout where none is given."""
    if options.ladder:
        settings, stages, peers, layout = ["full", "few", "course"], {"fwd": "03,04,05,06,07,08"}, [], "bshd"
    elif options.math:
        stages = {"fwd": "02d,08", "bwd": "09,09:det", "both": "02d,08,09,09:det"}
        settings, peers, layout = ["math"], ["math", "math16"] if options.direction == "fwd" else ["math"], "bhsd"
    else:
        stages = {"fwd": "08", "bwd": "09,09:det", "both": "08,10e,09,09:det"}
        settings, peers, layout = ["course"], ["flash", "cudnn"], "bshd"
    return settings, stages[options.direction], peers, options.layout or layout


def words_of_passes(text, known):
    """{"fwd": …, "bwd": …}: the words of --stage by the pass that their stages are of; `known` has the ids of both. What is of
    neither goes with the forward pass, for resolve() to tell."""
    words = {"fwd": [], "bwd": []}
    for word in text.split(","):
        stage = re.match(r"\d*[a-z]?", word)[0]
        words["bwd" if not ids_of(stage, known["fwd"]) and ids_of(stage, known["bwd"]) else "fwd"].append(word)
    return {direction: ",".join(its) for direction, its in words.items() if its}


def set_pass(options, direction, stages):
    """Makes the options those of one pass. Raises ValueError."""
    options.direction, options.backward = direction, direction == "bwd"
    options.runs = parse_runs(stages, options.tiles, options.grid == "bh", options.backward)


def parse(arguments=None):
    parser = Parser(description=__doc__.splitlines()[0], epilog="docs/method.md tells how it measures.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--ladder", action="store_true", help="03 to 08, each beside the one before, with its blocks")
    mode.add_argument("--math", action="store_true", help="02d and 08 beside PyTorch's math attention, N 2048, d 128")
    parser.add_argument("--library", default=ROOT / "build/cuda/lib/libflashsteps.so", metavar="FILE",
                        help="libflashsteps.so (default: %(default)s)")
    parser.add_argument("--pass", dest="direction", choices=("fwd", "bwd", "both"), default="fwd",
                        help="which pass is timed (default: fwd); both: one after the other, each stage in its own")
    parser.add_argument("--stage", help="stages between commas, as in 02d,07:64x64,08 or 09,09:det (default: by mode)")
    parser.add_argument("--tiles", type=tile_sizes, metavar="BRxBC", help="tiles of the stages from 07 on")
    parser.add_argument("--grid", choices=("bh",), help="bh: times 05 in the grid of 04, too")
    parser.add_argument("--peers", type=lambda text: a_list(str, PEERS)(text) if text else [],
                        help=f"of {', '.join(PEERS)}; '' for none (default: by mode)")
    parser.add_argument("--peer-module", action="append", default=[], metavar="NAME",
                        help="a module whose flash_attn_func is one more peer; may be given again")
    parser.add_argument("--setting", type=a_list(str, SETTINGS), help="course: batch x N = 16384, heads x d = 2048; full: four "
                        "blocks an SM for 04; few: batch 1, 8 heads, N 16384; math: batch 4, 16 heads (default: by mode)")
    parser.add_argument("--seqlen", type=a_list(int), help="lengths between commas, in place of the setting's")
    parser.add_argument("--head-dim", type=a_list(int), help="in place of the setting's")
    parser.add_argument("--mask", type=a_list(str, MASKS), help="none, causal or both between a comma")
    parser.add_argument("--batch", type=positive(int), help="in place of the setting's")
    parser.add_argument("--heads", type=positive(int), help="in place of the setting's")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16")
    parser.add_argument("--layout", choices=("bshd", "bhsd"), help="order of the axes in memory (default: bshd)")
    parser.add_argument("--rounds", type=positive(int), default=5)
    parser.add_argument("--measurement-ms", type=positive(float), default=12, metavar="MS", help="(default: 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--svg", metavar="FILE", help="draw it there; needs gnuplot")
    options = parser.parse_args(arguments)
    if options.direction != "fwd" and (options.ladder or options.grid):
        refuse(f"--pass {options.direction} has no {'--ladder' if options.ladder else '--grid'}: it is of the forward pass")
    settings, stages, peers, options.layout = defaults(options)
    options.peers = peers if options.peers is None else options.peers
    options.peer_module = list(dict.fromkeys(options.peer_module))
    for name in options.peer_module:
        if name in PEERS:
            refuse(f"--peer-module: {name} is a backend of PyTorch's; --peers takes it")
    options.peers = options.peers + options.peer_module
    settings = options.setting or settings
    options.stage = options.stage or stages
    options.functions, options.absent = {}, {}
    try:
        if options.direction != "both":  # there the library must say which stage is of which pass
            set_pass(options, options.direction, options.stage)
    except ValueError as error:
        refuse(f"--stage: {error}")
    options.cells = [cell for setting in settings
                     for cell in cells_of(setting, options.seqlen, options.head_dim, options.mask, options.batch, options.heads)]
    return options


def ids_of(stage, known):
    """Of the known ids, those that a stage's number, or its number and letter, mean."""
    return [name for name in known if name == stage or (len(stage) == 2 and name.startswith(stage))]


def resolve(runs, known):
    """A number without a letter means the last step of that stage. Raises ValueError."""
    resolved = []
    for run in runs:
        ids = ids_of(run.stage, known)
        if not ids:
            raise ValueError(f"there is no stage {run.stage!r}{' of the backward pass' if run.backward else ''}; there are "
                             f"{', '.join(known) or 'none'}")
        resolved.append(run._replace(stage=ids[-1], name=run.name.replace(run.stage, ids[-1], 1)))
    return list(dict.fromkeys(resolved))


def main(arguments=None):
    options = parse(arguments)
    torch = torch_with_a_card(refuse)
    try:
        library = abi.Library(options.library)
        passes = passes_of(options, library)
    except abi.Error as error:
        refuse(f"--library: {error}")
    except ValueError as error:
        refuse(f"--stage: {error}")
    try:
        functions, absent, versions = import_peers(options.peer_module)
    except ValueError as error:
        refuse(f"--peer-module: {error}")
    for its in passes:
        its.functions, its.absent = functions, absent

    torch.set_float32_matmul_precision("highest")  # the reference is fp32, not TF32
    torch.manual_seed(options.seed)
    card, stopwatch = describe_card(torch), Stopwatch(torch)
    command = shlex.join(["python3", *sys.argv] if arguments is None else ["python3", "bench_peers.py", *arguments])
    print(f"{card['name']}, driver {card.get('driver', 'unknown')}, torch {card['torch']}, cuDNN {card['cudnn']}; "
          f"commit {library.commit[:12] or 'unknown'}; {options.dtype}, layout {','.join(options.layout)}")
    ceilings = measure_ceilings(torch, stopwatch, options)
    print(f"ceilings, same run: copy {ceilings['copy_tb_per_s']:.2f} TB/s, bf16 product {ceilings['matmul_tflops']:.0f} TFLOP/s")
    for name, reason in absent.items():
        print(f"{name}: absent: {reason}")

    result = {"device": card, "commit": library.commit, "command": command,
              "method": {"rounds": options.rounds, "measurement_ms": options.measurement_ms, "warmup_ms": WARMUP_MS,
                         "seed": options.seed, "ratio": "median over the rounds of the ratio of milliseconds"},
              "ceilings": ceilings,
              "peers": {name: {"absent": absent[name]} if name in absent else
                        {"version": versions[name]} if name in versions else {} for name in options.peers},
              "cells": []}
    if not library.commit:
        del result["commit"]
    wrong = False
    for its in passes:
        wrong |= time_pass(torch, library, stopwatch, its, ceilings, result)
    if not any(report["runs"] for report in result["cells"]):
        refuse("nothing could be timed; the lines above say why", 1 if wrong else 3)
    if options.svg:
        try:
            plot_peers.draw(result, options.svg)
        except plot_peers.NoPicture as error:
            print(f"bench_peers.py: no picture: {error}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


def passes_of(options, library):
    """The options of each pass that is timed. Raises ValueError."""
    known = {"fwd": library.stages(abi.CUDA), "bwd": library.backward_stages(abi.CUDA)}
    passes = []
    words = {options.direction: options.stage} if options.direction != "both" else words_of_passes(options.stage, known)
    for direction, stages in words.items():
        its = copy.copy(options)
        set_pass(its, direction, stages)
        its.runs = resolve(its.runs, known[direction])
        passes.append(its)
    return passes


def time_pass(torch, library, stopwatch, options, ceilings, result):
    """Times the cells of one pass, prints its table and adds them to the result. Returns whether a stage gave wrong values."""
    table = LadderTable() if options.ladder else BesideTable([run.name for run in options.runs] + options.peers, options.peers)
    reports, wrong = [], False
    for number, cell in enumerate(options.cells):

        def progress(text, where=f"cell {number + 1} of {len(options.cells)}"):
            if sys.stderr.isatty():
                print(f"\r\x1b[K{where}, {text}" if text else "\r\x1b[K", end="", file=sys.stderr, flush=True)

        report = time_cell(torch, library, stopwatch, options, cell, ceilings, progress)
        progress("")
        reports.append(report)
        result["cells"].append(report)
        wrong |= any(reason.startswith("WRONG") for reason in report["left_out"].values())
        if report["runs"]:
            table.add(report)
        for note in notes(report, options.absent):
            print(f"{problem_name(report['problem'])}: {note}", flush=True)
        if options.json:  # after each cell: what is interrupted keeps what it has
            try:
                whole_file.write(options.json, json.dumps(result, indent=1) + "\n")
            except OSError as error:
                refuse(str(error))
    table.end(reports)
    return wrong


if __name__ == "__main__":
    main()
