"""The contents of the wheel and the source distribution."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
# The oldest Python that the wheel supports.
OLDEST = re.search(r'^requires-python = ">=3\.(\d+)"', (HERE / "pyproject.toml").read_text(), re.MULTILINE)


def hook(name: str) -> ModuleType:
    """A build hook, which is not a module of a package."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location(f"vramlab_{name}_hook", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["LICENSE-MIT", "LICENSE-APACHE"])
def test_the_licences_are_those_of_the_repository(name: str) -> None:
    found = [*ROOT.glob("[a-z]*/pyproject.toml"), *ROOT.glob("[a-z]*/*/pyproject.toml")]
    packages = [path.parent for path in found if ROOT / "target" not in path.parents]
    assert HERE in packages
    for folder in packages:
        # A link would point outside the source distribution.
        assert not (folder / name).is_symlink()
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_wheel_has_one_package_which_the_oldest_python_can_parse() -> None:
    assert [path.name for path in (HERE / "src").iterdir() if path.name != "__pycache__"] == ["vramlab"]
    assert OLDEST is not None
    files = sorted((HERE / "src").rglob("*.py"))
    assert files
    for file in files:
        ast.parse(file.read_text(), str(file), feature_version=(3, int(OLDEST[1])))


MANIFEST = """[workspace]
members = [
    "allocators",
    "elsewhere",
    "app/cli",
]
# Fuzzing.
exclude = ["allocators/fuzz"]
resolver = "3"

[workspace.package]
version = "1.0.0"
"""


def test_the_manifest_keeps_the_members_that_are_there() -> None:
    text = hook("sdist").with_members(MANIFEST, lambda member: member != "elsewhere")
    assert '    "allocators",\n    "app/cli",\n]\nresolver = "3"\n' in text
    assert "elsewhere" not in text
    assert "uzz" not in text
    with pytest.raises(SystemExit, match="members"):
        hook("sdist").with_members("[package]\n", bool)


def test_the_gathered_sources_are_a_workspace_with_the_locked_versions(tmp_path: Path) -> None:
    sdist = hook("sdist")
    if shutil.which("cargo") is None or not (ROOT / ".git").exists():
        pytest.skip("Cargo and a checkout with Git are needed")
    sdist.gather(ROOT, tmp_path)
    command = ["cargo", "metadata", "--locked", "--offline", "--format-version", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    metadata = json.loads(done.stdout)
    members = [one for one in metadata["packages"] if one["id"] in metadata["workspace_members"]]
    assert {"vramlab", "vramlab-capi", "vramlab-cli"} <= {one["name"] for one in members}
    folders = {Path(one["manifest_path"]).relative_to(tmp_path).parts[0] for one in members}
    assert folders == {"allocators", "app"}
    packages = re.compile(r'name = "(.*)"\nversion = "(.*)"')
    ours, locked = (set(packages.findall((root / "Cargo.lock").read_text())) for root in (tmp_path, ROOT))
    assert ours < locked
    note = json.loads((tmp_path / "app" / "cli" / ".cargo_vcs_info.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{40}", note["git"]["sha1"])
    assert not list(tmp_path.rglob("fuzz_targets"))
