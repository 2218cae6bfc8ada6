#!/usr/bin/env python3
"""Times PyTorch's attention beside ours, on one card in one run.

    python3 python/bench_math.py --attention build/cuda/bin/attention --stage 02d,03 --seqlen 2048 --head-dim 128

PyTorch's backends: `math` as it comes (for 16-bit inputs it computes in fp32), `math16` (all of it
in 16 bits, as torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True) asks), `flash`
(FlashAttention-2) and `cudnn`. The method is that of docs/method.md: device events around launches
back to back behind a spinning kernel, warm, on random normal inputs that rotate through more than
the L2 cache; rounds that time everybody in turn; a ratio is the median over the rounds of the ratio
of milliseconds. Needs torch with CUDA, and nothing else.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile

BACKENDS = ("math", "math16", "flash", "cudnn")
MEASUREMENT_MS = 20  # as TimingOptions in common/timing/timing.h
MOST_LAUNCHES = 256
WARMUP_MS = 50


def refuse(message, status=2):
    print(f"bench_math.py: {message}", file=sys.stderr)
    sys.exit(status)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", metavar="PROGRAM", help="our program; without it PyTorch is timed alone")
    parser.add_argument("--stage", default="all", help="stages of ours, as `attention bench --stage` takes them")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    options = parser.parse_args()
    options.backends = options.backends.split(",")
    for name in options.backends:
        if name not in BACKENDS:
            refuse(f"--backends: there is no {name!r}; there are {', '.join(BACKENDS)}")
    for name in ("batch", "heads", "seqlen", "head_dim", "rounds"):
        if getattr(options, name) < 1:
            refuse(f"--{name.replace('_', '-')} is {getattr(options, name)}; 1 or more is allowed")
    return options


class Stopwatch:
    """Milliseconds of one call of `launch(i)`; i counts on, so that inputs can rotate."""

    def __init__(self, torch):
        self.torch = torch
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.spin_us = 100
        self.next = 0

    def measure(self, launch, launches):
        torch = self.torch
        while True:
            spin_us = min(self.spin_us + 10 * launches, 20_000)
            torch.cuda._sleep(int(spin_us * 2000))  # cycles, at about 2 GHz
            self.start.record()
            for _ in range(launches):
                launch(self.next)
                self.next += 1
            self.stop.record()
            hidden = not self.start.query()  # still spinning: the card never waited for the host
            self.stop.synchronize()
            if hidden or spin_us >= 20_000:
                return self.start.elapsed_time(self.stop) / launches
            self.spin_us *= 2

    def plan(self, launch):
        """Warms up; returns how many launches make a measurement."""
        launch(0)
        self.torch.cuda.synchronize()
        launches, spent = 1, 0.0
        while True:
            one = self.measure(launch, launches)
            spent += max(one * launches, 0.1)
            launches = max(1, min(MOST_LAUNCHES, math.ceil(MEASUREMENT_MS / max(one, 5e-4))))
            if spent >= WARMUP_MS:
                return launches, max(1, min(10, int(80 / (launches * one))))


def backend_launch(torch, name, sets, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    backend = {"math": SDPBackend.MATH, "math16": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
               "cudnn": SDPBackend.CUDNN_ATTENTION}[name]

    def launch(i):
        q, k, v = sets[i % len(sets)]
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def within(action):
        allow = getattr(torch.backends.cuda, "allow_fp16_bf16_reduction_math_sdp", None)
        if name == "math16" and allow is None:
            raise RuntimeError(f"torch {torch.__version__} has no such mode; its math computes in 16 bits")
        if allow:
            allow(name == "math16")
        with torch.no_grad(), sdpa_kernel([backend]):
            return action(launch)

    return within


def run_ours(options):
    """One `attention bench`: {stage: milliseconds}, and its whole report."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "bench.json")
        command = [options.attention, "bench", "--device", "cuda", "--stage", options.stage, "--json", report,
                   "--batch", str(options.batch), "--heads", str(options.heads), "--seqlen", str(options.seqlen),
                   "--head-dim", str(options.head_dim), "--dtype", options.dtype, "--seed", str(options.seed)]
        if options.causal:
            command.append("--causal")
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            refuse(f"--attention: {error}")
        if run.returncode != 0:
            lines = (run.stderr or run.stdout).strip().splitlines() or ["it said nothing"]
            refuse(f"{' '.join(command)} ended with {run.returncode}: {lines[-1]}", run.returncode)
        with open(report, encoding="utf-8") as file:
            result = json.load(file)
    return {stage["stage"]: stage["time"]["median_ms"] for stage in result["stages"] if "time" in stage}, result


