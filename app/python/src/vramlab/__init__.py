"""GPU memory allocators for Python and PyTorch, and recordings of a program's memory events.

Keep imports cheap: every process that `vramlab run` starts loads this module.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

__all__ = ["Allocator", "Error", "OutOfMemoryError", "library_path", "record"]

# The module of each name. `record` is a class in `_record`, so that a module of that name cannot replace it.
_LAZY = {
    "Allocator": "vramlab.allocator",
    "Error": "vramlab.allocator",
    "OutOfMemoryError": "vramlab.allocator",
    "record": "vramlab._record",
}
_NAMES = {"darwin": "libvramlab.dylib", "win32": "vramlab.dll"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'vramlab' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def library_path() -> Path:
    """The C library: the file named by VRAMLAB_LIBRARY, else the file in this package, else the build of a checkout.

    Raises ImportError with the searched paths if no file exists.
    """
    from pathlib import Path

    named = os.environ.get("VRAMLAB_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise ImportError(f"VRAMLAB_LIBRARY={named}: there is no such file")
        return Path(named)
    here = Path(__file__).resolve().parent
    name = _NAMES.get(sys.platform, "libvramlab.so")
    places = [here / name]
    # In a checkout this directory is app/python/src/vramlab.
    if here.parts[-4:-1] == ("app", "python", "src"):
        target = Path(os.environ.get("CARGO_TARGET_DIR", here.parents[3] / "target"))
        built = [target / profile / name for profile in ("release", "debug")]
        # The newer file is the latest build.
        places += sorted(built, key=lambda file: file.stat().st_mtime if file.is_file() else 0.0, reverse=True)
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    raise ImportError(f"libvramlab is not there ({looked}); pip install the wheel, or cargo build -p vramlab-capi")
