#!/usr/bin/env python3
"""Runs the acceptance list (programs/acceptance) under PyTorch's own allocators and VramLab's, and compares each run with native's.

    python3 experiments/pytorch/acceptance.py -o DIR --budget 480                    programs of one GPU, under every allocator
    python3 experiments/pytorch/acceptance.py -o DIR --gpus 2 --budget 540           programs and jobs of two
    python3 experiments/pytorch/acceptance.py -o DIR --gpus 2 --programs ddp_hook --arms native+run,caching+run,remap+run --repeat 100

Needs PyTorch with a GPU, libvramlab (VRAMLAB_LIBRARY, or built in target/) and a C++ compiler for the shim. An arm is an
allocator; with the suffix `+run` the program runs under `vramlab run`, which records it (--vramlab is the path of that
program; without it such arms are skipped). `native` runs first and twice: a difference between its own runs is not
attributed to an allocator. Each run is a separate Python process, as users start it; runs are concurrent as far as --jobs and
the GPU's memory allow.

A run that exceeds --limit-s is asked for its threads' stacks (SIGABRT, which Python's faulthandler handles) and then killed
with all its children. DIR/acceptance.jsonl has a line for the machine, then one for each run, written when the run ends: the
next call with the same -o resumes. No run starts that would not end within --budget seconds.

Exit codes: 0 each run matches native's, 1 some differ, failed or timed out, 2 bad input, 4 the budget ended first.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import catalogue
from environment import HERE, NATIVE, PACKAGE, choice, compile_shim, environment, last_line, machine

sys.path.insert(0, str(HERE.parents[1] / "analysis" / "src"))
from run_record import whole_lines

# Imports only Python's standard library: runs are judged here as in the table.
from vramlab_analysis.acceptance import RECORDED, peak_reserved, verdict

GIB = 2**30
RECORD = "acceptance.jsonl"
# The most important allocators run first, so that an interrupted call has them.
FIRST = ("native", "native+run", "caching", "remap", "pytorch-expandable", "expandable")
# These behave like `caching`, but more slowly, and run last.
LAST = ("pytorch", "lab")
# The capabilities that PyTorch needs: private pools for graphs and MemPools, block lists for statistics and snapshots.
CLAIMS = {"pools", "snapshot"}
# Allocators that need a setting from the user.
NEED_SETTINGS = ("plan",)
# Seconds between the request for stacks and the kill, and beyond the budget for runs in progress.
PATIENCE_S, GRACE_S = 6, 20
# Below the kernel's ephemeral ports.
PORTS = range(15000, 32000)


def allocators():
    """VramLab's allocators that support PyTorch, by their capabilities on a simulated device."""
    code = (
        "import json, vramlab; from vramlab._library import allocators\n"
        "def can(name):\n"
        "    with vramlab.Allocator(name, device='sim') as one: return sorted(one.can())\n"
        f"print(json.dumps({{name: can(name) for name in allocators() if name not in {NEED_SETTINGS!r}}}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment("native"))
    if found.returncode:
        raise SystemExit(f"error: no allocators: {last_line(found.stderr)}")
    return [name for name, can in json.loads(found.stdout).items() if set(can) >= CLAIMS]


def in_order(arms):
    """The arms, the most important ones first."""
    return sorted(arms, key=lambda arm: (arm in LAST, FIRST.index(arm) if arm in FIRST else len(FIRST)))


@dataclass(frozen=True)
class Job:
    """One run of a program under an arm."""

    program: catalogue.Program
    arm: str
    repeat: int

    @property
    def id(self):
        return f"{self.program.name} {self.arm} #{self.repeat}"

    @property
    def recorded(self):
        return self.arm.endswith(RECORDED)

    @property
    def allocator(self):
        return self.arm.removesuffix(RECORDED)


def plan(programs, arms, repeats):
    """All runs: arm by arm, long programs first; native's second run follows its first, then further repeats."""
    programs = sorted(programs, key=lambda program: -program.seconds)
    least = {arm: max(repeats, 2 if arm == "native" else 1) for arm in arms}
    jobs = []
    for repeat in range(max(least.values(), default=0)):
        for arm in arms:
            # The second run of native belongs to the first round: later runs are compared with both.
            rounds = (0, 1) if repeat == 0 and arm == "native" else (repeat,) if (repeat, arm) != (1, "native") else ()
            jobs += [Job(program, arm, at) for at in rounds if at < least[arm] for program in programs]
    return jobs


def free_port(given):
    """An unused port that no other job of this call had; adds it to `given`."""
    for port in PORTS:
        if port in given:
            continue
        given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("error: no port is free")


def prefix(program, folder):
    """Copies `vramlab` to a prefix that contains this package, as an installed program's does; returns the copy."""
    bin_, packages = folder / "prefix" / "bin", folder / "prefix" / "lib" / "python3" / "site-packages"
    bin_.mkdir(parents=True)
    packages.mkdir(parents=True)
    shutil.copy2(program, bin_ / "vramlab")
    (bin_ / "vramlab").chmod(0o755)
    (packages / "vramlab").symlink_to(PACKAGE / "src" / "vramlab")
    return bin_ / "vramlab"


def session_processes(session):
    """The processes of a session, which contains a job and its children; empty if all have exited."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # After the name, which may contain any character: state, parent, group, session.
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(words[3]) == session and words[0] != "Z":
                    found.append(int(folder.name))
    return found


def send(pids, number):
    """Sends a signal to processes that may have exited."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kernel_view(pid):
    """A process's command, and the name, state and wait channel of each of its threads."""
    folder = Path("/proc") / str(pid)
    lines = []
    with contextlib.suppress(OSError):
        lines.append(f"{pid}: {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')[-160:]}")
        for task in sorted((folder / "task").iterdir()):
            with contextlib.suppress(OSError):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                waits = (task / "wchan").read_text().strip()
                lines.append(f"  {(task / 'comm').read_text().strip()} {state} {waits}")
    return lines


class Running:
    """A run in progress; `gpus` are its GPUs, empty if the program chooses."""

    def __init__(self, job, options, folder, ports, gpus=()):
        self.job, self.folder, self.gpus = job, folder, gpus
        folder.mkdir()
        self.log = folder / "log"
        self.stacks = []
        command = [sys.executable, str(catalogue.FOLDER / "run.py"), job.program.name]
        if job.program.ranks > 1:
            launcher = str(catalogue.FOLDER / "launch.py")
            command = [sys.executable, launcher, str(job.program.ranks), str(free_port(ports)), job.program.name]
        if options.device == "cpu":
            command += ["--device", "cpu"]
        variables = environment(job.allocator, hook=not job.recorded)
        # A process that hangs prints its stacks on request.
        variables["PYTHONFAULTHANDLER"] = "1"
        # A trainer uses all visible GPUs. Keep the user's own selection.
        if gpus and "CUDA_VISIBLE_DEVICES" not in variables:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        # Many processes run simultaneously.
        variables.setdefault("OMP_NUM_THREADS", "2")
        # Sums over NVLink multicast may differ from call to call.
        variables.setdefault("NCCL_NVLS_ENABLE", "0")
        variables.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        if job.recorded:
            alloc = ["--alloc", job.allocator] if job.allocator not in NATIVE else []
            command = [str(options.vramlab), "run", "--no-advise", "-o", str(folder / "recorded"), *alloc, "--", *command]
        self.began = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        self.asked = self.over = None

    @property
    def seconds(self):
        return (self.over or time.monotonic()) - self.began

    def poll(self, limit, debugger=None):
        """True once the run has ended; after the limit requests its stacks, and kills it some seconds later."""
        if self.process.poll() is not None:
            self.over = self.over or time.monotonic()
            # Helpers of Python's multiprocessing exit shortly after their parent.
            return not session_processes(self.process.pid) or time.monotonic() - self.over > PATIENCE_S
        if self.asked is None and self.seconds > limit:
            self.asked = time.monotonic()
            alive = session_processes(self.process.pid)
            self.stacks = [line for pid in alive for line in [*kernel_view(pid), *native_stacks(pid, debugger)]]
            self.asked = time.monotonic()
            # Not `vramlab run` itself, which is not a Python process and must still print its report.
            send([pid for pid in alive if is_python(pid)], signal.SIGABRT)
        if self.asked is not None and time.monotonic() - self.asked > PATIENCE_S:
            self.kill()
            self.process.wait()
            self.over = time.monotonic()
            return True
        return False

    def kill(self):
        """Kills the run and all its children."""
        send(session_processes(self.process.pid), signal.SIGKILL)
        self.process.kill()

    def record(self):
        """The run's record."""
        job, code = self.job, self.process.returncode
        text = self.log.read_text(errors="replace")
        ranks = sorted(printed_records(text), key=lambda rank: rank["rank"])
        fields = {
            "id": job.id, "program": job.program.name, "arm": job.arm, "repeat": job.repeat, "gpus": job.program.gpus,
            "tolerance": job.program.tolerance, "code": code, "took_s": round(self.seconds, 2),
        }  # fmt: skip
        skipped = next((rank["skipped"] for rank in ranks if "skipped" in rank), None)
        if self.asked is not None:
            fields |= {"status": "hung", "stacks": self.stacks[:800], "log": text[-12000:]}
        elif code == 0 and skipped:
            return fields | {"status": "skipped", "why": skipped}
        elif code == 0 and len(ranks) == job.program.ranks:
            fields["status"] = "ok"
        else:
            fields |= {"status": "failed", "log": text[-6000:]}
        if left := session_processes(self.process.pid):
            # Remaining processes of a job keep its GPU memory allocated.
            fields["left_behind"] = [line for pid in left for line in kernel_view(pid)][:40]
            send(left, signal.SIGKILL)
            if fields["status"] == "ok":
                fields |= {"status": "failed", "log": text[-3000:]}
        if job.recorded:
            files = [file for file in (self.folder / "recorded").glob("*") if file.is_file() and file.name != "program.json"]
            fields["recorded"] = {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}
        if ranks:
            fields["ranks"] = [
                {key: value for key, value in rank.items() if key not in ("acceptance", "torch")} for rank in ranks
            ]
        return fields


def native_stacks(pid, debugger):
    """C++ stacks of a Python process, from py-spy or a debugger such as gdb, if available."""
    if shutil.which("py-spy"):
        command = ["py-spy", "dump", "--native", "--pid", str(pid)]
    elif debugger:
        command = [debugger, "-p", str(pid), "-batch", "-ex", "thread apply all bt 14"]
    else:
        return []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if is_python(pid):
            output = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
            return [text[:240] for text in output.stdout.splitlines() if text.startswith(("#", "Thread", " "))][:400]
    return []


def is_python(pid):
    """True if a process runs Python."""
    with contextlib.suppress(OSError):
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return False


def printed_records(text):
    """The records that a run's processes printed."""
    found, decoder = [], json.JSONDecoder()
    for match in re.finditer(r'\{"acceptance"', text):
        with contextlib.suppress(ValueError):
            found.append(decoder.raw_decode(text, match.start())[0])
    return found


class Acceptance:
    """The runs, their records, and the file of records."""

    def __init__(self, options, known):
        self.options = options
        self.records = {record["id"]: record for record in known if record.get("kind") != "machine"}
        self.began = time.monotonic()
        self.kept = self.bad = self.skipped = 0
        self.ports = set()

    def remaining_s(self):
        return self.options.budget - (time.monotonic() - self.began)

    def natives(self, name):
        """Native's runs of a program."""
        return [record for record in self.records.values() if record["program"] == name and record["arm"] == "native"]

    def should_run(self, job):
        """True if a run must start: not done before, in time, and not skipped by native."""
        done = self.records.get(job.id)
        if done is not None and not (self.options.again and done["status"] in ("failed", "hung")):
            return False
        if any(record["status"] == "skipped" for record in self.natives(job.program.name)):
            return False
        if self.remaining_s() < min(job.program.seconds, self.options.limit_s):
            self.skipped += 1
            return False
        return True

    def keep(self, running, file):
        """Writes the record of a completed run, and prints a line about it."""
        record = running.record()
        self.records[record["id"]] = record
        self.kept += 1
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
        file.flush()
        print(line(record, self.natives(record["program"])), flush=True)
        shutil.rmtree(running.folder, ignore_errors=True)

    def run(self, jobs, folder, file, room, gpus=1):
        """Starts the jobs in order, as soon as the GPUs have room."""
        running, waiting, number = [], list(jobs), 0
        try:
            while waiting or running:
                for run in list(running):
                    if run.poll(self.options.limit_s, self.options.debugger):
                        running.remove(run)
                        self.keep(run, file)
                while waiting and len(running) < self.options.jobs:
                    job = waiting[0]
                    used = [sum(run.job.program.gib for run in running if gpu in run.gpus) for gpu in range(gpus)]
                    # The least used GPUs.
                    chosen = sorted(sorted(range(gpus), key=used.__getitem__)[: job.program.gpus])
                    if any(used[gpu] and used[gpu] + job.program.gib > room for gpu in chosen):
                        break
                    waiting.pop(0)
                    if self.should_run(job):
                        number += 1
                        place = folder / f"{number:05}"
                        running.append(Running(job, self.options, place, self.ports, chosen))
                if running and self.remaining_s() < -GRACE_S:
                    print(f"the budget has ended; {len(running)} runs are ended and not kept", flush=True)
                    self.skipped += len(running)
                    return
                time.sleep(0.02)
        finally:
            for run in running:
                run.kill()
                run.process.wait()

    def differences(self):
        """The verdicts of all runs that differ from native, a line each."""
        found = {key: verdict(record, self.natives(record["program"])) for key, record in self.records.items()}
        return [f"{key}: {what}" for key, what in found.items() if what]


def line(record, natives):
    """A run's summary in one line."""
    words = [f"{record['took_s']:6.1f} s  {record['id']}: {record['status']}"]
    if record["status"] == "skipped":
        words.append(record["why"])
    if record["status"] in ("failed", "hung"):
        words.append((record["log"].strip().splitlines() or [f"code {record['code']}, nothing was printed"])[-1][-200:])
    if (peak := peak_reserved(record)) is not None:
        words.append(f"{peak / 2**20:,.0f} MiB reserved")
    if what := verdict(record, natives):
        words.append(what)
    return ", ".join(words)


def gpus_here():
    """The number of visible GPUs."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip()])
    with contextlib.suppress(OSError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        return max(1, sum(text.startswith("GPU ") for text in listed.splitlines()))
    return 1


def selection(options, known):
    """The requested programs."""
    if options.programs:
        return [known[name] for name in options.programs]
    return [program for program in known.values() if program.gpus == options.gpus]


def parser(known):
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="folder of the record; made if need be")
    names = lambda words: choice(words, known, "program")  # noqa: E731
    add("--programs", type=names, metavar="A,B", help="only these (default: all of --gpus)")
    add("--arms", metavar="A,B", help="only these, such as native,native+run,remap (default: all that claim PyTorch)")
    add("--gpus", type=int, choices=(1, 2), default=1, help="programs of so many GPUs (default: 1)")
    add("--repeat", type=int, default=1, metavar="N", help="runs of each arm; native has two at least (default: 1)")
    add("--jobs", type=int, metavar="N", help="runs side by side at most (default: by cores and GPUs)")
    add("--limit-s", type=float, default=200, metavar="SECONDS", help="limit for one run (default: 200)")
    add("--budget", type=float, default=480, metavar="SECONDS", help="no run begins that would end later (default: 480)")
    add("--resume", type=Path, action="append", default=[], metavar="FILE", help="records of earlier calls with another -o")
    add("--again", action="store_true", help="run anew what failed or did not end")
    add("--vramlab", type=Path, metavar="PROGRAM", help="the program `vramlab` (default: the one of target/ or PATH)")
    debugger = "a debugger that shows the stacks of C++ of what did not end (default: gdb, where it is there)"
    add("--debugger", default=shutil.which("gdb"), metavar="PROGRAM", help=debugger)
    add("--build", metavar="TEXT", help="commit of what is measured, where there is no repository to ask")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes under PyTorch alone, to try this program")
    add("--plan", action="store_true", help="print what would run, and start nothing")
    add("--verdicts", action="store_true", help="print what differs in the record, and start nothing")
    return parser


def program_vramlab(named):
    """The path of `vramlab`, or None."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target"))
    on_path = shutil.which("vramlab")
    places = [named] if named else [target / "release" / "vramlab", target / "debug" / "vramlab", *([Path(on_path)] if on_path else [])]
    return next((place for place in places if place.is_file()), None)


