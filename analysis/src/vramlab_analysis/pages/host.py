"""What pinned host memory costs: pinning by way of doing it, copies, a pool's operations, and steps of the trainer.

The records are `experiments/results/*-host.json` (`experiments calibrate --only-host -m`) and the results of the spec
`host`. Where there is none of a GPU, the simulated device makes them on the spot.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, parse_json, read_bytes
from vramlab_analysis.experiments import Experiment, load_experiment, machine, results
from vramlab_analysis.pages.cells import build

GIB = 2**30
LIMIT_S = 200
WAYS = {
    "alloc": "cudaHostAlloc",
    "register": "cudaHostRegister",
    "register_huge": "cudaHostRegister, huge pages",
}
MEMORY = {
    "pageable": "pageable",
    "alloc": WAYS["alloc"],
    "register": "registered",
    "register_huge": "registered, huge pages",
}


def size(count: int) -> str:
    """Bytes in the largest unit of which they are a whole number: `64 KiB`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count % 2**power == 0:
            return f"{count >> power:,} {unit}"
    return f"{count:,} bytes"


@dataclass(frozen=True)
class Costs:
    """Measurements of `experiments calibrate --only-host`."""

    document: dict[str, Any]

    @property
    def machine(self) -> str:
        """The device's name, `simulated` before it where time was virtual."""
        return machine(str(self.document["device"]["name"]))

    @property
    def simulated(self) -> bool:
        """Whether the time to pin is that of published costs."""
        return bool(self.document["clock"] == "virtual")

    @property
    def origin(self) -> str:
        """The build and the day."""
        return f"build {build(self.document['provenance'])}, {self.document['started_at'][:10]}"

    def pins(self) -> dict[tuple[str, int], float]:
        """Seconds to pin a GiB, touching included, by way and threads (0 for `alloc`), of the largest size."""
        rows = self.document["pins"]
        largest = max(row["bytes"] for row in rows)
        return {
            (row["way"], row.get("threads", 0)): (row.get("touch_ns", 0) + row["pin_ns"]) / 1e9 * GIB / row["bytes"]
            for row in rows
            if row["bytes"] == largest
        }

    def copy_ns(self, direction: str, memory: str) -> dict[int, float]:
        """Time of a copy until it has completed, by bytes."""
        rows = self.document["copies"]
        return {row["bytes"]: row["p50_ns"] for row in rows if (row["direction"], row["memory"]) == (direction, memory)}

    def pool_ns(self) -> dict[int, float]:
        """Time of a pool's allocation and free that find a block, by bytes."""
        return {row["bytes"]: row["p50_ns"] for row in self.document["pool"]}

    def anew_ns(self, size: int) -> float:
        """Time to pin and release a buffer by `cudaHostAlloc`: in proportion to the nearest measured size."""
        rows = [row for row in self.document["pins"] if row["way"] == "alloc"]
        nearest = min(rows, key=lambda row: abs(row["bytes"] - size))
        return float((nearest["pin_ns"] + nearest.get("release_ns", 0)) * size / nearest["bytes"])

    def pays_after(self, size: int) -> float:
        """Copies to the device after which a buffer that is pinned once is cheaper; NaN for never."""
        pageable, pinned = (self.copy_ns("to_device", memory)[size] for memory in ("pageable", "alloc"))
        return self.anew_ns(size) / (pageable - pinned) if pageable > pinned else float("nan")


@cache
def costs() -> Costs:
    """The newest measurements of a GPU's host, else simulated ones."""
    recorded = repository.listing().files("host.json")
    path = recorded[-1] if recorded else _simulated() / "host.json"
    return Costs(parse_json(read_bytes(path), str(path)))


@cache
def steps() -> Experiment:
    """The newest results of the spec `host` on a GPU, else simulated ones."""
    for device in ("gpu", "sim"):
        try:
            return results("host", device)
        except AnalysisError:
            continue
    return load_experiment(_simulated() / "host")


@cache
def _simulated() -> Path:
    """A directory with both records, made on the simulated device. It is removed when the process ends.

    Raises AnalysisError when the program is not built or fails.
    """
    program = repository.built("experiments") or shutil.which("experiments")
    if program is None:
        raise AnalysisError("experiments: not built; run `cargo build -p experiments` in the repository.")
    holder = tempfile.TemporaryDirectory(prefix="host-")
    _HELD.append(holder)
    folder, sim = Path(holder.name), ["--device", "sim"]
    spec = repository.root() / "experiments" / "specs" / "host.toml"
    for arguments in (
        ["calibrate", *sim, "--only-host", "--source", "simulated", "-o", "costs.json", "-m", "host.json"],
        ["run", str(spec), *sim, "-o", str(folder), "--jobs", "2"],
    ):
        try:
            done = subprocess.run(
                [str(program), *arguments], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise AnalysisError(f"`{program} {arguments[0]}` took more than {LIMIT_S} s.") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise AnalysisError(f"`{program} {' '.join(arguments)}` failed: {reason}")
    return folder


# Directories of records that this process made.
_HELD: list[tempfile.TemporaryDirectory[str]] = []
