#!/usr/bin/env bash
# Captures a program with Nsight Systems, with the flags that `vramlab-analysis nsight` needs.
#
#   experiments/nsight/capture.sh -o DIR/NAME -- target/release/trainer --alloc naive --steps 300 --profile-steps 200..260
#
# writes DIR/NAME.nsys-rep and DIR/NAME.sqlite; then
#
#   vramlab-analysis nsight DIR/NAME.sqlite
#
# Options:
#   -o DIR/NAME          where the report goes (needed)
#   -f                   replace a report that is there
#   -e NAME              pass this environment variable on, besides those below (may be given several times)
#   --whole              the whole program, for one that does not call cuProfilerStart
#   --no-memory-usage    leave out the record of device memory, which slows allocations down
#   -h                   this text
#
# What is captured is what lies between cuProfilerStart and cuProfilerStop. The trainer calls them around the whole
# training, or with --profile-steps FIRST..LAST around those steps, which leaves out the warming up. A PyTorch program does by
# torch.cuda.profiler.start() and stop(); one that is to stay as it is is captured with --whole:
#
#   VRAMLAB_ALLOC=caching experiments/nsight/capture.sh --whole -o DIR/NAME -- python3 train.py
#
# A report holds the environment of the program, so only a few variables are passed on, and reports are best not
# published: `vramlab-analysis nsight extract` writes the small tables that can be.
#
# Nsight Systems is looked for in $NSYS, PATH, /opt/nvidia/nsight-systems* and /usr/local/cuda*. Where only its
# capturing side is installed there is a .qdstrm and no .sqlite; this script says what to do with it.
set -euo pipefail

passed_on=(PATH HOME TMPDIR LANG LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER MNIST_DIR
  PYTHONPATH VIRTUAL_ENV PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF VRAMLAB_ALLOC VRAMLAB_LIBRARY VRAMLAB_LIMIT)

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

refuse() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

find_nsys() {
  if [ -n "${NSYS:-}" ]; then
    [ -x "$NSYS" ] || refuse "NSYS is $NSYS, which is no program"
    printf '%s\n' "$NSYS"
    return
  fi
  local found
  found=$(command -v nsys || true)
  if [ -z "$found" ]; then
    # The newest of those that are installed beside each other.
    found=$(find /opt/nvidia/nsight-systems*/*/bin/nsys /opt/nvidia/nsight-systems*/*/target-linux-x64/nsys \
      /usr/local/cuda*/bin/nsys -maxdepth 0 2> /dev/null | sort -V | tail -n 1 || true)
  fi
  [ -n "$found" ] || refuse "Nsight Systems (nsys) was not found. It is part of the CUDA toolkit and of NVIDIA's package \
repositories (apt-get install nsight-systems-cli), and at https://developer.nvidia.com/nsight-systems; or set NSYS to the \
program"
  printf '%s\n' "$found"
}

output='' force=false memory_usage=true range=(--capture-range=cudaProfilerApi --capture-range-end=stop)
while [ $# -gt 0 ]; do
  case $1 in
    -o) [ $# -ge 2 ] || refuse "-o needs DIR/NAME"
        output=$2; shift 2 ;;
    -f) force=true; shift ;;
    -e) [ $# -ge 2 ] || refuse "-e needs the name of an environment variable"
        passed_on+=("$2"); shift 2 ;;
    --whole) range=(); shift ;;
    --no-memory-usage) memory_usage=false; shift ;;
    -h|--help) usage; exit 0 ;;
    --) shift; break ;;
    *) refuse "'$1' is no option of this script; write: capture.sh -o DIR/NAME -- PROGRAM ARGUMENTS (see -h)" ;;
  esac
done
[ -n "$output" ] || refuse "say where the report goes: capture.sh -o DIR/NAME -- PROGRAM ARGUMENTS (see -h)"
[ $# -gt 0 ] || refuse "say what to run: capture.sh -o DIR/NAME -- PROGRAM ARGUMENTS (see -h)"
command -v "$1" > /dev/null || refuse "$1: no such program; build it first: cargo build --release -p trainer"
output=${output%.nsys-rep}
for existing in "$output.nsys-rep" "$output.qdstrm" "$output.sqlite"; do
  if [ -e "$existing" ] && ! $force; then refuse "$existing exists already; choose another name, or replace it with -f"; fi
done
nsys=$(find_nsys)
mkdir -p "$(dirname "$output")"
rm -f "$output.nsys-rep" "$output.qdstrm" "$output.sqlite"

environment=()
for name in "${passed_on[@]}"; do
  if [ -n "${!name+set}" ]; then environment+=("$name=${!name}"); fi
done

# --capture-range-end=stop, because the default ends the program, which has its own record to write.
status=0
env -i "${environment[@]}" "$nsys" profile --trace=cuda,nvtx --sample=none --cpuctxsw=none \
  --cuda-memory-usage="$memory_usage" "${range[@]}" \
  --force-overwrite=true --output="$output" "$@" || status=$?

if [ -e "$output.nsys-rep" ]; then
  rm -f "$output.qdstrm"
  "$nsys" export --force-overwrite=true --type sqlite --output "$output.sqlite" "$output.nsys-rep" > /dev/null \
    || { printf 'error: %s cannot export %s.nsys-rep\n' "$nsys" "$output" >&2; exit 1; }
  printf 'report   %s.nsys-rep\ntables   vramlab-analysis nsight %s.sqlite\n' "$output" "$output" >&2
elif [ -e "$output.qdstrm" ]; then
  cat >&2 <<TEXT
raw      $output.qdstrm
         Only the capturing side of Nsight Systems is here. On a machine with all of it, of the same version:
         QdstrmImporter -i $output.qdstrm -o $output.nsys-rep
         nsys export --type sqlite -o $output.sqlite $output.nsys-rep
TEXT
  # Not having the importer is no failure of the program.
  status=0
else
  printf 'error: there is no capture: %s\n' \
    "the program ended with $status, or never called cuProfilerStart (the trainer does with --device cuda; for another program use --whole)" >&2
  [ "$status" -ne 0 ] || status=1
fi
exit "$status"
