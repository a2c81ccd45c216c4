#!/usr/bin/env bash
# Checks the analysis: style, types, tests, and every notebook executed on the recorded results.
#
#   bash analysis/test.sh         all of it
#   bash analysis/test.sh --env   only make the environment, and print its path
#
# Its environment is target/analysis-venv. It has this directory's package in editable form, and is made again when the lock changes:
# by uv if installed, else by python3 -m venv and pip. Needs Python 3.11 or newer (PYTHON names another one) and, for the test of the page, Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }

environment=target/analysis-venv
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: Python 3.11 or newer is needed; this is $("$python" --version) (set PYTHON to another one)" >&2
  exit 2
}
stamp="$("$python" --version) $(cat analysis/requirements.lock analysis/pyproject.toml | sha256sum) $PWD"
if [ "$(cat "$environment/stamp" 2>/dev/null)" != "$stamp" ]; then
  step "environment in $environment"
  rm -rf "$environment"
  mkdir -p target
  if command -v uv > /dev/null; then
    uv venv --quiet --python "$(command -v "$python")" "$environment"
    install() { uv pip install --quiet --compile-bytecode --python "$environment/bin/python" "$@"; }
  else
    "$python" -m venv "$environment"
    install() { "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
  fi
  install -r analysis/requirements.lock
  # The package in editable form, so that a change to it needs no new environment.
  install --no-deps --no-build-isolation --editable ./analysis
  echo "$stamp" > "$environment/stamp"
fi
bin="$environment/bin"
if [ "${1:-}" = --env ]; then
  echo "$bin"
  exit
fi

# Debian and Ubuntu have a small headless Chromium; CI may install it.
headless() {
  [ -n "${CHROMIUM:-}" ] && return
  for name in chromium-headless-shell chrome-headless-shell chromium chromium-browser google-chrome-stable google-chrome; do
    command -v "$name" > /dev/null && return
  done
  return 1
}
if ! headless && [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  step "installing Chromium"
  apt-get install -qq -y --no-install-recommends chromium-headless-shell > /dev/null 2>&1 \
    || { apt-get update -qq > /dev/null 2>&1 && apt-get install -qq -y --no-install-recommends chromium-headless-shell > /dev/null 2>&1; } \
    || { apt-get install -qq -y --no-install-recommends chromium > /dev/null 2>&1; } || true
fi

export MPLBACKEND=agg
# Tables in tests are small, so threads would only wait for each other; each core runs a file of tests.
export POLARS_MAX_THREADS=1

step "ruff"
linted=(analysis app/python/{src,tests,wheel.py} experiments/pytorch/tests)
"$bin/ruff" check --quiet --config analysis/pyproject.toml "${linted[@]}"
"$bin/ruff" format --quiet --check --config analysis/pyproject.toml "${linted[@]}"

step "mypy"
"$bin/mypy" --config-file analysis/pyproject.toml analysis/src/vramlab_analysis analysis/tests

step "pytest"
# Every directory with tests in Python, wherever it moves.
mapfile -t tests < <(find analysis app experiments -name 'test_*.py' -not -path '*/.*' -printf '%h\n' | sort -u)
# Each core runs a file at a time, because its tests share fixtures.
"$bin/pytest" -c analysis/pyproject.toml --rootdir . -p no:cacheprovider \
  --numprocesses auto --maxprocesses 4 --dist loadscope "${tests[@]}"

step "notebooks, executed again"
"$bin/vramlab-analysis" notebooks

step "analysis passed"
