#!/usr/bin/env python3
"""Runs PyTorch programs under PyTorch's own allocators and VramLab's, and writes the measurements, one line of JSON per run.

    python3 experiments/pytorch/campaign.py -o DIR --parts smoke,checks,empty --budget 400 [--resume FILE]...

Needs PyTorch with a GPU, libvramlab (VRAMLAB_LIBRARY, or built in target/) and a C++ compiler for the shim. `--plan` prints
the planned runs and their time. Timed runs have the GPU for themselves; where a single call is timed (`empty`), the
processes of all allocators take turns on one core; where only memory is measured, runs are concurrent as far as the GPU's
memory allows. Each run is a process forked from one that has imported PyTorch but has not used the GPU; `--fresh` starts a
new Python for each instead.

DIR/results.jsonl has a line for the machine, then one for each run: program, arm, and the record of programs/measure.py.
`--resume` names such files of earlier calls, whose runs are not repeated. No run starts that would not end within
`--budget` seconds; the next call resumes. `experiments run inside-histories` records the programs' events.

Exit codes: 0 all completed, 1 some runs failed, 2 bad input, 4 the budget ended first.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from processes import HERE, NATIVE, Starter, environment
from turns import Turns

sys.path.insert(0, str(HERE / "baselines"))
from run_record import provenance

GIB = 2**30

OURS = ("caching", "pytorch-expandable", "remap", "remap:steal=always", "stream-ordered", "rmm-pool", "bfc", "tlsf")
ARMS = (*NATIVE, *OURS)
# The arms in the bar charts; the others are only compared.
MAIN = ("native", "expandable", "caching", "pytorch-expandable", "remap", "remap:steal=always")
# Planned GiB and seconds of a program's forked run. A fresh process takes more.
SIZES = {
    "gpt2": (20, 3.5), "resnet50": (14, 3), "varying": (22, 4.5), "moe": (16, 5), "generate": (14, 6),
    "gnn": (26, 5), "compiled": (16, 25), "graphed": (26, 4), "usual": (16, 20), "checks": (16, 40), "empty": (2, 12),
}  # fmt: skip
FRESH_S = 6
VARIED = ("varying", "moe", "generate", "gnn", "graphed", "compiled")
# Limits as multiples of active memory: for the main arms, and for the others.
LIMITS = (1.3, 1.2, 1.1, 1.06, 1.04, 1.02, 1.01, 1.005, 1.0)
FEW_LIMITS = (1.3, 1.1, 1.04, 1.01)
PARTS = ("smoke", "checks", "empty", "timed", "passes", "curve", "memory", "latency")
# Context and libraries on the device, in addition to PyTorch's reserved memory.
BESIDE = 1.2


@dataclass
class Task:
    """One run."""

    part: str
    program: str
    arm: str
    repeat: int = 0
    options: list = field(default_factory=list)
    # The limit as a multiple of `native`'s peak active memory without a limit.
    limit: float | None = None
    alone: bool = False
    fresh: bool = False
    latency: bool = False
    timeout: int = 120

    @property
    def id(self):
        limit = f" at {self.limit:g}" if self.limit else ""
        return f"{self.part} {self.program} {self.arm}{limit} #{self.repeat}"

    @property
    def turns(self):
        """Runs with equal keys take turns; None for runs that do not."""
        return self.repeat if self.program == "empty" else None

    @property
    def gib(self):
        return SIZES[self.program][0] + BESIDE

    @property
    def seconds(self):
        return SIZES[self.program][1] + (FRESH_S if self.fresh else 0)


def shuffled(tasks, key):
    """The tasks in a reproducible order that gives no arm a fixed position."""
    tasks = list(tasks)
    random.Random(key).shuffle(tasks)
    return tasks


def rounds(part, programs, arms, repeats, **options):
    """Each arm once, in a random order, then each once more: a drift of the machine affects all arms equally."""
    for repeat in range(repeats):
        for program in programs:
            yield from shuffled(
                (Task(part, program, arm, repeat, **options) for arm in arms), f"{part} {program} {repeat}"
            )


def planned(parts, arms, repeats, checks):
    """All runs of the parts, the most important ones first."""
    main = [arm for arm in arms if arm in MAIN]
    others = [arm for arm in arms if arm not in MAIN]
    few = ["--warm-up", "2", "--steps", "3"]
    tasks = []
    for part in parts:
        if part == "smoke":
            # Once as a user starts it, and once forked, as in the other parts.
            tasks += [Task(part, "gpt2", arm, 0, few, fresh=True) for arm in arms]
            tasks += [Task(part, "gpt2", arm, 1, few) for arm in arms]
            tasks += [
                Task(part, "usual", arm, 0, ["--steps", "8"], fresh=True)
                for arm in arms
                if arm in ("native", "caching", "remap")
            ]
        elif part == "checks":
            # Concurrent runs exhausted each other's memory. They take half a minute; where memory cannot be sent to another
            # process, that process waits a minute for it, and its parent does not exit.
            some = (
                Task(part, "checks", arm, options=[str(checks)], alone=True, fresh=True, timeout=110) for arm in arms
            )
            tasks += some
        elif part == "empty":
            tasks += rounds(part, ["empty"], arms, 3)
        elif part == "timed":
            tasks += rounds(part, ["gpt2", "resnet50"], main, repeats, alone=True)
            tasks += rounds(part, ["gpt2", "resnet50"], others, 3, alone=True)
        elif part == "passes":
            tasks += rounds(part, ["varying"], main, repeats, alone=True)
        elif part == "curve":
            short = {"gpt2": ["--warm-up", "4", "--steps", "8"], "resnet50": ["--warm-up", "4", "--steps", "10"]}
            # The limits are multiples of `native`'s memory without a limit.
            tasks += [Task(part, program, "native", 0, options, alone=True) for program, options in short.items()]
            for wanted, limits in ((main, LIMITS), (others, FEW_LIMITS)):
                wanted = [arm for arm in wanted if arm != "remap:steal=always"]
                for program, options in short.items():
                    for limit in limits:
                        some = (Task(part, program, arm, 0, options, limit=limit, alone=True) for arm in wanted)
                        tasks += shuffled(some, f"{program} {limit}")
        elif part == "memory":
            tasks += rounds(part, VARIED, arms, 3, timeout=300)
        elif part == "latency":
            ours = [arm for arm in arms if arm in OURS]
            tasks += rounds(part, ["gpt2", "resnet50", *VARIED[:4]], ours, 1, latency=True)
    return tasks


def outcome(running, code):
    """The record of a completed run: its output file, or the end of its printed text."""
    task = running.task
    base = {
        key: value
        for key, value in asdict(task).items()
        if value not in (None, False, []) and key not in ("timeout", "alone")
    }
    base["id"] = task.id
    if task.limit:
        base["over_active"] = base.pop("limit")
    base["start"] = "fresh" if running.process is not None else "forked"
    log = running.log.read_text(errors="replace") if running.log.exists() else ""
    record = running.record
    if task.program == "checks":
        lines = [line for line in log.splitlines() if line.startswith(("PASS ", "FAIL "))]
        result = {
            "checks": lines,
            "passed": sum(line.startswith("PASS") for line in lines),
            "failed": sum(line.startswith("FAIL") for line in lines),
        }
        bad = code != 0 or result["failed"] > 0 or not lines
    elif task.program == "usual":
        results = [text for text in log.splitlines() if text.startswith('{"program"')]
        result = json.loads(results[-1]) if results else {}
        bad = code != 0 or not result
    else:
        result = json.loads(record.read_text().splitlines()[-1]) if record.exists() and record.stat().st_size else {}
        bad = code not in (0, 3) or not result
    status = "failed" if bad else "oom" if result.get("oom") else "ok"
    out = base | result | {"status": status, "code": code, "took_s": round(time.monotonic() - running.began, 3)}
    if inside := out.get("vramlab"):
        out["vramlab"] = without_zeros(inside)
    if bad:
        out["log"] = log[-3000:]
    elif task.program == "usual":
        out["log"] = log[-6000:]
    return out


def without_zeros(stats):
    """The allocator's own statistics, without zeros and without those that PyTorch's statistics contain."""
    if not isinstance(stats, dict):
        return stats
    kept = {key: without_zeros(value) for key, value in stats.items() if value not in (0, 0.0, None)}
    return {key: value for key, value in kept.items() if not re.search(r"\.(small_pool|large_pool|all)\.", key)}


def machine(build):
    """The machine and its software."""
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'gpu': p.name, 'memory': p.total_memory, 'torch': torch.__version__, 'cuda': torch.version.cuda}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(
            f"error: PyTorch finds no GPU: {(found.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    facts = json.loads(found.stdout.splitlines()[-1])
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        # One line per GPU.
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()
    with contextlib.suppress(OSError):
        commit = subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        build = build or commit
    return {"kind": "machine", "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "build": build, "cores": os.cpu_count(),
            "python": sys.version.split()[0], "kernel": os.uname().release,
            "provenance": provenance(whole=True, build=build), **facts}  # fmt: skip


def line(record):
    """A run's summary in one line."""
    stats = record.get("stats") or {}
    words = [f"{record['took_s']:6.1f} s  {record['id']}: {record['status']}"]
    if record["status"] == "failed":
        words.append((record["log"].strip().splitlines() or [f"code {record['code']}, nothing was printed"])[-1][-200:])
    if "ms" in record:
        words.append(f"{record['ms']:.2f} ms")
    if "ns" in record:
        words.append(f"{statistics.median(record['ns']):.0f} ns")
    for name in ("reserved", "active"):
        if (bytes_held := stats.get(f"{name}_bytes.all.peak")) is not None:
            words.append(f"{bytes_held / 2**20:,.0f} MiB {name}")
    if "checks" in record:
        words.append(f"{record['passed']} passed, {record['failed']} failed")
        words += [check[:150] for check in record["checks"] if check.startswith("FAIL")]
    return ", ".join(words)


