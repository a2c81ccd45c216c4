"""The table of programs with pinned host memory, from the runs of its spec."""

from __future__ import annotations

from typing import Any

import pytest

from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages.offload import GIB, HOSTS, PROGRAMS, of_runs, table_of, values_of

PINNED = {"pytorch": 1.5, "host-pytorch": 1.5, "host-exact": 1.001}


def run(host: str, repeat: int, step: float, digest: str = "a", programs: Any = PROGRAMS) -> Any:
    """A run whose steps have a median."""
    lines = [
        {
            "program": program,
            "requested_bytes": GIB,
            "reserved_bytes": int(PINNED[host] * GIB),
            "step_s": [step, 9.0, step / 2],
            "digest": digest,
        }
        for program in programs
    ]
    return host, {"repeat": repeat}, {"lines": lines}


def runs(exact: tuple[float, float, float]) -> list[Any]:
    """Three repeats, of which each is twice as slow as the one before."""
    base = [(host, 1.0) for host in HOSTS[:2]]
    return [
        run(host, repeat, 2**repeat * factor)
        for repeat in range(3)
        for host, factor in [*base, ("host-exact", exact[repeat])]
    ]


def test_a_step_is_compared_within_its_repeat() -> None:
    rows = of_runs(runs((1.0, 1.2, 1.1)))
    exact = rows["fsdp", "host-exact"]
    assert exact["step_over_pytorch"] == pytest.approx(1.1)
    assert (exact["low"], exact["high"]) == (pytest.approx(1.0), pytest.approx(1.2))
    assert exact["rounds"] == 3
    assert rows["fsdp", "host-pytorch"]["step_over_pytorch"] == 1.0
    values = values_of(rows)
    assert values["exact"] == pytest.approx(1.001, rel=1e-6)
    assert values["step"] == pytest.approx(1.1)
    assert (values["equal"], values["programs"]) == (5, 5)
    line = table_of(rows).splitlines()[2]
    assert line.endswith("| 1.00 | 1.500 | 1.500 | 1.001 | 1.000 (1.000 to 1.000) | 1.100 (1.000 to 1.200) |")


def test_losses_are_equal_only_if_every_run_has_them() -> None:
    some = runs((1.0, 1.0, 1.0))
    some[-1] = run("host-exact", 2, 4.0, digest="b")
    rows = of_runs(some)
    assert not rows["weights", "host-exact"]["equal_losses"]
    assert rows["weights", "host-pytorch"]["equal_losses"]
    assert values_of(rows)["equal"] == 0


def test_a_program_needs_two_repeats() -> None:
    with pytest.raises(AnalysisError, match="fsdp under pytorch has fewer than two repeats"):
        of_runs([run("pytorch", 0, 1.0), run("host-exact", 0, 1.0)])
