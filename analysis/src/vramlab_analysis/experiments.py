"""Experiments: directories that `experiments run` writes, merged shards, and the recorded results."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import polars as pl

from vramlab_analysis import repository, schema
from vramlab_analysis.errors import AnalysisError, found, read_json
from vramlab_analysis.measures import measures
from vramlab_analysis.records import Run, load_run

# The beginning of a simulated device's name.
SIMULATED = "simulated"
# A repeat and a host.
Turn = tuple[int, str | None]


@dataclass(frozen=True)
class Entry:
    """One run of an experiment."""

    path: Path
    meta: dict[str, Any]

    @property
    def id(self) -> str:
        """Its id, which does not depend on the shard or the order."""
        return str(self.meta["id"])

    @property
    def arm(self) -> str:
        """Name of its arm."""
        return str(self.meta["arm"])

    @property
    def options(self) -> dict[str, Any]:
        """Options by axis."""
        return dict(self.meta.get("options", {}))

    @property
    def host(self) -> str | None:
        """Hash of its host, if the record has one. Steps of two hosts are not comparable."""
        found: str | None = (self.meta.get("provenance") or {}).get("host_hash")
        return found

    @property
    def turn(self) -> Turn:
        """Its repeat and its host: runs of one turn are compared, because a repeat can be of two hosts."""
        return int(self.meta["repeat"]), self.host

    @property
    def done(self) -> bool:
        """Whether it ran to its end."""
        return self.meta.get("status") == "done"

    @cached_property
    def record(self) -> Run:
        """Its run record (programs `trainer` and `pytorch`)."""
        return load_run(self.path)

    @cached_property
    def result(self) -> Any:
        """Its `result.json` (programs `replay`, `capacity` and `bench`).

        Raises AnalysisError when there is none.
        """
        path = found(self.path / "result.json")
        if path is None:
            raise AnalysisError(
                f"{self.path}: no result.json; is {self.meta.get('program')} a program that writes one?"
            )
        return read_json(path)


@dataclass(frozen=True)
class Experiment:
    """Runs of one spec, from one directory or from the directories of several shards."""

    name: str
    document: dict[str, Any]
    runs: list[Entry]
    directories: list[Path] = field(default_factory=list)

    @property
    def question(self) -> str:
        """The question of the spec."""
        return str(self.document.get("question") or self.document.get("spec", {}).get("question", ""))

    @cached_property
    def machine(self) -> str:
        """The device of its runs in words (`machine`). PyTorch's count last: with the simulator they ran on a CPU."""
        entry = min(self.select(), key=lambda entry: entry.meta.get("program") == "pytorch")
        if entry.meta.get("program") in ("trainer", "pytorch"):
            return machine(entry.record.device)
        if entry.meta.get("program") == "command":
            return machine(str(entry.meta["machine"]["gpu"]))
        result = entry.result[0] if isinstance(entry.result, list) else entry.result
        return machine(str(result["gpu"] if entry.meta.get("program") == "inside" else result["device_name"]))

    @property
    def simulated(self) -> bool:
        """Whether its times are those of a simulated device."""
        return self.machine.startswith(SIMULATED)

    def select(self, **options: Any) -> list[Entry]:
        """Finished runs whose options (or `arm`, `program`, `repeat`) have these values, compared as text.

        Raises AnalysisError when there is none.
        """
        expected = {name.replace("_", "-"): str(value) for name, value in options.items()}
        chosen = [
            entry
            for entry in self.runs
            if entry.done and all(str(self._value(entry, name)) == value for name, value in expected.items())
        ]
        if not chosen:
            described = ", ".join(f"{name} {value}" for name, value in expected.items()) or "any"
            raise AnalysisError(
                f"{self.directories[0]}: no finished run with {described}; `experiments run {self.name}` continues it."
            )
        return chosen

    @staticmethod
    def _value(entry: Entry, name: str) -> Any:
        if name in ("arm", "program", "repeat"):
            return entry.meta.get(name)
        options = entry.options
        return options.get(name, options.get(name.replace("-", "_")))

    def frame(self, **options: Any) -> pl.DataFrame:
        """One row for each finished run of a trainer or of PyTorch.

        Its columns are id, arm, program, repeat, host, options (under their names with `_` for `-`) and `measures`.
        """
        rows: list[dict[str, Any]] = []
        for entry in self.select(**options):
            if entry.meta.get("program") not in ("trainer", "pytorch"):
                continue
            row = {"id": entry.id, "arm": entry.arm, "program": entry.meta["program"]}
            row |= {"repeat": entry.meta["repeat"], "host": entry.host}
            row |= {name.replace("-", "_"): value for name, value in entry.options.items()}
            rows.append(row | {"name": entry.record.arm} | measures(entry.record))
        if not rows:
            raise AnalysisError(f"{self.directories[0]}: no run of a trainer; `replays` has the replays.")
        return pl.DataFrame(rows, infer_schema_length=None, strict=False)

    def replays(self, **options: Any) -> pl.DataFrame:
        """One row for each result of `replay` and `capacity`: the run's id, repeat, options, and the result's keys.

        Objects remain objects. Options are columns under their names with `_` for `-`.
        """
        rows: list[dict[str, Any]] = []
        for entry in self.select(**options):
            if entry.meta.get("program") not in ("replay", "capacity"):
                continue
            options_of = {name.replace("-", "_"): value for name, value in entry.options.items()}
            result = entry.result
            for row in result if isinstance(result, list) else [result]:
                plain = {k: v for k, v in row.items() if k not in ("allocator_settings", "driver_calls", "probes")}
                rows.append({"id": entry.id, "arm": entry.arm, "repeat": entry.meta["repeat"], **options_of, **plain})
        if not rows:
            raise AnalysisError(f"{self.directories[0]}: no replay.")
        return pl.DataFrame(rows, infer_schema_length=None, strict=False)

    def ratios(self, **options: Any) -> pl.DataFrame:
        """A row for each `alloc` and `history` of `replays`, for `plots.cells.matrix`: `over`, a median of repeats.

        For a replay, peak reserved over the lower bound; for a capacity, the minimum memory over peak active.
        """
        frame = self.replays(**options)
        known = [name for name in ("ratio", "lower_bound_bytes") if name in frame.columns]
        if not known:
            raise AnalysisError(f"{self.directories[0]}: its replays have no lower bound.")
        over = pl.coalesce(
            pl.col("ratio") if name == "ratio" else pl.col("peak_reserved_bytes") / pl.col("lower_bound_bytes")
            for name in known
        )
        short = pl.col("history").str.replace(r"(\.pickle)?(\.xz|\.gz)?$", "")
        return frame.group_by("alloc", history=short, maintain_order=True).agg(over=over.median())

    def has(self, **options: Any) -> bool:
        """Whether `select` finds a run."""
        try:
            self.select(**options)
        except AnalysisError:
            return False
        return True

    def missing(self) -> list[str]:
        """Ids of planned runs that are missing or failed."""
        planned = [str(run["id"] if isinstance(run, dict) else run) for run in self.document.get("runs", [])]
        finished = {entry.id for entry in self.runs if entry.done}
        return [id_ for id_ in planned if id_ not in finished]


