#!/usr/bin/env bash
# Captures any CUDA program with Nsight Systems, with the flags that `vramlab nsight` needs.
#
#   experiments/nsight/capture.sh [OPTIONS] -- ./program arguments
#
# writes program.nsys-rep and program.sqlite; then
#
#   vramlab nsight program.sqlite
#
# Options:
#   -o DIR/NAME          base name of the files [the program's name, in the current directory]
#   -f                   replace existing files
#   --range              capture from cuProfilerStart to cuProfilerStop instead of the whole program
#   --stacks             record the call stacks of CUDA calls, and of Python where this nsys can; slows calls down
#   --no-memory-usage    do not record the sizes of allocations, which slows them down
#   --clean              pass only a few environment variables to the program, such as PATH
#   -e NAME              pass this environment variable in any case (may be repeated)
#   -h                   this text
#
# With --range a program chooses what is captured. In C it calls cuProfilerStart() and cuProfilerStop() of cudaProfiler.h; in
# PyTorch, torch.cuda.profiler.start() and stop().
#
# A report contains the environment of the program. Variables whose names look like those of secrets are not passed, unless -e
# names them. Do not publish reports: `vramlab nsight FILE --extract DIR` writes small tables that can be published.
#
# The script searches for nsys in $NSYS, PATH, /opt/nvidia/nsight-systems* and /usr/local/cuda*. Where only the capturing part of
# Nsight Systems is installed, the result is a .qdstrm, and the script prints how to import it.
set -euo pipefail

few=(PATH HOME TMPDIR LANG LD_LIBRARY_PATH LD_PRELOAD CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER PYTHONPATH VIRTUAL_ENV
  PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF VRAMLAB_ALLOC VRAMLAB_LIBRARY VRAMLAB_LIMIT)
secret='(TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|AUTH|PRIVATE|_KEY$|^KEY|APIKEY|_PAT$)'

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

refuse() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

find_nsys() {
  if [ -n "${NSYS:-}" ]; then
    [ -x "$NSYS" ] || refuse "NSYS is $NSYS, which is not a program"
    printf '%s\n' "$NSYS"
    return
  fi
  local path
  path=$(command -v nsys || true)
  if [ -z "$path" ]; then
    # The newest of several installed versions.
    path=$(find /opt/nvidia/nsight-systems*/*/bin/nsys /opt/nvidia/nsight-systems*/*/target-linux-x64/nsys \
      /usr/local/cuda*/bin/nsys -maxdepth 0 2> /dev/null | sort -V | tail -n 1 || true)
  fi
  [ -n "$path" ] || refuse "Nsight Systems (nsys) was not found. It is part of the CUDA toolkit and of NVIDIA's package \
repositories (apt-get install nsight-systems-cli), and at https://developer.nvidia.com/nsight-systems; or set NSYS to the \
program"
  printf '%s\n' "$path"
}

output='' force=false clean=false stacks=false memory_usage=true range=() named=()
while [ $# -gt 0 ]; do
  case $1 in
    -o) [ $# -ge 2 ] || refuse "-o needs DIR/NAME"
        output=$2; shift 2 ;;
    -f) force=true; shift ;;
    -e) [ $# -ge 2 ] || refuse "-e needs the name of an environment variable"
        named+=("$2"); shift 2 ;;
    --range) range=(--capture-range=cudaProfilerApi --capture-range-end=stop); shift ;;
    --whole) range=(); shift ;; # the default
    --stacks) stacks=true; shift ;;
    --clean) clean=true; shift ;;
    --no-memory-usage) memory_usage=false; shift ;;
    -h|--help) usage; exit 0 ;;
    --) shift; break ;;
    *) refuse "'$1' is not an option of this script; write: capture.sh [OPTIONS] -- PROGRAM ARGUMENTS (see -h)" ;;
  esac
done
[ $# -gt 0 ] || refuse "name the program: capture.sh [OPTIONS] -- PROGRAM ARGUMENTS (see -h)"
command -v "$1" > /dev/null || refuse "$1: program not found; check its path, and that it is executable"
output=${output:-$(basename "$1")}
output=${output%.nsys-rep}
for existing in "$output.nsys-rep" "$output.qdstrm" "$output.sqlite"; do
  if [ -e "$existing" ] && ! $force; then refuse "$existing already exists; choose another name with -o, or replace it with -f"; fi
done
nsys=$(find_nsys)
mkdir -p "$(dirname "$output")"
rm -f "$output.nsys-rep" "$output.qdstrm" "$output.sqlite"

if $clean; then names=("${few[@]}"); else mapfile -t names < <(compgen -e | grep -viE "$secret"); fi
environment=()
for name in "${names[@]}" "${named[@]}"; do
  if [ -n "${!name+set}" ]; then environment+=("$name=${!name}"); fi
done

sampling=(--sample=none)
if $stacks; then
  # Without sampling nsys does not unwind stacks.
  sampling=(--sample=process-tree --cudabacktrace=all)
  if "$nsys" profile --help 2> /dev/null | grep -q -- --python-backtrace; then sampling+=(--python-backtrace=cuda); fi
fi

# --capture-range-end=stop, because the default ends the program.
status=0
env -i "${environment[@]}" "$nsys" profile --trace=cuda,nvtx "${sampling[@]}" --cpuctxsw=none \
  --cuda-memory-usage="$memory_usage" "${range[@]}" \
  --force-overwrite=true --output="$output" "$@" || status=$?

if [ -e "$output.nsys-rep" ]; then
  rm -f "$output.qdstrm"
  "$nsys" export --force-overwrite=true --type sqlite --output "$output.sqlite" "$output.nsys-rep" > /dev/null \
    || { printf 'error: %s cannot export %s.nsys-rep\n' "$nsys" "$output" >&2; exit 1; }
  printf 'report   %s.nsys-rep\nnext     vramlab nsight %s.sqlite\n' "$output" "$output" >&2
elif [ -e "$output.qdstrm" ]; then
  cat >&2 <<TEXT
raw      $output.qdstrm
         Only the capturing part of Nsight Systems is installed. Where all of the same version is installed:
         QdstrmImporter -i $output.qdstrm -o $output.nsys-rep
         vramlab nsight $output.nsys-rep
TEXT
  # A missing importer is not a failure of the program.
  status=0
else
  printf 'error: nsys wrote no capture: %s\n' \
    "the program ended with $status${range:+, or never called cuProfilerStart (without --range all of it is captured)}" >&2
  [ "$status" -ne 0 ] || status=1
fi
exit "$status"
