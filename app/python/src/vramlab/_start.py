"""The start hook of each Python process of `vramlab run`, and of a program for which VRAMLAB_ALLOC is set.

Loaded before the program. It only starts watching for the import of torch: a process that never imports torch is
unaffected, and a process that never uses CUDA leaves no file. Its variables:

VRAMLAB_ALLOC   allocator to use under PyTorch
VRAMLAB_HOST_ALLOC  allocator of pinned host memory to use under PyTorch; VRAMLAB_INJECT_HOST, which `run --host-alloc`
                sets, does the same
VRAMLAB_OUTPUT  directory for snapshots; if unset, nothing is recorded
VRAMLAB_RUN     the run's word, in each process's record
VRAMLAB_LIMIT   limit on PyTorch's reserved bytes
VRAMLAB_EVERY   seconds between snapshots
VRAMLAB_FRAMES  events with stack frames: alloc, none
VRAMLAB_FRAMES_FROM  minimum size of a block with stack frames, in bytes
VRAMLAB_EVENTS  maximum number of events when PyTorch's history replaces the recorder
VRAMLAB_STEPS   whether to time optimizer steps
"""

from __future__ import annotations

import os
import sys

# Every Python process of a program runs this module. Imports for PyTorch programs are deferred until torch is imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class _AfterImport:
    """Calls a function once, after a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then
        self.busy = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Asks the other finders, and wraps the loader so that the function is called after the import."""
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
            # Restore the loader for code that inspects it.
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.then()

        loader.exec_module = exec_module
        return spec


def _torch_is_there() -> None:
    """Sets up the allocator, the limit and the recording after the import of torch."""
    from vramlab import _recorder

    _recorder.torch_is_there()


def install() -> None:
    """Watches for the import of torch, if a variable requests it."""
    if not any(
        os.environ.get(name) for name in ("VRAMLAB_ALLOC", "VRAMLAB_HOST_ALLOC", "VRAMLAB_OUTPUT", "VRAMLAB_LIMIT")
    ):
        return
    if "torch" in sys.modules:
        _torch_is_there()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport("torch", _torch_is_there))


install()
