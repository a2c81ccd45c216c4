#!/usr/bin/env python3
"""Runs PyTorch's own tests of CUDA memory natively and under VramLab's allocators, and lists the differences.

    python3 experiments/pytorch/torch_tests.py -o DIR --tests FOLDER --budget 500 [--resume DIR/torch-tests.jsonl]

FOLDER contains test_cuda.py and test_cudagraph_trees.py (test/ and test/inductor/ of PyTorch's sources, 2.6 or newer), and the
package expecttest if it is not installed. They belong to PyTorch and are not stored here.

A class is divided into pieces of a few tests, each in a separate process, concurrently on the GPU. A test that times out or
crashes its process is marked, and the remainder of its piece continues in another process. Failed tests run once more with the
GPU for themselves, as some measure all of its memory: the second result counts. For an allocator with expandable segments the
tests expect the behaviour of PyTorch's own. DIR/torch-tests.jsonl has a line for each test and allocator, DIR/torch-tests.txt
the counts and names.

Exit codes: 0 each test that passes natively passes under each allocator, 1 some fail, 2 bad input, 4 the budget ended first.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from environment import NATIVE, environment, last_line

# Per file, the classes that test memory, streams, graphs and pools.
FILES = {
    "test_cuda": ("TestCuda", "TestCudaMallocAsync", "TestBlockStateAbsorption", "TestMemPool"),
    "test_cudagraph_trees": ("CudaGraphTreeTests",),
}
# Tests that take minutes, or need more than one GPU without a network.
LEFT_OUT = {
    "test_cusparse_multiple_threads_same_device": "takes minutes",
    "test_cublas_multiple_threads_same_device": "takes minutes",
    "test_cudnn_multiple_threads_same_device": "takes minutes",
    "test_reproducer_device_memory_leak": "takes minutes",
}
# Allocators with expandable segments. Some tests derive their expectations from PYTORCH_CUDA_ALLOC_CONF.
EXPANDABLE = ("pytorch-expandable", "remap")
PIECE = 12
BAD = ("failed", "crashed", "timed out")


def worker(folder, module, names, output):
    """Runs tests of a file in this process; writes a line at each start and end of a test."""
    import faulthandler
    import importlib
    import unittest

    # Before PyTorch's testing modules, which import expecttest.
    sys.path.insert(0, folder)
    import torch.testing._internal.inductor_utils as inductor

    if not hasattr(inductor, "HAS_CUDA"):
        # The name before 2.9.
        inductor.HAS_CUDA = inductor.HAS_CUDA_AND_TRITON
    sys.argv = [module]
    loaded = importlib.import_module(module)
    file = open(output, "a", encoding="utf-8", buffering=1)

    def write(**facts):
        file.write(json.dumps(facts) + "\n")

    def reason(error):
        text = str(error[1]).strip() if isinstance(error, tuple) else str(error)
        kind = f"{error[0].__name__}: " if isinstance(error, tuple) else ""
        return (kind + " ".join(text.split()))[:300]

    class Result(unittest.TestResult):
        """Writes outcomes immediately. Some versions of Python do not call startTest for skipped tests."""

        began, found = None, ("passed", "")

        def startTest(self, test):
            super().startTest(test)
            # The location of a hang is at the end of the log, which becomes the reason.
            faulthandler.dump_traceback_later(float(os.environ["HANGS_AFTER"]))
            self.began, self.found = time.monotonic(), ("passed", "")
            write(begin=test.id())

        def addError(self, test, error):
            self.found = ("failed", reason(error))

        addFailure = addError

        def addSubTest(self, test, subtest, error):
            if error is not None:
                self.found = ("failed", reason(error))

        def addSkip(self, test, why):
            self.found = ("skipped", why[:200])

        def addExpectedFailure(self, test, error):
            self.found = ("passed", "fails as expected")

        def addUnexpectedSuccess(self, test):
            self.found = ("failed", "passes unexpectedly")

        def stopTest(self, test):
            super().stopTest(test)
            took = time.monotonic() - self.began if self.began else 0.0
            write(test=test.id(), outcome=self.found[0], reason=self.found[1], seconds=round(took, 2))
            self.began = None

    if names == ["list"]:
        for name in FILES[module]:
            if (kind := getattr(loaded, name, None)) is not None:
                for test in unittest.defaultTestLoader.getTestCaseNames(kind):
                    write(test=f"{module}.{name}.{test}")
        return
    result = Result()
    for name in names:
        unittest.defaultTestLoader.loadTestsFromName(name.removeprefix(module + "."), loaded).run(result)


@dataclass
class Piece:
    """Tests for one process."""

    arm: str
    tests: list
    alone: bool = False
    process: subprocess.Popen | None = None
    output: Path | None = None
    log: Path | None = None
    began: float = 0.0
    seen: dict = field(default_factory=dict)


class Tests:
    """The pieces, and the results of each test."""

    def __init__(self, options, folder):
        self.options, self.folder = options, Path(folder)
        self.began, self.count = time.monotonic(), 0
        self.found, self.cut = {}, False
        for file in options.resume:
            for line in file.read_text().splitlines():
                one = json.loads(line)
                if "outcome" in one:
                    self.found[one["arm"], one["test"]] = one

    def left(self):
        return self.options.budget - (time.monotonic() - self.began)

    def start(self, piece):
        """Starts a piece's process."""
        self.count += 1
        piece.output, piece.log = self.folder / f"{self.count}.jsonl", self.folder / f"{self.count}.log"
        piece.output.touch()
        module = piece.tests[0].partition(".")[0]
        command = [
            sys.executable,
            __file__,
            "--worker",
            str(self.options.tests.resolve()),
            module,
            str(piece.output),
            *piece.tests,
        ]
        # A separate cache, as tests of compiled graphs count compilations.
        own = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"inductor-{self.count}"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "HANGS_AFTER": str(self.options.timeout * 0.9),
        }
        if piece.arm.partition(":")[0] in EXPANDABLE:
            own["PYTORCH_CUDA_ALLOC_CONF"] = NATIVE["expandable"]
        with open(piece.log, "wb") as log:
            piece.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.folder,
                env=environment(piece.arm) | own, start_new_session=True,
            )  # fmt: skip
        piece.began = time.monotonic()
        return piece

    def read(self, piece, file):
        """Reads a process's new output; returns its running test and that test's start time."""
        current = None
        for line in piece.output.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                one = json.loads(line)
                if "begin" in one:
                    current = one["begin"]
                else:
                    current = None
                    if one["test"] not in piece.seen:
                        piece.seen[one["test"]] = time.monotonic()
                        self.keep(piece, one, file)
        if current is not None:
            piece.seen.setdefault("begin " + current, time.monotonic())
        return current

    def keep(self, piece, one, file):
        """Writes a test's result."""
        known = {
            "arm": piece.arm,
            "test": one["test"],
            "outcome": one["outcome"],
            "reason": one["reason"],
            "seconds": one["seconds"],
        }
        if piece.alone:
            known["alone"] = True
        self.found[piece.arm, one["test"]] = known
        file.write(json.dumps(known) + "\n")
        file.flush()

    def ended(self, piece, file):
        """True if a piece has ended; the remainder of a crashed piece continues in another process."""
        current = self.read(piece, file)
        code = piece.process.poll()
        since = piece.seen.get("begin " + current, 0.0) if current else max([piece.began, *piece.seen.values()])
        too_long = time.monotonic() - since > (self.options.timeout if current else 120)
        if code is None and not too_long:
            return False
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(piece.process.pid, 9)
            piece.process.wait()
        self.read(piece, file)
        left = [test for test in piece.tests if test not in piece.seen]
        if left:
            lines = piece.log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
            why = (
                f"took more than {self.options.timeout} s: {' | '.join(lines[-12:])[:600]}"
                if too_long
                else f"process ended with code {code}: {lines[-1][:200]}"
            )
            broke = current if current in left else left[0]
            outcome = "timed out" if too_long else "crashed"
            self.keep(
                piece,
                {"test": broke, "outcome": outcome, "reason": why, "seconds": round(time.monotonic() - since, 1)},
                file,
            )
            left.remove(broke)
        piece.tests = left
        return True

    def run(self, pieces, jobs, file):
        """Runs pieces, some concurrently."""
        waiting, running = list(pieces), []
        while waiting or running:
            while waiting and len(running) < jobs and self.left() > 20:
                running.append(self.start(waiting.pop(0)))
            if self.left() < 0:
                for piece in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(piece.process.pid, 9)
                self.cut = True
                return
            if not running:
                self.cut = True
                return
            for piece in list(running):
                if self.ended(piece, file):
                    running.remove(piece)
                    if piece.tests:
                        waiting.insert(0, Piece(piece.arm, piece.tests, piece.alone))
            time.sleep(0.1)

    def again(self, arm):
        """Failed tests to run alone: those that pass natively; for native, all that failed."""
        failed = {}
        for (of, test), one in self.found.items():
            natively = self.found.get(("native", test), {}).get("outcome")
            if (
                of == arm
                and one["outcome"] in BAD
                and not one.get("alone")
                and (arm == "native" or natively not in BAD)
            ):
                failed.setdefault(test.partition(".")[0], []).append(test)
        if arm == "native":
            return [Piece(arm, some, alone=True) for some in failed.values()]
        # A process per test: leftovers of a failed test can make the next one fail.
        return [Piece(arm, [test], alone=True) for some in failed.values() for test in some]

    def names(self):
        """All tests by name, in the order of their files."""
        names, loading = [], {}
        # Concurrently, as each imports PyTorch's testing modules from a cold disk.
        for module in FILES:
            output = self.folder / f"{module}.list"
            command = [sys.executable, __file__, "--worker", str(self.options.tests.resolve()), module, str(output), "list"]
            loading[module] = output, subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment("native"), cwd=self.folder
            )
        for module, (output, process) in loading.items():
            _, errors = process.communicate()
            if process.returncode:
                raise SystemExit(f"error: {module} cannot be loaded: {last_line(errors)}")
            names += [json.loads(line)["test"] for line in output.read_text().splitlines()]
        only = self.options.only
        return [
            name
            for name in names
            if name.rpartition(".")[2] not in LEFT_OUT and (not only or any(word in name for word in only))
        ]


