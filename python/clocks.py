#!/usr/bin/env python3
"""What a card's clock does under a large product of cuBLAS, 10e and cuDNN: why 10e's TFLOP/s may lie above the product's.

Each runs for some seconds in bursts with pauses, which leave the card below its power limit, and then without a pause, while
nvidia-smi reports the multiprocessors' clock and the power. bf16, random values; one attention problem for all: batch 1, 16 heads,
d 128, N 16384. Needs torch and a card of compute capability 9.0; prints a line for each, and writes nothing.
"""
import argparse
import pathlib
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active", "--format=csv,noheader,nounits", "-lms", "50")
CALLS = 4  # in a burst, and between two looks at the time
PAUSE = 0.024  # seconds


class Watch:
    """Reads nvidia-smi's lines while it is entered: (clock in MHz, power in W, reasons for a lower clock)."""

    def __enter__(self):
        self.rows = []
        self.smi = subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        time.sleep(0.3)
        self.rows.clear()
        return self

    def read(self):
        for line in self.smi.stdout:
            clock, power, reasons = line.strip().split(", ")
            self.rows.append((int(clock), float(power), reasons))

    def __exit__(self, *_):
        self.smi.kill()
        self.reader.join()
        self.smi.stdout.close()


def line_of(name, bursts, tflops, rows):
    """The report of one run."""
    clocks, powers = (sorted(row[i] for row in rows) for i in range(2))
    middle = len(rows) // 2
    how = "with pauses" if bursts else "no pause"
    return (f"{name:22} {how:12} {tflops:6.0f} TFLOP/s   SM clock {clocks[middle]} MHz ({clocks[0]} to {clocks[-1]})   "
            f"{powers[middle]:.0f} W   reasons {', '.join(sorted({row[2] for row in rows}))}")


def run(torch, name, call, flops, seconds):
    """Times `call` both ways."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    for bursts in (True, False):
        calls, busy = 0, 0.0
        with Watch() as watch:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                for _ in range(CALLS):
                    call()
                after.record()
                after.synchronize()
                busy += before.elapsed_time(after)
                calls += CALLS
                if bursts:
                    time.sleep(PAUSE)
        print(line_of(name, bursts, flops * calls / busy / 1e9, watch.rows), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="for each line (default: 3)")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("clocks.py: torch was not found")
    if not torch.cuda.is_available():
        sys.exit("clocks.py: there is no card")
    import flashsteps
    from torch.nn.attention import SDPBackend, sdpa_kernel
    n = 8192
    a, b, c = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    run(torch, f"cuBLAS {n} x {n} x {n}", lambda: torch.mm(a, b, out=c), 2 * n**3, options.seconds)
    N, heads, d = 16384, 16, 128
    q, k, v = (torch.randn(1, N, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flops = 4 * heads * d * N**2
    with torch.no_grad():
        for causal in (False, True):
            run(torch, "10e causal" if causal else "10e", lambda causal=causal: flashsteps.flash_attn_func(q, k, v, causal=causal, stage="10e"),
                flops / (2 if causal else 1), options.seconds)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            heads_first = [x.transpose(1, 2) for x in (q, k, v)]
            run(torch, "cuDNN", lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first), flops, options.seconds)


if __name__ == "__main__":
    main()
