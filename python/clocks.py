#!/usr/bin/env python3
"""What a card's clock does under a large product of cuBLAS, 10e and cuDNN: why 10e's TFLOP/s may lie above the product's.

Each runs for some seconds in bursts with pauses, which leave the card below its power limit, and then without a pause, while
nvidia-smi reports the multiprocessors' clock and the power (with pauses, most of what it sees is the pauses'). bf16, random values; one
attention problem for all: batch 1, 16 heads, d 128, N 16384. Needs torch and a card of compute capability 9.0; prints a line for
each, and writes nothing.

Exit status: 0 all right, 1 it cannot be measured, 3 no torch, no card or none that 10e runs on.
"""
import argparse
import pathlib
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import bench_peers  # noqa: E402

QUERY = ("nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active", "--format=csv,noheader,nounits", "-lms", "50")
CALLS = 4  # in a burst, and between two looks at the time
PAUSE = 0.024  # seconds


def refuse(message, status=2):
    print(f"clocks.py: {message}", file=sys.stderr)
    sys.exit(status)


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
            if clock.isdigit() and power[0].isdigit():  # not [N/A]
                self.rows.append((int(clock), float(power), reasons))

    def __exit__(self, *_):
        self.smi.kill()
        self.reader.join()
        self.smi.stdout.close()


def line_of(name, bursts, tflops, rows):
    """The report of one run. Raises ValueError where nvidia-smi reported nothing."""
    if not rows:
        raise ValueError("nvidia-smi reports no clock or no power of this card")
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
    torch = bench_peers.torch_with_a_card(refuse)
    if torch.cuda.get_device_capability() != (9, 0):
        refuse("10e needs compute capability 9.0", 3)
    try:
        measure(torch, options.seconds)
    except (OSError, ValueError) as error:
        refuse(error, 1)


def measure(torch, seconds):
    """All lines."""
    import flashsteps
    from torch.nn.attention import SDPBackend, sdpa_kernel
    n = 8192
    a, b, c = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    run(torch, f"cuBLAS {n} x {n} x {n}", lambda: torch.mm(a, b, out=c), 2 * n**3, seconds)
    N, heads, d = 16384, 16, 128
    q, k, v = (torch.randn(1, N, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with torch.no_grad():
        for causal, pairs in ((False, N * N), (True, N * (N + 1) // 2)):
            run(torch, "10e causal" if causal else "10e", lambda causal=causal: flashsteps.flash_attn_func(q, k, v, causal=causal, stage="10e"),
                4 * heads * d * pairs, seconds)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            heads_first = [x.transpose(1, 2) for x in (q, k, v)]
            run(torch, "cuDNN", lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first), 4 * heads * d * N * N, seconds)


if __name__ == "__main__":
    main()
