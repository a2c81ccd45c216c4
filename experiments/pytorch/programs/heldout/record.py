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
import random
import sys
from pathlib import Path

BASELINES = Path(__file__).resolve().parents[2] / "baselines"
sys.path.insert(0, str(BASELINES))

from command_line import Parser, positive, record_code  # noqa: E402
from record_settings import record, record_chosen, start  # noqa: E402

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


def arguments():
    """The options of this call."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="directory of the files")
    only = f"one of {', '.join(NAMES)}, more than once for several (default: all)"
    parser.add_argument("--only", choices=NAMES, action="append", metavar="NAME", help=only)
    parser.add_argument("--limit-mib", type=positive, metavar="N", help="limit on reserved memory (default: none)")
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    return parser.parse_args()


def record_one(name, options):
    """Runs one program under one setting in this process."""

    def run():
        from programs import PROGRAMS

        random.seed(0)
        PROGRAMS[name]()

    record(name, options.setting, SETTINGS[options.setting], options.limit_mib or 0, options.output, run)


def record_all(options):
    """Runs each program under each setting."""
    for name in options.only or NAMES:
        for setting, conf in SETTINGS.items():
            start(__file__, name, setting, conf, options.limit_mib, options.output)


if __name__ == "__main__":
    sys.exit(record_code(arguments, lambda options: record_chosen(options, record_one, record_all)))
