#!/usr/bin/env python3
"""Times the whole captured step of the trainer and of PyTorch, cell by cell: a width and a type, batch 32, four layers.

    python3 experiments/pytorch/baselines/train_beside.py -o DIR/training-beside.jsonl --trainer target/release/trainer --budget 540

Needs PyTorch 2.11, a GPU, MNIST's files (--data-dir or MNIST_DIR) and the trainer's binary, which needs no Rust. The arms are

    ours            the trainer: caching allocator, updates in the gradients' epilogues, the step as one graph
    ours-streams    the same with updates on a stream of their own; at widths up to 1024, where launches and not bytes bound a step
    captured        PyTorch's eager step as one CUDA graph, fused SGD
    compiled        the step compiled as one function (max-autotune-no-cudagraphs) and captured
    compiled-plain  the same by Inductor's default, which tunes nothing
    autotune        torch.compile(mode="max-autotune") of forward and backward pass, fused SGD

A type is f32 (full f32 matrix products), tf32 or f16 (16-bit weights), the same in all arms. PyTorch's arms of a cell are
processes that are ready and wait. Then each round times every arm once, in a random order: 300 steps by the GPU's events, in
the trainer the second of two epochs, after 1875 others. First all cells are compiled, --jobs at a time; Inductor's cache is
DIR/inductor. The file has a line for the machine and one for each cell, with every time in microseconds per step, medians and
middle halves. `ratio` is the faster of the first two arms relative to PyTorch's fastest. The same command resumes: a completed
cell in the file is not repeated, an interrupted one is.

Exit codes: 0 completed, 1 an arm failed (its cell contains the error), 2 bad input, 4 the budget ended first.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from run_record import provenance, whole_lines

HERE = Path(__file__).resolve().parent
WIDTHS = (128, 1024, 2048, 4096, 8192)
TYPES = ("f16", "f32", "tf32")
WORK = ["--dataset", "mnist", "--layers", "4", "--batch", "32", "--lr", "0.003", "--epochs", "2", "--loader", "resident"]
STEPS, BEFORE = 300, 1875
# The options of `mlp.py` for each arm.
THEIRS = {
    "captured": ["--mode", "graph", "--fused-sgd", "on"],
    "compiled": ["--mode", "compiled-graph"],
    "compiled-plain": ["--mode", "compiled-graph", "--compile-mode", "default"],
    "autotune": ["--mode", "compile", "--compile-mode", "max-autotune", "--fused-sgd", "on"],
}
# The trainer's options for each of its arms.
OURS = {"ours": [], "ours-streams": ["--streams", "2"]}
ARMS = (*OURS, *THEIRS)
# The maximum width at which launches bound a step.
NARROW = 1024
# Planned seconds of a compiled cell, and of compiling an arm, until the file has measured ones.
CELL_S, COMPILE_S = 75, 60


def options_of(width, dtype):
    """A cell's options for both programs."""
    return [*WORK, "--hidden", str(width), "--dtype", dtype, *(["--weights", "half"] if dtype == "f16" else [])]


def arms_of(width, options):
    """A cell's arms."""
    left_out = {"ours-streams"} if width > NARROW else set()
    return [arm for arm in options.arms if arm not in left_out]


def work(words):
    """The main loop of a PyTorch process: compiles, prints `ready`, and times its steps on each request."""
    import mlp
    import mlp_torch

    sys.argv = ["mlp.py", *words]
    options = mlp.arguments()
    start = mlp.settle(options)
    torch, device = mlp.framework(options)
    data = mlp.load(options, start, torch)
    torch.set_float32_matmul_precision("high" if options.dtype == "tf32" else "highest")
    widths = [data.facts["features"], *[options.hidden] * (options.layers - 1), data.facts["classes"]]
    model = mlp_torch.network(widths, device)
    mlp_torch.from_seed(model, options.init, options.seed, device)
    arithmetic = mlp_torch.Arithmetic(options, device)
    arithmetic.place(model)
    source = mlp_torch.loader(options, data.train, device)
    steps = mlp_torch.steps(options, model, arithmetic, source, STEPS)
    source.begin_pass(torch.randperm(len(data.train)))
    steps.prepare([options.batch], options.warm_up)
    if options.mode == "compile":
        # Inductor records and then replays its graphs on real batches.
        for slot in range(10):
            steps.run(slot, slot * options.batch, options.batch)
    torch.cuda.synchronize()
    print(json.dumps({"ready": torch.__version__}), flush=True)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for line in sys.stdin:
        source.begin_pass(torch.randperm(len(data.train)))
        # The first time, as many steps as the trainer runs before its timed ones.
        for count, timed in ((int(line), False), (STEPS, True)):
            if timed:
                first.record()
            for slot in range(count):
                steps.run(slot % STEPS, slot % STEPS * options.batch, options.batch)
        last.record()
        torch.cuda.synchronize()
        loss = steps.losses[STEPS - 1].item()
        print(json.dumps({"us": 1e3 * first.elapsed_time(last) / STEPS, "loss": loss}), flush=True)


