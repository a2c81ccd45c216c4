"""The build of the shim: refused versions of PyTorch, the cache, and machines without a compiler.

PyTorch and the compiler are stand-ins: a directory with headers, and a script that writes its arguments.
"""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))

from vramlab import _build  # noqa: E402
from vramlab._build import BuildError, Torch  # noqa: E402

COMPILER = """#!/bin/sh
echo called >> "$COUNT"
while [ $# -gt 0 ]; do
    case $1 in -o) out=$2;; -DVRAMLAB_SHIM_SOURCE=*) made=$1;; esac
    shift
done
sleep 0.2
echo "$made" > "$out"
"""


# The header's name must not be reported as an error.
FAILS = """#!/bin/sh
echo 'In file included from system_error:41:' >&2
echo 'shim.cpp:1: error: of a test' >&2
exit 1
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a compiler and CUDA's headers, and an empty cache."""
    tools = tmp_path / "bin"
    tools.mkdir()
    compiler = tools / "cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    include = tmp_path / "cuda" / "include"
    (include / "crt").mkdir(parents=True)
    (include / "crt" / "host_config.h").touch()
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    for variable, value in {"CXX": compiler, "CUDA_HOME": include.parent, "COUNT": tmp_path / "count"}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(_build.ANYWAY, raising=False)
    monkeypatch.setattr(_build, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(_build, "header_folder", lambda: include)
    (include / "vramlab.h").touch()
    return tmp_path


def torch(machine: Path, version: str = "2.11.0+cu130", cuda: str | None = "13.0") -> Torch:
    return Torch(machine / "torch", version, cuda)


def calls(machine: Path) -> int:
    counted = machine / "count"
    return len(counted.read_text().splitlines()) if counted.exists() else 0


def test_it_is_compiled_once_for_each_version(machine: Path) -> None:
    first = _build.shim(torch(machine))
    assert first.parent == machine / "cache" / "vramlab"
    assert first.name.startswith("shim-2.11.0+cu130-")
    assert _build.source_digest() in first.read_text()
    assert _build.shim(torch(machine)) == first
    assert calls(machine) == 1
    others = {_build.shim(torch(machine, version)) for version in ("2.11.1+cu130", "2.11.0+cu132", "2.12.0+cu130")}
    assert len(others | {first}) == 4
    assert calls(machine) == 4
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".lock"] * 4 + [".so"] * 4


def test_a_change_of_the_source_is_a_new_shim(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _build.shim(torch(machine))
    (_build.header_folder() / "vramlab.h").write_text("// another")
    assert _build.shim(torch(machine)) != first


def test_processes_that_start_together_compile_once(machine: Path) -> None:
    # File locks belong to the open file, so threads behave like processes.
    made: list[Path] = []
    ranks = [threading.Thread(target=lambda: made.append(_build.shim(torch(machine)))) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert calls(machine) == 1


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.7.1+cu128", "older than 2.9, the oldest that vramlab knows: pip install 'torch>=2.9'"),
        ("2.16.0+cu132", "newer than 2.15, the newest that vramlab knows: pip install -U vramlab"),
        ("3.0.0", "newer than 2.15"),
    ],
)
def test_a_version_that_is_not_known_is_refused(
    machine: Path, version: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError) as caught:
        _build.shim(torch(machine, version))
    assert words in str(caught.value)
    assert "VRAMLAB_TORCH_ANYWAY=1" in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv(_build.ANYWAY, "1")
    assert _build.shim(torch(machine, version)).is_file()


def test_a_pytorch_without_cuda_is_refused(machine: Path) -> None:
    with pytest.raises(BuildError, match="without CUDA"):
        _build.shim(torch(machine, "2.11.0+cpu", None))


@pytest.mark.parametrize("cache", ["/proc/no/cache", "file"])
def test_a_cache_that_cannot_be_written_costs_a_warning(
    machine: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine / cache))
    with pytest.warns(UserWarning, match=r"cannot be written .* vramlab's shim .* XDG_CACHE_HOME") as told:
        made = _build.shim(torch(machine))
    assert made.is_file()
    assert len(told) == 1
    assert "\n" not in str(told[0].message)


def test_without_a_compiler_a_shim_of_the_package_serves(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(machine))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler .*g\+\+") as caught:
        _build.shim(torch(machine))
    assert "\n" not in str(caught.value)
    prebuilt = _build.PACKAGE / "prebuilt"
    prebuilt.mkdir(parents=True)
    shipped = prebuilt / "shim-2.11.0+cu130.so"
    shipped.write_text(f"made of {_build.source_digest()}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _build.shim(torch(machine)) == shipped
    # It fits only that version and these sources.
    with pytest.raises(BuildError, match="no C"):
        _build.shim(torch(machine, "2.11.1+cu130"))
    shipped.write_text("made of other sources")
    with pytest.raises(BuildError, match="no C"):
        _build.shim(torch(machine))


def test_a_compiler_that_fails_leaves_nothing_and_a_log(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "bin" / "cc").write_text(FAILS)
    with pytest.raises(BuildError, match=r"does not compile: shim.cpp:1: error: of a test") as caught:
        _build.shim(torch(machine))
    log = Path(str(caught.value).partition("all of it: ")[2].rstrip(")"))
    assert "-lc10_cuda" in log.read_text()
    log.unlink()
    assert not list((machine / "cache" / "vramlab").glob("*.so*"))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(BuildError, match="CXX=/no/such/compiler"):
        _build.shim(torch(machine))


def test_headers_are_of_the_cuda_that_pytorch_was_built_for(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = machine / "cuda" / "include"
    assert _build.cuda_includes(torch(machine), []) == [include]
    # One directory of PyTorch's wheels contains the runtime's headers, another the compiler's.
    first = machine / "wheel" / "include"
    first.mkdir(parents=True)
    (first / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13020\n")
    assert _build.cuda_includes(torch(machine), [first]) == [first, include]
    monkeypatch.setattr(_build, "_places_of_cuda", lambda: iter([include]))
    with pytest.raises(BuildError, match=r"cuda_runtime_api.h of CUDA 12: pip install nvidia-cuda-runtime-cu12"):
        _build.shim(torch(machine, "2.11.0+cu128", "12.8"))
    (include / "crt" / "host_config.h").unlink()
    with pytest.raises(BuildError, match=r"crt/host_config.h: pip install .* CUDA_HOME"):
        _build.shim(torch(machine))


def test_a_user_without_a_home_has_no_cache(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.chdir(machine)
    with pytest.warns(UserWarning, match="no home folder"):
        assert _build.shim(torch(machine)).is_file()
    assert not (machine / "~").exists()
