"""The recording of a process that uses PyTorch, in a program started by `vramlab run`: see `_start`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramlab import _record

# The variables in which launchers set a process's rank.
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# A program that searches its batch size by running out of memory does so often: only the first few are written.
MOST_OUT_OF_MEMORY = 3
# The maximum number of step times; the newest are retained.
MOST_STEPS = 100_000


def say(text: object) -> None:
    """Prints one line to the program's standard error."""
    print(f"vramlab: {text}", file=sys.stderr, flush=True)


def _number(name: str, kind: Callable[[str], Any], default: Any) -> Any:
    """The value of a variable, or the default if it is unset or invalid."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        say(f"{name}={text} is no number; it is read over")
        return default


class _Signal:
    """Writes a snapshot on SIGUSR1. The program sees its own handler, which is called afterwards."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.installed = False
        self.theirs: Any = signal.SIG_DFL

    def install(self) -> None:
        """Sets the handler, if the system has the signal and this thread is allowed to."""
        number = getattr(signal, "SIGUSR1", None)
        if number is None or self.installed or threading.current_thread() is not threading.main_thread():
            return
        set_handler, get_handler = signal.signal, signal.getsignal
        self.theirs = get_handler(number)

        def ours(caught: int, frame: Any) -> None:
            self.act()
            if callable(self.theirs):
                self.theirs(caught, frame)

        # Programs that check whether the signal has a handler, such as PyTorch Lightning, see only their own.
        def signal_signal(which: int, handler: Any) -> Any:
            if which != number:
                return set_handler(which, handler)
            if not callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN):
                return set_handler(which, handler)
            before, self.theirs = self.theirs, handler
            return before

        def signal_getsignal(which: int) -> Any:
            return self.theirs if which == number else get_handler(which)

        set_handler(number, ours)
        replaced: Any = signal
        replaced.signal, replaced.getsignal = signal_signal, signal_getsignal
        self.installed = True


