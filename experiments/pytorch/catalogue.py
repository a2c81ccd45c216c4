"""The programs of the acceptance list (`programs/acceptance`), read from their source: listing them needs no PyTorch."""

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "programs" / "acceptance"


@dataclass(frozen=True)
class Program:
    """One program: a function with the decorator `program`, whose arguments these are, but for the first four."""

    name: str
    summary: str
    family: str
    """The file that it stands in, without its suffix."""
    line: int
    gpus: int = 1
    """GPUs that it needs."""
    ranks: int = 1
    """Processes of a job, a GPU each."""
    tolerance: float = 0.0
    """By how much losses may differ from native's, relatively; 0 where they must be equal to the bit."""
    needs: tuple[str, ...] = ()
    """Packages beside PyTorch without which it is skipped."""
    cpu: bool = True
    """Whether it runs without a GPU, too, to be tried."""
    gib: float = 3.0
    """Most memory of a GPU that it takes, in GiB, its context included."""
    seconds: float = 15.0
    """Estimated seconds on an H200, imports included."""

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not here."""
        return [name for name in self.needs if find_spec(name) is None]


def _of_file(path: Path) -> list[Program]:
    found = []
    for node in ast.parse(path.read_text(), str(path)).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "program":
                options = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                found.append(Program(node.name, summary, path.stem, node.lineno, **options))
    return found


def programs(folder: Path = FOLDER) -> dict[str, Program]:
    """All programs, by name, in the order in which they stand in their files."""
    found: dict[str, Program] = {}
    for path in sorted(folder.glob("*.py")):
        for one in _of_file(path):
            if one.name in found:
                raise ValueError(f"{path}:{one.line}: {one.name} is in {found[one.name].family}.py already; rename one")
            found[one.name] = one
    return found
