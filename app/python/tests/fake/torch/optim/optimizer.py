"""An optimizer that calls hooks after its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_hooks: list[Callable[..., None]] = []


def register_optimizer_step_post_hook(hook: Callable[..., None]) -> None:
    _hooks.append(hook)


class Optimizer:
    def step(self, *args: Any) -> None:
        time.sleep(0.001)
        for hook in _hooks:
            hook(self, args, {})
