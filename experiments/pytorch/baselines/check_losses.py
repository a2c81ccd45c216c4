#!/usr/bin/env python3
"""Checks that the trainer and PyTorch, from the same weights and batches, compute the same losses.

    python3 experiments/pytorch/baselines/check_losses.py                                on any machine: simulated device, CPU
    python3 experiments/pytorch/baselines/check_losses.py --trainer-device cuda --torch-device cuda --hidden 784
    python3 experiments/pytorch/baselines/check_losses.py --dtype bf16 --weights half --lr 0.03 --tolerance 2e-2

Writes a start file, runs `trainer` and `mlp.py` from it and compares `steps.csv` row by row. The difference of a step is
|theirs - ours| / |ours|. Exit code 0 if all differences of the first hundred steps are below the tolerance, 1 if one
is not or a run failed, 2 for bad input. Needs PyTorch 2.11 and the built trainer.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; see --help", 2)


def fail(message, code):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--trainer", type=Path, metavar="PROGRAM", help="the trainer (default: target/release or target/debug)")
    add("--python", default=sys.executable, metavar="PROGRAM", help="a Python that has PyTorch (default: this one)")
    add("--trainer-device", default="sim", metavar="DEVICE", help="sim or cuda (default: sim)")
    add("--torch-device", default="cpu", metavar="DEVICE", help="cpu or cuda (default: cpu)")
    add("--dataset", choices=("mnist", "iris", "digits"), default="digits", help="default: digits")
    add("--data-dir", metavar="DIR", help="folder with MNIST's four files")
    add("--hidden", default="128", metavar="N")
    add("--layers", default="4", metavar="N")
    add("--batch", default="64", metavar="N")
    add("--steps", default="120", metavar="N")
    add("--lr", default="0.1", metavar="RATE")
    add("--seed", default="42", metavar="N")
    add("--dtype", choices=("f32", "tf32", "bf16", "f16"), default="f32", help="type of activations and products (default: f32)")
    add("--weights", choices=("master", "half"), default="master", help="weights that are stepped (default: master)")
    add("--gemm", choices=("tiled", "tensor"), help="the trainer's product (default: tiled for f32, else tensor)")
    add("--mode", choices=("eager", "graph", "compile"), default="eager", help="PyTorch's mode (default: eager)")
    add("--tolerance", type=float, default=1e-4, help="largest relative difference in the first hundred steps (default: 1e-4)")
    add("--out", type=Path, metavar="DIR", help="keep start file and records here (default: they are removed)")
    add("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    options.gemm = options.gemm or ("tiled" if options.dtype == "f32" else "tensor")
    return options


def built():
    """The most recently built trainer."""
    found = [path for path in (ROOT / "target" / profile / "trainer" for profile in ("release", "debug")) if path.is_file()]
    if not found:
        fail("the trainer is not built: cargo build --release -p trainer, or name it with --trainer", 2)
    return max(found, key=lambda path: path.stat().st_mtime)


def run(command):
    try:
        done = subprocess.run([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}", 2)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"{command[0]} ended with {done.returncode}"])[-1]
        fail(last.removeprefix("error: "), 2 if done.returncode == 2 else 1)


def losses(record):
    with open(record / "steps.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def compare(options, folder):
    """Runs both programs; returns the relative difference of each step."""
    trainer, start = options.trainer or built(), folder / "start.safetensors"
    data = ["--data-dir", options.data_dir] if options.data_dir else []
    arithmetic = [f"--{name}={getattr(options, name)}" for name in ("dtype", "weights")]
    work = [f"--{name}={getattr(options, name)}" for name in ("dataset", "hidden", "layers", "batch", "steps", "seed")] + data
    run([trainer, *work, *arithmetic, "--lr", options.lr, "--gemm", options.gemm, "--device", options.trainer_device,
         "--save-start", start, "--out", folder / "trainer"])  # fmt: skip
    run([options.python, HERE / "mlp.py", "--start", start, *data, *arithmetic, "--lr", options.lr, "--mode", options.mode,
         "--device", options.torch_device, "--out", folder / "pytorch"])  # fmt: skip
    ours, theirs = losses(folder / "trainer"), losses(folder / "pytorch")
    if len(ours) != len(theirs):
        fail(f"the trainer did {len(ours)} steps, PyTorch {len(theirs)}", 1)
    return ours, [abs(b - a) / abs(a) for a, b in zip(ours, theirs)]


def main():
    options = arguments()
    if options.out:
        try:
            options.out.mkdir(parents=True)
        except OSError as error:
            fail(f"{options.out}: {error.strerror}; choose another directory with --out", 2)
        ours, differences = compare(options, options.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            ours, differences = compare(options, Path(folder))
    early = differences[:100]
    worst = max(range(len(early)), key=early.__getitem__)
    report = {
        "steps": len(differences),
        "largest_in_100": early[worst],
        "at_step": worst + 1,
        "largest": max(differences),
        "last": differences[-1],
        "tolerance": options.tolerance,
        "agree": early[worst] < options.tolerance,
    }
    if options.json:
        print(json.dumps(report))
    else:
        print(
            f"{len(differences)} steps, loss {ours[0]:.4f} to {ours[-1]:.4f}: largest relative difference {early[worst]:.1e} "
            f"(step {worst + 1}) in the first {len(early)}, {max(differences):.1e} in all; tolerance {options.tolerance:.0e}"
        )
    return 0 if report["agree"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
