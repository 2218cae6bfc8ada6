"""The Python tools do what they say, without a card: the picture of the ladder is drawn from both
kinds of report, the comparison with Nsight Compute reads its table (a stand-in for ncu writes one),
the benchmark beside PyTorch checks what it times (a stand-in for torch, the stages on the CPU
model), and each refuses bad input with one line.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLOT = ROOT / "common/timing/plot_ladder.py"
COMPARE = ROOT / "python/compare_ncu.py"
BENCH = ROOT / "python/bench_peers.py"
MEMORY = ROOT / "python/memory.py"
PLOT_PEERS = ROOT / "python/plot_peers.py"
STANDIN = ROOT / "tests/bench_peers_standin.py"
LIBRARY = os.environ.get("FLASHSTEPS_LIBRARY")

sys.path.insert(0, str(ROOT / "python"))
import bench_peers  # noqa: E402
import clocks  # noqa: E402
import lesson_tables  # noqa: E402
import memory  # noqa: E402
import plot_peers  # noqa: E402
import readme_table  # noqa: E402
import whole_file  # noqa: E402
from flashsteps import abi  # noqa: E402

PROBLEM = {"batch": 1, "heads": 2, "seqlen_q": 256, "seqlen_k": 256, "head_dim": 64,
           "dtype": "fp16", "causal": False}
COUNTS = {"global_read": {"Q": 1000, "K": 2000}, "global_written": {"S": 500},
          "global_unique_read": {}, "atomic_bytes": 0, "shared_read": 10, "shared_written": 1044,
          "bank_conflicts": 3, "mma": 7, "ldmatrix": 8, "cp_async": 64, "grid_blocks": 4}

# What the stand-in for ncu knows and measures: names differ by version, so one counter comes by its second name.
COUNTERS = {
    "sm__sass_data_bytes_mem_global_op_ld": 2000, "smsp__sass_data_bytes_mem_global_op_ldgsts": 1000,
    "sm__sass_data_bytes_mem_global_op_st": 500, "sm__sass_data_bytes_mem_global_op_red": 0,
    "sm__sass_data_bytes_mem_global_op_atom": 0, "sm__sass_data_bytes_mem_shared_op_ld": 4,
    "sm__sass_data_bytes_mem_shared_op_ldsm": 6, "sm__sass_data_bytes_mem_shared_op_st": 20,
    "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared": 3, "smsp__inst_executed_pipe_tensor_op_hmma": 10,
    "smsp__inst_executed_pipe_tensor_op_hmma_type_hfma2": 3,
    "smsp__inst_executed_op_ldsm": 8, "smsp__inst_executed_op_ldgsts": 2, "dram__bytes_read": 12345,
}


def run(*command):
    environment = dict(os.environ, LC_ALL="C")
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, env=environment)


class Tools(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return path

    def program(self, name, body):
        head = f"#!{sys.executable}\nimport json, sys\narguments = sys.argv[1:]\n"
        path = self.write(name, head + textwrap.dedent(body))
        path.chmod(0o755)
        return path

    def assert_refused(self, done, status, words):
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn(words, done.stderr)


class Picture(Tools):
    def draw(self, ladder):
        picture = self.folder / "ladder.svg"
        return picture, run(sys.executable, PLOT, self.write("ladder.json", ladder), picture)

    @unittest.skipUnless(shutil.which("gnuplot"), "gnuplot is not installed")
    def test_counts_are_drawn_by_tensor(self):
        ladder = {"device": {"name": "CPU model"}, "problem": PROBLEM,
                  "stages": [{"stage": "01", "name": "naive", "counts": COUNTS},
                             {"stage": "02b", "name": "tensor_cores", "counts": COUNTS}]}
        picture, done = self.draw(ladder)
        self.assertEqual(done.returncode, 0, done.stderr)
        svg = picture.read_text()
        for words in ("<svg", "01 naive", "02b tensor_cores", "CPU model", ">Q<", ">S<", "0.0035"):
            self.assertIn(words, svg)
        self.assertEqual([path.name for path in self.folder.iterdir() if ".new" in path.name], [])

    @unittest.skipUnless(shutil.which("gnuplot"), "gnuplot is not installed")
    def test_times_are_drawn_under_the_ceiling(self):
        ladder = {"device": {"name": "NVIDIA H200"}, "problem": PROBLEM, "ceilings": {"matmul_tflops": 690},
                  "stages": [{"stage": "01", "name": "naive", "time": {"tflops": 1.5}, "counts": COUNTS}]}
        picture, done = self.draw(ladder)
        self.assertEqual(done.returncode, 0, done.stderr)
        svg = picture.read_text()
        for words in ("TFLOP/s", "cuBLAS", "1.5", "NVIDIA H200"):
            self.assertIn(words, svg)

    def test_bad_input_is_refused(self):
        self.assert_refused(run(sys.executable, PLOT), 2, "two arguments are needed")
        self.assert_refused(run(sys.executable, PLOT, self.folder / "none.json", "x.svg"), 2, "No such file")
        for ladder, words in (("[]", "not a ladder"), ("{", "Expecting"), ({"stages": []}, "no stage"),
                              ({"stages": [{"stage": "01", "name": "x", "time": {}}]}, "not a ladder")):
            picture, done = self.draw(ladder)
            self.assert_refused(done, 2, words)
            self.assertFalse(picture.exists())


class Comparison(Tools):
    def compare(self, counters, counts=None, backward=False):
        stage = {"stage": "02d", "name": "cp_async", "counts": counts or COUNTS, "lse_counts": COUNTS}
        if backward:
            stage = {"stage": "09", "name": "backward", "pass": "backward", "counts": {**COUNTS, "launches": 1}}
        report = {"problem": PROBLEM, "stages": [stage]}
        attention = self.program("attention", f"""
            json.dump({report!r}, open(arguments[arguments.index("--json") + 1], "w"))
            """)
        ncu = self.program("ncu", f"""
            counters = {counters!r}
            if arguments[0] == "--version":
                print("Version 2025.3")
            elif arguments[0] == "--query-metrics":
                print("Device H200\\n" + "\\n".join(name + "     # of something" for name in counters))
            else:
                metrics = arguments[arguments.index("--metrics") + 1].split(",")
                counters["launch__grid_size"] = {COUNTS["grid_blocks"]}
                with open(arguments[arguments.index("--log-file") + 1], "w") as log:
                    print("==PROF== Connected to process", file=log)
                    row = lambda *cells: print(",".join('"' + str(cell) + '"' for cell in cells), file=log)
                    row("ID", "Kernel Name", *metrics)
                    row("", "", *["unit"] * len(metrics))
                    if {backward}:  # the forward stage's, which counts other things
                        row(0, "forward_kernel", *["1"] * len(metrics))
                    for kernel in ("output_kernel",) if {backward} else ("output_kernel", "lse_from_stats_kernel"):
                        row(0, kernel, *[format(counters[metric.split(".")[0]], ",") for metric in metrics])
            """)
        result = self.folder / "result.json"
        done = run(sys.executable, COMPARE, "--attention", attention, "--ncu", ncu, "--stage", "02d", "--json", result)
        return done, json.loads(result.read_text()) if result.exists() else None

    def test_equal_counts(self):
        done, result = self.compare(dict(COUNTERS))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("all counts that were read are equal", done.stdout)
        forward = {row["name"]: row for row in result["stages"][0]["forward"]}
        self.assertEqual(forward["global bytes read"]["ncu"], 3000)
        self.assertEqual(forward["shared bytes stored"]["ncu"], 20)
        self.assertEqual(result["stages"][0]["kernels"], ["output_kernel"], "the kernel for L is apart")
        self.assertTrue(all(row["equal"] for row in forward.values()))

    def test_the_forward_stage_before_a_backward_one_is_not_compared(self):
        done, result = self.compare(dict(COUNTERS), backward=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(result["stages"][0]["kernels"], ["output_kernel"])
        self.assertNotIn("lse", result["stages"][0])

    def test_one_count_that_differs_fails(self):
        for name in ("global_written", "mma", "bank_conflicts"):
            counts = dict(COUNTS)
            counts[name] = {"S": 501} if name == "global_written" else counts[name] + 1
            done, _ = self.compare(dict(COUNTERS), counts)
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertRegex(done.stdout, r"these counts differ: 02d [\w ]+\n")

    def test_missing_metric_is_told(self):
        counters = dict(COUNTERS)
        del counters["smsp__inst_executed_op_ldsm"]
        done, result = self.compare(counters)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("not compared: ldmatrix instructions", done.stderr)
        forward = {row["name"]: row for row in result["stages"][0]["forward"]}
        self.assertIsNone(forward["ldmatrix instructions"]["equal"])

    def test_unusable_tools_are_refused(self):
        self.assert_refused(run(sys.executable, COMPARE, "--attention", "/none"), 2, "/none was not found")
        self.assert_refused(run(sys.executable, COMPARE, "--attention", sys.executable, "--ncu", "/none"), 3, "/none")


class BenchArguments(Tools):
    def bench(self, *arguments, torch=None):
        """Runs it where `import torch` runs this source."""
        if torch is not None:
            self.write("torch.py", torch)
        environment = dict(os.environ, LC_ALL="C", PYTHONPATH=str(self.folder))
        return subprocess.run([sys.executable, BENCH, *arguments], capture_output=True, text=True, check=False, env=environment)

    def test_bad_options_are_refused(self):
        for words, *arguments in (
                ("--peers: there is no 'fast'; there are flash, cudnn, efficient, math, math16", "--peers", "math,fast"),
                ("--seqlen: 0 is given; 1 or more is allowed", "--seqlen", "512,0"),
                ("--seqlen: 'x' is no number", "--seqlen", "x"),
                ("--heads: 0 is given; more than 0 is allowed", "--heads", "0"),
                ("--measurement-ms: nan is given", "--measurement-ms", "nan"),
                ("--setting: there is no 'all'; there are course, full, few, math", "--setting", "all"),
                ("--mask: there is no 'half'", "--mask", "half"),
                ("--stage: '8' is no stage; allowed: ids as in 08 or 02d", "--stage", "8"),
                ("--stage: '07:64' is no stage", "--stage", "07:64"),
                ("--tiles: '64' is given; BRxBC is allowed", "--tiles", "64"),
                ("--dtype: invalid choice: 'fp32'", "--dtype", "fp32"),
                ("--math: not allowed with argument --ladder", "--ladder", "--math"),
                ("--pass: invalid choice: 'all'", "--pass", "all"),
                ("--pass both has no --ladder", "--pass", "both", "--ladder"),
                ("--pass bwd has no --ladder", "--pass", "bwd", "--ladder"),
                ("--pass bwd has no --grid", "--pass", "bwd", "--grid", "bh"),
                ("'05:bh': :bh is for 05, which is of the forward pass", "--pass", "bwd", "--stage", "05:bh"),
                ("'09:det': :det is for the backward pass", "--stage", "09:det"),
                ("unrecognized arguments: --backends", "--backends", "math")):
            self.assert_refused(self.bench(*arguments, torch="1 / 0  # not reached"), 2, words)

    def test_no_torch_no_card_no_library(self):
        self.assert_refused(self.bench(torch="raise ImportError"), 3, "torch is not installed")
        self.assert_refused(self.bench(torch="class cuda: is_available = lambda: False"), 3, "torch sees no CUDA card")
        has_card = "class cuda: is_available = lambda: True"
        self.assert_refused(self.bench("--library", "/none.so", torch=has_card), 2, "--library: /none.so cannot be loaded")
        text = self.write("text.so", "no library")
        self.assert_refused(self.bench("--library", text, torch=has_card), 2, "text.so cannot be loaded")


class Memory(Tools):
    """The memory of a step, on a stand-in for torch that knows what is asked of its allocator."""

    class Torch:
        bfloat16, float16, OutOfMemoryError = "bf16", "fp16", type("OutOfMemoryError", (RuntimeError,), {})

        class Tensor:
            def __init__(self, torch, count): self.torch, self.count = torch, count
            def numel(self): return self.count
            def element_size(self): return 2
            def detach(self): return self
            def requires_grad_(self): return self
            def all(self): return True

        def __init__(self):
            self.current = self.peak = 0
            self.cuda, self.autograd = self, self

        def take(self, count):
            self.current += count
            self.peak = max(self.peak, self.current)

        def randn(self, *shape, device, dtype):
            assert (device, dtype) == ("cuda", "bf16")
            count = shape[0] * shape[1] * shape[2] * shape[3]
            self.take(2 * count)
            return self.Tensor(self, count)

        def grad(self, output, leaves, _d_o):
            self.take(6 * output.count + 1000)  # the gradients, and a workspace that goes back
            self.current -= 1000
            return [self.Tensor(self, output.count) for _ in leaves]

        def memory_stats(self): return {"requested_bytes.all.current": self.current, "requested_bytes.all.peak": self.peak}
        def reset_peak_memory_stats(self): self.peak = self.current
        def synchronize(self): pass
        def empty_cache(self): pass
        def isfinite(self, tensor): return tensor

    def test_what_is_beside_inputs_and_outputs(self):
        torch = self.Torch()

        def call(q, _k, _v):
            torch.take(2 * q.count)
            return self.Torch.Tensor(torch, q.count)

        def too_large(q, _k, _v):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has less.\nmore")

        def elsewhere(q, _k, _v):
            raise abi.Unavailable("stage 10e needs another card")

        options = memory.parse(["--head-dim", "64"])
        report = memory.report_of(torch, options, 300, 3, {"08+09": call, "standard": too_large, "10e+09": elsewhere})
        count = 300 * 3 * 64
        self.assertEqual(report["runs"], [{"name": "08+09", "input_bytes": 8 * count, "output_bytes": 8 * count,
                                           "beside_bytes": 1000}])
        self.assertEqual(report["absent"], {"standard": "CUDA out of memory. Tried to allocate 8.00 GiB.",
                                            "10e+09": "stage 10e needs another card"})
        self.assertEqual(list(memory.lines_of(report))[2:], [f"  {name}: absent: {why}" for name, why in report["absent"].items()])

    def test_times_as_much(self):
        run = {"input_bytes": 2**30, "output_bytes": 2**30}
        report = {"problem": {"batch": 1, "heads": 1, "seqlen_q": 8, "head_dim": 64, "causal": False}, "absent": {},
                  "runs": [{"name": "08+09", "beside_bytes": 2**20, **run}, {"name": "standard", "beside_bytes": 3 * 2**30, **run}]}
        self.assertEqual(list(memory.lines_of(report)), [
            "batch 1, heads 1, N 8, d 64, no mask",
            "  08+09           1.00 MiB beside 2.00 GiB; standard attention takes 3072.0 times as much",
            "  standard        3.00 GiB beside 2.00 GiB"])

    def test_bad_input_is_refused(self):
        for torch, status, words, *arguments in (
                ("1 / 0", 2, "--seqlen: 0 is given; 1 or more is allowed", "--seqlen", "0"),
                ("1 / 0", 2, "--mask: invalid choice: 'half'", "--mask", "half"),
                ("raise ImportError", 3, "torch is not installed"),
                ("class cuda: is_available = lambda: False", 3, "torch sees no CUDA card"),
                ("class cuda: is_available = lambda: True", 3, "/none.so")):
            self.write("torch.py", torch)
            environment = dict(os.environ, LC_ALL="C", PYTHONPATH=str(self.folder), FLASHSTEPS_LIBRARY="/none.so")
            self.assert_refused(subprocess.run([sys.executable, MEMORY, *arguments], capture_output=True, text=True, check=False,
                                               env=environment), status, words)


class SpecialFiles(Tools):
    """A pipe is written to, and no tool puts a file or a picture in its place."""

    def setUp(self):
        super().setUp()
        self.pipe = self.folder / "pipe"
        os.mkfifo(self.pipe)

    def read_while(self, write):
        with subprocess.Popen(["cat", str(self.pipe)], stdout=subprocess.PIPE, text=True) as reader:
            write()
            text = reader.communicate(timeout=10)[0]
        self.assertTrue(self.pipe.is_fifo())
        self.assertEqual(os.listdir(self.folder), ["pipe"])
        return text

    def test_a_result_goes_into_a_pipe(self):
        self.assertEqual(self.read_while(lambda: whole_file.write(self.pipe, "{}\n")), "{}\n")

    def test_points_go_into_a_pipe(self):
        sys.path.insert(0, str(ROOT / "course"))
        import grade  # only where there are labs
        self.assertEqual(json.loads(self.read_while(lambda: grade.write_json(self.pipe, {"score": 1}))), {"score": 1})

    def test_a_picture_does_not_take_a_pipe_s_place(self):
        with self.assertRaises(plot_peers.NoPicture):
            plot_peers.draw(json.loads((ROOT / "docs/results/peers_h200.json").read_text()), str(self.pipe))
        self.assertTrue(self.pipe.is_fifo())


class BenchArithmetic(unittest.TestCase):
    def test_default_cells_are_the_papers(self):
        cells = bench_peers.parse([]).cells
        self.assertEqual(len(cells), 24)
        for cell in cells:
            self.assertEqual((cell.batch * cell.seqlen, cell.heads * cell.head_dim), (16384, 2048))
        self.assertEqual({(c.head_dim, c.causal) for c in cells}, {(64, False), (64, True), (128, False), (128, True)})

    def test_ladder_cells_fill_the_card(self):
        options = bench_peers.parse(["--ladder"])
        full = [cell for cell in options.cells if cell.setting == "full"]
        self.assertEqual([(c.batch, c.heads, c.seqlen) for c in full if c.head_dim == 64 and not c.causal],
                         [(17, 32, 1024), (17, 32, 4096)])
        self.assertTrue(all(528 <= c.batch * c.heads < 528 + c.heads for c in full))
        few = [cell for cell in options.cells if cell.setting == "few"]
        self.assertEqual({(c.batch, c.heads, c.seqlen) for c in few}, {(1, 8, 16384)})
        self.assertEqual(options.peers, [])

    def test_options_choose_cells(self):
        options = bench_peers.parse(["--seqlen", "100,200", "--head-dim", "40", "--mask", "causal", "--batch", "3", "--heads", "5"])
        self.assertEqual([cell[1:] for cell in options.cells], [(3, 5, 100, 40, True), (3, 5, 200, 40, True)])
        math = bench_peers.parse(["--math"])
        self.assertEqual([cell[1:] for cell in math.cells], [(4, 16, 2048, 128, False)])
        self.assertEqual(([run.name for run in math.runs], math.peers, math.layout), (["02d", "08"], ["math", "math16"], "bhsd"))

    def test_runs(self):
        names = lambda *arguments: [run.name for run in bench_peers.parse_runs(*arguments)]
        self.assertEqual(names("05,06,07,08", (64, 64), True), ["05:bh", "05", "06", "07:64x64", "08:64x64"])
        self.assertEqual(names("07:32x64,07,07"), ["07:32x64", "07"])
        backward = bench_peers.parse_runs("09,09:det,09:64x64:det", backward=True)
        self.assertEqual([(run.name, run.tiles, run.deterministic, run.backward) for run in backward],
                         [("09", (0, 0), False, True), ("09:det", (0, 0), True, True), ("09:64x64:det", (64, 64), True, True)])
        tiled = bench_peers.parse_runs("09,09:det", (64, 128), backward=True)
        self.assertEqual([run.name for run in tiled], ["09:64x128", "09:64x128:det"])
        with self.assertRaisesRegex(ValueError, "there is no stage '08' of the backward pass; there are 09"):
            bench_peers.resolve(bench_peers.parse_runs("08", backward=True), ["09"])
        options = bench_peers.parse(["--pass", "bwd"])
        self.assertEqual(([run.name for run in options.runs], options.peers), (["09", "09:det"], ["flash", "cudnn"]))
        known = {"fwd": ["08", "10e"], "bwd": ["09", "10g"]}
        self.assertEqual(bench_peers.words_of_passes("08,10,09:det,10g,09", known), {"fwd": "08,10", "bwd": "09:det,10g,09"})
        options = bench_peers.parse(["--pass", "bwd", "--math"])
        self.assertEqual((options.peers, options.layout), (["math"], "bhsd"))
        known = ["02a", "02d", "07", "08"]
        resolved = bench_peers.resolve(bench_peers.parse_runs("02,07:64x64"), known)
        self.assertEqual([(run.name, run.stage) for run in resolved], [("02d", "02d"), ("07:64x64", "07")])
        with self.assertRaisesRegex(ValueError, "there is no stage '09'; there are 02a, 02d, 07, 08"):
            bench_peers.resolve(bench_peers.parse_runs("09"), known)

    def test_ladder_runs(self):
        built = {"06": [(64, 64)], "07": [(128, 64), (64, 64)], "08": [(128, 128), (128, 64)]}  # a stage's choice first

        def tiles_of(run):
            there = built.get(run.stage, [(32, 64)])
            return there[0] if run.tiles == (0, 0) else run.tiles if run.tiles in there else None

        def ladder(text, setting="full"):
            cell = bench_peers.Cell(setting, 2, 3, 130, 64, True)
            return [run.name for run in bench_peers.ladder_runs(bench_peers.parse_runs(text), cell, tiles_of)]

        self.assertEqual(ladder("03,04,05,06,07,08"),
                         ["03", "04", "05:bh", "05", "06", "07:64x64", "07", "08:128x64", "08"])
        self.assertEqual(ladder("04,05,07", "course"), ["04", "05", "07"], "07 is not built for the tiles of 05")
        self.assertEqual(ladder("05,06"), ["05", "06"])
        self.assertEqual(ladder("07:64x64,07"), ["07:64x64", "07"])

    def test_blocks(self):
        cell = bench_peers.Cell("full", 2, 3, 130, 64, True)
        run = {run.name: run for run in bench_peers.parse_runs("04,05:bh,05,01")}
        self.assertEqual([bench_peers.grid_blocks(run[name], cell, (64, 64), 10) for name in ("04", "05:bh", "05")], [6, 6, 18])
        self.assertIsNone(bench_peers.grid_blocks(run["01"], cell, (0, 0), 10))
        backward = bench_peers.Run("09", "09", backward=True)  # one for each tile of keys
        self.assertEqual(bench_peers.grid_blocks(backward, cell, (64, 128), 10), 12)
        persistent = bench_peers.Run("10e", "10e")
        self.assertEqual([bench_peers.grid_blocks(persistent, cell, (64, 128), most) for most in (10, 132)], [10, 18])

    def test_work(self):
        cell = bench_peers.Cell("course", 4, 16, 4096, 128, True)
        self.assertEqual(cell.pairs(), 8_390_656)  # docs/method.md
        self.assertEqual(cell.flops(), 4 * 4 * 16 * 128 * 8_390_656)
        self.assertEqual(cell.flops(backward=True), 10 * 4 * 16 * 128 * 8_390_656)
        self.assertEqual(cell._replace(causal=False).pairs(), 4096**2)

    def test_ratio_is_the_median_of_ratios(self):
        # Drift of the card, common to both, does not count; nor is it the ratio of the medians (which is 3 / 2).
        self.assertEqual(bench_peers.median_ratio([3, 30, 2], [1, 10, 2]), 3)
        for numerator, denominator in (([], []), ([1], [1, 2])):
            with self.assertRaises(ValueError):
                bench_peers.median_ratio(numerator, denominator)
        self.assertAlmostEqual(bench_peers.geometric_mean([1, 4]), 2)

    def test_plans(self):
        self.assertEqual(bench_peers.plan_launches(0.1, 12), (120, 3))
        self.assertEqual(bench_peers.plan_launches(0, 12), (256, 3))
        self.assertEqual(bench_peers.plan_launches(200, 12), (1, 1))
        self.assertEqual(bench_peers.rotating_sets(30, 50, 100, 10**9), 4)
        self.assertEqual(bench_peers.rotating_sets(192 << 20, 320 << 20, 50 << 20, 1 << 40), 2)
        self.assertEqual(bench_peers.rotating_sets(1, 1, 10**9, 10**12), 64)
        self.assertEqual(bench_peers.rotating_sets(30, 50, 100, 60), 1)

    def test_sampled_heads(self):
        all_heads = bench_peers.sampled_heads(bench_peers.Cell("course", 32, 32, 512, 64, False), 1)
        self.assertEqual(all_heads, list(range(1024)))
        some = bench_peers.sampled_heads(bench_peers.Cell("course", 1, 32, 16384, 64, False), 1)
        self.assertTrue(2 <= len(some) <= 4 and {0, 31} <= set(some), some)


class BenchOnTheModel(Tools):
    def setUp(self):
        super().setUp()
        if not LIBRARY or not abi.Library(LIBRARY).stages(abi.MODEL):
            self.skipTest("the library was built without the CPU model")
        pythons = [os.environ.get("PYTHON"), sys.executable, "python3", "/usr/bin/python3"]
        self.python = next((p for p in pythons if p and shutil.which(p) and run(p, "-c", "import numpy").returncode == 0), None)
        if not self.python:
            self.skipTest("numpy is not installed")

    def bench(self, fault, *arguments):
        report = self.folder / "peers.json"
        done = run(self.python, STANDIN, LIBRARY, fault, "--batch", "1", "--heads", "2", "--rounds", "3", "--measurement-ms", "1",
                   "--json", report, *arguments)
        return done, json.loads(report.read_text()) if report.exists() else None

    def test_beside_peers(self):
        for layout in ("bshd", "bhsd"):
            done, result = self.bench("none", "--seqlen", "70", "--head-dim", "64,128", "--stage", "03,08", "--layout", layout)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(len(result["cells"]), 4)
            for cell in result["cells"]:
                runs = {entry["name"]: entry for entry in cell["runs"]}
                self.assertEqual(list(runs), ["03", "08", "flash", "cudnn"])
                self.assertEqual(cell["left_out"], {})
                for entry in runs.values():
                    self.assertTrue(entry["check"]["ok"])
                    self.assertEqual(len(entry["round_ms"]), 3)
                self.assertIn("lse_max_abs_err", runs["08"]["check"])
                ratios = [a / b for a, b in zip(runs["flash"]["round_ms"], runs["08"]["round_ms"])]
                self.assertEqual(cell["speedups"]["08"]["flash"], sorted(ratios)[1])
            self.assertIn("08 is ", done.stdout)

    def test_ladder(self):
        picture = self.folder / "ladder.svg"
        done, result = self.bench("none", "--ladder", "--setting", "full", "--seqlen", "70", "--head-dim", "64", "--svg", picture)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        runs = {entry["name"]: entry for entry in result["cells"][0]["runs"]}
        self.assertEqual([name for name in runs if not name.startswith("08:")],
                         ["03", "04", "05:bh", "05", "06", "07:64x64", "07", "08"])
        for name, entry in runs.items():
            blocks = 2 if name in ("04", "05:bh") else 2 * -(-70 // entry["tiles"]["Br"])
            self.assertEqual(entry["grid_blocks"], blocks, name)
        self.assertEqual(runs["07:64x64"]["tiles"], runs["06"]["tiles"])
        self.assertIn("full, causal: 08 is ", done.stdout)
        if shutil.which("gnuplot"):
            for words in ("<svg", "07:64x64", "full: 2 heads, d 64, causal", "stand-in"):
                self.assertTrue(words in picture.read_text(), words)

    def test_wrong_values_are_not_timed(self):
        for fault in ("wrong", "nan", "lse"):
            done, result = self.bench(fault, "--seqlen", "70", "--mask", "causal", "--head-dim", "64")
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertIn("08: left out: WRONG VALUES", done.stdout)
            self.assertEqual([entry["name"] for entry in result["cells"][0]["runs"]], ["flash", "cudnn"])

    def test_backward_beside_peers(self):
        for layout in ("bshd", "bhsd"):
            lengths = "1,70" if layout == "bshd" else "70"
            done, result = self.bench("none", "--pass", "bwd", "--seqlen", lengths, "--head-dim", "64", "--layout", layout,
                                      "--peers", "flash,math")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(len(result["cells"]), 4 if layout == "bshd" else 2)
            for cell in result["cells"]:
                self.assertEqual(cell["left_out"], {})
                self.assertEqual(cell["problem"]["pass"], "bwd")
                pairs = cell["problem"]["seqlen_q"] ** 2 if not cell["problem"]["causal"] else \
                    cell["problem"]["seqlen_q"] * (cell["problem"]["seqlen_q"] + 1) // 2
                self.assertEqual(cell["problem"]["flops"], 10 * 2 * 64 * pairs)
                runs = {entry["name"]: entry for entry in cell["runs"]}
                self.assertEqual(list(runs), ["09", "09:det", "flash", "math"])
                self.assertEqual([runs[name]["deterministic"] for name in ("09", "09:det")], [False, True])
                for entry in runs.values():
                    for tensor in ("dQ", "dK", "dV"):
                        self.assertTrue(entry["check"][tensor]["ok"], entry)
                    self.assertEqual(len(entry["round_ms"]), 3)
                self.assertEqual(set(cell["speedups"]["09:det"]), {"09", "flash", "math"})
            self.assertIn("09 is ", done.stdout)

    def test_wrong_gradients_are_not_timed(self):
        for fault in ("dq", "dk", "dv", "nan"):
            done, result = self.bench(fault, "--pass", "bwd", "--seqlen", "70", "--mask", "causal", "--head-dim", "64")
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertIn("09: left out: WRONG VALUES", done.stdout)
            self.assertIn("09:det: left out: WRONG VALUES", done.stdout)
            self.assertEqual([entry["name"] for entry in result["cells"][0]["runs"]], ["flash", "cudnn"])

    def test_absent_peers_are_told(self):
        done, result = self.bench("flash", "--seqlen", "70", "--mask", "none", "--head-dim", "64")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("flash: absent: No available kernel. Aborting execution.\n", done.stdout)
        line = next(line for line in done.stdout.splitlines() if line.startswith("  64 "))
        self.assertRegex(line, r"\d +absent +- ")
        self.assertEqual(list(result["cells"][0]["speedups"]["08"]), ["cudnn"])
        self.assertEqual(result["cells"][0]["absent"], {"flash": "No available kernel. Aborting execution."})
        self.assertEqual(result["cells"][0]["left_out"], {})

    def test_peer_modules(self):
        for direction, run in (("fwd", "08"), ("bwd", "09")):
            cells = ("--pass", direction, "--seqlen", "70", "--mask", "causal", "--head-dim", "64")
            done, result = self.bench("none", *cells, "--peers", "efficient", "--peer-module", "standin_peer", "--peer-module", "standin_absent")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            cell = result["cells"][0]
            runs = {entry["name"]: entry for entry in cell["runs"]}
            self.assertLessEqual({run, "efficient", "standin_peer"}, set(runs))
            self.assertTrue(runs["standin_peer"]["check"]["ok"], runs["standin_peer"])
            self.assertIn("standin_peer", cell["speedups"][run])
            self.assertEqual(cell["absent"], {"standin_absent": "No module named 'standin_absent'"})
            self.assertEqual(result["peers"], {"efficient": {}, "standin_peer": {"version": "1.2"},
                                               "standin_absent": {"absent": "No module named 'standin_absent'"}})
            self.assertEqual(done.stdout.count("standin_absent: absent: No module named 'standin_absent'\n"), 1)
            self.assertIn(" standin_peer ms", done.stdout)
            self.assertRegex(done.stdout, r"\d +absent +- ")
            done, result = self.bench("peer", *cells, "--peers", "", "--peer-module", "standin_peer")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(result["cells"][0]["absent"], {"standin_peer": "no kernel for this card"})
        done, _ = self.bench("none", "--peer-module", "standin_without")
        self.assert_refused(done, 2, "--peer-module: module standin_without has no flash_attn_func")
        done, _ = self.bench("none", "--peer-module", "flash")
        self.assert_refused(done, 2, "--peer-module: flash is a backend of PyTorch's; --peers takes it")

    def test_both_passes(self):
        picture = self.folder / "both.svg"
        done, result = self.bench("none", "--pass", "both", "--stage", "09:det,08", "--seqlen", "70", "--mask", "none",
                                  "--head-dim", "64", "--svg", picture)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual([(cell["problem"]["pass"], [run["name"] for run in cell["runs"]]) for cell in result["cells"]],
                         [("fwd", ["08", "flash", "cudnn"]), ("bwd", ["09:det", "flash", "cudnn"])])
        self.assertIn("08 is ", done.stdout)
        self.assertIn("09:det is ", done.stdout)
        if shutil.which("gnuplot"):
            for words in ("Forward and backward on stand-in", "backward, course: 2 heads"):
                self.assertIn(words, picture.read_text())
        done, _ = self.bench("none", "--pass", "both", "--stage", "08,77")
        self.assert_refused(done, 2, "there is no stage '77'; there are 01")

    def test_what_the_library_refuses_is_told(self):
        for status, words, *arguments in (
                (2, "; 32x32 was given", "--stage", "07:32x32"),
                (2, "there is no stage '99'; there are 01, 02a", "--stage", "99"),
                (2, "head_dim is 12; allowed: multiples of 8 from 8 to 128", "--head-dim", "12")):
            done, _ = self.bench("none", "--seqlen", "70", "--mask", "none", *arguments)
            self.assert_refused(done, status, words)


class PeersPicture(Tools):
    CELL = {"setting": "course", "problem": {"seqlen_q": 512, "heads": 32, "head_dim": 64, "causal": False},
            "runs": [{"name": "08", "tflops": 250.0}, {"name": "flash", "tflops": 240.0}]}

    def draw(self, result):
        picture = self.folder / "peers.svg"
        return picture, run(sys.executable, PLOT_PEERS, self.write("peers.json", result), picture)

    @unittest.skipUnless(shutil.which("gnuplot"), "gnuplot is not installed")
    def test_lines_over_the_length(self):
        cells = [json.loads(json.dumps(self.CELL)) for _ in range(3)]
        for cell, length in zip(cells, (512, 1024, 2048)):
            cell["problem"]["seqlen_q"] = length
        del cells[1]["runs"][0]  # not timed there
        picture, done = self.draw({"device": {"name": "NVIDIA H200"}, "ceilings": {"matmul_tflops": 690}, "cells": cells})
        self.assertEqual(done.returncode, 0, done.stderr)
        for words in ("Forward on NVIDIA H200", "course: 32 heads, d 64, no mask", "2048</text>", ">flash<", ">bf16 product<"):
            self.assertTrue(words in picture.read_text(), words)

    def test_bad_input_is_refused(self):
        self.assert_refused(run(sys.executable, PLOT_PEERS), 2, "two arguments are needed")
        for result, words in (("{", "Expecting"), ({"cells": []}, "no cell has a time"), ({}, "not a result of bench_peers.py")):
            picture, done = self.draw(result)
            self.assert_refused(done, 2, words)
            self.assertFalse(picture.exists())


class Clocks(unittest.TestCase):
    def test_a_line_has_medians(self):
        line = clocks.line_of("a product", False, 664.6, [(1500, 690.0, "0x4"), (1980, 300.0, "0x0"), (1600, 680.0, "0x4")])
        for words in ("no pause", "665 TFLOP/s", "SM clock 1600 MHz (1500 to 1980)", "680 W", "reasons 0x0, 0x4"):
            self.assertIn(words, line)
        self.assertRaisesRegex(ValueError, "no clock", clocks.line_of, "a product", True, 1, [])

    def test_without_torch_or_a_card(self):
        done = run(sys.executable, str(ROOT / "python/clocks.py"))
        if done.returncode == 0:
            self.skipTest("there is a card")
        self.assertEqual((done.returncode, done.stdout), (3, ""))
        self.assertRegex(done.stderr, r"\Aclocks.py: [^\n]+\n\Z")


class LessonTables(unittest.TestCase):
    """Every figure in a lesson's measured tables is that of docs/results."""

    def test_lessons_hold_what_was_measured(self):
        for path in lesson_tables.lessons():
            with self.subTest(path.parent.name):
                text = path.read_text(encoding="utf-8")
                self.assertEqual(lesson_tables.fill(text), text)

    def test_another_figure_is_noticed(self):
        for lesson, figure in (("04_fa1", " ms, "), ("08_causal_skip", "| 64 | none | 512 | 0."),
                               ("09_backward", "| 128 | causal | 512 | 0."), ("10_hopper", "| 64 | none | 2048 | 0.")):
            with self.subTest(lesson):
                text = (ROOT / lesson / "README.md").read_text(encoding="utf-8")
                at = text.index(figure) + len(figure)
                wrong = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1:]
                self.assertEqual(lesson_tables.fill(wrong), text)