class Failed(Exception):
    """The reason why an arm has no times, in one line."""


def last_words(path):
    """The last line that a process wrote to stderr."""
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


class Theirs:
    """A PyTorch process, from its start to its end."""

    def __init__(self, arm, width, dtype, folder, options):
        words = [*options_of(width, dtype), *THEIRS[arm], "--rows", "values"]
        words += ["--data-dir", str(options.data_dir)] if options.data_dir else []
        cache = str(options.output.resolve().parent / "inductor")
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache + "/triton"}
        self.errors = Path(folder) / f"{arm}-{width}-{dtype}.log"
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--work", *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        self.asked = False

    def answer(self):
        """The next line of its answer, skipping the tables that tuning prints."""
        for line in self.process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        raise Failed(last_words(self.errors))

    def time(self):
        """Microseconds per step, and the last loss."""
        self.process.stdin.write(f"{0 if self.asked else BEFORE}\n")
        self.process.stdin.flush()
        self.asked = True
        return self.answer()

    def end(self):
        """Ends the process if it still runs."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ours(arm, width, dtype, folder, options):
    """The trainer's microseconds per step: 300 steps of a second epoch."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [str(options.trainer), "--device", "cuda", *options_of(width, dtype), "--steps", str(BEFORE + STEPS)]
    command += ["--alloc", "caching", "--fuse", "update", "--launch", "graph", "--latency", "off", "--nvtx", "off"]
    command += [*OURS[arm], "--out", str(out)] + (["--data-dir", str(options.data_dir)] if options.data_dir else [])
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300])
    summary = json.loads((out / "summary.json").read_text())
    epoch = summary["epochs"][-1]
    told = {"us": 1e6 * epoch["train_device_s"] / epoch["steps"], "loss": epoch["train_loss"]}
    return told | {"provenance": summary.get("provenance"), "settings": summary.get("settings")}


