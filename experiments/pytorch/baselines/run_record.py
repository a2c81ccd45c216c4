"""Writes the trainer's run record (`analysis/schema.md`) from Python: `summary.json` and `steps.csv`."""

import hashlib
import json
import os
import re
import struct
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from command_line import BadInput

SCHEMA_VERSION = 1
COLUMNS = (
    "epoch", "step", "rows", "loss", "host_ns", "driver_allocations", "reserved_bytes", "allocated_bytes",
    "active_bytes", "requested_bytes",
)  # fmt: skip


def code_version():
    """The version of this repository's programs."""
    manifest = Path(__file__).resolve().parents[3] / "Cargo.toml"
    found = re.search(r'^version = "(.+)"$', manifest.read_text(), re.MULTILINE) if manifest.is_file() else None
    return found[1] if found else "unknown"


def provenance():
    """Commit, state of the sources, host and job of a record, under the trainer's keys; unknown values are absent.

    The sources are this directory.
    """
    here = Path(__file__).resolve().parent

    def git(*words):
        try:
            done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if done.returncode else done.stdout.strip()

    def system(*names):
        for name in names:
            try:
                found = Path(name).read_text().strip()
            except OSError:
                continue
            if found:
                return found
        return ""

    told = {}
    if commit := git("rev-parse", "HEAD"):
        told["git_commit"] = commit
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        if changed is not None:
            told["git_dirty"] = changed != ""
    module = system("/proc/driver/nvidia/version").partition("\n")[0]
    release = re.search(r"\s(\d+(?:\.\d+){1,2})\s", f"{module} ") or re.fullmatch(
        r"(\d+(?:\.\d+){1,2})", system("/sys/module/nvidia/version")
    )
    # As in app/terminal/src/provenance.rs: virtual machines of one image share machine ID and name.
    machine, name = system("/etc/machine-id", "/var/lib/dbus/machine-id"), system("/proc/sys/kernel/hostname")
    if machine or name:
        model = re.search(r"^model name\s*:[ \t]*(.*)$", system("/proc/cpuinfo"), re.MULTILINE)
        listed = (system(path) for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
        uuids = (re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE) for text in listed)
        facts = [machine, name, model[1].strip() if model else "", release[1] if release else ""]
        facts += sorted(uuid[1] for uuid in uuids if uuid)
        told["host_hash"] = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    if release:
        told["driver_release"] = release[1]
    variables = {"id": "SLURM_JOB_ID", "array_id": "SLURM_ARRAY_JOB_ID", "array_task": "SLURM_ARRAY_TASK_ID"}
    job = {key: os.environ[name] for key, name in variables.items() if re.fullmatch(r"[\w.+-]{1,64}", os.environ.get(name, ""))}
    if "id" in job:
        told["job"] = job
    return told


def shortest(value):
    """The shortest decimal that is the same f32."""
    if value != value or value in (float("inf"), float("-inf")):
        return {"nan": "NaN"}.get(str(value), str(value))
    same = struct.pack("<f", value)
    return next(text for text in (f"{value:.{digits}g}" for digits in range(1, 18)) if struct.pack("<f", float(text)) == same)


class Record:
    """The directory of a record. The summary is replaced atomically; rows are appended after each epoch."""

    def __init__(self, out, label):
        now = datetime.now(timezone.utc)
        self.started_at = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            self.directory = self.make(out, f"{now:%Y%m%dT%H%M%SZ}-{label}")
            (self.directory / "steps.csv").write_text(",".join(COLUMNS) + "\n")
        except FileExistsError:
            raise BadInput(f"{out} exists already; choose another directory with --out, or remove it") from None
        except OSError as error:
            where = out or "runs"
            raise BadInput(
                f"cannot write a run record to {where}: {error.strerror}; choose another directory with --out"
            ) from None

    @staticmethod
    def make(out, name):
        if out:
            Path(out).mkdir(parents=True)
            return Path(out)
        for attempt in range(1, 1 << 30):
            path = Path("runs") / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                path.mkdir(parents=True)
                return path
            except FileExistsError:
                pass
        raise FileExistsError

    def write_summary(self, summary):
        """Replaces the summary; a reader sees the old one or the new one, never a partial one."""
        fresh = self.directory / ".summary.json.part"
        fresh.write_text(text(summary))
        os.replace(fresh, self.directory / "summary.json")

    def append_steps(self, rows):
        """Appends rows: dictionaries of columns. Unknown values are empty."""
        with open(self.directory / "steps.csv", "a") as out:
            for row in rows:
                loss = row.get("loss")
                cells = {**row, "loss": None if loss is None else shortest(loss)}
                out.write(",".join("" if cells.get(name) is None else str(cells[name]) for name in COLUMNS) + "\n")


def text(summary):
    """The summary as text, for the file and for `--json`."""
    return json.dumps(summary, indent=2) + "\n"
