"""The trainer's network in numpy, from a start file: a third opinion on losses that needs neither GPU nor framework.

In float64 it says which of two float32 programs strayed.
"""

import numpy as np

KINDS = {"F32": "<f4", "U32": "<u4", "U8": "u1"}


def array(tensor):
    """A tensor of a start file."""
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

    def step(self, x, labels, lr):
        """One step; the loss before it."""
        inputs, logits = self.forward(x)
        loss, dy = self.loss(logits, labels)
        for number in reversed(range(len(self.weights))):
            dw, db = dy.T @ inputs[number], dy.sum(0)
            if number:
                dy = (dy @ self.weights[number]) * (inputs[number] > 0)
            self.weights[number] -= dw.dtype.type(lr) * dw
            self.biases[number] -= db.dtype.type(lr) * db
        return loss


def train(start, data, lr, kind=np.float64, steps=None):
    """The losses of a run's steps: `data` is features (f32) and labels of the training rows; `steps` at most."""
    features, labels = data
    network, batch, losses = Network(start, kind), start.number("batch"), []
    for epoch in range(1, start.orders + 1):
        order = array(start.tensors[f"order.{epoch}"])
        for first in range(0, len(order), batch):
            if len(losses) == (steps or start.number("steps")):
                return losses, network
            rows = order[first : first + batch]
            losses.append(network.step(features[rows].astype(kind), labels[rows], lr))
    return losses, network


def rows(start, split):
    """Features and labels in a start file: of iris or digits."""
    features, labels = array(start.tensors[f"{split}.features"]), array(start.tensors[f"{split}.labels"])
    if features.dtype == np.uint8:
        # Rounded once, as the trainer does it.
        scale, shift = (np.float64(np.float32(start.metadata[name])) for name in ("scale", "shift"))
        features = (features * scale + shift).astype(np.float32)
    return features, labels
