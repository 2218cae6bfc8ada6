#!/usr/bin/env python3
"""Draws what bench_peers.py measured: plot_peers.py RESULT.json PICTURE.svg

For each setting, head dimension and mask a panel of TFLOP/s: over the length where there are three or more, else by stage.
The dashed line is the large bf16 product of the same run. Needs gnuplot 5 and no Python package.
"""
import contextlib
import json
import os
import shutil
import subprocess
import sys

PANEL = (480, 360)  # pixels
# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")


class NoPicture(Exception):
    """Why nothing was drawn, in one line."""


def quoted(text):
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def passes_of(result):
    """The passes that were timed, "fwd" and "bwd"."""
    return {cell["problem"].get("pass", "fwd") for cell in result["cells"] if cell["runs"]}


def panels_of(result):
    """{title: cells}, in the order of the file; cells without times are left out."""
    panels, both = {}, len(passes_of(result)) == 2
    for cell in result["cells"]:
        problem = cell["problem"]
        if cell["runs"]:
            mask = "causal" if problem["causal"] else "no mask"
            title = f"{cell['setting']}: {problem['heads']} heads, d {problem['head_dim']}, {mask}"
            title = f"{'backward' if problem.get('pass') == 'bwd' else 'forward'}, {title}" if both else title
            panels.setdefault(title, []).append(cell)
    return panels


def panel_script(title, cells, ceiling, top):
    names = list(dict.fromkeys(run["name"] for cell in cells for run in cell["runs"]))
    table = [{run["name"]: run["tflops"] for run in cell["runs"]} for cell in cells]
    lengths = [cell["problem"]["seqlen_q"] for cell in cells]
    script = f"set title {quoted(title)}\nset yrange [0:{top}]\nunset xtics\n"
    ceiling_line = f'{ceiling} with lines lw 2 dt 2 lc rgb "#888888" title "bf16 product"' if ceiling else ""
    if len(cells) >= 3:
        script += "$panel << EOD\n"
        for length, row in zip(lengths, table):
            script += f"{length} " + " ".join(str(row.get(name, "NaN")) for name in names) + "\n"
        script += f'EOD\nset logscale x 2\nset xrange [{min(lengths) / 1.3}:{max(lengths) * 1.3}]\nset xlabel "N"\n'
        script += "set xtics nomirror norotate center (" + ", ".join(str(length) for length in lengths) + ")\n"
        plots = [f'$panel using 1:{2 + at} with linespoints pt 7 ps 0.6 lw 2 lc rgb "{COLOURS[at % len(COLOURS)]}" '
                 f'title {quoted(name)}' for at, name in enumerate(names)]
    else:
        script += "$panel << EOD\n"
        for at, name in enumerate(names):
            script += f"{at} " + " ".join(str(row.get(name, "NaN")) for row in table) + "\n"
        width = 0.8 / len(cells)
        script += f'EOD\nunset logscale x\nset xrange [-0.7:{len(names) - 0.3}]\nset xlabel ""\nset boxwidth {width * 0.95}\n'
        labels = ", ".join(f"{quoted(name)} {at}" for at, name in enumerate(names))
        script += f"set xtics nomirror rotate by 30 right ({labels})\n"
        plots = [f'$panel using ($1+{(at - (len(cells) - 1) / 2) * width}):{2 + at} with boxes fs solid noborder '
                 f'lc rgb "{COLOURS[at]}" title "N {length}"' for at, length in enumerate(lengths)]
    return script + "plot " + ", ".join(plots + [ceiling_line] * bool(ceiling_line)) + "\n"


def script_of(result):
    panels = panels_of(result)
    if not panels:
        raise NoPicture("no cell has a time")
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    ceiling = result.get("ceilings", {}).get("matmul_tflops", 0)
    top = 1.05 * max([ceiling] + [run["tflops"] for cells in panels.values() for cell in cells for run in cell["runs"]])
    head = (f'set terminal svg size {PANEL[0] * columns},{PANEL[1] * rows + 40} font "sans-serif,12" noenhanced '
            'background "white"\n'
            "set border 3\nset tics nomirror out\nset grid ytics lc rgb \"#dddddd\"\nset key below center horizontal samplen 1\n"
            'set ylabel "TFLOP/s"\n')
    passes = " and ".join(name for name, its in (("forward", "fwd"), ("backward", "bwd")) if its in passes_of(result))
    heading = f"{passes.capitalize()} on {result.get('device', {}).get('name', 'an unknown card')}"
    body = f"set multiplot layout {rows},{columns} title {quoted(heading)}\n"
    return head, body + "".join(panel_script(title, cells, ceiling, top) for title, cells in panels.items()) + "unset multiplot\n"


def draw(result, picture):
    """Writes the picture beside, then renames it. Raises NoPicture."""
    try:
        head, body = script_of(result)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NoPicture(f"not a result of bench_peers.py: {error!r}") from None
    gnuplot = shutil.which("gnuplot")
    if not gnuplot:
        raise NoPicture("gnuplot was not found; install gnuplot-nox")
    if os.path.exists(picture) and not os.path.isfile(picture):
        raise NoPicture(f"{picture}: not a regular file")
    beside = f"{picture}.{os.getpid()}.new"
    try:
        run = subprocess.run([gnuplot], input=f"{head}set output {quoted(beside)}\n{body}set output\n", text=True,
                             capture_output=True, check=False)
        if run.returncode != 0 or not os.path.isfile(beside) or os.path.getsize(beside) == 0:
            raise NoPicture("gnuplot: " + (run.stderr.strip().splitlines() or ["it drew nothing"])[-1].strip())
        os.replace(beside, picture)
    except OSError as error:
        raise NoPicture(str(error)) from None
    finally:
        with contextlib.suppress(OSError):
            os.remove(beside)


def main(arguments):
    try:
        if len(arguments) != 2:
            raise NoPicture("two arguments are needed: RESULT.json PICTURE.svg")
        with open(arguments[0], encoding="utf-8") as file:
            result = json.load(file)
        draw(result, arguments[1])
    except (NoPicture, OSError, ValueError) as error:
        print(f"plot_peers.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
