#!/usr/bin/env python3
"""Measures the memory that a forward and a backward pass take beside their inputs and outputs, on one card.

    python3 python/memory.py --json memory.json              08 and 10e, each with 09, beside standard attention

Standard attention is softmax(scale Q K^T) V in torch's operations, differentiated by torch: it keeps P, of size N², for the
backward pass, and makes S, dP and dS of that size. A stage is called through the package flashsteps, so its workspaces come
from torch's allocator as all tensors do. What is counted is what was asked of the allocator at the peak, less Q, K, V and dO,
which are there before, and O, dQ, dK and dV, which are there after. L is no output here: it is kept between the two passes.
Where an output is made only after the peak, what is counted is too small by its size.
What does not fit the card, or cannot run on it, is absent, with the reason.

The library is the one that the package finds: $FLASHSTEPS_LIBRARY, else the one in build/cuda.

Exit status: 0 all right, 1 a stage failed, 2 bad input, 3 no torch, no card or nothing that can run on it.
"""
import argparse
import json
import math
import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import bench_peers  # noqa: E402
import whole_file  # noqa: E402
import flashsteps  # noqa: E402
from flashsteps import abi  # noqa: E402

STANDARD = "standard"
WARMUP_SEQLEN = 128  # loads code, and lets cuBLAS take what it keeps


def refuse(message, status=2):
    print(f"memory.py: {message}", file=sys.stderr)
    sys.exit(status)


def standard_attention(torch, q, k, v, causal):
    """softmax(Q K^T / sqrt(d)) V of tensors (batch, heads, seqlen, head_dim), with as few matrices of size N² as torch's
    operations need."""

    def scores():
        s = (q * (1 / math.sqrt(q.shape[3]))) @ k.transpose(2, 3)
        if causal:
            s.masked_fill_(torch.ones(s.shape[2:], dtype=torch.bool, device=q.device).triu_(1), -math.inf)
        return s

    return torch.softmax(scores(), dim=3) @ v


def calls_of(torch, stages, backward_stage, causal):
    """{name: function of q, k, v}."""
    calls = {}
    for stage in stages:
        calls[f"{stage}+{backward_stage}"] = lambda q, k, v, stage=stage: flashsteps.attention(
            q, k, v, stage=stage, backward_stage=backward_stage, causal=causal)
    calls[STANDARD] = lambda q, k, v: standard_attention(torch, q, k, v, causal)
    return calls


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def asked_for(torch, which):
    """Bytes that are asked of the allocator: "current" or "peak"."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def step(torch, call, tensors):
    """A forward and a backward pass: O and the gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output = call(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors[3])]


def measure(torch, call, make_tensors, seqlen):
    """The bytes of one step. Raises what the call raises."""
    step(torch, call, make_tensors(WARMUP_SEQLEN))
    tensors = make_tensors(seqlen)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = asked_for(torch, "current")
    torch.cuda.reset_peak_memory_stats()
    outputs = step(torch, call, tensors)
    torch.cuda.synchronize()
    more = asked_for(torch, "peak") - before
    if not all(bool(torch.isfinite(x).all()) for x in outputs):
        raise ValueError("an output is not finite")
    return {"input_bytes": bytes_of(tensors), "output_bytes": bytes_of(outputs), "beside_bytes": more - bytes_of(outputs)}


def report_of(torch, options, seqlen, heads, calls):
    """One cell of the result."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype]

    def make_tensors(n):
        return [torch.randn(options.batch, heads, n, options.head_dim, device="cuda", dtype=dtype) for _ in range(4)]

    report = {"problem": {"batch": options.batch, "heads": heads, "kv_heads": heads, "seqlen_q": seqlen, "seqlen_k": seqlen,
                          "head_dim": options.head_dim, "dtype": options.dtype, "causal": options.mask == "causal"},
              "runs": [], "absent": {}}
    for name, call in calls.items():
        try:
            report["runs"].append({"name": name, **measure(torch, call, make_tensors, seqlen)})
        except torch.cuda.OutOfMemoryError as error:
            report["absent"][name] = bench_peers.first_line(error).split(" GPU ")[0]
        except flashsteps.Unavailable as error:
            report["absent"][name] = bench_peers.first_line(error)
        torch.cuda.empty_cache()
    return report


def sized(count):
    """Bytes for a reader."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def lines_of(report):
    """The lines that tell of a cell."""
    p = report["problem"]
    yield f"batch {p['batch']}, heads {p['heads']}, N {p['seqlen_q']}, d {p['head_dim']}, {'causal' if p['causal'] else 'no mask'}"
    standard = next((run["beside_bytes"] for run in report["runs"] if run["name"] == STANDARD), None)
    for run in report["runs"]:
        line = f"  {run['name']:12}{sized(run['beside_bytes']):>12} beside {sized(run['input_bytes'] + run['output_bytes'])}"
        if standard and run["name"] != STANDARD:
            line += f"; {STANDARD} attention takes {standard / max(1, run['beside_bytes']):.1f} times as much"
        yield line
    for name, reason in report["absent"].items():
        yield f"  {name}: absent: {reason}"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(message.removeprefix("argument "))


def parse(arguments=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=bench_peers.a_list(str), default=["08", "10e"],
                        help="forward stages between commas (default: 08,10e)")
    parser.add_argument("--backward-stage", default="09", metavar="ID", help="(default: 09)")
    parser.add_argument("--seqlen", type=bench_peers.a_list(int), default=[4096, 16384, 65536], help="lengths between commas")
    parser.add_argument("--heads", type=bench_peers.a_list(int), default=[1], help="numbers of heads between commas (default: 1)")
    parser.add_argument("--head-dim", type=bench_peers.positive(int), default=128)
    parser.add_argument("--batch", type=bench_peers.positive(int), default=1)
    parser.add_argument("--mask", choices=bench_peers.MASKS, default="none")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    torch = bench_peers.torch_with_a_card(refuse)
    try:
        library = flashsteps.library()
        for given, known, what in ((options.stage, library.stages(abi.CUDA), "forward"),
                                   ([options.backward_stage], library.backward_stages(abi.CUDA), "backward")):
            for stage in given:
                if stage not in known:
                    refuse(f"{stage!r} is no stage of the {what} pass; there are {', '.join(known) or 'none'}")
    except abi.Error as error:
        refuse(str(error), error.status)

    card = bench_peers.describe_card(torch)
    command = shlex.join(["python3", *sys.argv] if arguments is None else ["python3", "memory.py", *arguments])
    print(f"{card['name']}, torch {card['torch']}; commit {library.commit[:12] or 'unknown'}; {options.dtype}")
    result = {"device": card, "commit": library.commit, "command": command,
              "counted": "bytes asked of torch's allocator at the peak of one forward and backward pass, beside inputs and outputs",
              "cells": []}
    if not library.commit:
        del result["commit"]
    torch.manual_seed(1)
    calls = calls_of(torch, options.stage, options.backward_stage, options.mask == "causal")
    for heads in options.heads:
        for seqlen in options.seqlen:
            try:
                report = report_of(torch, options, seqlen, heads, calls)
            except (RuntimeError, ValueError) as error:
                refuse(bench_peers.first_line(error), getattr(error, "status", 1))
            result["cells"].append(report)
            print("\n".join(lines_of(report)), flush=True)
            if options.json:  # after each cell: what is interrupted keeps what it has
                try:
                    whole_file.write(options.json, json.dumps(result, indent=1) + "\n")
                except OSError as error:
                    refuse(str(error))
    if not any(report["runs"] for report in result["cells"]):
        refuse("nothing could be measured; the lines above say why", 3)


if __name__ == "__main__":
    main()