class Campaign:
    """The runs, their records, and the file of results."""

    def __init__(self, options):
        self.options = options
        self.done, self.active, self.peak, self.broken, self.refused = set(), {}, {}, set(), {}
        for file in options.resume:
            for text in file.read_text().splitlines():
                self.learn(json.loads(text))
        self.began = time.monotonic()
        self.kept = self.failed = self.skipped = 0

    def learn(self, record):
        """Registers a record: its run is not repeated, and later runs use its memory and time."""
        if record.get("kind") == "machine" or record.get("status") not in ("ok", "oom"):
            return
        self.done.add(record["id"])
        stats, limit = record.get("stats") or {}, record.get("limit")
        if limit and record["oom"]:
            key = record["program"], record["arm"]
            self.refused[key] = self.refused.get(key, 0) + 1
        if limit is None and stats:
            if record["arm"] == "native" and record["part"] in ("timed", "curve"):
                self.active[record["program"]] = stats["active_bytes.all.peak"]
            key = record["program"], record["arm"]
            if record["part"] != "smoke" and "reserved_bytes.all.peak" in stats:
                self.peak[key] = max(self.peak.get(key, 0), stats["reserved_bytes.all.peak"])

    def left(self):
        return self.options.budget - (time.monotonic() - self.began)

    def gib(self, task):
        """GiB to reserve for a run: its earlier use, or the plan's estimate."""
        known = self.peak.get((task.program, task.arm))
        return known / GIB * 1.05 + BESIDE if known else task.gib

    def limit(self, task):
        """The limit in bytes, once the active memory is known."""
        return int(task.limit * self.active[task.program]) if task.limit else None

    def keep(self, running, code, file):
        """Writes the record of a completed run and prints a line about it."""
        record = outcome(running, code)
        self.learn(record)
        self.kept += 1
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
        file.flush()
        if record["status"] == "failed":
            self.failed += 1
            # The other parts fork their runs.
            if record["part"] == "smoke" and record["start"] == "forked":
                self.broken.add(record["arm"])
        print(line(record), flush=True)

    def run(self, tasks, starter, file, room):
        """Runs the tasks in order: one by one or in turn if they are timed, else concurrently."""
        for (turns, alone), group in itertools.groupby(tasks, key=lambda task: (task.turns, task.alone)):
            if turns is not None:
                self.in_turn(list(group), starter, file)
            elif alone:
                self.one_by_one(group, starter, file)
            else:
                self.side_by_side(list(group), starter, file, room)

    def one_by_one(self, tasks, starter, file):
        """Runs tasks alone. The next one imports and creates its CUDA context while the last one creates its model, then waits."""
        wanted = (task for task in tasks if self.wanted(task))
        running = None
        while True:
            ahead = self.options.ahead and running is not None and not running.task.fresh
            following = next(wanted, None) if running is None or ahead else None
            started = following and starter.start(following, self.limit(following), go=False)
            if running:
                self.finish(running, starter, file)
                if not ahead:
                    following = next(wanted, None)
                    started = following and starter.start(following, self.limit(following), go=False)
            if not started:
                return
            starter.release(started)
            running = started

    def in_turn(self, tasks, starter, file):
        """Runs tasks whose processes take turns. If one is missing, all are repeated."""
        if not any(self.wanted(task) for task in tasks):
            return
        path = starter.folder / f"turns-{tasks[0].turns}"
        turns = Turns(path)
        running = [starter.start(task, None, turns=path) for task in tasks]
        turns.gather({run.request["id"]: run for run in running}, lambda run: starter.code(run) is not None)
        turns.take(tasks[0].turns)
        turns.close()
        for run in running:
            self.finish(run, starter, file)

    def finish(self, running, starter, file):
        """Waits for a run and writes its record."""
        while (code := starter.code(running)) is None:
            starter.wait()
        self.keep(running, code, file)

    def side_by_side(self, waiting, starter, file, room):
        """Starts tasks as soon as the GPU has room for them."""
        running = []
        while waiting or running:
            for run in list(running):
                if (code := starter.code(run)) is not None:
                    running.remove(run)
                    self.keep(run, code, file)
            used = sum(self.gib(run.task) for run in running)
            for task in list(waiting):
                if len(running) >= self.options.jobs:
                    break
                if not self.wanted(task):
                    waiting.remove(task)
                elif not running or used + self.gib(task) <= room:
                    waiting.remove(task)
                    running.append(starter.start(task, None))
                    used += self.gib(task)
            starter.wait()
            if running and self.left() < -30:
                print(f"the budget has ended; {len(running)} runs are left alone", flush=True)
                self.skipped += len(running) + len(waiting)
                return

    def wanted(self, task):
        """True if a run must start: not done before, in time, with a known limit, under a working allocator."""
        if task.id in self.done:
            return False
        # A task that ran out of memory under two limits would do so under lower ones.
        if task.limit and self.refused.get((task.program, task.arm), 0) >= 2:
            return False
        if task.arm in self.broken or (task.limit and task.program not in self.active) or self.left() < task.seconds:
            self.skipped += 1
            return False
        return True


