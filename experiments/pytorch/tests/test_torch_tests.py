"""The runner of PyTorch's tests on substitutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]

TESTS = """
import os, time, unittest
class TestCuda(unittest.TestCase):
    def test_passes(self): pass
    def test_breaks(self): os._exit(7)
    def test_fails(self): self.assertEqual(1, 2)
    def test_hangs(self): time.sleep(60)
    def test_passes_natively(self): self.assertNotIn("expandable", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    @unittest.skip("never")
    def test_skipped(self): pass
"""


@pytest.fixture
def tests(tmp_path, monkeypatch):
    """Files of tests, and a substitute for PyTorch's module."""
    internal = tmp_path / "torch" / "testing" / "_internal"
    internal.mkdir(parents=True)
    for folder in (internal, internal.parent, internal.parents[1]):
        (folder / "__init__.py").touch()
    (internal / "inductor_utils.py").write_text("HAS_CUDA_AND_TRITON = False\n")
    (tmp_path / "test_cuda.py").write_text(TESTS)
    (tmp_path / "test_cudagraph_trees.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_test_that_breaks_or_hangs_costs_no_other(tests):
    command = [
        sys.executable,
        HERE / "torch_tests.py",
        "-o",
        tests / "out",
        "--tests",
        tests,
        "--arms",
        "native,expandable",
    ]
    done = subprocess.run([*command, "--timeout", "2", "--jobs", "2"], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for line in (tests / "out" / "torch-tests.jsonl").read_text().splitlines():
        one = json.loads(line)
        found[one["arm"], one["test"].rpartition("_")[2]] = one
    outcomes = {"passes": "passed", "breaks": "crashed", "fails": "failed", "hangs": "timed out", "skipped": "skipped"}
    for arm in ("native", "expandable"):
        assert {name: found[arm, name]["outcome"] for name in outcomes} == outcomes
    assert found["native", "natively"]["outcome"] == "passed"
    assert found["expandable", "natively"]["reason"].startswith("AssertionError: 'expandable' unexpectedly found")
    # A test that fails natively is not an allocator's fault, so it is not run again.
    assert found["native", "fails"].get("alone")
    assert not found["expandable", "fails"].get("alone")
    assert "1 of 2 that pass natively do not under expandable" in done.stdout