class Recorder:
    """The recording of this process, starting with its first use of CUDA."""

    def __init__(self, torch: Any, folder: Path) -> None:
        self.torch = torch
        self.folder = folder
        self.signal = _Signal(lambda: self.write("signal"))
        # The process that started the recording; a forked child inherits the object but not the recording.
        self.pid = 0
        self.recording: _record.Recording | _record.History | None = None
        self.snapshots: list[dict[str, Any]] = []
        self.steps: dict[int, list[int]] = {}
        self.began_ns = 0
        self.lock = threading.RLock()
        self.over = False

    def watch(self) -> None:
        """Schedules the recording for the first use of CUDA, without initialising CUDA."""
        self.torch.cuda._lazy_call(self.begin)
        self.signal.install()
        if os.environ.get("VRAMLAB_STEPS"):
            # PyTorch deletes the name of this module from `torch.optim`.
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(self._stepped)

    def begin(self) -> None:
        """Starts the recording. PyTorch calls it while it initialises CUDA, so errors must not propagate."""
        try:
            self._begin()
        except Exception as error:
            say(f"this process is not recorded: {type(error).__name__}: {error}")

    def _begin(self) -> None:
        self.pid = os.getpid()
        self.began_ns = time.time_ns()
        self.snapshots = []
        self.over = False
        self.recording = _record.begin(
            self.folder / f"{self.name}.pickle",
            events=_number("VRAMLAB_EVENTS", int, _record.EVENTS),
            frames=_record.check_frames(os.environ.get("VRAMLAB_FRAMES") or "alloc"),
            frames_from=_number("VRAMLAB_FRAMES_FROM", int, 0),
        )
        if isinstance(self.recording, _record.Recording):
            try:
                served = self._host_allocator() is not None
                self.recording.watch_pinned(self.folder / self._pinned_name, served=served)
            except Exception as error:
                say(f"what is requested of pinned memory is not recorded: {error}")
        attach = getattr(self.torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._out_of_memory)
        self.signal.install()
        atexit.register(self.end)
        # Processes that multiprocessing forks exit without running `atexit`.
        if "multiprocessing.process" in sys.modules:
            from multiprocessing import process, util

            if process.parent_process() is not None:
                util.Finalize(None, self.end, exitpriority=0)
        every = _number("VRAMLAB_EVERY", float, 0.0)
        if every > 0:
            threading.Thread(target=self._every, args=(every,), name="vramlab", daemon=True).start()
        self._say_what("running")

    @property
    def name(self) -> str:
        """The prefix of this process's file names."""
        rank = _rank()
        return f"pid{self.pid}" if rank is None else f"rank{rank}-pid{self.pid}"

    @property
    def _pinned_name(self) -> str:
        """The file of the requests of pinned memory."""
        return f"{self.name}-host.jsonl"

    def write(self, why: str) -> None:
        """Writes a complete recording so far: `NAME.pickle` at the end, else `NAME.WHY-N.pickle`."""
        if self.pid != os.getpid() or self.recording is None:
            return
        with self.lock:
            number = 1 + sum(snapshot["why"] == why for snapshot in self.snapshots)
            if why == "out-of-memory" and number > MOST_OUT_OF_MEMORY:
                return
            file = f"{self.name}.pickle" if why == "exit" else f"{self.name}.{why}-{number}.pickle"
            began = time.monotonic()
            try:
                files = self.recording.write(self.folder / file, last=why == "exit")
            except Exception as error:
                say(f"{self.folder / file} is not written: {type(error).__name__}: {error}")
                return
            seconds = round(time.monotonic() - began, 3)
            told = {"why": why, "time_ns": time.time_ns(), "took_s": seconds}
            self.snapshots += [{"file": written.name} | told for written in files]
            if why != "exit":
                self._say_what("running")

    def end(self) -> None:
        """Writes the last snapshot and the process's record."""
        if self.pid != os.getpid() or self.over:
            return
        with self.lock:
            self.over = True
            self.write("exit")
            self._say_what("ended")

    def _out_of_memory(self, device: int, allocating: int, allocated: int, free: int) -> None:
        self.write("out-of-memory")

    def _every(self, seconds: float) -> None:
        while not self.over:
            time.sleep(seconds)
            if not self.over:
                self.write("every")

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # torch.compile traces steps through here and must not trace the clock.
        compiler = getattr(self.torch, "compiler", None)
        if compiler is not None and compiler.is_compiling():
            return
        times = self.steps.setdefault(id(optimizer), [])
        times.append(time.perf_counter_ns())
        if len(times) > MOST_STEPS:
            del times[: MOST_STEPS // 2]

    def _say_what(self, state: str) -> None:
        """Writes the process's record for the program that started the run."""
        told = {
            "run": os.environ.get("VRAMLAB_RUN"),
            "state": state,
            "pid": self.pid,
            "rank": _rank(),
            # The program without its arguments, which may contain secrets.
            "command": [sys.executable, *sys.argv[:1]],
            "torch": str(self.torch.__version__),
            "allocator": self._allocator(),
            "takes_signal": self.signal.installed,
            "began_ns": self.began_ns,
            "until_ns": time.time_ns(),
            "snapshots": self.snapshots + self._unfinished(state),
            "devices": self._devices() if state == "ended" else [],
            "host_allocator": self._host_allocator(),
            "pinned_bytes": self._pinned() if state == "ended" else None,
            "pinned_requested_bytes": self._pinned_requested() if state == "ended" else None,
            "pinned_history": self._pinned_history(state),
            "step_ns": self._step_times(),
            "allocator_stats": self._own_stats() if state == "ended" else None,
        }
        text = json.dumps(told, indent=1).encode()
        try:
            _record.write_whole(self.folder / f"{self.name}.process.json", lambda file: file.write(text))
        except OSError as error:
            say(f"{self.folder}: {error}")

    @staticmethod
    def _allocator() -> str | None:
        """The allocator that PyTorch uses, by its requested name; None for PyTorch's own."""
        inside = sys.modules.get("vramlab.torch")
        return None if inside is None else inside.allocator()

    def _unfinished(self, state: str) -> list[dict[str, Any]]:
        """The growing file of a running process: if the process is killed, it contains the most events."""
        if state == "ended" or not isinstance(self.recording, _record.Recording):
            return []
        return [{"file": self.recording.path.name, "why": "running", "time_ns": time.time_ns(), "took_s": 0.0}]

    def _devices(self) -> list[dict[str, Any]]:
        """PyTorch's statistics of each GPU with reserved memory."""
        cuda, out = self.torch.cuda, []
        for index in range(cuda.device_count()):
            try:
                stats = cuda.memory_stats(index)
            except Exception as error:
                say(f"statistics of GPU {index}: {error}")
                continue
            if not stats.get("reserved_bytes.all.peak"):
                continue
            uuid = getattr(cuda.get_device_properties(index), "uuid", None)
            out.append({"index": index, "uuid": None if uuid is None else str(uuid), "stats": dict(stats)})
        return out

    def _pinned(self) -> int | None:
        """Peak bytes of pinned host memory; None if this PyTorch does not count them."""
        try:
            stats = self.torch.cuda.host_memory_stats()
            # PyTorch 2.9 calls the same quantity otherwise.
            return int(
                stats["reserved_bytes.peak"] if "reserved_bytes.peak" in stats else stats["allocated_bytes.peak"]
            )
        except (AttributeError, KeyError):
            return None

    @staticmethod
    def _host_allocator() -> str | None:
        """The allocator of PyTorch's pinned memory, by its requested name; None for PyTorch's own."""
        inside = sys.modules.get("vramlab.torch")
        return None if inside is None else inside.host_allocator()

    def _pinned_requested(self) -> int | None:
        """Peak bytes of pinned memory that the program held, before rounding; None if nothing counted them."""
        try:
            if self._host_allocator() is not None:
                return int(sys.modules["vramlab.torch"].host_stats()["requested_bytes"]["peak"])
            return self.recording.pinned() if isinstance(self.recording, _record.Recording) else None
        except Exception as error:
            say(f"what was requested of pinned memory: {error}")
            return None

    def _pinned_history(self, state: str) -> str | None:
        """The file of the requests of pinned memory: of a running process it may not be there yet."""
        if not isinstance(self.recording, _record.Recording):
            return None
        return self._pinned_name if state == "running" or self.recording.has_pinned() else None

    def _step_times(self) -> list[int]:
        """The intervals between steps of the optimizer that steps most often."""
        times = max(self.steps.values(), key=len, default=[])
        return [times[at] - times[at - 1] for at in range(1, len(times))]

    def _own_stats(self) -> Any:
        """The allocator's statistics that PyTorch does not have; None for PyTorch's own allocator."""
        if not os.environ.get("VRAMLAB_ALLOC"):
            return None
        try:
            import vramlab.torch

            stats = vramlab.torch.stats()
            json.dumps(stats)
            return stats
        except Exception as error:
            say(f"statistics of {os.environ['VRAMLAB_ALLOC']}: {error}")
            return None


def _rank() -> int | None:
    """The process's rank in its job; None if no launcher set it."""
    for name in RANKS:
        value = os.environ.get(name, "")
        # isdigit() accepts digits of other scripts; a rank beyond 32 bits is invalid.
        if value.isascii() and value.isdigit() and len(value) < 20 and int(value) < 1 << 32:
            return int(value)
    return None


def _limit(torch: Any, limit: int) -> None:
    """Limits PyTorch's reserved memory on each GPU that the process selects.

    Setting a limit creates a context on the GPU, so GPUs of other ranks are left unlimited.
    """
    cuda = torch.cuda
    limited: set[int] = set()
    # The GPU of a call in progress: PyTorch initialises CUDA before it selects the GPU.
    turning_to: list[int] = []
    set_device = cuda.set_device

    def limit_on(index: int) -> None:
        if index in limited:
            return
        limited.add(index)
        try:
            total = cuda.get_device_properties(index).total_memory
            before = torch._C._cuda_getDevice()
            cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)
            # Some releases of PyTorch select the GPU and do not restore the previous one.
            if torch._C._cuda_getDevice() != before:
                torch._C._cuda_setDevice(before)
        except Exception as error:
            say(f"the limit of {limit} bytes is not set on GPU {index}: {error}")

    def begin() -> None:
        own = os.environ.get("LOCAL_RANK", "")
        if turning_to:
            limit_on(turning_to[0])
        elif own.isdigit() and int(own) < cuda.device_count():
            limit_on(int(own))
        else:
            limit_on(torch._C._cuda_getDevice())

    def set_device_and_limit(device: Any) -> None:
        index = getattr(torch.device(device), "index", None) if not isinstance(device, int) else device
        if index is not None and index >= 0:
            turning_to.append(index)
        try:
            set_device(device)
        finally:
            turning_to.clear()
        limit_on(torch._C._cuda_getDevice())

    cuda._lazy_call(begin)
    cuda.set_device = set_device_and_limit