def costs(tasks, jobs):
    """Seconds of the runs, by part."""
    took = {}
    for task in tasks:
        took[task.part] = took.get(task.part, 0) + task.seconds / (1 if task.alone else min(jobs, 6))
    return took


def choice(words, known, what):
    """The names in a list; raises an error for unknown ones."""
    names = [name for name in words.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {what} is called '{unknown[0]}'; there are {', '.join(known)}")
    return names


def arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder of results; made if need be"
    )
    parts = f"of {', '.join(PARTS)} (default: all)"
    parser.add_argument(
        "--parts", type=lambda words: choice(words, PARTS, "part"), default=list(PARTS), metavar="A,B", help=parts
    )
    arms = f"of {', '.join(ARMS)} (default: all)"
    parser.add_argument(
        "--arms", type=lambda words: choice(words, ARMS, "arm"), default=list(ARMS), metavar="A,B", help=arms
    )
    parser.add_argument("--programs", metavar="A,B", help="only runs of these programs")
    parser.add_argument(
        "--repeats",
        type=int,
        default=10,
        metavar="N",
        help="runs of each arm in the parts timed and passes (default: 10)",
    )
    parser.add_argument(
        "--budget", type=float, default=540, metavar="SECONDS", help="no run begins that would end later (default: 540)"
    )
    parser.add_argument(
        "--resume", type=Path, action="append", default=[], metavar="FILE", help="results of an earlier call"
    )
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), metavar="N", help="runs side by side at most"
    )
    parser.add_argument(
        "--checks", type=Path, metavar="FILE", help="a program that prints PASS or FAIL a line, for the part `checks`"
    )
    parser.add_argument(
        "--build", metavar="TEXT", help="commit of what is measured, where there is no repository to ask"
    )
    parser.add_argument("--fresh", action="store_true", help="start a Python for each run")
    parser.add_argument(
        "--no-ahead", dest="ahead", action="store_false", help="begin a timed run only when the last one has ended"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="small programs on the CPU under PyTorch's allocator, to try this program"
    )
    parser.add_argument("--plan", action="store_true", help="print what would run, and start nothing")
    return parser.parse_args()