def holds_experiment(path: Path) -> bool:
    """Whether a directory contains an experiment."""
    return found(path / "experiment.json") is not None


def load_experiment(*directories: str | Path) -> Experiment:
    """The experiment in a directory; several directories are merged as shards of one.

    Raises AnalysisError when a directory contains none, when the specs differ, or when no run is finished.
    """
    documents, entries = [], {}
    paths = [Path(directory) for directory in directories]
    for path in paths:
        if not path.is_dir():
            raise AnalysisError(f"{path}: no such directory.")
        document = found(path / "experiment.json")
        if document is None:
            empty = not any(path.iterdir())
            raise AnalysisError(
                f"{path}: {'an empty directory' if empty else 'no experiment.json in it'}, so not an experiment; "
                "give a directory that `experiments run` wrote."
            )
        documents.append(schema.read(document, "an experiment", schema.EXPERIMENT))
        for meta in sorted((path / "runs").glob("*/run.json")):
            run = schema.read(meta, "a run of an experiment", schema.RUN)
            entry = Entry(meta.parent, run)
            # Of a run in several shards the finished one counts.
            if entry.id not in entries or entry.done:
                entries[entry.id] = entry
    for key, what in (("spec_sha256", "specs"), ("profile_sha256", "profiles of the simulated device")):
        if len({document.get(key) for document in documents}) > 1:
            raise AnalysisError(f"{', '.join(map(str, paths))}: different {what}, so not shards of one experiment.")
    if not entries:
        raise AnalysisError(f"{paths[0]}: no run is finished yet; `experiments run` continues it.")
    first = documents[0]
    name = str(first.get("name") or first.get("spec", {}).get("name") or paths[0].name)
    return Experiment(name, first, [entries[entry] for entry in sorted(entries)], paths)