def main():
    """Schedules and runs the programs, and prints the differences."""
    known = catalogue.programs()
    options = parser(known).parse_args()
    missing = [file for file in options.resume if not file.is_file()]
    if options.vramlab and not options.vramlab.is_file():
        missing.append(options.vramlab)
    if missing:
        print(f"error: {missing[0]}: no such file", file=sys.stderr)
        return 2
    if options.repeat < 1:
        print(f"error: --repeat {options.repeat}: write 1 or more", file=sys.stderr)
        return 2
    record = options.output / RECORD
    acceptance = Acceptance(options, [run for file in (*options.resume, record) for run in whole_lines(file)])
    if options.verdicts:
        print("\n".join(acceptance.differences()) or "each run is as native's")
        return 1 if acceptance.differences() else 0
    vramlab = program_vramlab(options.vramlab)
    theirs = [*NATIVE] if options.device == "cuda" else ["native"]
    # cudaMallocAsync does not support PyTorch's CUDA graphs, and is not one of VramLab's.
    default = [arm for arm in theirs if arm != "cudaMallocAsync"]
    ours = allocators() if options.device == "cuda" else []
    arms = options.arms.split(",") if options.arms else [*default, *ours, *(["native" + RECORDED] if vramlab else [])]
    unknown = [arm for arm in arms if arm.removesuffix(RECORDED).partition(":")[0] not in [*theirs, *ours]]
    if unknown:
        print(f"error: no arm is called '{unknown[0]}'; there are {', '.join([*theirs, *ours])}, each also with {RECORDED}", file=sys.stderr)
        return 2
    if any(arm.endswith(RECORDED) for arm in arms) and not vramlab:
        print("error: arms with +run need the program vramlab; cargo build --release -p vramlab-cli, or name it with --vramlab", file=sys.stderr)
        return 2
    options.jobs = options.jobs or max(1, (os.cpu_count() or 2) // (1 if options.gpus == 1 else 4))
    jobs = plan(selection(options, known), in_order(dict.fromkeys(arms)), options.repeat)
    seconds = sum(job.program.seconds for job in jobs if job.id not in acceptance.records) / options.jobs
    print(f"{len(jobs)} runs, {sum(job.id in acceptance.records for job in jobs)} done before, about {seconds:.0f} s", flush=True)
    if options.plan:
        print("\n".join(job.id for job in jobs))
        return 0
    # SIGABRT, sent for the stacks, would write a core file of the whole memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    facts = {"kind": "machine", "cpu": True} if options.device == "cpu" else machine(options.build)
    if options.device == "cuda":
        if any(arm.removesuffix(RECORDED) not in NATIVE for arm in arms):
            facts["shim_s"] = compile_shim()
        facts["jobs"] = options.jobs
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="acceptance-", ignore_cleanup_errors=True) as folder,
        open(record, "a", encoding="utf-8") as file,
    ):
        options.vramlab = prefix(vramlab, Path(folder)) if vramlab else None
        file.write(json.dumps(facts, separators=(",", ":")) + "\n")
        file.flush()
        room = facts.get("memory", 64 * GIB) / GIB * 0.94
        acceptance.run(jobs, Path(folder), file, room, gpus_here() if options.device == "cuda" else options.gpus)
    differ = acceptance.differences()
    print("\n".join(["", *differ]) if differ else "each run is as native's")
    took = time.monotonic() - acceptance.began
    print(f"{acceptance.kept} runs kept, {len(differ)} differ, {acceptance.skipped} not begun, {took:.0f} s")
    return 1 if differ else 4 if acceptance.skipped else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
