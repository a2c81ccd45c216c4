"""Measures the steps of a program: losses to the bit, time of each step, memory at the end, as one line of JSON.

Measuring allocates nothing on the device after its start, so it does not change a program's peaks except for one block for
the losses.
"""

import itertools
import json
import lzma
import os
import pickle
import statistics
import sys
import time
from pathlib import Path

# Keys of `torch.cuda.memory_stats` besides its nine gauges.
COUNTERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams")


def device_used(torch):
    """Bytes of the device in use: by all programs, and by this process only if the driver reports it."""
    free, total = torch.cuda.mem_get_info()
    used = {"device_used": total - free, "device_total": total}
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        own = [process for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if process.pid == os.getpid()]
        if own and own[0].usedGpuMemory:
            used["process_used"] = own[0].usedGpuMemory
    except Exception as error:  # NVML is missing or not permitted on this machine.
        used["nvml"] = str(error).splitlines()[0]
    return used


def peaks(torch):
    """The peaks of PyTorch's statistics since the last reset."""
    return {key: value for key, value in torch.cuda.memory_stats().items() if key.endswith(".all.peak")}


def memory(torch, warm_up):
    """PyTorch's statistics over all pools, the device's memory use, and the statistics of VramLab's allocator.

    `warm_up` has the peaks at the end of the warm-up, before they were reset. In `stats` peaks are those of the whole
    run, in `after_warm_up` those of the measured steps.
    """
    later = peaks(torch)
    stats = torch.cuda.memory_stats() | {key: max(value, warm_up.get(key, 0)) for key, value in later.items()}
    kept = {
        key: value for key, value in stats.items() if ".all." in key or key in COUNTERS or key.startswith("oversize")
    }
    after = {key: value for key, value in later.items() if "bytes" in key}
    found = {"stats": kept, "after_warm_up": after, "backend": torch.cuda.get_allocator_backend(), **device_used(torch)}
    if inside := sys.modules.get("vramlab.torch"):
        try:
            found["vramlab"] = inside.stats()
        except Exception as error:
            found["vramlab"] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return found


# PyTorch's memory at the end of each phase of this process's program, and its peaks during the phase.
PHASES = []


def end_phase(torch, device, name):
    """Records a phase that ended; the next one begins."""
    phase = {"name": name}
    if device.type == "cuda":
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        for kind in ("reserved", "active"):
            phase[kind] = stats[f"{kind}_bytes.all.current"]
            phase[f"peak_{kind}"] = stats[f"{kind}_bytes.all.peak"]
        phase |= counters(torch)
    PHASES.append(phase)


def settings(torch):
    """The settings of PyTorch's allocator in effect, as PyTorch prints them; empty under another allocator."""
    try:
        known = torch.cuda.memory._snapshot()["allocator_settings"]
    except (KeyError, RuntimeError):
        return {}
    return {key: value for key, value in known.items() if isinstance(value, (int, float, str, bool))}


def save_history(torch, path):
    """Writes PyTorch's history since the start, compressed with xz."""
    Path(path).parent.mkdir(exist_ok=True)
    data = pickle.dumps(torch.cuda.memory._snapshot(), protocol=4)
    with open(path, "wb") as file:
        file.write(lzma.compress(data, preset=6))


def loss_bits(values):
    """Losses as the 32 bits of their floats, in hexadecimal."""
    import numpy

    return [f"{bits:08x}" for bits in numpy.asarray(values, dtype="float32").view("uint32").tolist()]


def run(torch, step, device, *, warm_up, steps):
    """Calls `step(number)`, which returns the loss, `warm_up + steps` times; returns the measurements of the last `steps`.

    No step waits for the device, as in a training loop that reads its loss only occasionally. Peaks are read and reset after
    the warm-up. An out-of-memory error ends the steps and is reported.
    """
    on_gpu = device.type == "cuda"
    losses = torch.zeros(warm_up + steps, device=device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)] if on_gpu else []
    host, refused, began, counted, early = [], None, 0.0, {}, {}

    def synchronise():
        if on_gpu:
            torch.cuda.synchronize()

    done = 0
    try:
        for number in range(warm_up + steps):
            if number == warm_up:
                synchronise()
                if on_gpu:
                    counted, early = counters(torch), peaks(torch)
                    torch.cuda.reset_peak_memory_stats()
                began = last = time.perf_counter()
                if on_gpu:
                    marks[0].record()
            loss = step(number)
            if loss is not None:
                losses[number].copy_(loss.detach())
            del loss
            done += 1
            if number >= warm_up:
                if on_gpu:
                    marks[number - warm_up + 1].record()
                now = time.perf_counter()
                host.append(1e3 * (now - last))
                last = now
        synchronise()
    except torch.OutOfMemoryError as error:
        refused = str(error).splitlines()[0]
    ended = time.perf_counter()
    out = {"steps": max(0, done - warm_up), "warm_up": min(done, warm_up), "oom": refused}
    if refused is None:
        out["wall_ms"] = 1e3 * (ended - began) / steps
        out["host_ms"] = [round(ms, 4) for ms in host]
        if on_gpu:
            out["device_ms"] = [round(first.elapsed_time(second), 4) for first, second in itertools.pairwise(marks)]
        out["ms"] = statistics.median(out.get("device_ms") or host)
        if on_gpu:
            out["calls_in_steps"] = {key: value - counted[key] for key, value in counters(torch).items()}
    synchronise()
    out["losses"] = loss_bits(losses[:done].cpu().numpy())
    return out | (memory(torch, early) if on_gpu else {})


def counters(torch):
    """The number of driver calls so far."""
    stats = torch.cuda.memory_stats()
    return {key: stats[key] for key in COUNTERS if key in stats}


def write(record, output=None):
    """Prints a record as one line, or appends it to a file."""
    line = json.dumps(record, separators=(",", ":")) + "\n"
    if output is None:
        sys.stdout.write(line)
        sys.stdout.flush()
    else:
        with open(output, "a", encoding="utf-8") as file:
            file.write(line)


def empty(torch, on_gpu, turns, calls=5_000):
    """Nanoseconds of torch.empty and its free with no other live tensor, at each turn, which has a number of floats.

    All processes of a comparison run on one core: cores of a virtual machine differ.
    """
    device = "cuda" if on_gpu else "cpu"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = {"calls": calls, "ns": [], "ns_large": []}
    for words in turns:
        for _ in range(calls // 5):
            torch.empty(words, device=device)
        began = time.perf_counter()
        for _ in range(calls):
            torch.empty(words, device=device)
        took = round((time.perf_counter() - began) / calls * 1e9, 1)
        found["ns" if words == 1000 else "ns_large"].append(took)
    if found["ns"]:
        found["ms"] = statistics.median(found["ns"]) / 1e6
    return found | (memory(torch, {}) if on_gpu else {})
