"""PyTorch's tests, part by part, on substitutes."""

import json
import os
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
    def test_fails_once(self):
        if not os.path.exists(os.environ["ONCE"]):
            open(os.environ["ONCE"], "w").close()
            self.fail("memory of others")
    def test_hangs(self): time.sleep(60)
    def test_passes_natively(self): self.assertNotIn("expandable", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    @unittest.skip("never")
    def test_skipped(self): pass
"""


@pytest.fixture
def run(tmp_path):
    """Files of tests, and a substitute for PyTorch's module; returns a function that runs a part."""
    internal = tmp_path / "torch" / "testing" / "_internal"
    internal.mkdir(parents=True)
    for folder in (internal, internal.parent, internal.parents[1]):
        (folder / "__init__.py").touch()
    (internal / "inductor_utils.py").write_text("HAS_CUDA_AND_TRITON = False\n")
    (tmp_path / "test_cuda.py").write_text(TESTS)

    def run(chosen, alloc=""):
        own = {"PYTHONPATH": str(tmp_path), "VRAMLAB_ALLOC": alloc, "TEST_TIMEOUT_S": "2", "TMPDIR": str(tmp_path)}
        own["ONCE"] = str(tmp_path / "once")
        command = [sys.executable, HERE / "torch_tests.py", tmp_path, chosen]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | own)

    return run


def outcomes(done):
    assert done.returncode == 0, done.stderr
    return {
        line["torch_test"].partition("_")[2].partition("test_")[2]: line
        for line in map(json.loads, done.stdout.splitlines())
    }


def test_a_test_that_breaks_or_hangs_costs_no_other(run):
    found = outcomes(run("test_cuda.TestCuda.1-1"))
    expected = {"passes": "passed", "breaks": "crashed", "fails": "failed", "hangs": "timed out", "skipped": "skipped"}
    assert {name: found[name]["outcome"] for name in expected} == expected
    assert found["passes_natively"]["outcome"] == "passed"
    assert found["fails_once"]["outcome"] == "passed", "the second time it had the GPU for itself"
    assert found["fails_once"]["alone"]


def test_parts_share_out_the_tests_and_expect_expandable_memory(run):
    parts = [outcomes(run(f"test_cuda.TestCuda.{part}-2", alloc="remap:steal=always")) for part in (1, 2)]
    assert sorted([*parts[0], *parts[1]]) == sorted(
        ["passes", "breaks", "fails", "fails_once", "hangs", "passes_natively", "skipped"]
    )
    natively = (parts[0] | parts[1])["passes_natively"]
    assert natively["reason"].startswith("AssertionError: 'expandable' unexpectedly found")


def test_a_file_or_a_class_that_is_not_there_is_said(run):
    assert run("test_none.TestCuda.1-1").returncode == 2
    assert "no such file" in run("test_none.TestCuda.1-1").stderr
    assert outcomes(run("test_cuda.TestNone.1-1")) == {}
