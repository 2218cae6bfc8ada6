#!/usr/bin/env python3
"""Compares the model's ledger with the counters of a card, as Nsight Compute reads them.

    python3 python/compare_ncu.py --attention build/cuda/bin/attention --stage 01,02a,02b,02c,02d,03

For each stage: `attention count` gives the ledger, `ncu … attention check --device cuda` the
counters, both for the same problem. Kernels of the stage and the common kernel that computes L
(lse_…) are compared apart. docs/method.md says what each count means and which metric stands for
it. Exit status: 0 all comparable counts are equal, 1 some differ, 2 bad input, 3 the counters
cannot be read here. Needs ncu, the card, and a program with the model in it.
"""
import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import whole_file


def total(name):
    return lambda ledger: sum(ledger[name].values())


def count(name, divisor=1):
    return lambda ledger: ledger[name] / divisor


def either(name):
    """The alternatives sm__NAME and smsp__NAME: the same counter, by unit."""
    return [[f"{unit}__{name}.sum"] for unit in ("sm", "smsp")]


# What the ledger counts -> the metrics that count the same. A count is the sum of its terms; a term is the first of its
# alternatives whose metrics all exist.
COMPARED = [
    ("global bytes read", total("global_read"), [
        either("sass_data_bytes_mem_global_op_ld"),
        either("sass_data_bytes_mem_global_op_ldgsts") + [[
            "sm__sass_data_bytes_mem_global_op_ldgsts_cache_access.sum",
            "sm__sass_data_bytes_mem_global_op_ldgsts_cache_bypass.sum"]],
    ]),
    ("global bytes written", total("global_written"), [either("sass_data_bytes_mem_global_op_st")]),
    ("global bytes by atomics", count("atomic_bytes"), [
        either("sass_data_bytes_mem_global_op_red"), either("sass_data_bytes_mem_global_op_atom")]),
    ("shared bytes read", lambda ledger: ledger["shared_read"], [
        either("sass_data_bytes_mem_shared_op_ld"), either("sass_data_bytes_mem_shared_op_ldsm")]),
    # What cp.async brings is left out on both sides: it is under "global bytes read" already.
    ("shared bytes stored", lambda ledger: ledger["shared_written"] - 16 * ledger["cp_async"], [
        either("sass_data_bytes_mem_shared_op_st")]),
    ("bank conflicts", count("bank_conflicts"), [
        either("sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared")
        + [["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"]]]),
    ("mma instructions", count("mma"), [
        either("inst_executed_pipe_tensor_op_hmma") + either("sass_inst_executed_op_hmma")]),
    ("ldmatrix instructions", count("ldmatrix"), [
        either("sass_inst_executed_op_ldsm") + [["smsp__inst_executed_op_ldsm.sum"]]]),
    # The ledger counts lanes; every lane of a warp takes part in our copies.
    ("cp.async of warps", count("cp_async", 32), [
        either("sass_inst_executed_op_ldgsts") + [["smsp__inst_executed_op_ldgsts.sum"]]]),
    ("blocks", count("grid_blocks"), [[["launch__grid_size"]]]),
]

# What a metric counts beside the thing itself: the tensor pipe also takes 16-bit FMAs.
LESS = {"mma instructions": either("inst_executed_pipe_tensor_op_hmma_type_hfma2")}

# Where the two do not count the same thing, and why (docs/method.md).
EXPLAINED = {
    ("01", "global bytes read"): "ncu counts an element once that several lanes of a warp read",
    ("02a", "shared bytes read"): "nvcc joins loads of neighbouring columns; a word read by several lanes counts once",
    ("02a", "bank conflicts"): "nvcc joins loads of neighbouring columns",
    ("03", "shared bytes read"): "four lanes read the same factor; ncu counts it once",
    ("04", "shared bytes read"): "lanes of a row read the same maxima and sums; ncu counts a word once",
    ("05", "shared bytes read"): "lanes of a row read the same maxima and sums; ncu counts a word once",
    ("06", "shared bytes read"): "lanes of a row read the same maxima and sums; ncu counts a word once",
}

# So many bank conflicts appear, from run to run or not, where there are none.
NOISE = 1000

