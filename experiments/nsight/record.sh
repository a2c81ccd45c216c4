#!/usr/bin/env bash
# Records what the attribution is tested with: for each backend, with and without waiting after each step, one process
# that Nsight Systems captures and that writes its own trace of driver calls at the same time; three of them with wide layers, too.
#
#   experiments/nsight/record.sh -o DIR [-t PROGRAM] [-- TRAINER OPTIONS]
#
#   -o DIR       a new directory
#   -t PROGRAM   the trainer [target/release/trainer]
#
# writes, for each arm, DIR/ARM.nsys-rep and DIR/ARM.sqlite (or DIR/ARM.qdstrm.xz where only the capturing side of
# Nsight Systems is installed) and DIR/ARM/, the run's record. DIR/machine.txt says what it ran on. Then, for each arm,
#
#   vramlab nsight DIR/ARM.sqlite --extract RESULTS/ARM
#   cp DIR/ARM/summary.json DIR/ARM/driver_calls.jsonl.gz RESULTS/ARM
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
refuse() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

output='' trainer=$here/../../target/release/trainer
while [ $# -gt 0 ]; do
  case $1 in
    -o) [ $# -ge 2 ] || refuse "-o needs a directory"
        output=$2; shift 2 ;;
    -t) [ $# -ge 2 ] || refuse "-t needs a program"
        trainer=$2; shift 2 ;;
    --) shift; break ;;
    *) refuse "'$1' is no option of this script; write: record.sh -o DIR [-t PROGRAM] [-- TRAINER OPTIONS]" ;;
  esac
done
[ -n "$output" ] || refuse "say where the captures go: record.sh -o DIR"
[ ! -e "$output" ] || refuse "$output exists already; choose another directory"
command -v "$trainer" > /dev/null || refuse "$trainer: no such program; build it first: cargo build --release -p trainer"
mkdir -p "$output"

{
  date -u +%Y-%m-%dT%H:%M:%SZ
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
  "$trainer" --version
} > "$output/machine.txt" 2>&1

# The captured steps lie in one epoch, whether its steps are the 938 of MNIST or the 125 of the generated digits.
failed=0 given=("$@")
record() {
  local alloc=$1 sync=$2 arm=$1-sync-$2$3
  shift 3
  printf '%s\n' "$arm" >&2
  if ! "$here/capture.sh" --range --clean -e MNIST_DIR -o "$output/$arm" -- "$trainer" --device cuda --alloc "$alloc" --sync "$sync" \
    --layers 4 --batch 64 --epochs 8 --steps 220 --profile-steps 140..200 --latency off --export perfetto --offline \
    --out "$output/$arm" "$@" "${given[@]}" > "$output/$arm.log" 2>&1; then
    printf 'error: %s failed: %s; see %s\n' "$arm" "$(tail -n 1 "$output/$arm.log")" "$output/$arm.log" >&2
    failed=1
    return
  fi
  # What the comparison needs is the account of driver calls; the rest is larger.
  rm -f "$output/$arm/trace.jsonl" "$output/$arm/perfetto.json"
  gzip -f "$output/$arm/driver_calls.jsonl"
  if [ -e "$output/$arm.qdstrm" ]; then xz -T0 -3 -f "$output/$arm.qdstrm"; fi
}
for alloc in naive caching stream-ordered; do
  for sync in never step; do
    record "$alloc" "$sync" '' --hidden 784
  done
done
# Wide layers, without ranges, whose cost the gaps between kernels would include.
for arm in 'naive never' 'caching step' 'stream-ordered step'; do
  record ${arm% *} ${arm#* } -hidden-2048 --hidden 2048 --nvtx off
done
exit "$failed"
