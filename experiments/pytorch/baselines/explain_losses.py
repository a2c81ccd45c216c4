#!/usr/bin/env python3
"""Explains why two runs from the same start diverge, using numpy in float64 as the reference.

    mkdir parted
    trainer --dataset mnist --hidden 128 --lr 0.1 --steps 120 --save-start parted/start.safetensors --out parted/trainer
    python3 experiments/pytorch/baselines/mlp.py --lr 0.1 --start parted/start.safetensors --out parted/pytorch
    python3 experiments/pytorch/baselines/explain_losses.py parted

Two programs in float32 differ by rounding, about 1e-7 of the loss per step, and stay that close until the input of a ReLU
is so near zero that rounding decides its sign. Its derivative is 0 on one side and 1 on the other, so the weights differ
by a finite amount, and each later step multiplies it. For each run this prints the first step whose loss differs by more than
1e-5 from float64's, the ReLU inputs nearest to zero in the preceding step, and the effect of each one's other sign on the loss.
Exit codes: 0 completed, 2 bad input. Needs numpy.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import mnist_files
import start_file
from command_line import BadInput

FAR = 1e-5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="start.safetensors, and the records trainer and pytorch")
    parser.add_argument("--data-dir", metavar="DIR", help="folder with MNIST's four files")
    return parser.parse_args()


def training_rows(start, data_dir):
    """Features and labels, in float64."""
    import mlp_numpy
    import numpy as np

    if start.metadata["dataset"] != "mnist":
        return mlp_numpy.rows(start, "train")
    found = mnist_files.read(mnist_files.locate(data_dir, start.folder))
    if found["checksum"] != start.metadata["checksum"]:
        raise BadInput("MNIST's files are not those from which the start was made; check --data-dir")
    rows, width, pixels, labels = found["train"]
    features = np.frombuffer(pixels, np.uint8).reshape(rows, width) * np.float64(np.float32(mnist_files.SCALE))
    return features.astype(np.float32), np.frombuffer(labels, np.uint8)


def recorded(folder, name):
    """A run's losses and learning rate."""
    try:
        with open(folder / name / "steps.csv", newline="") as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
        return losses, json.loads((folder / name / "summary.json").read_text())["settings"]["lr"]
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder / name} is not a run record ({error}); --help has the commands") from None


def nearest(start, data, lr, step, count=3):
    """A step's ReLU inputs nearest to zero, and the change of the next loss if their sign were inverted."""
    import mlp_numpy

    batches = list(mlp_numpy.batches(start, data))[: step + 1]
    network = mlp_numpy.Network(start, "f8")
    for batch in batches[: step - 1]:
        network.step(*batch, lr)
    (x, labels), (following, answers) = batches[step - 1 :]

    def next_loss(flip):
        other = network.copy()
        other.step(x, labels, lr, flip)
        return other.loss(other.forward(following)[1], answers)[0]

    plain, found = next_loss(None), []
    for layer, z in enumerate(network.relu_inputs(x)):
        for place in abs(z).ravel().argsort()[:count]:
            row, unit = divmod(int(place), z.shape[1])
            found.append((abs(z[row, unit]), layer, row, unit, z[row, unit], next_loss((layer, row, unit)) / plain - 1))
    return [entry[1:] for entry in sorted(found)[:count]]


def main():
    options = arguments()
    try:
        import mlp_numpy
    except ImportError as error:
        print(f"error: {error}; pip install numpy", file=sys.stderr)
        return 2
    try:
        start = start_file.read(options.folder / "start.safetensors")
        data = training_rows(start, options.data_dir)
        runs = {name: recorded(options.folder, name) for name in ("trainer", "pytorch")}
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lr = runs["trainer"][1]
    length = min(len(losses) for losses, _ in runs.values())
    exact, _ = mlp_numpy.train(start, data, lr, "f8", length)
    for name, (losses, _) in runs.items():
        differences = [abs(a / b - 1) for a, b in zip(losses, exact)]
        far = next((at + 1 for at, difference in enumerate(differences) if difference > FAR), None)
        if far is None:
            print(f"{name}: within {max(differences):.1e} of float64 in all {length} steps")
            continue
        before = max(differences[: far - 1], default=0.0)
        print(f"{name}: within {before:.1e} of float64 up to step {far - 1}, {differences[far - 1]:.1e} off in step {far}")
        for layer, row, unit, z, effect in nearest(start, data, lr, far - 1) if far > 1 else []:
            print(
                f"  step {far - 1}, layer {layer + 1}, row {row}, unit {unit}: ReLU input {z:.1e}; "
                f"with the other sign the loss of step {far} changes by {effect:.1e}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
