#!/usr/bin/env python3
"""Trains the trainer's network in PyTorch and writes the trainer's run record.

With --start FILE (`trainer start -o FILE`) it starts from the trainer's weights and uses the trainer's batches, so that
losses are comparable number by number. Otherwise PyTorch draws weights and order from --seed.

--dtype, --weights and --loss-scale have the trainer's meaning. f32 is f32 in every matrix product, without TF32. Written for
PyTorch 2.11; runs on a CPU too. Exit codes are the trainer's: 0 completed, 1 failed while running, 2 bad input,
130 interrupted.
"""

import argparse
import ctypes
import math
import os
import sys
import time
from types import SimpleNamespace

import mnist_files
import start_file
from command_line import BadInput, Failed, Parser, positive
from run_record import SCHEMA_VERSION, Record, code_version, provenance, text

STARTED = time.perf_counter()
INSTALL = "pip install torch==2.11.0"
HALVES = ("bf16", "f16")
MODES = ("eager", "graph", "compile", "compiled-graph")
# Modes with CUDA graphs, for which the steps are prepared.
GRAPHS = ("graph", "compiled-graph")
# The default of --compile-mode by --mode; other modes compile nothing.
COMPILE_MODES = {"compile": "reduce-overhead", "compiled-graph": "max-autotune-no-cudagraphs"}
# Options that a start file fixes; the defaults are the trainer's.
WORK = {"dataset": "mnist", "hidden": 256, "layers": 3, "batch": 64, "epochs": 8, "steps": None, "seed": 42, "init": "kaiming"}


def switch(word):
    if word not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"'{word}': write on or off")
    return word == "on"


def count(word):
    if not word.isdigit():
        raise argparse.ArgumentTypeError(f"'{word}': must be a whole number")
    return int(word)


def rate(word):
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"'{word}': must be a positive number")
    return value


def arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--mode", choices=MODES, default="eager", help="how a step runs (default: eager)")
    add(
        "--compile-mode", choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        help="torch.compile's mode (default: reduce-overhead; max-autotune-no-cudagraphs for --mode compiled-graph)",
    )  # fmt: skip
    add("--start", metavar="FILE", help="start file; brings the options of the next seven lines, epochs and steps may be fewer")
    add("--dataset", choices=("mnist", "iris", "digits"), help="iris and digits only with --start (default: mnist)")
    add("--hidden", type=positive, metavar="N", help="width of the hidden layers (default: 256)")
    add("--layers", type=positive, metavar="N", help="linear layers (default: 3)")
    add("--batch", type=positive, metavar="N", help="rows in a batch (default: 64)")
    add("--epochs", type=positive, metavar="N", help="passes over the training set (default: 8)")
    add("--steps", type=positive, metavar="N", help="stop after this many steps in all")
    add("--seed", type=count, metavar="N", help="seed of weights and order (default: 42)")
    add("--init", choices=("normal", "xavier", "kaiming"), help="initial weights (default: kaiming)")
    add("--lr", type=rate, default=0.1, metavar="RATE", help="learning rate (default: 0.1)")
    add("--data-dir", metavar="DIR", help="folder with MNIST's four files (default: MNIST_DIR, then where the trainer has them)")
    add("--dtype", choices=("f32", "tf32", *HALVES), default="f32", help="type of activations and products (default: f32)")
    add(
        "--weights", choices=("master", "half"), default="master",
        help="weights that are stepped: f32 under torch.autocast, or those of --dtype bf16 or f16 (default: master)",
    )  # fmt: skip
    add("--loss-scale", type=rate, metavar="N", help="factor of the gradients until the update (default: 1024 for f16, else 1)")
    add("--fused-sgd", type=switch, default=False, metavar="on|off", help="SGD(fused=True): one kernel a step (default: off)")
    add("--loader", choices=("resident", "copy", "pinned", "workers"), default="resident", help="how batches reach the device")
    add(
        "--rows", choices=("bytes", "values"), default="bytes",
        help="what --loader resident holds: bytes, made values in each step as by the trainer, or values (default: bytes)",
    )  # fmt: skip
    add("--workers", type=count, default=0, metavar="N", help="processes of --loader workers (default: 0)")
    add("--pin", type=switch, default=False, metavar="on|off", help="page-locked memory in --loader workers (default: off)")
    add("--sync", choices=("never", "step"), default="never", help="when the host waits (default: never, but for results)")
    add("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    add("--warm-up", type=count, default=3, metavar="N", help="steps before the first, undone afterwards (default: 3)")
    add(
        "--step-memory", type=switch, default=False, metavar="on|off",
        help="read the allocator's statistics after each step, which takes the host some 0.1 ms (default: off)",
    )  # fmt: skip
    add("--out", metavar="DIR", help="directory for the run record; must not exist (default: a new one under runs/)")
    add("--json", action="store_true", help="print the run record, and nothing else, on stdout")
    return parser.parse_args()


def settle(options):
    """Combines start file and options; returns the start, if there is one."""
    start = start_file.read(options.start) if options.start else None
    for name, default in WORK.items():
        given = getattr(options, name)
        if not start:
            setattr(options, name, default if given is None else given)
            continue
        held = start.metadata.get(name) if name in ("dataset", "init") else start.number(name)
        if given is None:
            setattr(options, name, held)
        elif name in ("epochs", "steps"):
            pass
        elif given != held:
            raise BadInput(
                f"--{name} {given} contradicts {options.start}, which holds {held}; leave it out or write another start"
            )
    if options.seed >= 1 << 64:
        raise BadInput(f"--seed must be below 2^64, found {options.seed}")
    if not start and options.dataset != "mnist":
        raise BadInput(
            f"{options.dataset} comes in a start file: trainer start --dataset {options.dataset} -o FILE, then --start FILE"
        )
    if options.loader != "workers" and (options.workers or options.pin):
        raise BadInput("--workers and --pin are for --loader workers")
    if options.compile_mode and options.mode not in COMPILE_MODES:
        raise BadInput(f"--compile-mode is for --mode {' and '.join(COMPILE_MODES)}")
    options.compile_mode = options.compile_mode or COMPILE_MODES.get(options.mode)
    if options.mode == "compiled-graph" and options.compile_mode in ("reduce-overhead", "max-autotune"):
        raise BadInput(f"--compile-mode {options.compile_mode} captures graphs of its own; with --mode compiled-graph leave it out")
    if options.loader != "resident" and options.rows != "bytes":
        raise BadInput("--rows is for --loader resident")
    arithmetic(options)
    return start


def arithmetic(options):
    """Applies the trainer's rules for valid combinations, and its default loss scale."""
    if options.weights == "half" and options.dtype not in HALVES:
        raise BadInput(f"--weights half needs --dtype bf16 or f16, found {options.dtype}")
    if options.loss_scale is None:
        options.loss_scale = 1024.0 if options.dtype == "f16" else 1.0


def framework(options):
    """PyTorch and the device; raises an error with the fix if one is missing."""
    try:
        import torch
    except ImportError as error:
        raise BadInput(f"PyTorch cannot be loaded by {sys.executable} ({error}); {INSTALL}") from None
    kind, _, number = options.device.partition(":")
    if kind not in ("cuda", "cpu") or (number and (kind == "cpu" or not number.isdigit())):
        raise BadInput(f"'{options.device}' is no device: write cuda, cuda:N or cpu")
    if kind == "cpu":
        if options.mode in GRAPHS or options.loader == "pinned" or options.pin:
            raise BadInput("--mode graph and compiled-graph, --loader pinned and --pin on need a GPU")
        if options.dtype == "tf32":
            raise BadInput("--dtype tf32 needs a GPU")
        if options.fused_sgd and options.weights == "half":
            # github.com/pytorch/pytorch/issues/191763: the vectorised part of such weights is not updated.
            raise BadInput(
                "--fused-sgd on with --weights half needs a GPU: on a CPU PyTorch 2.11 leaves such weights as they are"
            )
        return torch, torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "is built without CUDA" if torch.version.cuda is None else "finds no GPU"
        raise BadInput(f"PyTorch {torch.__version__} {reason}; use --device cpu, or {INSTALL} on a machine with a driver")
    if int(number or 0) >= torch.cuda.device_count():
        raise BadInput(f"there is no {options.device}: this machine has {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", int(number or 0))
    torch.cuda.set_device(device)
    return torch, device


def load(options, start, torch):
    """The data set: its splits, and their description in the record."""
    from mlp_torch import DTYPES, Split, tensor

    kind = DTYPES[options.dtype]
    if options.dataset == "mnist":
        found = mnist_files.read(mnist_files.locate(options.data_dir, start.folder if start else None))
        if start and found["checksum"] != start.metadata["checksum"]:
            where = found["files"][0]["path"]
            raise BadInput(f"{where} and its neighbours are not the files from which {start.path} was made; check --data-dir")
        splits = []
        for name in ("train", "validation"):
            rows, width, pixels, labels = found[name]
            values = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(rows, width)
            splits.append(Split(values, torch.frombuffer(bytearray(labels), dtype=torch.uint8), mnist_files.SCALE, 0.0, kind))
        facts = {"source": os.path.dirname(found["files"][0]["path"]), "checksum": found["checksum"], "files": found["files"]}
        facts |= {"features": found["features"], "classes": mnist_files.CLASSES}
    else:
        scale, shift = (float(start.metadata.get(name, default)) for name, default in (("scale", 1), ("shift", 0)))
        try:
            parts = {name: tensor(start.tensors[name]) for name in DATA}
        except KeyError as error:
            raise BadInput(f"{start.path} lacks {error}; write it again with: trainer start -o {start.path}") from None
        splits = [
            Split(parts[f"{name}.features"], parts[f"{name}.labels"], scale, shift, kind) for name in ("train", "validation")
        ]
        facts = {"source": f"{start.path}: {start.metadata['source']}", "checksum": start.metadata["checksum"], "files": []}
        facts |= {"features": start.number("features"), "classes": start.number("classes")}
    rows = {"train_rows": len(splits[0]), "validation_rows": len(splits[1])}
    return SimpleNamespace(train=splits[0], validation=splits[1], facts={"name": options.dataset, **facts, **rows})


DATA = [f"{split}.{part}" for split in ("train", "validation") for part in ("features", "labels")]


def driver_version():
    """The driver's CUDA version, which PyTorch does not report."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return {}
    return {} if failed else {"driver_version": f"{version.value // 1000}.{version.value % 1000 // 10}"}


def describe(torch, device):
    """The device, in the record's format."""
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"kind": "cpu", "name": "CPU", "total_bytes": memory, "virtual_time": False}
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": "cuda",
        "name": properties.name,
        **driver_version(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "total_bytes": properties.total_memory,
        "virtual_time": False,
    }


