"""What happens in each Python process of `vramlab run`, and of a program for which VRAMLAB_ALLOC is set.

Loaded before the program. All that it does at once is to watch for the import of torch; a process that never imports it
is left alone, and one that never uses CUDA leaves no file. What it reads:

VRAMLAB_ALLOC   allocator that is put under PyTorch
VRAMLAB_OUTPUT  folder for snapshots; without it nothing is recorded
VRAMLAB_RUN     a word that is the run's, in each record of a process
VRAMLAB_LIMIT   most bytes that PyTorch may reserve
VRAMLAB_EVERY   seconds between snapshots
VRAMLAB_FRAMES  which events have stack frames: alloc, none
VRAMLAB_FRAMES_FROM  least size of a block that gets them, in bytes
VRAMLAB_EVENTS  events that are kept where PyTorch's history takes the recorder's place
VRAMLAB_STEPS   whether steps of optimizers are timed
"""

from __future__ import annotations

import os
import sys

# Every process of Python that a program starts gets here. What those need that use PyTorch is loaded with it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class _AfterImport:
    """Calls something once, when a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then
        self.busy = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Has the other finders look, and what they find tell when it is done."""
        if fullname != self.name or self.busy:
            return None
        self.busy = True
        try:
            from importlib.util import find_spec

            spec = find_spec(fullname)
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            # The loader is its old self again for all that looks at it.
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.then()

        loader.exec_module = exec_module
        return spec


def _torch_is_there() -> None:
    """Torch has just been imported."""
    from vramlab import _recorder

    _recorder.torch_is_there()


def install() -> None:
    """Watches for the import of torch, where a variable asks for something."""
    if not any(os.environ.get(name) for name in ("VRAMLAB_ALLOC", "VRAMLAB_OUTPUT", "VRAMLAB_LIMIT")):
        return
    if "torch" in sys.modules:
        _torch_is_there()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport("torch", _torch_is_there))


install()