def summary(tests, names, arms):
    """Counts by allocator and class, then each test that passes natively but not under an allocator."""
    lines = [f"PyTorch's tests, {len(names)} of {', '.join(FILES)}; left out: {', '.join(LEFT_OUT)}"]
    outcomes = ("passed", *BAD, "skipped")
    classes = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    worse = 0
    for arm in arms:
        counts = Counter(
            (name.rpartition(".")[0], tests.found[arm, name]["outcome"]) for name in names if (arm, name) in tests.found
        )
        lines.append(f"\n{arm}")
        for kind in classes:
            counted = ", ".join(f"{counts[kind, outcome]} {outcome}" for outcome in outcomes if counts[kind, outcome])
            lines.append(f"  {kind}: {counted or 'not run'}")
    for arm in arms:
        some = [name for name in names if (arm, name) in tests.found and ("native", name) in tests.found]
        if arm == "native":
            bad = [name for name in some if tests.found[arm, name]["outcome"] in BAD]
            lines.append(f"\n{len(bad)} that do not pass natively")
        else:
            passing = [name for name in some if tests.found["native", name]["outcome"] == "passed"]
            bad = [name for name in passing if tests.found[arm, name]["outcome"] != "passed"]
            lines.append(f"\n{len(bad)} of {len(passing)} that pass natively do not under {arm}")
            worse += len(bad)
        for name in bad:
            one = tests.found[arm, name]
            lines.append(f"  {name}: {one['outcome']}: {one['reason']}")
    return "\n".join(lines) + "\n", worse