def summary_of(options, torch, device, data, start, record):
    """The record before training."""
    keys = (
        "hidden",
        "layers",
        "batch",
        "epochs",
        "steps",
        "lr",
        "seed",
        "sync",
        "loader",
        "init",
        "mode",
        "dtype",
        "weights",
        "loss_scale",
        "fused_sgd",
        "warm_up",
        "step_memory",
    )
    settings = {
        "allocator": "pytorch",
        "allocator_settings": {},
        "memory_limit": None,
        "device": str(device),
        "dataset": options.dataset,
        **{key: getattr(options, key) for key in keys},
        # The trainer's key for the way in which steps are launched.
        "launch": options.mode,
    }
    if device.type == "cuda":
        variable = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        settings["allocator_settings"] = {"backend": torch.cuda.get_allocator_backend(), "conf": variable}
    if options.compile_mode:
        settings["compile_mode"] = options.compile_mode
    if options.loader == "resident":
        settings["rows"] = options.rows
    if options.loader == "workers":
        settings |= {"workers": options.workers, "pin": options.pin}
    summary = {
        "schema_version": SCHEMA_VERSION,
        "program": "pytorch",
        "status": "running",
        "code_version": code_version(),
        "provenance": provenance(),
        "framework_version": torch.__version__,
        "started_at": record.started_at,
        "command": sys.argv,
        "settings": settings,
        "device": describe(torch, device),
        "clock": "monotonic",
        "process_s": 0.0,
        "dataset": data.facts,
    }
    if start:
        summary["start"] = {"path": start.path, "sha256": start.sha256}
    return summary | {"epochs": [], "step_losses": "steps.csv", "allocator_stats": {}, "files": {"steps": "steps.csv"}}


def main():
    try:
        options = arguments()
        start = settle(options)
        torch, device = framework(options)
        data = load(options, start, torch)
        needed = needed_epochs(options, len(data.train))
        if start and start.orders < needed:
            holds = f"{start.path} holds the order of {start.orders} epochs"
            raise BadInput(f"{holds}, this run needs {needed}; write it with more --epochs")
        record = Record(options.out, f"pytorch-{options.mode}-{device.type}")
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high" if options.dtype == "tf32" else "highest")
    summary = summary_of(options, torch, device, data, start, record)
    from mlp_run import Run

    return finish(options, Run(options, torch, device, data, start, record, summary, STARTED))


def needed_epochs(options, rows):
    in_epoch = -(-rows // options.batch)
    return min(options.epochs, -(-options.steps // in_epoch)) if options.steps else options.epochs


def finish(options, run):
    """Runs to the end, on success or failure, and reports the result."""
    code, error = 0, None
    try:
        run.train()
        run.summary["status"] = "finished"
    except KeyboardInterrupt:
        code, error = 130, "interrupted; what was done so far is in the run record"
        run.summary["status"] = "interrupted"
    except (Failed, RuntimeError, OSError, MemoryError) as problem:
        # The first line is the error; PyTorch appends pages of advice.
        first = next(iter(str(problem).splitlines()), "") or type(problem).__name__
        advice = "; lower --batch or --hidden" if isinstance(problem, (run.torch.OutOfMemoryError, MemoryError)) else ""
        code, error = 1, f"{first}{advice}"
        run.summary["status"] = "failed"
    if error:
        run.summary["error"] = error
    try:
        run.write_summary()
        sys.stdout.write(text(run.summary) if options.json else run.report())
        sys.stdout.flush()
    except BrokenPipeError:
        # A closed pipe is not an error; nothing remains to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as problem:
        code, error = 1, f"{run.record.directory}: {problem.strerror}; the run record is incomplete"
    print(f"record   {run.record.directory}", file=sys.stderr)
    if error:
        print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
