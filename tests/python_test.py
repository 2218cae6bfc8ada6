"""The Python tools do what they say, without a card: the picture of the ladder is drawn from both
kinds of report, the comparison with Nsight Compute reads its table (a stand-in for ncu writes one),
and each refuses bad input with one line.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLOT = ROOT / "common/timing/plot_ladder.py"
COMPARE = ROOT / "python/compare_ncu.py"
BENCH = ROOT / "python/bench_math.py"

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
    def compare(self, counters, counts=None):
        report = {"problem": PROBLEM, "stages": [{"stage": "02d", "name": "cp_async", "counts": counts or COUNTS,
                                                  "lse_counts": COUNTS}]}
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
                    for kernel in ("output_kernel", "lse_from_stats_kernel"):
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


class Bench(Tools):
    def test_bad_options_are_refused(self):
        self.assert_refused(run(sys.executable, BENCH, "--backends", "math,fast"), 2, "there is no 'fast'")
        self.assert_refused(run(sys.executable, BENCH, "--seqlen", "0"), 2, "--seqlen is 0")


if __name__ == "__main__":
    unittest.main()
