#!/usr/bin/env python3
"""Runs one part of a class of PyTorch's own tests of CUDA memory, and prints a line of JSON for each test.

    python3 experiments/pytorch/torch_tests.py FOLDER test_cuda.TestCuda.1-8      the first of eight parts

FOLDER contains test_cuda.py and test_cudagraph_trees.py (test/ and test/inductor/ of PyTorch's sources, 2.6 or newer),
and the package expecttest if it is not installed. They belong to PyTorch and are not stored here. The spec
`torch-tests` runs all parts under each allocator, which the environment selects.

A test that times out or crashes its process is marked, and the remainder continues in another process. Failed tests run
once more, in another process and while no other part runs a test, as some measure all of the GPU's memory: the second
outcome counts. For an allocator with expandable segments the tests expect the behaviour of PyTorch's own.

Exit codes: 0 all tests have an outcome, 2 bad input.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Tests that take minutes, or need more than one GPU without a network.
LEFT_OUT = (
    "test_cusparse_multiple_threads_same_device",
    "test_cublas_multiple_threads_same_device",
    "test_cudnn_multiple_threads_same_device",
    "test_reproducer_device_memory_leak",
)
# Allocators with expandable segments. Some tests derive their expectations from PYTORCH_CUDA_ALLOC_CONF.
EXPANDABLE = ("pytorch-expandable", "remap")
BAD = ("failed", "crashed", "timed out")
LOCKS = {"shared": fcntl.LOCK_SH, "exclusive": fcntl.LOCK_EX}
# Seconds for one test, and for the imports.
TIMEOUT_S, IMPORTS_S = float(os.environ.get("TEST_TIMEOUT_S", "60")), 120


def lock_path():
    """The lock that all parts take for each test."""
    return Path(tempfile.gettempdir()) / f"vramlab-torch-tests-{os.getuid()}.lock"


def worker(folder, chosen, lock, output, names):
    """Runs tests of a part, all or those of these names; writes a line at each start and end of a test.

    `lock` is "shared" with other parts, or "exclusive".
    """
    import faulthandler
    import importlib
    import unittest

    # Before PyTorch's testing modules, which import expecttest.
    sys.path.insert(0, folder)
    import torch.testing._internal.inductor_utils as inductor

    if not hasattr(inductor, "HAS_CUDA"):
        # The name before 2.9.
        inductor.HAS_CUDA = inductor.HAS_CUDA_AND_TRITON
    module, name, part = chosen.split(".")
    sys.argv = [module]
    loaded = importlib.import_module(module)

    def write(**facts):
        with open(output, "a", encoding="utf-8") as file:
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
            faulthandler.dump_traceback_later(TIMEOUT_S * 0.9)
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
            write(torch_test=test.id(), outcome=self.found[0], reason=self.found[1], seconds=round(took, 2))
            self.began = None

    kind, (number, parts) = getattr(loaded, name, None), map(int, part.split("-"))
    known = unittest.defaultTestLoader.getTestCaseNames(kind) if kind else []
    mine = [f"{name}.{test}" for test in known if test not in LEFT_OUT][number - 1 :: parts]
    write(tests=[f"{module}.{test}" for test in mine])
    result = Result()
    # Locked for each test, as the imports take longer than most tests.
    with open(lock_path(), "w") as gpu:
        for test in mine:
            if not names or f"{module}.{test}" in names:
                write(waits=test)
                fcntl.flock(gpu, LOCKS[lock])
                unittest.defaultTestLoader.loadTestsFromName(test, loaded).run(result)
                fcntl.flock(gpu, fcntl.LOCK_UN)


def lines_of(path):
    """The whole lines of a worker's file."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def attempt(arguments, names, folder):
    """Runs a worker until it ends or a test takes too long.

    Returns the tests of its part, the outcomes by name, the test that was running, and why the worker ended early.
    """
    output, log = folder / "lines.jsonl", folder / "log"
    output.unlink(missing_ok=True)
    with open(log, "wb") as file:
        command = [sys.executable, __file__, "--worker", *arguments, str(output), *names]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    count, since, late = 0, time.monotonic(), False
    while process.poll() is None:
        time.sleep(0.05)
        lines = lines_of(output)
        if len(lines) > count:
            count, since = len(lines), time.monotonic()
        last = lines[-1] if lines else {}
        # Other parts may hold the lock for as long as their tests take.
        limit = TIMEOUT_S if "begin" in last else float("inf") if "waits" in last else IMPORTS_S
        if time.monotonic() - since > limit:
            process.kill()
            late = True
    lines = lines_of(output)
    part = next((line["tests"] for line in lines if "tests" in line), None)
    outcomes = {line["torch_test"]: line for line in lines if "torch_test" in line}
    printed = log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
    if process.returncode == 0:
        return part, outcomes, None, None
    begun = next((line["begin"] for line in reversed(lines) if "begin" in line), None)
    if late:
        where = " | ".join(printed[-12:])[:600]
        return part, outcomes, begun, ("timed out", f"took more than {TIMEOUT_S:.0f} s: {where}")
    return part, outcomes, begun, ("crashed", f"process ended with code {process.returncode}: {printed[-1][:200]}")


def outcomes_of(arguments, names, folder):
    """The outcomes of tests by name; of the whole part without names."""
    done, left = {}, names
    while True:
        part, found, begun, fault = attempt(arguments, left, folder)
        if part is None:
            raise SystemExit(f"error: {arguments[1]} cannot be loaded: {fault[1] if fault else 'it has no tests'}")
        done |= found
        left = [test for test in names or part if test not in done]
        if fault is None or not left:
            return done
        broken = begun if begun in left else left[0]
        done[broken] = {"torch_test": broken, "outcome": fault[0], "reason": fault[1], "seconds": 0.0}
        left.remove(broken)
        if not left:
            return done


def main():
    """Runs the part, then what failed by itself, and prints the outcomes."""
    if sys.argv[1:2] == ["--worker"]:
        folder, chosen, lock, output, *names = sys.argv[2:]
        worker(folder, chosen, lock, output, names)
        return 0
    if len(sys.argv) != 3 or sys.argv[2].count(".") != 2:
        print(f"usage: {sys.argv[0]} FOLDER FILE.CLASS.PART-PARTS", file=sys.stderr)
        return 2
    folder, chosen = sys.argv[1:]
    file = Path(folder) / f"{chosen.partition('.')[0]}.py"
    if not file.is_file():
        print(f"error: {file}: no such file; take it from PyTorch's sources", file=sys.stderr)
        return 2
    if os.environ.get("VRAMLAB_ALLOC", "").partition(":")[0] in EXPANDABLE:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="torch-tests-", ignore_cleanup_errors=True) as own:
        # A separate cache, as tests of compiled graphs count compilations.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own + "/inductor"
        found = outcomes_of((folder, chosen, "shared"), [], Path(own))
        if bad := [test for test, line in found.items() if line["outcome"] in BAD]:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = own + "/inductor-again"
            again = outcomes_of((folder, chosen, "exclusive"), bad, Path(own))
            found |= {name: line | {"alone": True} for name, line in again.items()}
    for test in sorted(found):
        # The key that the runner looks for is the first.
        print(json.dumps({"torch_test": test} | found[test]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
