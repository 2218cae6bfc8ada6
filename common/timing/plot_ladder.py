#!/usr/bin/env python3
"""Draws the ladder: plot_ladder.py LADDER.json PICTURE.svg

Reads what `attention ladder --json` wrote. On a card: a bar for each stage, TFLOP/s, under the measured ceiling of a
large product. On the CPU model: the bytes that each stage's threads ask of global memory, by tensor. Needs gnuplot 5
and no Python package.
"""
import json
import os
import shutil
import subprocess
import sys

# A colour for each tensor that stages keep in global memory, the same in every picture.
TENSOR_COLOURS = {
    "Q": "#4477aa", "K": "#66ccee", "V": "#228833", "O": "#ccbb44", "S": "#ee6677", "P": "#aa3377",
    "O_acc": "#ddaa33", "m": "#999999", "l": "#bbbbbb", "L": "#666666",
}
OTHER_COLOUR = "#000000"
STYLE = """set terminal svg size 960,480 font "sans-serif,14" noenhanced background "white"
set style fill solid noborder
set boxwidth 0.7
set border 3
set tics nomirror out
set grid ytics lc rgb "#dddddd"
set yrange [0:*]
set offsets 0.6, 0.6, 0, 0
"""


def refuse(message, status=2):
    print(f"plot_ladder.py: {message}", file=sys.stderr)
    sys.exit(status)


def quoted(text):
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def read_ladder(path):
    try:
        with open(path, encoding="utf-8") as file:
            ladder = json.load(file)
    except (OSError, ValueError) as error:
        refuse(f"{path}: {error}")
    if not isinstance(ladder, dict) or not isinstance(ladder.get("stages"), list):
        refuse(f'{path}: not a ladder: an object with "stages" is expected, as `attention ladder --json` writes it')
    return ladder


def title(ladder, what):
    problem, device = ladder.get("problem", {}), ladder.get("device", {})
    names = ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim")
    shape = ", ".join(f"{name} {problem[name]}" for name in names if name in problem)
    mask = "causal" if problem.get("causal") else "no mask"
    return quoted(f"{what} on {device.get('name', 'an unknown device')}\n{shape}, {problem.get('dtype', '')}, {mask}")


def tics(stages):
    labels = (quoted(f"{stage['stage']} {stage['name']}") + f" {at}" for at, stage in enumerate(stages))
    return f"set xtics rotate by 25 right ({', '.join(labels)})\n"


def timed_script(ladder, stages):
    script = f'set title {title(ladder, "Forward")}\nset ylabel "TFLOP/s"\n' + tics(stages)
    script += "$bars << EOD\n"
    for at, stage in enumerate(stages):
        script += f"{at} {stage['time']['tflops']}\n"
    script += "EOD\n"
    plots = ['$bars using 1:2 with boxes lc rgb "#4477aa" notitle',
             '$bars using 1:2:(sprintf("%.3g", $2)) with labels offset 0,0.7 notitle']
    ceiling = ladder.get("ceilings", {}).get("matmul_tflops")
    if ceiling:
        plots.append(f'{ceiling} with lines lw 2 dt 2 lc rgb "#ee6677" title "large bf16 product by cuBLAS, same run"')
        script += f"set yrange [0:{1.25 * max(ceiling, *(s['time']['tflops'] for s in stages))}]\nset key top left\n"
    return script + "plot " + ", ".join(plots) + "\n"


def counted_script(ladder, stages):
    def bytes_of(stage):
        counts, total = stage["counts"], {}
        for table in ("global_read", "global_written"):
            for tensor, count in counts.get(table, {}).items():
                total[tensor] = total.get(tensor, 0) + count
        return total

    by_stage = [bytes_of(stage) for stage in stages]
    present = {tensor for total in by_stage for tensor in total}
    tensors = [t for t in TENSOR_COLOURS if t in present] + sorted(present - TENSOR_COLOURS.keys())
    script = f'set title {title(ladder, "Global memory, bytes read and written")}\n'
    script += 'set ylabel "MB asked for by the threads"\nset key outside right reverse Left invert\n' + tics(stages)
    script += "$bars << EOD\n"
    for at, total in enumerate(by_stage):
        heights, sum_so_far = [], 0
        for tensor in tensors:
            sum_so_far += total.get(tensor, 0) / 1e6
            heights.append(str(sum_so_far))
        script += f"{at} {' '.join(heights)}\n"
    script += "EOD\n"
    # The tallest first: each later bar hides the lower part of the one before.
    plots = [f"$bars using 1:{2 + index} with boxes lc rgb \"{TENSOR_COLOURS.get(tensor, OTHER_COLOUR)}\" title "
             + quoted(tensor) for index, tensor in reversed(list(enumerate(tensors)))]
    plots.append(f'$bars using 1:{1 + len(tensors)}:(sprintf("%.3g", ${1 + len(tensors)})) with labels '
                 "offset 0,0.7 notitle")
    return script + "plot " + ", ".join(plots) + "\n"


def main(arguments):
    if len(arguments) != 2:
        refuse("two arguments are needed: LADDER.json PICTURE.svg")
    source, picture = arguments
    ladder = read_ladder(source)
    try:
        timed = [stage for stage in ladder["stages"] if "time" in stage]
        counted = [stage for stage in ladder["stages"] if "counts" in stage]
        if timed:
            script = timed_script(ladder, timed)
        elif counted:
            script = counted_script(ladder, counted)
        else:
            refuse(f"{source}: no stage in it has a time or counts")
    except (KeyError, TypeError, AttributeError) as error:
        refuse(f"{source}: not a ladder that `attention ladder --json` wrote: {error!r}")
    gnuplot = shutil.which("gnuplot")
    if not gnuplot:
        refuse("gnuplot was not found; install gnuplot-nox", 3)
    if os.path.exists(picture) and not os.path.isfile(picture):
        refuse(f"{picture}: not a regular file")
    beside = f"{picture}.{os.getpid()}.new"
    try:
        run = subprocess.run([gnuplot], input=f"{STYLE}set output {quoted(beside)}\n{script}set output\n",
                             text=True, capture_output=True, check=False)
        if run.returncode != 0 or not os.path.isfile(beside) or os.path.getsize(beside) == 0:
            lines = run.stderr.strip().splitlines() or ["it drew nothing"]
            refuse(f"gnuplot: {lines[-1].strip()}")
        os.replace(beside, picture)
    except OSError as error:
        refuse(str(error))
    finally:
        if os.path.exists(beside):
            os.remove(beside)


if __name__ == "__main__":
    main(sys.argv[1:])
