#!/usr/bin/env bash
# Captures training steps as one graph with Nsight Systems and Nsight Compute, and breaks each down: step-kernels.sh OUT
#
# writes OUT/step-kernels.jsonl, a line for each width and type. Needs nsys, ncu and the trainer (TRAINER, default
# target/release/trainer). BUILD names the commit where the repository is not here.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# = 1 ] || { echo "error: write step-kernels.sh OUT" >&2; exit 2; }
trainer=${TRAINER:-$here/../../target/release/trainer}
for program in nsys ncu "$trainer"; do
  command -v "$program" > /dev/null || { echo "error: $program was not found" >&2; exit 2; }
done
mkdir -p "$1"
output=$(cd "$1" && pwd)/step-kernels.jsonl work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
build=${BUILD:-$(git -C "$here" rev-parse --short HEAD)}
rm -f "$output"
for type in f16 f32 tf32; do
  for width in 128 1024 2048 4096 8192; do
    step=("$trainer" --device cuda --dataset mnist --layers 4 --batch 32 --hidden "$width" --dtype "$type" --loader resident
      --alloc caching --launch graph --fuse update --latency off --nvtx off --steps 400 --epochs 1 --profile-steps "200..359")
    [ "$type" != f16 ] || step+=(--weights half)
    nsys profile --trace=cuda --cuda-graph-trace=node --capture-range=cudaProfilerApi --capture-range-end=stop \
      --export=sqlite --force-overwrite true -o "$work/step" "${step[@]}" --out "$work/systems-$type-$width" > "$work/log" 2>&1
    ncu --graph-profiling node --cache-control none --clock-control none --profile-from-start off --launch-count 120 --csv \
      --metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum \
      "${step[@]}" --out "$work/compute-$type-$width" > "$work/step.csv" 2>> "$work/log"
    "${PYTHON:-python3}" "$here/step_kernels.py" --width "$width" --type "$type" --sqlite "$work/step.sqlite" \
      --counters "$work/step.csv" --gpu "$gpu" --build "$build" -o "$output"
  done
done