class ReadmeTable(unittest.TestCase):
    """Every figure in the README's section on speed, and its picture, are those of docs/results."""

    def setUp(self):
        self.text = readme_table.README.read_text(encoding="utf-8")

    def test_readme_holds_what_was_measured(self):
        self.assertEqual(readme_table.fill(self.text), self.text)
        table = [line for line in self.text.split("\n") if re.match(r"\| (64|128) \| (none|causal) \| \d+ \| \d", line)]
        self.assertEqual(len(table), 24)

    def test_another_figure_is_noticed(self):
        for words in ("| 128 | causal | 16384 | ", " is 1.", "up to ", "NVIDIA H"):
            at = self.text.index(words, self.text.index(readme_table.BEGIN)) + len(words)
            wrong = self.text[:at] + str((int(self.text[at]) + 1) % 10) + self.text[at + 1:]
            self.assertEqual(readme_table.fill(wrong), self.text)
        for without in (self.text.replace(readme_table.END, ""), self.text + "\n" + readme_table.BEGIN):
            self.assertRaisesRegex(ValueError, "has not one", readme_table.fill, without)

    def test_absent_peers_are_marked(self):
        result = readme_table.load()
        forward, backward = (next(cell for cell in result["cells"] if cell["problem"]["pass"] == direction) for direction in ("fwd", "bwd"))
        self.assertEqual(readme_table.entry(forward, "cudnn"), f"{forward['runs'][-1]['tflops']:.0f}")
        forward["absent"] = {"cudnn": "no such backend"}
        del backward["runs"][0]
        p = forward["problem"]
        self.assertEqual(backward["problem"]["seqlen_q"], p["seqlen_q"])
        line = next(line for line in readme_table.fill(self.text, result).split("\n")
                    if line.startswith(f"| {p['head_dim']} | {readme_table.MASKS[p['causal']]} | {p['seqlen_q']} | "))
        self.assertEqual([column.strip() for column in line.split("|")][7:9], ["absent", ""])

    def test_each_pass_is_in_its_own_columns(self):
        result = readme_table.load()
        for cell in result["cells"]:
            for run_ in cell["runs"]:
                run_["tflops"] = 111 if cell["problem"]["pass"] == "fwd" else 222
        rows = [line for line in readme_table.section(result) if line.startswith("| 64 |")]
        self.assertEqual(len(rows), 12)
        for row in rows:
            self.assertEqual([column.strip() for column in row.split("|")][4:12], ["111"] * 4 + ["222"] * 4)

    def test_pictures_are_of_the_results(self):
        version = run("gnuplot", "--version").stdout.strip() if shutil.which("gnuplot") else "none"
        for name in ("peers", "steps"):
            picture = ROOT / f"docs/results/{name}_h200.svg"
            drawn_by = re.search(r"Produced by GNUPLOT (.*?) *</desc>", picture.read_text())[1]
            if version != f"gnuplot {drawn_by}":
                self.skipTest(f"the pictures are of gnuplot {drawn_by}; here is {version}")
            with tempfile.TemporaryDirectory() as folder:
                again = pathlib.Path(folder) / "again.svg"
                plot_peers.draw(json.loads(picture.with_suffix(".json").read_text()), again)
                self.assertEqual(again.read_text(), picture.read_text(), name)


if __name__ == "__main__":
    unittest.main()