def on_cpu(task):
    """A run of the same position in the plan that needs no GPU."""
    if task.program not in ("checks", "usual", "empty"):
        task.options = ["--device", "cpu", "--small", "--warm-up", "1", "--steps", "2"]
    elif task.program != "checks":
        task.options = ["--device", "cpu"] + ["--small", "--steps", "6", "--length", "16", "--batch", "2"] * (
            task.program == "usual"
        )
    return task


def main():
    """Schedules and runs the tasks, and prints the missing ones."""
    options = arguments()
    missing = [file for file in (*options.resume, *filter(None, [options.checks])) if not file.is_file()]
    if missing:
        print(f"error: {missing[0]}: no such file", file=sys.stderr)
        return 2
    if "checks" in options.parts and not options.checks:
        print("error: the part `checks` needs --checks FILE; leave it out with --parts", file=sys.stderr)
        return 2
    campaign = Campaign(options)
    tasks = planned(options.parts, options.arms, options.repeats, options.checks)
    if options.programs:
        tasks = [task for task in tasks if task.program in options.programs.split(",")]
    tasks = [task for task in tasks if task.id not in campaign.done]
    for part, seconds in costs(tasks, options.jobs).items():
        print(f"{part}: {sum(task.part == part for task in tasks)} runs, about {seconds:.0f} s", flush=True)
    if options.plan:
        for task in tasks:
            print(task.id)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    if options.cpu:
        tasks = [on_cpu(task) for task in tasks if task.arm in NATIVE and not task.limit]
        facts = {"kind": "machine", "cpu": True}
    else:
        facts = machine(options.build)
        if any(task.arm not in NATIVE for task in tasks):
            facts["shim_s"] = compile_shim()
    room = facts.get("memory", 64 * GIB) / GIB * 0.94
    with (
        tempfile.TemporaryDirectory(prefix="campaign-") as folder,
        open(options.output / "results.jsonl", "a", encoding="utf-8") as file,
    ):
        file.write(json.dumps(facts, separators=(",", ":")) + "\n")
        file.flush()
        starter = Starter(folder, options.fresh)
        try:
            campaign.run(tasks, starter, file, room)
        finally:
            starter.close()
    print(
        f"{campaign.kept} runs kept, {campaign.failed} failed, {campaign.skipped} not begun, {time.monotonic() - campaign.began:.0f} s"
    )
    return 1 if campaign.failed else 4 if campaign.skipped else 0


def compile_shim():
    """Compiles the shim once, before concurrent runs need it; returns the seconds."""
    began = time.monotonic()
    code = "from vramlab import _build; print(_build.shim(_build.Torch.installed()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment("caching"))
    if found.returncode:
        raise SystemExit(f"error: no shim: {(found.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return round(time.monotonic() - began, 1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