def main():
    """Runs the tests and writes the results."""
    if sys.argv[1:2] == ["--worker"]:
        folder, module, output, *names = sys.argv[2:]
        worker(folder, module, names, output)
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder of results; made if need be"
    )
    parser.add_argument("--tests", type=Path, required=True, metavar="FOLDER", help="where PyTorch's test files are")
    parser.add_argument(
        "--arms", default="native,caching,remap", metavar="A,B", help="allocators (default: %(default)s)"
    )
    parser.add_argument("--only", action="append", metavar="TEXT", help="only tests whose name has this in it")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), metavar="N", help="processes side by side"
    )
    parser.add_argument(
        "--piece", type=int, default=PIECE, metavar="N", help="tests of one process (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="for one test (default: 60)")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="for all (default: 540)")
    parser.add_argument(
        "--resume", type=Path, action="append", default=[], metavar="FILE", help="results of an earlier call"
    )
    options = parser.parse_args()
    for module in FILES:
        file = options.tests / f"{module}.py"
        if not file.is_file():
            print(f"error: {file}: no such file; take it from PyTorch's sources", file=sys.stderr)
            return 2
    options.output.mkdir(parents=True, exist_ok=True)
    arms = [arm for arm in options.arms.split(",") if arm]
    with tempfile.TemporaryDirectory(prefix="torch-tests-", ignore_cleanup_errors=True) as folder:
        tests = Tests(options, folder)
        names = tests.names()
        with open(options.output / "torch-tests.jsonl", "a", encoding="utf-8") as file:
            for known in tests.found.values():
                file.write(json.dumps(known) + "\n")
            pieces = []
            for module, kinds in FILES.items():
                for kind in kinds:
                    wanted = [name for name in names if name.startswith(f"{module}.{kind}.")]
                    for at in range(0, len(wanted), options.piece):
                        for arm in arms:
                            some = [name for name in wanted[at : at + options.piece] if (arm, name) not in tests.found]
                            pieces += [Piece(arm, some)] if some else []
            print(f"{len(names)} tests, {len(pieces)} pieces, {time.monotonic() - tests.began:.0f} s to find them", flush=True)
            # Compiled graphs take longest.
            pieces.sort(key=lambda piece: "trees" not in piece.tests[0])
            tests.run(pieces, options.jobs, file)
            for arm in dict.fromkeys(["native", *arms]):
                again = tests.again(arm)
                print(
                    f"{time.monotonic() - tests.began:.0f} s; {sum(len(p.tests) for p in again)} fail under {arm} and run alone",
                    flush=True,
                )
                tests.run(again, 1, file)
        text, worse = summary(tests, names, arms)
    (options.output / "torch-tests.txt").write_text(text)
    print(text, end="")
    return 1 if worse else 4 if tests.cut else 0


if __name__ == "__main__":
    sys.exit(main())