def _host_requested() -> str | None:
    """The allocator of pinned memory: of VRAMLAB_HOST_ALLOC, or the one that `vramlab run` puts before CUDA's driver.

    PyTorch's own allocator would sit above the one at the driver, and round its requests.
    """
    named = os.environ.get("VRAMLAB_HOST_ALLOC")
    get = os.environ.get
    if named or get("VRAMLAB_INJECT_TORCH") == "1" or get("VRAMLAB_INJECT_FREE") == "driver":
        return named or None
    pooled = "pinned" in get("VRAMLAB_INJECT_POOL", "").split(",")
    return get("VRAMLAB_INJECT_HOST") or ("host-exact" if pooled else None)


def torch_is_there() -> None:
    """Sets up the allocator, the limit and the recording after the import of torch."""
    import torch

    allocator = os.environ.get("VRAMLAB_ALLOC")
    limit = _number("VRAMLAB_LIMIT", int, 0)
    host = _host_requested()
    if allocator:
        try:
            import vramlab.torch

            vramlab.torch.use(allocator, limit=limit or None)
        except Exception as error:
            # Under another allocator than requested, its results would be attributed to the requested one.
            say(f"{allocator} cannot be put under PyTorch: {error}")
            raise SystemExit(2) from None
    elif limit > 0:
        _limit(torch, limit)
    if host:
        try:
            import vramlab.torch

            vramlab.torch.use(host=host)
        except Exception as error:
            # PyTorch's own allocator over another one would round what is attributed to the other.
            say(f"{host} cannot serve PyTorch's pinned memory: {error}")
            raise SystemExit(2) from None
    folder = os.environ.get("VRAMLAB_OUTPUT")
    if folder:
        try:
            Recorder(torch, Path(folder)).watch()
        except Exception as error:
            say(f"this process is not recorded: {type(error).__name__}: {error}")
