#!/usr/bin/env python3
"""Records the held-out programs of `vramlab advise` under PyTorch's settings.

    python3 experiments/pytorch/programs/heldout/record.py -o DIR [--only NAME]... [--limit-mib N]
    experiments advise-truth DIR

Each program runs under each setting in a separate process: DIR/NAME.SETTING.json has PyTorch's statistics at the end,
the setting, the command, driver, host, commit and day; DIR/NAME.default.pickle.xz is the recording under the defaults,
from which `advise` predicts the others. Needs PyTorch 2.11, transformers, timm, and a GPU on which a program may take
64 GB.

Exit codes: 0 completed, 1 failed while recording, 2 bad input, 130 interrupted.
"""

import argparse
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

BASELINES = Path(__file__).resolve().parents[2] / "baselines"
sys.path.insert(0, str(BASELINES))

from record_histories import BadInput, Failed, Parser, framework, positive, write  # noqa: E402
from run_record import provenance  # noqa: E402

NAMES = ("bert_eval", "vit_ckpt", "lstm_var", "gnn_sample", "load_serve", "sparse_rec")
SETTINGS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "exproundup4": "expandable_segments:True,roundup_power2_divisions:4",
    "roundup8": "roundup_power2_divisions:8",
    "split128": "max_split_size_mb:128",
    "split32": "max_split_size_mb:32",
    "splitround": "max_split_size_mb:256,roundup_power2_divisions:16",
}
MIB = 2**20


def arguments():
    """The options of this call."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="directory of the files")
    only = f"one of {', '.join(NAMES)}, more than once for several (default: all)"
    parser.add_argument("--only", choices=NAMES, action="append", metavar="NAME", help=only)
    parser.add_argument("--limit-mib", type=positive, metavar="N", help="limit on reserved memory (default: none)")
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
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


def record(name, setting, limit_mib, output):
    """Runs a program in this process and writes its statistics, and under the defaults its recording."""
    torch = framework()
    if setting == "default":
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
    from programs import PROGRAMS

    torch.manual_seed(0)
    random.seed(0)
    total = torch.cuda.get_device_properties(0).total_memory
    if limit_mib:
        torch.cuda.set_per_process_memory_fraction(limit_mib * MIB / total)
    refused = None
    try:
        PROGRAMS[name]()
    except torch.cuda.OutOfMemoryError as error:
        refused = str(error).splitlines()[0]
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    facts = {
        "workload": name,
        "config": setting,
        "conf": SETTINGS[setting],
        "limit_mib": limit_mib or 0,
        "total_memory": total,
        "oom": refused,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        **origin(),
        "stats": {
            key: value for key, value in stats.items() if isinstance(value, int) and ("." not in key or ".all." in key)
        },
    }
    if setting == "default":
        snapshot = pickle.dumps(torch.cuda.memory._snapshot(), protocol=4)
        write(output / f"{name}.default.pickle.xz", lzma.compress(snapshot, preset=9))
    write(output / f"{name}.{setting}.json", (json.dumps(facts, indent=1) + "\n").encode())
    print(
        f"{name} {setting}: peak reserved {stats['reserved_bytes.all.peak'] / MIB:.0f} MiB"
        + ", out of memory" * bool(refused)
    )


def start(name, setting, limit_mib, output):
    """The same in a separate process, since PyTorch reads its settings at start."""
    conf = SETTINGS[setting]
    environment = {**os.environ, **({"PYTORCH_ALLOC_CONF": conf} if conf else {})}
    command = [sys.executable, __file__, "-o", str(output), "--only", name, "--setting", setting]
    command += ["--limit-mib", str(limit_mib)] if limit_mib else []
    if subprocess.run(command, env=environment).returncode:
        raise Failed(f"{name} under {setting} was not recorded")


def main():
    """Records all; returns the exit code."""
    try:
        options = arguments()
        options.output.mkdir(parents=True, exist_ok=True)
        if options.setting:
            record(options.only[0], options.setting, options.limit_mib, options.output)
            return 0
        framework()
        for name in options.only or NAMES:
            for setting in SETTINGS:
                start(name, setting, options.limit_mib, options.output)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: cannot write to {options.output}: {error.strerror}; choose another directory with -o",
            file=sys.stderr,
        )
        return 2
    except (Failed, ImportError, RuntimeError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
