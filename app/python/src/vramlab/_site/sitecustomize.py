"""First on PYTHONPATH in the processes of `vramlab run`: watches for torch, then runs the user's own sitecustomize."""

import importlib.machinery
import importlib.util
import os
import sys


def _begin(here: str) -> None:
    """Loads the surrounding package without sys.path: other packages may be in the same directory."""
    package = os.path.dirname(here)
    if "vramlab" not in sys.modules:
        init = os.path.join(package, "__init__.py")
        spec = importlib.util.spec_from_file_location("vramlab", init, submodule_search_locations=[package])
        module = importlib.util.module_from_spec(spec)
        sys.modules["vramlab"] = module
        spec.loader.exec_module(module)
    importlib.import_module("vramlab._start")


def _chain(here: str) -> None:
    """Runs the sitecustomize that this one hides, as `site` would have."""
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_here = os.path.dirname(os.path.realpath(__file__))
try:
    _begin(_here)
except Exception as error:
    print(f"vramlab: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)
_chain(_here)
