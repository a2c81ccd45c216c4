"""Start files, losses and records of the baselines, without PyTorch: numpy reproduces the trainer's results.

    python3 -m pytest experiments/pytorch/baselines/tests

Runs the trainer on the simulated device, see `conftest.py`.
"""

import csv
import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BASELINES = Path(__file__).resolve().parents[1]
import mlp_numpy  # noqa: E402
import mnist_files  # noqa: E402
import run_record  # noqa: E402
import start_file  # noqa: E402


@pytest.fixture(scope="session")
def iris(run):
    return run("--dataset", "iris", "--hidden", "16", "--layers", "3", "--batch", "25", "--epochs", "3")


@pytest.fixture(scope="session")
def digits(run):
    return run("--dataset", "digits", "--hidden", "128", "--layers", "4", "--batch", "64", "--steps", "120")


def recorded(record):
    with open(record / "steps.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("case", ["iris", "digits"])
def test_losses_of_each_step_are_those_of_numpy(case, kind, request):
    start, record = request.getfixturevalue(case)
    ours = recorded(record)
    losses, network = mlp_numpy.train(start, mlp_numpy.rows(start, "train"), 0.1, kind)
    assert len(ours) == len(losses) == {"iris": 15, "digits": 120}[case]
    differences = np.abs(np.array(losses) / np.array(ours) - 1)
    assert differences.max() < 1e-5, f"step {differences.argmax() + 1}: {differences.max():.1e}"
    # The resulting network is the trainer's as well.
    last = json.loads((record / "summary.json").read_text())["epochs"][-1]
    features, labels = mlp_numpy.rows(start, "validation")
    _, logits = network.forward(features.astype(kind))
    assert network.loss(logits, labels)[0] == pytest.approx(last["val_loss"], rel=1e-4)
    assert (logits.argmax(1) == labels).mean() == pytest.approx(last["val_accuracy"], abs=1e-9)


def test_runs_that_part_are_explained(iris, tmp_path):
    start, record = iris
    (tmp_path / "start.safetensors").write_bytes(Path(start.path).read_bytes())
    for name in ("trainer", "pytorch"):
        (tmp_path / name).mkdir()
        for file in ("steps.csv", "summary.json"):
            (tmp_path / name / file).write_bytes((record / file).read_bytes())
    lines = (tmp_path / "pytorch/steps.csv").read_text().splitlines()
    cells = lines[7].split(",")
    lines[7] = ",".join([*cells[:3], str(1.001 * float(cells[3])), *cells[4:]])
    (tmp_path / "pytorch/steps.csv").write_text("\n".join(lines) + "\n")
    explain = [sys.executable, BASELINES / "explain_losses.py", tmp_path]
    done = subprocess.run(explain, check=True, capture_output=True, text=True).stdout.splitlines()
    assert done[0].startswith("trainer: within ") and done[0].endswith("in all 15 steps")
    assert "1.0e-03 off in step 7" in done[1] and done[2].startswith("  step 6, layer ") and len(done) == 5
    (tmp_path / "pytorch/summary.json").unlink()
    done = subprocess.run(explain, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "pytorch is not a run record" in done.stderr


def test_the_other_side_of_a_relu_changes_its_layer_and_those_below(iris):
    start, _ = iris
    x, labels = next(mlp_numpy.batches(start, mlp_numpy.rows(start, "train")))
    plain, flipped = mlp_numpy.Network(start, "f8"), mlp_numpy.Network(start, "f8")
    plain.step(x, labels, 0.1)
    flipped.step(x, labels, 0.1, (1, 3, 5))
    changed = [np.flatnonzero((a != b).any(1)) for a, b in zip(plain.weights, flipped.weights)]
    assert len(changed[0]) > 1 and list(changed[1]) == [5] and not len(changed[2])


def test_another_order_gives_other_losses(digits):
    """Validates the comparison above: it fails if batches differ."""
    start, record = digits
    turned = dict(start.tensors)
    order = mlp_numpy.array(start.tensors["order.1"])[::-1].copy()
    turned["order.1"] = start_file.Tensor("U32", order.shape, memoryview(order.tobytes()))
    other = start_file.Start(start.path, start.sha256, turned, start.metadata)
    losses, _ = mlp_numpy.train(other, mlp_numpy.rows(start, "train"), 0.1, np.float32, 3)
    assert abs(losses[0] / recorded(record)[0] - 1) > 1e-3


def test_the_record_names_the_start_file(iris):
    start, record = iris
    summary = json.loads((record / "summary.json").read_text())
    assert summary["start"] == {"path": start.path, "sha256": start.sha256}
    assert summary["dataset"]["checksum"] == start.metadata["checksum"]
    assert start.widths == [4, 16, 16, 3] and start.orders == 3 and start.number("steps") is None


def edited(start, change):
    """The bytes of a start file with a changed header."""
    content = Path(start.path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


BROKEN = {
    "no header": lambda start: b"\x00" * 4,
    "cut in the header": lambda start: Path(start.path).read_bytes()[:100],
    "cut in the values": lambda start: Path(start.path).read_bytes()[:-1],
    "too long": lambda start: Path(start.path).read_bytes() + b"\x00",
    "no JSON": lambda start: struct.pack("<Q", 4) + b"nope",
    "another format": lambda start: edited(start, lambda h: h["__metadata__"].update(format="pt")),
    "no metadata": lambda start: edited(start, lambda h: h.pop("__metadata__")),
    "a newer version": lambda start: edited(start, lambda h: h["__metadata__"].update(schema_version="2")),
    "no batch": lambda start: edited(start, lambda h: h["__metadata__"].pop("batch")),
    "a batch in words": lambda start: edited(start, lambda h: h["__metadata__"].update(batch="many")),
    "another width": lambda start: edited(start, lambda h: h["__metadata__"].update(hidden="17")),
    "a layer missing": lambda start: edited(start, lambda h: h["__metadata__"].update(layers="4")),
    "values of another kind": lambda start: edited(start, lambda h: h["layers.0.bias"].update(dtype="F64")),
    "values past the end": lambda start: edited(
        start, lambda h: h["layers.0.bias"].update(data_offsets=[1 << 40, (1 << 40) + 64])
    ),
    "rows taken twice": lambda start: (
        Path(start.path).read_bytes().replace(start.tensors["order.1"].data.tobytes()[:8], b"\x00" * 8)
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_start_file_is_named(fault, iris, tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(BROKEN[fault](iris[0]))
    with pytest.raises(start_file.BadInput) as caught:
        start_file.read(path)
    assert str(caught.value).startswith(f"{path} is no start file: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nonsense"], "--nonsense"),
        (["--lr", "0"], "--lr"),
        (["--hidden", "0"], "--hidden"),
        (["--dataset", "iris"], "trainer start --dataset iris"),
        (["--start", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--pin", "on"], "--loader workers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, words, tmp_path):
    done = subprocess.run([sys.executable, BASELINES / "mlp.py", *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_start_is_not_contradicted(iris, tmp_path):
    command = [sys.executable, BASELINES / "mlp.py", "--start", iris[0].path, "--hidden", "17"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "--hidden 17 contradicts" in done.stderr and "16" in done.stderr


def mnist(folder, packed=False, labels=bytes(range(10)), images=bytes(range(120))):
    for name in mnist_files.NAMES:
        body = images if "images" in name else labels
        shape = (2051, 10, 3, 4) if "images" in name else (2049, 10)
        content = b"".join(struct.pack(">I", number) for number in shape) + body
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_and_counted_as_the_trainer_does(packed, tmp_path, trainer):
    mnist(tmp_path, packed)
    found = mnist_files.read(mnist_files.locate(tmp_path))
    assert found["train"][0] == 10 and found["features"] == 12 and bytes(found["train"][3]) == bytes(range(10))
    path = tmp_path / "start.safetensors"
    subprocess.run([trainer, "start", "--dataset", "mnist", "--data-dir", tmp_path, "-o", path], check=True, capture_output=True)
    start = start_file.read(path)
    assert start.metadata["checksum"] == found["checksum"] and start.folder == tmp_path
    assert np.float32(start.metadata["scale"]) == np.float32(mnist_files.SCALE)
    assert json.loads(start.metadata["files"])[1]["sha256"] == found["files"][1]["sha256"]


def test_damaged_idx_files_are_named(tmp_path):
    with pytest.raises(start_file.BadInput, match="MNIST_DIR"):
        mnist_files.locate(tmp_path)
    for damage in ({"labels": bytes([11] * 10)}, {"labels": bytes(9)}, {"images": bytes(121)}):
        mnist(tmp_path, **damage)
        with pytest.raises(start_file.BadInput, match="ubyte"):
            mnist_files.read(mnist_files.locate(tmp_path))
    mnist(tmp_path, packed=True)
    path = tmp_path / f"{mnist_files.NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:-12])
    (tmp_path / mnist_files.NAMES[0]).unlink()
    with pytest.raises(start_file.BadInput, match="afresh"):
        mnist_files.read(mnist_files.locate(tmp_path))


def test_numbers_are_the_shortest_that_give_the_same_f32(digits):
    with open(digits[1] / "steps.csv", newline="") as file:
        for row in csv.DictReader(file):
            value = struct.unpack("<f", struct.pack("<f", float(row["loss"])))[0]
            assert run_record.shortest(value) == row["loss"]
    assert run_record.shortest(float("nan")) == "NaN" and run_record.shortest(float("inf")) == "inf"


def test_columns_are_the_trainers(digits):
    with open(digits[1] / "steps.csv") as file:
        assert file.readline().strip().split(",") == list(run_record.COLUMNS)


def test_a_record_does_not_overwrite(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(start_file.BadInput, match="exists already"):
        run_record.Record(tmp_path / "there", "label")
    record = run_record.Record(tmp_path / "fresh", "label")
    record.append_steps([{"epoch": 1, "step": 1, "rows": 2, "loss": 0.5, "host_ns": 7}])
    record.write_summary({"status": "running"})
    assert (tmp_path / "fresh/steps.csv").read_text().splitlines()[1] == "1,1,2,0.5,7,,,,,"
    assert json.loads((tmp_path / "fresh/summary.json").read_text()) == {"status": "running"}
    assert sorted(path.name for path in (tmp_path / "fresh").iterdir()) == ["steps.csv", "summary.json"]
