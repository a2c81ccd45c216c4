"""`vramlab.record` with PyTorch's history instead of the recorder, over a stand-in for PyTorch."""

from __future__ import annotations

import os
import pickle

from places import FAKE, HISTORY, PACKAGE, Place

BEGIN = "import torch, vramlab\n"


def run(place: Place, script: str, code: int = 0) -> tuple[str, str]:
    path = os.pathsep.join([str(PACKAGE.parent), str(FAKE)])
    return place.run(BEGIN + script, code, PYTHONPATH=path, VRAMLAB_OUTPUT="", FAKE_SNAPSHOT=str(HISTORY))


def test_a_block_is_recorded_whether_cuda_was_used_before_or_not(place: Place) -> None:
    for before, inside in [("torch.cuda.init()", "pass"), ("pass", "torch.cuda.init()")]:
        script = f"{before}\nwith vramlab.record('x.pickle', events=99, frames='alloc'):\n    {inside}\n"
        assert run(place, script) == ("", "")
        kinds = [call[:2] for call in place.calls("history")]
        assert kinds == [["history", "all"], ["history", None]]
        assert place.calls("history")[0][2] == {"context": "alloc", "stacks": "python", "max_entries": 99}
        with (place.folder / "x.pickle").open("rb") as file:
            assert pickle.load(file)["segments"]
        (place.folder / "x.pickle").unlink()
        (place.folder / "calls").unlink()


def test_a_block_that_fails_is_written_too(place: Place) -> None:
    _, err = run(
        place, "with vramlab.record('x.pickle'):\n    torch.cuda.init()\n    torch.cuda.run_out_of_memory()\n", 1
    )
    assert err.splitlines()[-1] == "torch.cuda.OutOfMemoryError: CUDA out of memory"
    assert (place.folder / "x.pickle").is_file()


def test_a_history_that_was_on_goes_on(place: Place) -> None:
    script = "torch.cuda.init()\ntorch.cuda.memory._record_memory_history('all')\n"
    script += "with vramlab.record('x.pickle'):\n    pass\nprint(torch._C.history)\n"
    assert run(place, script) == ("True\n", "")
    assert len(place.calls("history")) == 1


def test_without_cuda_there_is_a_warning_and_no_file(place: Place) -> None:
    _, err = run(place, "with vramlab.record('x.pickle'):\n    pass\ntorch.cuda.init()\n")
    assert "UserWarning: x.pickle is not written: CUDA was not used" in err
    assert not (place.folder / "x.pickle").exists()
    assert place.calls("history") == []


def test_what_is_wrong_is_said_before_the_block(place: Place) -> None:
    for call, words in [
        ("record('no/x.pickle')", "no/x.pickle: there is no folder no"),
        ("record('x', frames='cpp')", "frames='cpp': write one of alloc, none"),
        ("record('x', events=0)", "events=0: write 1 or more"),
    ]:
        _, err = run(place, f"with vramlab.{call}:\n    print('in it')\n", 1)
        assert words in err.splitlines()[-1]


def test_the_package_is_light_and_names_what_it_has(place: Place) -> None:
    script = "import sys\nprint(sorted(m for m in sys.modules if m.startswith('vramlab')))\n"
    script += "print(vramlab.record.__name__, 'record' in dir(vramlab))\n"
    script += "try:\n    vramlab.recrod\nexcept AttributeError as error:\n    print(error)\n"
    out, _ = run(place, script)
    assert out.splitlines() == ["['vramlab']", "record True", "module 'vramlab' has no attribute 'recrod'"]


def test_pytorchs_history_takes_the_place_of_a_recorder_that_cannot_be_had(place: Place) -> None:
    # No recorder can be compiled for the stand-in.
    path = os.pathsep.join([str(PACKAGE.parent), str(FAKE)])
    script = BEGIN + "torch.cuda.init()\nwith vramlab.record('x.pickle', events=7):\n    pass\n"
    more = {"VRAMLAB_OUTPUT": "", "VRAMLAB_RECORDER": "", "FAKE_SNAPSHOT": str(HISTORY)}
    _, err = place.run(script, PYTHONPATH=path, **more)
    assert err.startswith("vramlab: PyTorch's history of the newest 7 events takes the place of the recorder: ")
    assert len(err.splitlines()) == 1
    assert place.calls("history")[0][2] == {"context": "alloc", "stacks": "python", "max_entries": 7}
    assert (place.folder / "x.pickle").is_file()


def test_frames_of_frees_are_never_gathered(place: Place) -> None:
    for frames in ("alloc", "all", "none"):
        run(place, f"torch.cuda.init()\nwith vramlab.record('x.pickle', frames='{frames}'):\n    pass\n")
    contexts = [call[2]["context"] for call in place.calls("history") if call[1] is not None]
    assert contexts == ["alloc", "alloc", None]
