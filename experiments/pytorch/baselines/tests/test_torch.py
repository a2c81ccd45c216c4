"""The network in PyTorch on a CPU: 16-bit types compared with the trainer's, and captured steps.

    python3 -m pytest experiments/pytorch/baselines/tests

Skipped if PyTorch is not installed.
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
BASELINES = Path(__file__).resolve().parents[1]
# One thread, so that results do not depend on the machine's cores.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
RATE = "--lr=0.03"
WORK = ["--device=sim", "--dataset=digits", "--hidden=64", "--layers=4", "--batch=64", "--steps=60", "--seed=42", RATE]

import mlp_torch  # noqa: E402
import mnist_files  # noqa: E402


def losses(record):
    with open(record / "steps.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def apart(ones, others):
    """The largest relative difference."""
    assert len(ones) == len(others) == 60
    return max(abs(a - b) / abs(b) for a, b in zip(ones, others))


@pytest.fixture(scope="session")
def pair(trainer, tmp_path_factory):
    """Runs of both programs from one start; the directory with `start.safetensors`, `trainer` and `pytorch`."""

    def pair(*options):
        place = tmp_path_factory.mktemp("pair") / "out"
        place.mkdir()
        start = place / "start.safetensors"
        gemm = f"--gemm={'tensor' if options else 'tiled'}"
        ours = [trainer, *WORK, gemm, *options, "--save-start", start, "--out", place / "trainer"]
        theirs = [sys.executable, BASELINES / "mlp.py", "--device=cpu", RATE, *options]
        for command in (ours, [*theirs, "--mode=eager", "--start", start, "--out", place / "pytorch"]):
            subprocess.run([str(part) for part in command], check=True, capture_output=True, env=ENVIRONMENT)
        return place

    return pair


@pytest.fixture(scope="session")
def plain(pair):
    return pair()


def test_f32_is_the_trainers_but_for_rounding(plain):
    assert apart(losses(plain / "pytorch"), losses(plain / "trainer")) < 1e-5


def test_two_ranks_of_ddp_train_as_one_trainer_does(plain):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", BASELINES / "ddp_mlp.py", RATE]
    command += ["--start-file", plain / "start.safetensors", "--epochs=1"]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    record = json.loads(done.stdout)
    ours = losses(plain / "trainer")
    assert record["ranks"] == 2
    assert record["ms"] > 0
    assert len(record["losses"]) == 32
    assert max(abs(a - b) / abs(b) for a, b in zip(record["losses"], ours)) < 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("weights", ["master", "half"])
def test_sixteen_bits_train_as_the_trainers_do(dtype, weights, pair, plain):
    place = pair(f"--dtype={dtype}", f"--weights={weights}")
    ours, theirs, f32 = losses(place / "trainer"), losses(place / "pytorch"), losses(plain / "trainer")
    assert theirs[-1] < 0.75 * theirs[0]
    # A bf16 has 8 bits of significand: 4e-3 per rounding. The loss of bf16 weights is far beyond that noise, in both.
    assert apart(theirs, ours) < 2e-2
    lost = dtype == "bf16" and weights == "half"
    assert all((apart(one, f32) > 5e-2) == lost for one in (ours, theirs))
    records = [json.loads((place / name / "summary.json").read_text()) for name in ("trainer", "pytorch")]
    for key in ("dtype", "weights", "loss_scale", "launch", "lr", "hidden"):
        assert records[0]["settings"][key] == records[1]["settings"][key], key
    values = 784 * 64 + 64 + 2 * (64 * 64 + 64) + 64 * 10 + 10
    assert records[1]["parameter_bytes"] == values * (2 if weights == "half" else 4)


def mlp(place, *options):
    command = [sys.executable, BASELINES / "mlp.py", "--device", "cpu", "--lr", "0.03", *options]
    done = subprocess.run([str(part) for part in command], cwd=place, capture_output=True, text=True, env=ENVIRONMENT)
    return done


def test_ways_of_the_same_arithmetic_are_one(plain, tmp_path):
    """Fused updates, rows stored as values: other kernels, the same losses."""
    start = ["--start", plain / "start.safetensors", "--out", tmp_path / "record"]
    done = mlp(tmp_path, *start, "--fused-sgd", "on", "--rows", "values")
    assert done.returncode == 0, done.stderr
    assert apart(losses(tmp_path / "record"), losses(plain / "pytorch")) < 1e-5
    settings = json.loads((tmp_path / "record/summary.json").read_text())["settings"]
    assert settings["fused_sgd"] is True and settings["rows"] == "values"


def test_a_loss_scale_that_is_too_large_is_named(plain, tmp_path):
    start = ["--start", plain / "start.safetensors", "--out", tmp_path / "record"]
    done = mlp(tmp_path, *start, "--dtype", "f16", "--weights", "half", "--loss-scale", "1e8")
    assert done.returncode == 1 and "lower --loss-scale (now 1e+08)" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--weights", "half"], "--weights half needs --dtype bf16 or f16, found f32"),
        (["--dtype", "tf32"], "needs a GPU"),
        (["--dtype", "f16", "--weights", "half", "--fused-sgd", "on"], "needs a GPU"),
        (["--loss-scale", "nan"], "--loss-scale"),
        (["--loader", "copy", "--rows", "values"], "--loader resident"),
    ],
)
def test_arithmetic_that_cannot_be_is_one_line(options, words, plain, tmp_path):
    done = mlp(tmp_path, "--start", plain / "start.safetensors", *options)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_a_value_is_rounded_once(name):
    dtype, picked = mlp_torch.DTYPES[name], torch.arange(256, dtype=torch.uint8)
    for shift in (0.0, -0.1307):
        exact, halved = (mlp_torch.Split(picked, picked, mnist_files.SCALE, shift, kind) for kind in (torch.float32, dtype))
        assert torch.equal(halved.values(picked), exact.values(picked).to(dtype))


def options(**given):
    defaults = {"dtype": "bf16", "weights": "half", "loss_scale": 8.0, "lr": 0.1, "fused_sgd": False, "batch": 4}
    return argparse.Namespace(**{**defaults, **given})


def network(given, rows, width=6):
    """A network, its arithmetic and rows to train it on, the same each time."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 3, (rows,), dtype=torch.uint8, generator=generator)
    arithmetic = mlp_torch.Arithmetic(given, torch.device("cpu"))
    split = mlp_torch.Split(features, labels, mnist_files.SCALE, 0.0, arithmetic.dtype)
    model = mlp_torch.network([width, 5, 3], torch.device("cpu"))
    mlp_torch.from_seed(model, "kaiming", 3, torch.device("cpu"))
    arithmetic.place(model)
    return model, arithmetic, split, torch.randperm(rows, generator=generator)


