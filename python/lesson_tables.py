#!/usr/bin/env python3
"""Writes the measured tables of the lessons anew from the files in docs/results.

A table is known by its head: one that begins with `| d | N | mask |` and goes on with names of runs is filled from
steps_h200.json (batch as the ladder has it); one that begins with `| d | mask | N |` and goes on with names of runs,
each a column of milliseconds, and ratios (`08 / FlashAttention-2`) from the first of peers_h200.json and
hopper_steps_h200.json that has all of these runs. What is not in a file is left empty. Files are
written beside and renamed.
"""

import json
import pathlib
import sys

import whole_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = {"FlashAttention-2": "flash", "cuDNN": "cudnn"}
MASKS = {False: "none", True: "causal"}


def load(name):
    path = ROOT / "docs" / "results" / name
    return json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []


def runs_of(cell):
    """name -> (milliseconds, TFLOP/s) of one cell."""
    return {run["name"]: (run["median_ms"], run["tflops"]) for run in cell["runs"] if "median_ms" in run}


def run_of(column):
    """The run that a column is of, as the files name it: `FlashAttention-2 ms` is of `flash`."""
    name = column.removesuffix(" ms")
    return PEERS.get(name, name)


def milliseconds(ms):
    return f"{ms:.2f}" if ms < 1 else f"{ms:#.3g}"


def ordered(cells, *keys):
    return sorted(cells, key=lambda cell: [cell["problem"][key] for key in keys])


def steps_table(names):
    cells = [cell for cell in load("steps_h200.json") if cell["setting"] == "full"]
    rows = []
    for cell in ordered(cells, "head_dim", "seqlen_k", "causal"):
        p, runs = cell["problem"], runs_of(cell)
        columns = [f"{milliseconds(runs[n][0])} ms, {runs[n][1]:.0f}" if n in runs else "" for n in names]
        rows.append([str(p["head_dim"]), str(p["seqlen_k"]), MASKS[p["causal"]]] + columns)
    return rows


def peers_table(columns):
    names = [run_of(n) for column in columns if column != "TFLOP/s" for n in column.split(" / ")]
    rows = []
    for file in ("peers_h200.json", "hopper_steps_h200.json"):
        if rows:
            break  # the first that has these runs
        for cell in ordered(load(file), "head_dim", "causal", "seqlen_k"):
            runs, p = runs_of(cell), cell["problem"]
            if not all(n in runs for n in names):
                continue
            row = [str(p["head_dim"]), MASKS[p["causal"]], str(p["seqlen_k"])]
            for i, column in enumerate(columns):
                if column == "TFLOP/s":
                    row.append(f"{runs[run_of(columns[i - 1])][1]:.0f}")  # of the column before
                elif column.endswith(" ms"):
                    row.append(f"{runs[run_of(column)][0]:.3f}")
                else:  # the median over the rounds of the ratio of milliseconds
                    name, peer = map(run_of, column.split(" / "))
                    row.append(f"{cell['speedups'][name][peer]:.3f}")
            rows.append(row)
    return rows


def fill(text):
    lines, out, i = text.split("\n"), [], 0
    while i < len(lines):
        heads = [h.strip() for h in lines[i].strip("|").split("|")]
        rows = None
        if lines[i].startswith("| d | N | mask |"):
            rows = steps_table(heads[3:])
        elif lines[i].startswith("| d | mask | N |"):
            rows = peers_table(heads[3:])
        out.append(lines[i])
        i += 1
        if not rows:
            continue
        out.append(lines[i])  # the line below the head
        i += 1
        while i < len(lines) and lines[i].startswith("|"):
            i += 1
        out += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(out)


def lessons():
    return sorted(ROOT.glob("[01][0-9]_*/README.md"))


def main():
    changed = 0
    for path in lessons():
        text = path.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            whole_file.write(path, filled)
            changed += 1
            print(path.relative_to(ROOT))
    print(f"{changed} files changed")


if __name__ == "__main__":
    sys.exit(main())
