"""One run of `mlp.py`: its epochs, their times, and their values in the record."""

import contextlib
import math
import sys
import time

import torch

import mlp_torch
from command_line import Failed


class Run:
    """Trains according to the options and keeps the record up to date."""

    def __init__(self, options, _torch, device, data, start, record, summary, started):
        self.options, self.torch, self.device, self.data = options, torch, device, data
        self.start, self.record, self.summary, self.started = start, record, summary, started
        self.cuda = device.type == "cuda"
        self.shuffling = torch.Generator().manual_seed(options.seed)

    def train(self):
        """The whole run. Raises `Failed`, or PyTorch's exceptions."""
        options = self.options
        begun = time.perf_counter()
        facts = self.summary["dataset"]
        widths = [facts["features"], *[options.hidden] * (options.layers - 1), facts["classes"]]
        model = mlp_torch.network(widths, self.device)
        if self.start:
            mlp_torch.from_start(model, self.start)
        else:
            mlp_torch.from_seed(model, options.init, options.seed, self.device)
        arithmetic = mlp_torch.Arithmetic(options, self.device)
        arithmetic.place(model)
        self.summary["parameter_bytes"] = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        self.write_summary()
        self.line(f"device   {self.summary['device']['name']}")
        self.line(
            f"train    {options.layers} layers of width {options.hidden}, batch {options.batch}, {options.dtype}, {options.mode}"
        )

        rows = len(self.data.train)
        in_epoch = math.ceil(rows / options.batch)
        left = min(options.steps or math.inf, in_epoch * options.epochs)
        sources = [mlp_torch.loader(options, split, self.device) for split in (self.data.train, self.data.validation)]
        steps = mlp_torch.steps(options, model, arithmetic, sources[0], min(in_epoch, left))
        sizes = [min(options.batch, rows)]
        if rows % options.batch and rows > options.batch and left >= in_epoch:
            sizes.append(rows % options.batch)
        if options.warm_up or options.mode in ("graph", "compiled-graph"):
            steps.prepare(sizes, options.warm_up)
        self.synchronise()
        self.summary["set_up_s"] = time.perf_counter() - begun
        for epoch in range(1, options.epochs + 1):
            self.epoch(epoch, steps, sources, min(in_epoch, left))
            left -= min(in_epoch, left)
            if not left:
                break

    def epoch(self, number, steps, sources, count):
        """One pass over the training rows, and the validation after it."""
        options, rows, source = self.options, len(self.data.train), sources[0]
        begun = time.perf_counter()
        marks = [self.mark()]
        source.begin_pass(self.order(number))
        done = []
        allocations = self.memory().get("num_device_alloc", 0) if options.step_memory else 0
        steps_begun = time.perf_counter()
        marks.append(self.mark())
        try:
            for step in range(count):
                self.summary.setdefault("first_step_s", time.perf_counter() - self.started)
                first = step * options.batch
                size = min(options.batch, rows - first)
                steps.run(step, first, size)
                if options.sync == "step":
                    self.synchronise()
                row = {"epoch": number, "step": step + 1, "rows": size, "host_ns": self.now()}
                if options.step_memory and self.cuda:
                    stats = self.memory()
                    row["driver_allocations"] = stats["num_device_alloc"] - allocations
                    allocations = stats["num_device_alloc"]
                    for name in ("reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes"):
                        row[name] = stats[f"{name}.all.current"]
                done.append(row)
            marks.append(self.mark())
        except BaseException:
            # Completed steps are recorded, with their losses if the device still responds.
            with contextlib.suppress(RuntimeError):
                self.read_losses(steps, done)
            self.record.append_steps(done)
            raise
        self.read_losses(steps, done)
        # The trainer stops its clock here too: the losses have arrived, but are not written yet.
        train_s = time.perf_counter() - steps_begun
        self.record.append_steps(done)
        for row in done:
            if not math.isfinite(row["loss"]):
                raise Failed(f"the loss became {row['loss']} in epoch {number}, step {row['step']}: {self.advice()}")
        loss = sum(row["loss"] * row["rows"] for row in done) / sum(row["rows"] for row in done)
        batch, waits = options.batch, options.sync == "step" and self.cuda
        val_loss, accuracy = mlp_torch.evaluate(steps, sources[1], batch, len(self.data.validation), waits)
        if not math.isfinite(val_loss):
            raise Failed(f"the validation loss became {val_loss} in epoch {number}: {self.advice()}")
        marks.append(self.mark())
        self.synchronise()
        entry = {"epoch": number, "steps": count, "train_loss": loss, "val_loss": val_loss, "val_accuracy": accuracy}
        entry |= {"wall_s": time.perf_counter() - begun, "train_s": train_s}
        if self.cuda:
            # Events measure milliseconds.
            entry["device_s"] = marks[0].elapsed_time(marks[3]) / 1e3
            entry["train_device_s"] = marks[1].elapsed_time(marks[2]) / 1e3
        self.summary["epochs"].append(entry)
        self.write_summary()
        self.line(f"epoch {number:2} train loss {loss:.4f}, validation loss {val_loss:.4f}, accuracy {100 * accuracy:.2f} %")

    def advice(self):
        """The fix when the loss is not a number, in the trainer's words."""
        options = self.options
        scaled = options.dtype == "f16" or options.loss_scale != 1
        scale = f", lower --loss-scale (now {options.loss_scale:g})" if scaled else ""
        return f"lower --lr (now {options.lr}){scale} or change --init"

    def order(self, number):
        """An epoch's rows: the trainer's, or PyTorch's own order."""
        if self.start:
            return mlp_torch.tensor(self.start.tensors[f"order.{number}"]).long()
        return torch.randperm(len(self.data.train), generator=self.shuffling)

    def read_losses(self, steps, done):
        values = steps.losses[: len(done)].tolist()
        for row, value in zip(done, values):
            row["loss"] = value

    def mark(self):
        """An event in the stream, for timing."""
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronise(self):
        if self.cuda:
            torch.cuda.synchronize()

    def memory(self):
        return torch.cuda.memory_stats(self.device) if self.cuda else {}

    def now(self):
        """Nanoseconds since the program started."""
        return int((time.perf_counter() - self.started) * 1e9)

    def line(self, text):
        print(text, file=sys.stderr)

    def write_summary(self):
        """Replaces the summary with the current values."""
        self.summary["process_s"] = time.perf_counter() - self.started
        stats = self.memory()
        # Gauges and counts have the trainer's names.
        self.summary["allocator_stats"] = {name: value for name, value in stats.items() if isinstance(value, int)}
        self.record.write_summary(self.summary)

    def report(self):
        """A summary of the run in a few lines."""
        lines = ["epoch  steps  train loss  val loss  accuracy    wall s"]
        for epoch in self.summary["epochs"]:
            lines.append(
                f"{epoch['epoch']:5}  {epoch['steps']:5}  {epoch['train_loss']:10.4f}  {epoch['val_loss']:8.4f}"
                f"  {100 * epoch['val_accuracy']:6.2f} %  {epoch['wall_s']:8.3f}"
            )
        stats = self.summary["allocator_stats"]
        if "reserved_bytes.all.peak" in stats:
            reserved, allocated = (stats[f"{name}_bytes.all.peak"] / 2**20 for name in ("reserved", "allocated"))
            lines.append(f"peak reserved {reserved:.1f} MiB, peak allocated {allocated:.1f} MiB")
        return "\n".join(lines) + "\n"