def test_a_compiled_step_is_an_eager_one():
    """The step before compilation: the gradients of a function and an update that is written out."""
    for weights, scale in (("half", 8.0), ("master", 1.0)):
        given, runs = options(weights=weights, loss_scale=scale, compile_mode="default"), []
        for kind in (mlp_torch.Graph, mlp_torch.CompiledGraph):
            model, arithmetic, split, order = network(given, 10)
            source = mlp_torch.Resident(split, torch.device("cpu"), "values")
            steps = kind(given, model, arithmetic, source, 3)
            source.begin_pass(order)
            for size in (4, 4, 2):
                _, load = source.static(size, steps.at, 4)
                steps.optimizer.zero_grad(set_to_none=True)
                if kind is mlp_torch.Graph:
                    steps.captured(load)
                else:
                    steps.whole(load, steps.weights, steps.losses, steps.at)
            runs.append((steps.losses.tolist(), [weight.detach().clone() for weight in model.parameters()]))
        (eager, first), (whole, second) = runs
        assert eager == whole and len(set(eager)) == 3
        assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("held", ["bytes", "values"])
@pytest.mark.parametrize("weights", ["master", "half"])
def test_what_a_graph_captures_is_an_eager_step(held, weights):
    """Ten rows in batches of four: the last batch has two. The host supplies only the order of the pass."""
    given, runs = options(weights=weights), []
    for kind in (mlp_torch.Eager, mlp_torch.Graph):
        model, arithmetic, split, order = network(given, 10)
        source = mlp_torch.Resident(split, torch.device("cpu"), held)
        steps = kind(given, model, arithmetic, source, 3)
        sizes = (4, 4, 2)
        loads = {size: source.static(size, steps.at, 4) for size in set(sizes)} if kind is mlp_torch.Graph else {}
        seen = []
        for turn in range(2):
            source.begin_pass(order if turn else order.flip(0))
            for slot, size in enumerate(sizes):
                if kind is mlp_torch.Eager:
                    steps.run(slot, 4 * slot, size)
                    continue
                if slot == 0:
                    steps.at.zero_()
                fill, load = loads[size]
                assert fill is None
                steps.optimizer.zero_grad(set_to_none=True)
                steps.captured(load)
            seen += steps.losses.tolist()
        runs.append((seen, [weight.detach().clone() for weight in model.parameters()]))
    (eager, first), (captured, second) = runs
    assert eager == captured and all(math.isfinite(loss) for loss in eager) and len(set(eager)) == 6
    assert all(torch.equal(a, b) for a, b in zip(first, second))
