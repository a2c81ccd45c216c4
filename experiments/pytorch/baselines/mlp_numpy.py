"""The trainer's network in numpy, from a start file: reference losses without a GPU or a framework.

In float64 it shows which of two float32 programs diverged.
"""

import copy
import itertools

import numpy as np

KINDS = {"F32": "<f4", "U32": "<u4", "U8": "u1"}


def array(tensor):
    """A start file's tensor as an array."""
    return np.frombuffer(tensor.data, dtype=KINDS[tensor.dtype]).reshape(tensor.shape)


class Network:
    """Linear layers with ReLU between, mean cross-entropy, plain gradient descent."""

    def __init__(self, start, kind):
        layers = range(start.number("layers"))
        self.weights = [array(start.tensors[f"layers.{n}.weight"]).astype(kind) for n in layers]
        self.biases = [array(start.tensors[f"layers.{n}.bias"]).astype(kind) for n in layers]

    def forward(self, x):
        """The input of each layer, and the logits."""
        inputs = [x]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1]):
            inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0))
        return inputs, inputs[-1] @ self.weights[-1].T + self.biases[-1]

    def loss(self, logits, labels):
        """Mean cross-entropy, and its derivative by the logits."""
        rows = np.arange(len(labels))
        shifted = logits - logits.max(1, keepdims=True)
        exponentials = np.exp(shifted)
        sums = exponentials.sum(1)
        derivative = exponentials / sums[:, None]
        derivative[rows, labels] -= 1
        return float((np.log(sums) - shifted[rows, labels]).mean()), derivative / logits.dtype.type(len(labels))

    def copy(self):
        """A copy of the network."""
        return copy.deepcopy(self)

    def relu_inputs(self, x):
        """The input of each ReLU."""
        inputs, _ = self.forward(x)
        return [x @ weight.T + bias for x, weight, bias in zip(inputs[:-1], self.weights, self.biases)]

    def step(self, x, labels, lr, flip=None):
        """Runs one step; returns the loss before it. `flip`: layer, row and unit of a ReLU whose state, open or closed, is
        inverted in the backward pass."""
        inputs, logits = self.forward(x)
        loss, dy = self.loss(logits, labels)
        for number in reversed(range(len(self.weights))):
            dw, db = dy.T @ inputs[number], dy.sum(0)
            if number:
                opened = inputs[number] > 0
                if flip and flip[0] == number - 1:
                    opened[flip[1:]] ^= True
                dy = (dy @ self.weights[number]) * opened
            self.weights[number] -= dw.dtype.type(lr) * dw
            self.biases[number] -= db.dtype.type(lr) * db
        return loss


def batches(start, data):
    """Features and labels of each step's batch, in the run's order; `data` contains the training rows'."""
    features, labels = data
    for epoch in range(1, start.orders + 1):
        order, batch = array(start.tensors[f"order.{epoch}"]), start.number("batch")
        for first in range(0, len(order), batch):
            picked = order[first : first + batch]
            yield features[picked], labels[picked]


def train(start, data, lr, kind=np.float64, steps=None):
    """The losses of a run's steps, at most `steps`, and the network after them."""
    network, losses = Network(start, kind), []
    for x, labels in itertools.islice(batches(start, data), steps or start.number("steps")):
        losses.append(network.step(x.astype(kind), labels, lr))
    return losses, network


def rows(start, split):
    """Features and labels in a start file, for iris or digits."""
    features, labels = array(start.tensors[f"{split}.features"]), array(start.tensors[f"{split}.labels"])
    if features.dtype == np.uint8:
        # Rounded once, as in the trainer.
        scale, shift = (np.float64(np.float32(start.metadata[name])) for name in ("scale", "shift"))
        features = (features * scale + shift).astype(np.float32)
    return features, labels
