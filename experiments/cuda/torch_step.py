"""A training step of PyTorch: torch_step.py PROGRAM own|driver|both STEPS [SIZE=NUMBER...]

PROGRAM is one of `experiments/pytorch/programs/programs.py`, with sizes such as `batch=32`. `own` uses PyTorch's cache
and `driver` asks the driver for every tensor; `both` takes them in turn in one process, STEPS each, and prints the
ratio of each pair.
"""

import gc
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "pytorch/programs"))
sys.path.insert(0, str(Path(__file__).parent.parent / "pytorch/baselines"))

import torch
from programs import prepare


def block(step, cached, count):
    """Microseconds a step over `count` steps, and the last loss."""
    torch.cuda.memory.caching_allocator_enable(cached)
    for number in range(2):
        step(number)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(count):
        loss = step(number)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6, loss.item()


def spread(values):
    """Median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


name, way, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
sizes = {key: int(value) for key, value in (word.split("=") for word in sys.argv[4:])}
gc.disable()
step = prepare(name, "cuda", 1, False, **sizes)
if way != "both":
    block(step, way == "own", 8)
    us, loss = block(step, way == "own", count)
    print(f"{us:.1f} us a step, loss {loss:.3f}")
    sys.exit()
for cached in (True, False) * 2:
    block(step, cached, count)
own, driver = [], []
for pair in range(15):
    for cached in (True, False) if pair % 2 else (False, True):
        (own if cached else driver).append(block(step, cached, count)[0])
ratios = sorted(b / a for a, b in zip(own, driver, strict=True))
print(
    f"own cache {spread(own)}, driver {spread(driver)} us a step, ratio {statistics.median(ratios):.3f} "
    f"(middle half {ratios[3]:.3f} to {ratios[11]:.3f}), {len(ratios)} pairs"
)
