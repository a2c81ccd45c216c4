#!/usr/bin/env python3
"""Records PyTorch's reserved memory under each of its settings, to validate `vramlab advise`.

    python3 experiments/pytorch/baselines/record_settings.py -o DIR [--only NAME]... [--jobs N]

Eight programs with varying sizes, ten settings, each pair in a separate process: DIR/NAME.SETTING.json has PyTorch's
statistics at the end, the setting and the limit; DIR/NAME.default.pickle.xz the history under the defaults, from which
`advise` predicts the others. Limits are 35 % of the way from peak active to peak reserved memory, both under the defaults.
Needs PyTorch 2.11 and a GPU with up to 30 GB per job.

Exit codes: 0 completed, 1 failed while recording, 2 bad input.
"""

import argparse
import json
import lzma
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from command_line import Failed, Parser, positive, record_code
from record_histories import framework, write
from run_record import provenance

PROGRAMS = ("generate", "moe", "scales", "unet", "prefetch", "adapters", "adversaries", "rollouts")
SPLIT = "garbage_collection_threshold:0.8,max_split_size_mb:64,roundup_power2_divisions:4"
SETTINGS = {
    "default": ("", False),
    "expandable": ("expandable_segments:True", False),
    "split128": ("max_split_size_mb:128", False),
    "split32": ("max_split_size_mb:32", False),
    "roundup8": ("roundup_power2_divisions:8", False),
    "rounduplist": ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", False),
    "limit": ("", True),
    "expandable_limit": ("expandable_segments:True", True),
    "gc": ("garbage_collection_threshold:0.6", True),
    "gcsplit": (SPLIT, True),
}
MIB = 2**20


def arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="folder for the files; made if need be")
    only = f"one of {', '.join(PROGRAMS)}, more than once for several (default: all)"
    parser.add_argument("--only", choices=PROGRAMS, action="append", metavar="NAME", help=only)
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="programs at a time on the GPU (default: 1)")
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--limit-mib", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def origin():
    """Command, driver, host, commit and day of a run; unknown values are absent."""
    machine = provenance()
    commit = machine.get("git_commit")
    known = {
        "command": " ".join(["python3", *sys.argv]),
        "driver": machine.get("driver_release"),
        "host": machine.get("host_hash"),
        "commit": f"{commit[:8]}{'-dirty' if machine.get('git_dirty') else ''}" if commit else None,
        "date": datetime.now(UTC).date().isoformat(),
    }
    return {key: value for key, value in known.items() if value}


def record(name, setting, conf, limit_mib, output, run):
    """Runs one program in this process and writes its statistics, and under the defaults its history."""
    torch = framework()
    torch.manual_seed(0)
    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    if limit_mib:
        torch.cuda.set_per_process_memory_fraction(limit_mib * MIB / total)
    if setting == "default":
        torch.cuda.memory._record_memory_history(enabled="all", context=None)
    refused = None
    try:
        kept = run()
        torch.cuda.synchronize()
        del kept
    except torch.OutOfMemoryError as error:
        refused = str(error).splitlines()[0]
    stats = torch.cuda.memory_stats()
    facts = {
        "workload": name,
        "config": setting,
        "conf": conf,
        "limit_mib": limit_mib,
        "total_memory": total,
        "oom": refused,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        **origin(),
        "stats": {key: value for key, value in stats.items() if isinstance(value, int) and ("." not in key or ".all." in key)},
    }
    if setting == "default":
        snapshot = pickle.dumps(torch.cuda.memory._snapshot(), protocol=4)
        write(output / f"{name}.default.pickle.xz", lzma.compress(snapshot, preset=9))
    write(output / f"{name}.{setting}.json", (json.dumps(facts, indent=1) + "\n").encode())
    print(f"{name} {setting}: peak reserved {stats['reserved_bytes.all.peak'] / MIB:.0f} MiB{', out of memory' * bool(refused)}")


def start(script, name, setting, conf, limit_mib, output):
    """The same in a separate process, since PyTorch reads its settings at start."""
    environment = {**os.environ, **({"PYTORCH_ALLOC_CONF": conf} if conf else {})}
    command = [sys.executable, script, "-o", str(output), "--only", name, "--setting", setting]
    command += ["--limit-mib", str(limit_mib)] if limit_mib else []
    if subprocess.run(command, env=environment).returncode:
        raise Failed(f"{name} under {setting} was not recorded")


def record_chosen(options, record_one, record_all):
    """Records one program under one setting in this process, or all."""
    if options.setting:
        record_one(options.only[0], options)
    else:
        framework()
        record_all(options)
    return 0


def limit(name, output):
    """The program's limit in MiB, from its run under the defaults."""
    stats = json.loads((output / f"{name}.default.json").read_text())["stats"]
    active, reserved = (stats[f"{kind}_bytes.all.peak"] / MIB for kind in ("active", "reserved"))
    return int(active + 0.35 * (reserved - active)) + 1


def record_one(name, options):
    """Runs one program under one setting in this process."""

    def run():
        import torch
        from settings_workloads import WORKLOADS

        return WORKLOADS[name](torch.device("cuda"), 1 + PROGRAMS.index(name))

    record(name, options.setting, SETTINGS[options.setting][0], options.limit_mib, options.output, run)


def record_all(options):
    """Runs each program under each setting, first under the defaults, from which the limits follow."""
    programs, output = options.only or PROGRAMS, options.output
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda name: start(__file__, name, "default", "", 0, output), programs))
        limits = {name: limit(name, output) for name in programs}
        others = [(name, setting) for name in programs for setting in SETTINGS if setting != "default"]
        begun = []
        for name, setting in others:
            conf, limited = SETTINGS[setting]
            begun.append(pool.submit(start, __file__, name, setting, conf, limits[name] if limited else 0, output))
        for done in begun:
            done.result()


if __name__ == "__main__":
    sys.exit(record_code(arguments, lambda options: record_chosen(options, record_one, record_all)))
