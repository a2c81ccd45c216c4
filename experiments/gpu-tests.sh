#!/bin/bash
# Runs the tests that need a GPU, and writes their outcomes with the commit of their sources: gpu-tests.sh FILE
#
# Needs cargo, or TESTS: a directory of built tests named conformance, soundness and against_cpu (`cargo test --no-run` prints where
# it puts them), and then BUILD, the commit of their sources.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# = 1 ] || { echo "error: write gpu-tests.sh FILE" >&2; exit 2; }
output=$(realpath -m "$1")
if [ -n "${TESTS:-}" ]; then
  [ -n "${BUILD:-}" ] || { echo "error: BUILD is not set; it is the commit of the tests in TESTS" >&2; exit 2; }
  commit=$BUILD
else
  commit=$(git -C "$here" rev-parse HEAD 2> /dev/null) || { echo "error: $here is not in a repository; set TESTS and BUILD" >&2; exit 2; }
  [ -z "$(git -C "$here" status --porcelain --untracked-files=no)" ] || commit="$commit, changed since"
fi
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | head -1)
{
  echo "The tests that need a GPU, as they last ran on one."
  echo
  echo "machine  ${gpu:-unknown GPU}, $(nproc) cores, $(date -u +%F)"
  echo "commit   $commit"
  echo "command  experiments/gpu-tests.sh"
} > "$output"
failed=0
# run PACKAGE TEST [FILTER]: its outcomes.
run() {
  local package=$1 test=$2; shift 2
  printf '\n== %s\n' "$test" >> "$output"
  if [ -n "${TESTS:-}" ]; then set -- "$TESTS/$test" "$@"; else
    set -- cargo test --release --manifest-path "$here/../Cargo.toml" -p "$package" --test "$test" -- "$@"
  fi
  "$@" --format pretty 2>&1 | grep -E '^test |panicked|^error' >> "$output"
  [ "${PIPESTATUS[0]}" = 0 ] || failed=1
}
run vramlab-conformance conformance cuda
run vramlab-policies soundness cuda
run kernels against_cpu
exit $failed
