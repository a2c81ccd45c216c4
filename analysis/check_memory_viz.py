#!/usr/bin/env python3
"""Checks that PyTorch's own tools read the snapshots that are written here.

    python3 analysis/check_memory_viz.py [--wheel TORCH.whl] [--binaries DIR] [SNAPSHOT.pickle ...]

Without files it makes some: `trainer --export snapshot` on the simulated device for three allocators, and the snapshots
in ../shared/traces, if they are there, through `vramlab convert`. `--binaries` takes the two programs from a folder,
such as target/debug; without it Cargo builds and runs them. Then, for each file:

- `torch/cuda/_memory_viz.py` of PyTorch 2.11 runs its `stats`, `trace`, `trace_plot` and `segment_plot` on it. It is one
  file of the wheel and needs no PyTorch. The wheel (80.6 MB, the one for macOS, because it is the smallest) is
  downloaded by pip into a folder that is removed again; a few seconds. `--wheel` takes one that is there.
- It holds only instructions that pytorch.org/memory_viz understands, integers that fit 64 bits, and lists in batches of
  at most 1000. A file that holds others is not unpickled, neither here nor by PyTorch's script: others can run programs.
- The same as JSON follows `allocators/histories/schema/memory_snapshot.schema.json` (with the package jsonschema, which pip puts
  into the same folder).
- Written again from a PyTorch snapshot, it says to Python's `pickle` what the original says.

Exit code 0 when all is well, 1 when something is not, 2 when a file or a program is missing.
"""
import argparse
import io
import itertools
import json
import lzma
import pickle
import pickletools
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.11.0"
MEMBER = "torch/cuda/_memory_viz.py"
# The cases of the unpickler in torch/utils/viz/MemoryViz.js.
ACCEPTED = set(
    "PROTO FRAME MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE DICT LIST TUPLE TUPLE1 "
    "TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE NEWTRUE "
    "NEWFALSE NONE STOP".split()
)


