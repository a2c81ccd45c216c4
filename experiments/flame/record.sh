#!/usr/bin/env bash
# Records where the host's time goes in the trainer's epochs, once for each allocator, and folds it:
#
#   experiments/flame/record.sh [-o DIR] [--trainer PROGRAM] [--alloc NAME]... [-- TRAINER'S OPTIONS]
#   experiments/flame/record.sh -o flame -- --device cuda --hidden 784 --layers 4 --steps 4000 --epochs 5
#
# DIR/ALLOCATOR.folded holds a line for each stack (flamegraph.pl, inferno-flamegraph and speedscope.app draw it),
# DIR/ALLOCATOR.json what was recorded. Without --alloc: naive, caching and stream-ordered. PERF names another perf, RATE
# the samples a second (default 1999).
#
# perf samples by the processor's clock, so it sees waiting that spins (as a CUDA synchronise does by default) and not
# waiting that sleeps. It needs the kernel's permission: kernel.perf_event_paranoid of at most 2, or root; in a container
# also the capability PERFMON. Exit codes: 0 done, 1 a run failed, 2 bad input or no perf.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
refuse() { echo "error: $1" >&2; exit 2; }

out=flame
trainer=
allocators=()
while [ $# -gt 0 ]; do
  case $1 in
    -o | --trainer | --alloc)
      [ $# -ge 2 ] || refuse "$1 wants a value"
      case $1 in -o) out=$2 ;; --trainer) trainer=$2 ;; --alloc) allocators+=("$2") ;; esac
      shift 2 ;;
    -h | --help) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0"; exit 0 ;;
    --) shift; break ;;
    *) refuse "unknown option $1; the trainer's options come after --" ;;
  esac
done
[ ${#allocators[@]} -gt 0 ] || allocators=(naive caching stream-ordered)
[ $# -gt 0 ] || set -- --hidden 784 --layers 4 --steps 2000

perf=${PERF:-perf}
command -v "$perf" > /dev/null || refuse "there is no perf: install linux-perf (Debian) or linux-tools-$(uname -r) (Ubuntu), or name one with PERF; where there is none, samply (cargo install samply) records the same for its own viewer"
command -v python3 > /dev/null || refuse "there is no python3, which folds the samples"
if [ -z "$trainer" ]; then
  (cd "$root" && cargo build --quiet --release --locked -p trainer)
  trainer=$root/target/release/trainer
fi
[ -x "$trainer" ] || refuse "$trainer is no program; build it with: cargo build --release -p trainer"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rate=${RATE:-1999}
# User and kernel where that is allowed, else the user's side alone.
event=
for candidate in cpu-clock cpu-clock:u; do
  if "$perf" record -q -e "$candidate" -o "$work/probe" -- true > "$work/probe.log" 2>&1; then event=$candidate; break; fi
done
[ -n "$event" ] || refuse "perf may not record here ($(grep -v '^$' "$work/probe.log" | head -n 1)): as root, sysctl kernel.perf_event_paranoid=2, or give the container CAP_PERFMON; samply needs the same"
mkdir -p "$out" 2> /dev/null || refuse "cannot make the folder $out"

for allocator in "${allocators[@]}"; do
  echo "recording $allocator" >&2
  # Stacks are unwound from a copy of their upper 16 KiB: neither Rust nor the driver keeps frame pointers.
  code=0
  "$perf" record -q -e "$event" -F "$rate" --call-graph dwarf,16384 -o "$work/data" -- \
    "$trainer" --alloc "$allocator" "$@" --out "$work/$allocator" > "$work/stdout" 2> "$work/stderr" || code=$?
  if [ "$code" != 0 ]; then
    reason=$(grep '^error:' "$work/stderr" | tail -n 1 || true)
    echo "${reason:-error: perf record failed: $(tail -n 1 "$work/stderr")}" >&2
    [ "$code" = 2 ] || code=1
    exit "$code"
  fi
  "$perf" script --no-inline -i "$work/data" -F comm,tid,ip,sym,dso 2> /dev/null |
    python3 "$here/fold.py" --under train::Run::train --facts "$work/facts" > "$work/folded"
  python3 - "$work" "$allocator" "$event" "$rate" "$("$perf" --version)" "$@" > "$work/json" <<'PY'
import json, sys
from pathlib import Path
work, allocator, event, rate, perf, *options = sys.argv[1:]
summary = json.loads((Path(work) / allocator / "summary.json").read_text())
cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
print(json.dumps({
    "allocator": allocator,
    "command": ["trainer", "--alloc", allocator, *options],
    "device": summary["device"]["name"],
    "provenance": summary["provenance"],
    "started_at": summary["started_at"],
    "cpu": cpu,
    "perf": perf,
    "event": event,
    "samples_per_s": int(rate),
    "under": "train::Run::train",
    **json.loads((Path(work) / "facts").read_text()),
    "steps": sum(epoch["steps"] for epoch in summary["epochs"]),
    "wall_s": sum(epoch["wall_s"] for epoch in summary["epochs"]) if summary["clock"] == "monotonic" else None,
}, indent=1))
PY
  mv "$work/folded" "$out/$allocator.folded"
  mv "$work/json" "$out/$allocator.json"
done
echo "folded stacks in $out: $(cd "$out" && ls -- *.folded | tr '\n' ' ')" >&2