# Shown, not compared: what the memory system made of the requests, and what other pipes did.
SHOWN = [
    ("L1 sectors read, bytes", 32, [[["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]]]),
    ("L2 sectors read, bytes", 32, [[["lts__t_sectors_op_read.sum"]]]),
    ("L2 sectors written, bytes", 32, [[["lts__t_sectors_op_write.sum"]]]),
    ("DRAM bytes read", 1, [[["dram__bytes_read.sum"]]]),
    ("DRAM bytes written", 1, [[["dram__bytes_write.sum"]]]),
    ("l1tex's own bank conflicts", 1, [[["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"]]]),
    ("XU instructions, warps", 1, [either("inst_executed_pipe_xu")]),
    ("FFMA, lanes", 1, [either("sass_thread_inst_executed_op_ffma_pred_on")]),
]


def refuse(message, status=2):
    print(f"compare_ncu.py: {message}", file=sys.stderr)
    sys.exit(status)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", required=True, metavar="PROGRAM")
    parser.add_argument("--stage", default="all", help="as `attention check --stage` takes them")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=256, help="a multiple of the tiles makes the counts simplest")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--ncu", default="ncu", help="the profiler (default: ncu)")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    options = parser.parse_args()
    options.problem = ["--batch", str(options.batch), "--heads", str(options.heads), "--seqlen", str(options.seqlen),
                       "--head-dim", str(options.head_dim), "--dtype", options.dtype]
    if options.causal:
        options.problem.append("--causal")
    for program in (options.attention, options.ncu):
        if not shutil.which(program):
            refuse(f"{program} was not found", 2 if program == options.attention else 3)
    return options


def run(command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


def ledgers(options, folder):
    """The report of `attention count`: its stages, in order."""
    report = os.path.join(folder, "count.json")
    command = [options.attention, "count", "--stage", options.stage, "--json", report] + options.problem
    done = run(command)
    if done.returncode != 0:
        refuse(f"{' '.join(command)} ended with {done.returncode}: {last_line(done.stderr)}", done.returncode)
    with open(report, encoding="utf-8") as file:
        return json.load(file)


def available_metrics(options):
    """Base names ("sm__sass_…"); empty where ncu does not say."""
    done = run([options.ncu, "--query-metrics"])
    return set(re.findall(r"^([a-z0-9]+__\w+)", done.stdout, re.MULTILINE))


def choose(terms, known):
    """One alternative for each term, or None for a term that has none here. launch__… is not listed by the query."""
    def exists(metric):
        return not known or metric.startswith("launch__") or metric.split(".")[0] in known
    return [next((names for names in alternatives if all(map(exists, names))), None) for alternatives in terms]


def profile(options, stage, metrics, folder):
    """Rows of ncu's raw page: a dictionary for each kernel launch."""
    log = os.path.join(folder, f"{stage}.csv")
    command = [options.ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
               "--kernel-name-base", "function", "--metrics", ",".join(sorted(metrics)), "--log-file", log,
               options.attention, "check", "--device", "cuda", "--stage", stage] + options.problem
    done = run(command)
    text = ""
    if os.path.exists(log):
        with open(log, encoding="utf-8", errors="replace") as file:
            text = file.read()
    for sign, reason in (("ERR_NVGPUCTRPERM", "this user may not read the card's counters (ERR_NVGPUCTRPERM)"),
                         ("No kernels were profiled", "ncu saw no kernel")):
        if sign in text + done.stdout + done.stderr:
            refuse(f"{reason}: {' '.join(command)}", 3)
    # The header is the first line of the table; ncu's own remarks begin with "==".
    table = [line for line in text.splitlines() if line and not line.startswith("==")]
    while table and '"Kernel Name"' not in table[0]:
        table.pop(0)
    if done.returncode != 0 or len(table) < 3:
        remarks = [line for line in text.splitlines() if "ERROR" in line or "rror:" in line]
        refuse(f"ncu ended with {done.returncode} for stage {stage}: "
               f"{remarks[-1] if remarks else last_line(done.stderr or done.stdout or text)}", 3)
    rows = list(csv.DictReader(table))
    return rows[1:]  # the first row has the units


def number(text):
    """None for what ncu could not read."""
    try:
        return float(text.replace(",", ""))
    except (AttributeError, ValueError):
        return None


def sum_of(rows, names):
    values = [number(row.get(name)) for row in rows for name in names]
    return None if any(value is None for value in values) else sum(values)


def compare(stage, ledger, rows, chosen, less):
    """Result rows: name, counted, measured or None, equal or None, the reason where they may differ, metrics."""
    result = []
    for (name, counted_by, _), names in zip(COMPARED, chosen):
        counted = counted_by(ledger)
        used = [metric for term in names if term for metric in term]
        measured = None if None in names else sum_of(rows, used)
        if measured is not None and less.get(name):
            used = used + less[name]
            measured -= sum_of(rows, less[name]) or 0
        equal = None if measured is None else measured == counted
        row = {"name": name, "ledger": counted, "ncu": measured, "equal": equal,
               "metrics": {metric: sum_of(rows, [metric]) for metric in used}}
        if equal is False and (stage, name) in EXPLAINED:
            row["explained"] = EXPLAINED[stage, name]
        elif equal is False and name == "bank conflicts" and counted == 0 and measured < NOISE:
            row["explained"] = "the metric also counts cycles in which the data stage was busy for other reasons"
        result.append(row)
    return result


def shown(value):
    return "-" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def print_result(title, result, extra):
    print(f"\n{title}\n{'':28}{'ledger':>16}{'ncu':>16}")
    for row in result:
        verdict = ("not read" if row["equal"] is None else "equal" if row["equal"]
                   else f"differs: {row['explained']}" if "explained" in row else "DIFFERS")
        if row["ledger"] == 0 and row["ncu"] == 0:
            continue
        print(f"{row['name']:28}{shown(row['ledger']):>16}{shown(row['ncu']):>16}  {verdict}")
        if row["equal"] is False:
            for metric, value in row["metrics"].items():
                print(f"    {metric} = {shown(value)}")
    for name, value in extra.items():
        print(f"{name:28}{'':16}{shown(value):>16}")


def main():
    options = parse()
    known = available_metrics(options)
    chosen = [choose(terms, known) for _, _, terms in COMPARED]
    chosen_shown = [choose(terms, known) for _, _, terms in SHOWN]
    for (name, *_), names in zip(COMPARED + SHOWN, chosen + chosen_shown):
        if None in names:
            print(f"not compared: {name}: this ncu has no metric for it", file=sys.stderr)
    less = {name: choose([alternatives], known)[0] for name, alternatives in LESS.items()}
    metrics = {metric for names in chosen + chosen_shown for term in names if term for metric in term}
    metrics.update(metric for names in less.values() if names for metric in names)
    version = last_line(run([options.ncu, "--version"]).stdout)

    with tempfile.TemporaryDirectory() as folder:
        report = ledgers(options, folder)
        result = {"command": " ".join(sys.argv), "ncu": version, "problem": report["problem"], "stages": []}
        if "commit" in report:
            result["commit"] = report["commit"]
        print(f"ncu {version}; {' '.join(options.problem)}")
        for stage in report["stages"]:
            if "counts" not in stage:
                refuse(f"stage {stage['stage']} has no counts: {stage.get('check', {}).get('fault', 'see count')}", 1)
            launches = profile(options, stage["stage"], metrics, folder)
            lse = [row for row in launches if "lse_from_" in row["Kernel Name"]]
            own = [row for row in launches if "lse_from_" not in row["Kernel Name"]]
            if stage.get("pass") == "backward":  # after the forward stage that gives it O and L
                own, lse = own[-stage["counts"]["launches"]:], []
            entry = {"stage": stage["stage"], "kernels": [row["Kernel Name"] for row in own]}
            for key, rows, ledger in (("forward", own, stage["counts"]), ("lse", lse, stage.get("lse_counts"))):
                if ledger is None:
                    continue
                entry[key] = compare(stage["stage"], ledger, rows, chosen, less)
                extra = {name: sum_of(rows, sum((term for term in names), []))
                         for (name, *_), names in zip(SHOWN, chosen_shown) if None not in names}
                factors = {name: factor for name, factor, _ in SHOWN}
                extra = {name: None if value is None else value * factors[name] for name, value in extra.items()}
                entry[key + "_shown"] = extra
                print_result(f"{stage['stage']} {stage['name']}, {key}: {', '.join(r['Kernel Name'] for r in rows)}",
                             entry[key], extra)
            result["stages"].append(entry)

    if options.json:
        try:
            whole_file.write(options.json, json.dumps(result, indent=2) + "\n")
        except OSError as error:
            refuse(str(error))
    compared = [(entry["stage"], row) for entry in result["stages"] for key in ("forward", "lse")
                for row in entry.get(key, [])]
    unread = sorted({row["name"] for _, row in compared if row["equal"] is None})
    if all(row["equal"] is None for _, row in compared):
        refuse("ncu read none of the counters", 3)
    if unread:
        print(f"\nnot read everywhere: {', '.join(unread)}")
    differ = [f"{stage} {row['name']}" for stage, row in compared
              if row["equal"] is False and "explained" not in row]
    print("\n" + (f"these counts differ: {', '.join(differ)}" if differ else "all counts that were read are equal, or differ as explained"))
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