def run(*command):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"error: {' '.join(str(part) for part in command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def memory_viz(wheel, folder):
    """PyTorch's script, taken out of its wheel."""
    if wheel is None:
        run(
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
            "--platform", "macosx_11_0_arm64", "--python-version", "3.12", "--dest", folder, TORCH,
        )
        wheel = next(Path(folder).glob("torch-*.whl"))
        print(f"downloaded {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def validate(path, folder):
    """Problems of a JSON export by the schema."""
    target = folder / "packages"
    if not target.exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", target, "jsonschema")
        sys.path.insert(0, str(target))
    import jsonschema

    schema = json.loads((ROOT / "allocators/histories/schema/memory_snapshot.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    errors = jsonschema.Draft202012Validator(schema).iter_errors(json.loads(path.read_text()))
    return [f"{path.name}: {error.json_path}: {error.message[:100]}" for error in itertools.islice(errors, 5)]


def make(folder, binaries):
    """Exports of our own, and recorded snapshots written again, with their originals."""

    def program(name):
        return [binaries / name] if binaries else ["cargo", "run", "--quiet", "--bin", name, "--"]

    out = []
    for allocator in ["naive", "caching", "stream-ordered"]:
        record = folder / allocator
        run(
            *program("trainer"), "--device", "sim", "--dataset", "digits", "--steps", "30",
            "--alloc", allocator, "--export", "snapshot,snapshot-json", "--out", record,
        )
        out.append((record / "snapshot.pickle", None))
    for recorded in sorted((ROOT / "../shared/traces").glob("*.pickle.xz")):
        written = folder / recorded.name.removesuffix(".xz")
        for form, to in [("snapshot", written), ("snapshot-json", written.with_suffix(".json"))]:
            run(*program("vramlab"), "convert", recorded, "--to", form, "-o", to)
        out.append((written, recorded))
    return out


def check_instructions(data):
    """What the viewer in the browser would stumble over."""
    batch, problems, marks = 0, [], []
    for opcode, argument, at in pickletools.genops(data):
        if opcode.name not in ACCEPTED:
            problems.append(f"byte {at}: {opcode.name} is no instruction that MemoryViz.js knows")
        if isinstance(argument, int) and not -(1 << 63) <= argument < 1 << 63:
            problems.append(f"byte {at}: {argument} does not fit 64 bits")
        # Items above the last mark; each event closes its own marks first.
        if opcode.name == "MARK":
            marks.append(batch)
            batch = 0
        elif opcode.name in ("APPENDS", "SETITEMS"):
            if opcode.name == "APPENDS" and batch > 1000:
                problems.append(f"byte {at}: {batch} items in one APPENDS")
            if not marks:
                return [*problems, f"byte {at}: {opcode.name} without a mark"]
            batch = marks.pop()
        elif opcode.name in ("TUPLE2",):
            batch -= 1
        elif opcode.name not in ("MEMOIZE", "PROTO", "FRAME", "STOP"):
            batch += 1
    return problems


class DataOnly(pickle.Unpickler):
    """Builds dictionaries, lists, numbers and texts, and nothing that a file names."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"names {module}.{name}, and a snapshot holds only data")

    def persistent_load(self, identifier):
        raise pickle.UnpicklingError("refers to something outside, and a snapshot holds only data")


def load(data):
    """What a pickle holds, if it is data only."""
    return DataOnly(io.BytesIO(data)).load()


def report(path, problems, said):
    """Prints the outcome for a file, in lines that move no cursor, and returns whether it is well."""
    print(shown(f"{'FAILED' if problems else 'ok':7}{path.parent.name}/{path.name}: {said}"))
    for problem in problems[:20]:
        print(shown(f"       {problem}"))
    if len(problems) > 20:
        print(f"       and {len(problems) - 20} more")
    return not problems


def shown(text):
    """Text without control characters."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode() for one in text)


def check(path, original, script, folder):
    data = path.read_bytes()
    try:
        problems = check_instructions(data)
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        problems = [f"no pickle: {error}"]
    # PyTorch's script unpickles without a check, so it gets only files that can do nothing but build data.
    if problems:
        return report(path, problems, "not loaded")
    try:
        snapshot = load(data)
        events = sum(len(trace) for trace in snapshot["device_traces"])
    except Exception as error:  # a pickle can raise whatever it likes
        return report(path, [f"no snapshot: {type(error).__name__}: {str(error)[:200]}"], "not loaded")
    if original is not None:
        expected = load(lzma.open(original).read())
        for key in ["segments", "device_traces", "allocator_settings"]:
            if snapshot[key] != expected[key]:
                problems.append(f"'{key}' is not what {original.name} says")
    if path.with_suffix(".json").is_file():
        problems += validate(path.with_suffix(".json"), folder)
    sizes = []
    for command in ["stats", "trace"]:
        done = subprocess.run([sys.executable, script, command, path], capture_output=True, text=True)
        sizes.append(f"{command} {len(done.stdout.splitlines())} lines")
        if done.returncode != 0 or not done.stdout:
            problems.append(f"{command}: {done.stderr.strip().splitlines()[-1:] or 'no output'}")
    for command in ["trace_plot", "segment_plot"]:
        page = folder / f"{command}.html"
        done = subprocess.run([sys.executable, script, command, path, "-o", page], capture_output=True, text=True)
        if done.returncode != 0 or "add_local_files" not in page.read_text():
            problems.append(f"{command}: {done.stderr.strip().splitlines()[-1:] or 'no page'}")
        else:
            sizes.append(f"{command} {page.stat().st_size} bytes")
            page.unlink()
    return report(path, problems, f"{events} events; {', '.join(sizes)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a wheel of PyTorch instead of a download")
    parser.add_argument("--binaries", type=Path, metavar="DIR", help="folder of trainer and vramlab, already built")
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()
    binaries = args.binaries and args.binaries.resolve()
    programs = [binaries / name for name in ("trainer", "vramlab")] if binaries else []
    for path in [*args.files, *([args.wheel] if args.wheel else []), *programs]:
        if not path.is_file():
            print(f"error: {path} is not there", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        script = memory_viz(args.wheel, folder)
        files = [(path, None) for path in args.files] or make(folder, binaries)
        return 0 if all([check(path, original, script, folder) for path, original in files]) else 1


if __name__ == "__main__":
    sys.exit(main())