@cache
def _recorded(directory: Path, _written_ns: int) -> Experiment:
    return load_experiment(directory)


def machine(name: str) -> str:
    """A device's name without its memory, and whether it is simulated: `NVIDIA H100`, `simulated H100`."""
    plain = name.removesuffix(" (simulated)")
    short = " ".join(plain.split()[:2]) if plain.startswith("NVIDIA ") else plain
    return short if plain == name else f"{SIMULATED} {short.removeprefix('NVIDIA ')}"


def labels(device: str = "gpu") -> list[Path]:
    """The directories of recorded results, oldest first: those of GPUs (`gpu`), or those with another device's word in
    their label, such as `sim`. `experiments results` decides.
    """
    return repository.listing().labels(device)


def results(spec: str, device: str) -> Experiment:
    """The recorded results of a spec: the newest of `labels(device)` below `experiments/results` (or `RESULTS`).

    An experiment is read once while its `experiment.json` does not change.

    Raises AnalysisError when there are none, with the setting that finds them or the command that makes them.
    """
    listing = repository.listing()
    found_in = [path for label in listing.labels(device) if holds_experiment(path := label / spec)]
    if not found_in:
        root = listing.folder
        if holds_experiment(root) or holds_experiment(root / spec):
            above = root.parent.parent if holds_experiment(root) else root.parent
            raise AnalysisError(f"{root}: RESULTS is the directory above LABEL/SPEC, here {above}.")
        others = sorted({of for path, of in listing.records if of and holds_experiment(path / spec)})
        only = f", only on {', '.join(others)} (DEVICES={','.join(others)})" if others else ""
        kind = "cuda" if device == "gpu" else "sim"
        raise AnalysisError(
            f"{root}: no results of '{spec}' on {device}{only}; make them with `experiments run {spec} "
            f"--device {kind} -o {root}/DATE-{device}`."
        )
    directory = found_in[-1]
    return _recorded(directory, (directory / "experiment.json").stat().st_mtime_ns)


def kept(*parts: str, device: str = "gpu") -> list[Path]:
    """The directories or files of this name, plain or compressed, in those of `labels(device)`, oldest first."""
    paths = (label.joinpath(*parts) for label in labels(device))
    return [record for path in paths if (record := path if path.is_dir() else found(path))]


def newest(*parts: str, device: str = "gpu") -> Path:
    """The last of `kept`.

    Raises AnalysisError when there is none.
    """
    records = kept(*parts, device=device)
    if not records:
        raise AnalysisError(f"{repository.results()}: no {'/'.join(parts)} in the results of {device}.")
    return records[-1]