def main():
    options = parse()
    try:
        import torch
    except ImportError:
        refuse("torch is not installed for this python3", 3)
    if not torch.cuda.is_available():
        refuse("torch sees no CUDA card", 3)

    torch.manual_seed(options.seed)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
    shape = (options.batch, options.heads, options.seqlen, options.head_dim)
    properties = torch.cuda.get_device_properties(0)
    cache = getattr(properties, "L2_cache_size", 64 << 20)
    set_bytes = 3 * 2 * math.prod(shape)
    count = max(2, min(64, cache // set_bytes + 1))
    sets = [tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)) for _ in range(count)]

    stopwatch = Stopwatch(torch)
    peers, left_out = {}, {}
    for name in options.backends:
        within = backend_launch(torch, name, sets, options.causal)
        try:
            peers[name] = (within, *within(stopwatch.plan))
        except RuntimeError as error:  # out of memory is one of these
            left_out[name] = str(error).strip().splitlines()[0]
            torch.cuda.empty_cache()

    rounds, report = [], None
    for number in range(options.rounds):
        times = {}
        for name, (within, launches, reps) in peers.items():
            times[name] = statistics.median(
                within(lambda launch: [stopwatch.measure(launch, launches) for _ in range(reps)]))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # leaves memory for our program
        if options.attention:
            ours, report = run_ours(options)
            times.update(ours)
        rounds.append(times)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)

    pairs = options.seqlen * (options.seqlen + 1) / 2 if options.causal else options.seqlen**2
    flops = 4 * options.batch * options.heads * options.head_dim * pairs
    everybody = [name for name in rounds[0] if all(name in times for times in rounds)]
    stages = [name for name in everybody if name not in peers]
    result = {
        "device": {"name": properties.name, "torch": torch.__version__, "torch_cuda": torch.version.cuda,
                   "cudnn": torch.backends.cudnn.version()},
        "command": " ".join(sys.argv),
        "problem": {"batch": options.batch, "heads": options.heads, "seqlen": options.seqlen,
                    "head_dim": options.head_dim, "dtype": options.dtype, "causal": options.causal},
        "rounds_ms": rounds, "left_out": left_out, "times": {}, "speedups": {},
    }
    for key in ("device", "commit"):
        if report and key in report:
            result["ours_" + key] = report[key]

    print(f"{properties.name}, torch {torch.__version__}; batch {options.batch}, heads {options.heads}, "
          f"seqlen {options.seqlen}, head_dim {options.head_dim}, {options.dtype}, "
          f"{'causal' if options.causal else 'no mask'}")
    print("\n" + f"{'':10}{'ms':>10}{'TFLOP/s':>10}" + "".join(f"{'x ' + name:>10}" for name in peers))
    for name in everybody:
        ms = statistics.median(times[name] for times in rounds)
        result["times"][name] = {"median_ms": ms, "tflops": flops / ms / 1e9}
        line = f"{name:10}{ms:10.4f}{flops / ms / 1e9:10.1f}"
        if name in stages:
            # How many times as fast as the peer.
            result["speedups"][name] = {
                peer: statistics.median(times[peer] / times[name] for times in rounds) for peer in peers}
            line += "".join(f"{ratio:10.3f}" for ratio in result["speedups"][name].values())
        print(line)
    for name, reason in left_out.items():
        print(f"{name:10}left out: {reason}")

    if options.json:
        beside = f"{options.json}.{os.getpid()}.new"
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
        os.replace(beside, options.json)


if __name__ == "__main__":
    main()
