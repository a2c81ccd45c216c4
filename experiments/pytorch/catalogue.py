"""The programs of the acceptance list (`programs/acceptance`), read from their source: listing them needs no PyTorch."""

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "programs" / "acceptance"


@dataclass(frozen=True)
class Program:
    """One program: a function with the decorator `program`; all fields but the first four are the decorator's arguments."""

    name: str
    summary: str
    family: str
    """The stem of its file's name."""
    line: int
    gpus: int = 1
    """The number of GPUs that it needs."""
    ranks: int = 1
    """The number of processes of a job, with one GPU each."""
    tolerance: float = 0.0
    """Maximum relative difference of losses from native's; 0 if they must be equal to the bit."""
    needs: tuple[str, ...] = ()
    """Required packages besides PyTorch; without them it is skipped."""
    cpu: bool = True
    """True if it can also be tried without a GPU."""
    gib: float = 3.0
    """Peak GPU memory in GiB, including the context."""
    seconds: float = 15.0
    """Estimated seconds on an H200, including imports."""

    @property
    def missing(self) -> list[str]:
        """Required packages that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


def _of_file(path: Path) -> list[Program]:
    listed = []
    for node in ast.parse(path.read_text(), str(path)).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "program":
                options = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                listed.append(Program(node.name, summary, path.stem, node.lineno, **options))
    return listed


def programs(folder: Path = FOLDER) -> dict[str, Program]:
    """All programs by name, in the order of their files."""
    known: dict[str, Program] = {}
    for path in sorted(folder.glob("*.py")):
        for program in _of_file(path):
            if program.name in known:
                family = known[program.name].family
                raise ValueError(f"{path}:{program.line}: {program.name} is in {family}.py already; rename one")
            known[program.name] = program
    return known