def middle(values):
    """Median and middle half."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


def cell(width, dtype, options):
    """Times all arms of a cell in turn."""
    began = time.monotonic()
    record = {"kind": "cell", "width": width, "dtype": dtype, "batch": 32, "layers": 4, "steps": STEPS, "rounds": options.rounds}
    arms, failed, theirs, wanted = {}, {}, {}, arms_of(width, options)
    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        try:
            for arm in wanted:
                if arm in THEIRS:
                    theirs[arm] = Theirs(arm, width, dtype, folder, options)
            for arm, one in theirs.items():
                try:
                    one.answer()
                except Failed as problem:
                    failed[arm] = str(problem)
            for number in range(options.rounds):
                order = [arm for arm in wanted if arm not in failed]
                random.Random(f"{width} {dtype} {number}").shuffle(order)
                for arm in order:
                    try:
                        told = ours(arm, width, dtype, folder, options) if arm in OURS else theirs[arm].time()
                    except (Failed, OSError, ValueError) as problem:
                        failed[arm] = str(problem)
                        arms.pop(arm, None)
                        continue
                    one = arms.setdefault(arm, {"us": []})
                    one["us"].append(round(told["us"], 3))
                    one["loss"] = told["loss"]
                    if arm == "ours":
                        record |= {key: told[key] for key in ("provenance", "settings") if told.get(key)}
        finally:
            for one in theirs.values():
                one.end()
    for one in arms.values():
        one |= middle(one["us"])
    record["arms"] = arms
    medians = {arm: one["median"] for arm, one in arms.items()}
    if compared := {arm: median for arm, median in medians.items() if arm in THEIRS}:
        record["best"] = best = min(compared, key=compared.get)
        if alike := [medians[arm] for arm in OURS if arm in medians]:
            record["ratio"] = round(min(alike) / compared[best], 4)
    if failed:
        record["failed"] = failed
    return record | {"took_s": round(time.monotonic() - began, 1)}


def compile_all(cells, options, left):
    """Compiles the cells' code, several at a time; prints the times."""
    wanted = [(arm, *one) for one in cells for arm in options.arms if arm in THEIRS and arm != "captured"]
    marks = options.output.resolve().parent / "inductor" / "compiled"
    marks.mkdir(parents=True, exist_ok=True)
    wanted = [one for one in wanted if not (marks / "-".join(map(str, one))).exists()]

    def compile_one(one):
        if left() < COMPILE_S:
            return False
        began = time.monotonic()
        process = Theirs(*one, folder, options)
        try:
            process.answer()
        except Failed as problem:
            print(f"compiling {one}: {problem}", flush=True)
        else:
            (marks / "-".join(map(str, one))).touch()
            print(f"compiled {' '.join(map(str, one))} in {time.monotonic() - began:.0f} s", flush=True)
        finally:
            process.end()
        return True

    with tempfile.TemporaryDirectory(prefix="beside-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        return all(list(pool.map(compile_one, wanted)))


def machine(options):
    """The machine and the measured versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu, driver = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0].split(", ")
    except (OSError, IndexError, ValueError):
        raise SystemExit("error: nvidia-smi finds no GPU") from None
    facts = {"kind": "machine", "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "gpu": gpu, "driver": driver}
    facts |= {"cores": os.cpu_count(), "python": sys.version.split()[0], "provenance": provenance(build=options.build)}
    return facts | ({"build": options.build} if options.build else {})


def choice(known_words, kind):
    """An argparse type: comma-separated words from a list."""

    def names(text):
        found = [kind(word) for word in text.split(",") if word]
        if unknown := [word for word in found if word not in known_words]:
            raise argparse.ArgumentTypeError(f"'{unknown[0]}': write some of {', '.join(map(str, known_words))}")
        return found

    return names


def arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the record; lines are added")
    add("--trainer", type=Path, default=Path("target/release/trainer"), metavar="FILE", help="the trainer (default: %(default)s)")
    add("--data-dir", type=Path, metavar="DIR", help="MNIST's four files (default: MNIST_DIR)")
    add("--widths", type=choice(WIDTHS, int), default=list(WIDTHS), metavar="A,B", help=f"of {', '.join(map(str, WIDTHS))}")
    add("--types", type=choice(TYPES, str), default=list(TYPES), metavar="A,B", help=f"of {', '.join(TYPES)}")
    add("--arms", type=choice(ARMS, str), default=list(ARMS), metavar="A,B", help=f"of {', '.join(ARMS)}")
    add("--rounds", type=int, default=10, metavar="N", help="times of each arm (default: 10)")
    add("--jobs", type=int, default=4, metavar="N", help="compilations at a time (default: 4)")
    add("--budget", type=float, default=540, metavar="SECONDS", help="nothing begins that would end later (default: 540)")
    add("--build", metavar="TEXT", help="commit of what is measured, where there is no repository to ask")
    add("--plan", action="store_true", help="print what would run, and start nothing")
    options = parser.parse_args()
    if options.rounds < 1 or options.jobs < 1:
        parser.error("--rounds and --jobs take numbers from 1 on")
    return options


def main():
    """Measures the cells given on the command line."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
        return 0
    options = arguments()
    if set(OURS) & set(options.arms) and not options.plan and not options.trainer.is_file():
        print(f"error: {options.trainer}: no such file; cargo build --release -p trainer makes it", file=sys.stderr)
        return 2
    # An interrupted cell is repeated.
    done = [one for one in whole_lines(options.output) if one["kind"] == "cell"]
    have = {(one["width"], one["dtype"]) for one in done}
    cells = [(width, dtype) for width in options.widths for dtype in options.types if (width, dtype) not in have]
    took = statistics.median([one["took_s"] for one in done]) if done else CELL_S
    print(f"{len(cells)} cells, about {took * len(cells):.0f} s when compiled", flush=True)
    if options.plan or not cells:
        for width, dtype in cells:
            print(f"{dtype} {width}: {', '.join(arms_of(width, options))}")
        return 0
    began = time.monotonic()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    facts = machine(options)
    compile_all(cells, options, lambda: options.budget - (time.monotonic() - began))
    failed = skipped = 0
    with open(options.output, "a", encoding="utf-8") as file:
        file.write(json.dumps(facts, separators=(",", ":")) + "\n")
        file.flush()
        for width, dtype in cells:
            if options.budget - (time.monotonic() - began) < took:
                skipped += 1
                continue
            record = cell(width, dtype, options)
            took = max(record["took_s"], took if done else 0)
            failed += "failed" in record
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            file.flush()
            medians = ", ".join(f"{arm} {one['median']:.1f}" for arm, one in record["arms"].items())
            print(f"{dtype} {width}: {medians} us, ratio {record.get('ratio')} ({record['took_s']:.0f} s)", flush=True)
    print(f"{len(cells) - skipped} cells kept, {failed} with a failed arm, {skipped} not begun")
    return 1 if failed else 4 if skipped else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
