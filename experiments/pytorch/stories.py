#!/usr/bin/env python3
"""Runs the two case studies (programs/stories.py) under several settings, and writes one line of JSON per run.

    python3 experiments/pytorch/stories.py -o DIR --budget 540

Needs PyTorch with a GPU that has 60 GB free; `remap` also needs libvramlab and a C++ compiler, and can be excluded with --arms.
DIR/stories.jsonl starts with a line for the machine. The same command resumes: runs in the file are not repeated, and no run
starts that would not end within `--budget` seconds. First each story runs once under PyTorch's defaults and is recorded
(DIR/histories/STORY.pickle.xz, for `vramlab advise`). Then each round has every arm once, in a random order; `--repeats` is
the number of rounds. After the first round `load_serve` runs with a limit of 1.15 times its active memory.

Exit codes: 0 all completed, 1 some runs failed, 2 bad input, 4 the budget ended first.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import campaign
from processes import HERE, start_hook
from run_record import whole_lines

# The settings of PyTorch's own allocator, and the setting that the story changes while it loads.
SETTINGS = {
    "default": ("", None),
    "split20": ("max_split_size_mb:20", None),
    "split20-while-loading": ("", "max_split_size_mb:20"),
    "split64": ("max_split_size_mb:64", None),
    "split512": ("max_split_size_mb:512", None),
    "expandable": ("expandable_segments:True", None),
    "roundup8": ("roundup_power2_divisions:8", None),
}
ARMS = (*SETTINGS, "remap")
FEW = ("default", "expandable", "roundup8", "remap")
OVER_ACTIVE = 1.15
# Planned seconds of a run, until this file has one of the same kind.
PLANNED_S = 25


def planned(arms, repeats):
    """All runs, the most important ones first: (story, arm, kind, repeat)."""
    tasks = [(story, "default", "history", 0) for story in ("load_serve", "emptying", "training") if "default" in arms]
    for repeat in range(repeats):
        some = [("load_serve", arm, "free", repeat) for arm in arms]
        some += [(story, arm, "free", repeat) for story in ("emptying", "training") for arm in arms if arm in FEW]
        random.Random(repeat).shuffle(some)
        tasks += some
        if repeat == 0:
            tasks += [("load_serve", arm, "limit", 0) for arm in arms]
    return tasks


def arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder of results; made if need be")
    parser.add_argument(
        "--arms", type=lambda words: campaign.choice(words, ARMS, "arm"), default=list(ARMS), metavar="A,B",
        help=f"of {', '.join(ARMS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="no run begins that would end later (default: 540)")
    parser.add_argument("--build", metavar="TEXT", help="commit of what is measured, where there is no repository to ask")
    parser.add_argument("--cpu", action="store_true", help="small stories on the CPU, to try this program")
    parser.add_argument("--plan", action="store_true", help="print what would run, and start nothing")
    return parser.parse_args()


def name_of(story, arm, kind, repeat):
    """The name of a run in the file."""
    return f"{story} {arm} {kind} #{repeat}"


def run(task, options, folder, hook, active):
    """Runs a task in a separate process; returns its record."""
    story, arm, kind, repeat = task
    conf, while_loading = SETTINGS.get(arm, ("", None))
    environment = campaign.environment(arm if arm == "remap" else "native", hook)
    if conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = conf
    line = folder / "line.json"
    line.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "programs" / "stories.py"), story, "--output", str(line)]
    if while_loading and not options.cpu:
        command += ["--while-loading", while_loading]
    if options.cpu:
        command += ["--device", "cpu", "--small", "--warm-up", "1", "--steps", "2"]
    if kind == "limit":
        command += ["--limit", str(int(active * OVER_ACTIVE))]
    if kind == "history":
        (options.output / "histories").mkdir(exist_ok=True)
        command += ["--history", str(options.output / "histories" / f"{story}.pickle.xz")]
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        code, log = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, log = 124, "it ran for 240 s and was ended"
    told = json.loads(line.read_text()) if line.exists() else {}
    status = "failed" if code not in (0, 3) or not told else "oom" if told["oom"] else "ok"
    record = {"id": name_of(*task), "arm": arm, "kind": kind, "repeat": repeat, **told, "status": status, "code": code}
    record["took_s"] = round(time.monotonic() - began, 3)
    if inside := record.get("vramlab"):
        record["vramlab"] = campaign.without_zeros(inside)
    return record | ({"log": log[-3000:]} if status == "failed" else {})


def main():
    """Runs the tasks given on the command line."""
    options = arguments()
    path = options.output / "stories.jsonl"
    # An interrupted run is repeated.
    records = [record for record in whole_lines(path) if record.get("status") in ("ok", "oom")]
    done = {record["id"] for record in records}
    tasks = [task for task in planned(options.arms, options.repeats) if name_of(*task) not in done]
    if options.cpu:
        tasks = [task for task in tasks if task[1] != "remap" and task[2] == "free"]
    took = {record["id"].rsplit(" ", 1)[0]: record["took_s"] for record in records}
    seconds = [took.get(f"{story} {arm} {kind}", PLANNED_S) for story, arm, kind, _ in tasks]
    print(f"{len(tasks)} runs, about {sum(seconds):.0f} s", flush=True)
    if options.plan:
        print("\n".join(name_of(*task) for task in tasks))
        return 0
    if not tasks:
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    facts = {"kind": "machine", "cpu": True} if options.cpu else campaign.machine(options.build)
    if not options.cpu and any(arm == "remap" for _, arm, _, _ in tasks):
        facts["shim_s"] = campaign.compile_shim()
    began, failed, skipped = time.monotonic(), 0, 0
    active = max((one["stats"]["active_bytes.all.peak"] for one in records if is_first(one)), default=None)
    with tempfile.TemporaryDirectory(prefix="stories-") as folder, open(path, "a", encoding="utf-8") as file:
        hook = start_hook(folder)
        file.write(json.dumps(facts, separators=(",", ":")) + "\n")
        for task, expected in zip(tasks, seconds, strict=True):
            expected = took.get(" ".join(task[:3]), expected)
            if (task[2] == "limit" and not active) or options.budget - (time.monotonic() - began) < expected:
                skipped += 1
                continue
            record = run(task, options, Path(folder), hook, active)
            if is_first(record):
                active = record["stats"]["active_bytes.all.peak"]
            took[" ".join(task[:3])] = record["took_s"]
            failed += record["status"] == "failed"
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            file.flush()
            print(campaign.line(record), flush=True)
    print(f"{len(tasks) - skipped} runs kept, {failed} failed, {skipped} not begun")
    return 1 if failed else 4 if skipped else 0


def is_first(record):
    """True if a run determines the active memory of `load_serve`."""
    return record["id"].startswith("load_serve default ") and record["kind"] != "limit" and "stats" in record


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
