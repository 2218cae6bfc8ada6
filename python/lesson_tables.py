#!/usr/bin/env python3
"""Writes the measured tables of the lessons anew from the files in docs/results.

A table is known by its head: one that begins with `| d | N | mask |` and goes on with names of runs is filled from
steps_h200.json (batch as the ladder has it); one that begins with `| d | mask | N |` and goes on with names of runs,
each a column of milliseconds, and ratios (`08 / FlashAttention-2`) from the first of peers_h200.json,
hopper_steps_h200.json and backward_h200.json that has all of these runs. What is not in a file is left empty. Files are written beside and renamed.
"""

import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = {"FlashAttention-2": "flash", "cuDNN": "cudnn"}
MASKS = {False: "none", True: "causal"}


def load(name):
    path = ROOT / "docs" / "results" / name
    return json.loads(path.read_text())["cells"] if path.exists() else []


def runs_of(cell):
    """name -> (milliseconds, TFLOP/s) of one cell."""
    return {run["name"]: (run["median_ms"], run["tflops"]) for run in cell["runs"] if "median_ms" in run}


def ratio_of(cell, name, peer):
    """The median over the rounds of the ratio of milliseconds, as the file has it."""
    return cell["speedups"][name][peer]


def milliseconds(ms):
    return f"{ms:.2f}" if ms < 1 else f"{ms:#.3g}"


def steps_table(names):
    rows = []
    for cell in sorted((c for c in load("steps_h200.json") if c["setting"] == "full"), key=order_of_steps):
        p, runs = cell["problem"], runs_of(cell)
        columns = [f"{milliseconds(runs[n][0])} ms, {runs[n][1]:.0f}" if n in runs else "" for n in names]
        rows.append([str(p["head_dim"]), str(p["seqlen_k"]), MASKS[p["causal"]]] + columns)
    return rows


def order_of_steps(cell):
    p = cell["problem"]
    return p["head_dim"], p["seqlen_k"], p["causal"]


def order(cell):
    p = cell["problem"]
    return p["head_dim"], p["causal"], p["seqlen_k"]


def peers_table(columns):
    timed = [column for column in columns if column != "TFLOP/s"]
    names = [PEERS.get(n, n) for column in timed for n in column.replace(" ms", "").split(" / ")]
    rows = []
    for file in ("peers_h200.json", "hopper_steps_h200.json", "backward_h200.json"):
        if rows:
            break  # the first that has these runs
        for cell in sorted(load(file), key=order):
            runs, p = runs_of(cell), cell["problem"]
            if not all(n in runs for n in names):
                continue
            row = [str(p["head_dim"]), MASKS[p["causal"]], str(p["seqlen_k"])]
            for i, column in enumerate(columns):
                if " / " in column:
                    name, peer = (PEERS.get(n, n) for n in column.split(" / "))
                    row.append(f"{ratio_of(cell, name, peer):.3f}")
                elif column.endswith(" ms"):
                    row.append(f"{runs[PEERS.get(column[:-3], column[:-3])][0]:.3f}")
                elif column == "TFLOP/s":
                    last = columns[i - 1][:-3]  # of the column before
                    row.append(f"{runs[PEERS.get(last, last)][1]:.0f}")
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


def main():
    changed = 0
    for path in sorted(ROOT.glob("[01][0-9]_*/README.md")) + [ROOT / "README.md"]:
        text = path.read_text()
        filled = fill(text)
        if filled != text:
            beside = path.with_suffix(".tmp")
            beside.write_text(filled)
            os.replace(beside, path)
            changed += 1
            print(path.relative_to(ROOT))
    print(f"{changed} files changed")


if __name__ == "__main__":
    sys.exit(main())
