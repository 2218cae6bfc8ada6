#!/usr/bin/env python3
"""Writes the README's section on speed anew from peers_h200.json in docs/results, which has both passes.

What is between the lines `<!-- BEGIN MEASURED -->` and `<!-- END MEASURED -->` is the script's: a summary, the picture, and a table
of TFLOP/s. A peer that could not run is marked absent; what was not timed is left empty. The README is written beside and
renamed.
"""
import json
import pathlib
import sys

import whole_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = "docs/results"
BEGIN, END = "<!-- BEGIN MEASURED -->", "<!-- END MEASURED -->"
LESSONS = {"08": "08_causal_skip/README.md", "09": "09_backward/README.md", "10e": "10_hopper/README.md"}
# The table's columns: the pass, the run as bench_peers.py names it, the head.
COLUMNS = (("fwd", "08", "08"), ("fwd", "10e", "10e"), ("fwd", "flash", "FA-2"), ("fwd", "cudnn", "cuDNN"),
           ("bwd", "09", "09"), ("bwd", "09:det", "09 fixed order"), ("bwd", "flash", "FA-2"), ("bwd", "cudnn", "cuDNN"))
MASKS = {False: "none", True: "causal"}


def load():
    return json.loads((ROOT / RESULTS / "peers_h200.json").read_text(encoding="utf-8"))


def cells_of(result, direction):
    """{(head_dim, causal, N): cell} of one pass, in the papers' setting."""
    return {(cell["problem"]["head_dim"], cell["problem"]["causal"], cell["problem"]["seqlen_q"]): cell
            for cell in result["cells"] if cell["setting"] == "course" and cell["problem"]["pass"] == direction}


def entry(cell, name):
    """A run's TFLOP/s in a cell, "absent", or nothing."""
    if cell is None:
        return ""
    if name in cell.get("absent", {}):
        return "absent"
    return next((f"{run['tflops']:.0f}" for run in cell["runs"] if run["name"] == name and "tflops" in run), "")


def ratios(cells, stage, peer):
    """ "1.04 to 1.24": how many times as fast a stage is as a peer, the least and the most."""
    values = [cell["speedups"][stage][peer] for cell in cells if peer in cell["speedups"].get(stage, {})]
    if not values:
        raise ValueError(f"no cell has both {stage} and {peer}")
    return f"{min(values):.2f} to {max(values):.2f}"


def linked(stage):
    return f"[{stage}]({LESSONS[stage]})"


def section(result):
    """The lines between the marks."""
    cells = {direction: cells_of(result, direction) for direction in ("fwd", "bwd")}
    fwd, bwd = list(cells["fwd"].values()), list(cells["bwd"].values())
    most = max(run["tflops"] for cell in fwd for run in cell["runs"] if run["name"] == "10e")
    dtypes = {cell["problem"]["dtype"] for cell in fwd + bwd}
    lines = [
        f"On one {result['device']['name']} with torch {result['device']['torch']}, {' and '.join(sorted(dtypes))}, "
        f"in the papers' {len(fwd)} cells (batch · N = 16384, heads · d = 2048):",
        "",
        f"- {linked('08')} is {ratios(fwd, '08', 'flash')} times as fast as PyTorch's FlashAttention-2;",
        f"- {linked('10e')} {ratios(fwd, '10e', 'flash')} times, and {ratios(fwd, '10e', 'cudnn')} times as fast as cuDNN; "
        f"up to {most:.0f} TFLOP/s;",
        f"- the backward pass of {linked('09')} {ratios(bwd, '09', 'flash')} times as fast as FlashAttention-2's "
        f"({ratios(bwd, '09:det', 'flash')} times where dQ is summed in a fixed order).",
        "",
        f"![TFLOP/s of 08 and 10e beside FlashAttention-2 and cuDNN, over N]({RESULTS}/peers_h200.svg)",
        "",
        f"TFLOP/s, medians of {result['method']['rounds']} interleaved rounds ([how](docs/method.md), "
        f"[what else was measured]({RESULTS}/README.md)); the first four columns are forward passes, the others backward passes:",
        "",
        "| d | mask | N | " + " | ".join(head for _, _, head in COLUMNS) + " |",
        "|--:|---|--:|" + "--:|" * len(COLUMNS),
    ]
    for key in sorted({*cells["fwd"], *cells["bwd"]}):
        head_dim, causal, seqlen = key
        entries = [entry(cells[direction].get(key), name) for direction, name, _ in COLUMNS]
        lines.append("| " + " | ".join([str(head_dim), MASKS[causal], str(seqlen), *entries]) + " |")
    return lines


def fill(text, result=None):
    """The README's text with its section written anew. Raises ValueError where the marks are not there once each, in order."""
    lines = text.split("\n")
    if lines.count(BEGIN) != 1 or lines.count(END) != 1 or lines.index(BEGIN) > lines.index(END):
        raise ValueError(f"README.md has not one {BEGIN} and one {END} after it")
    made = section(result or load())
    return "\n".join(lines[:lines.index(BEGIN) + 1] + made + lines[lines.index(END):])


def main():
    try:
        text = README.read_text(encoding="utf-8")
        filled = fill(text)
    except (OSError, ValueError, KeyError) as error:
        print(f"readme_table.py: {error}", file=sys.stderr)
        return 2
    if filled != text:
        whole_file.write(README, filled)
    print("README.md " + ("was written" if filled != text else "holds what was measured"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
