#!/usr/bin/env bash
# Runs the programs of allocators/capi/tests under a tool that finds errors of memory or of threads. Any finding ends it with 1.
#
#   allocators/capi/sanitize.sh valgrind   the library as the tests built it; about a minute
#   allocators/capi/sanitize.sh address    AddressSanitizer in library and programs; wants a nightly toolchain
#   allocators/capi/sanitize.sh thread     ThreadSanitizer in library, standard library and programs; wants nightly with rust-src
#
# Where a tool is missing it says so and ends with 0. VRAMLAB_LIBRARY names a library that is built already, for valgrind.
set -euo pipefail
cd "$(dirname "$0")/../.."

mode=${1:-}
tests=allocators/capi/tests
host=$(rustc -vV | sed -n 's/^host: //p')
skip() { echo "skipped: $1"; exit 0; }

flags=()
linked=()
run=()
library=
case $mode in
  valgrind)
    command -v valgrind > /dev/null || skip "valgrind is not installed"
    library=${VRAMLAB_LIBRARY:-target/debug/libvramlab.so}
    [ -f "$library" ] || cargo build --quiet --locked -p vramlab-capi
    # Its threads run one at a time; without turns one that waits for another may wait long.
    run=(valgrind --quiet --error-exitcode=9 --fair-sched=yes)
    ;;
  address | thread)
    cargo +nightly --version > /dev/null 2>&1 || skip "there is no nightly toolchain"
    build=(cargo +nightly build --quiet --locked -p vramlab-capi --target "$host" --target-dir "target/$mode")
    if [ "$mode" = thread ]; then
      [ -d "$(rustc +nightly --print sysroot)/lib/rustlib/src" ] || skip "rustup component add rust-src --toolchain nightly"
      # The locks of the standard library have to be seen, too.
      build+=(-Z build-std)
    fi
    RUSTFLAGS="-Zsanitizer=$mode" CARGO_PROFILE_DEV_DEBUG=0 "${build[@]}"
    library=target/$mode/$host/debug/libvramlab.so
    flags=("-fsanitize=$mode")
    # GCC's runtime lacks functions that Rust's compiler calls, so the programs get the one of Rust.
    if [ "$mode" = thread ]; then
      runtime=$(echo "$(rustc +nightly --print sysroot)/lib/rustlib/$host"/lib/librustc*_rt.tsan.a)
      linked=(-Wl,--whole-archive "$runtime" -Wl,--no-whole-archive -Wl,--export-dynamic -ldl -lm -lrt -lstdc++)
    else
      linked=("${flags[@]}")
    fi
    # What a callback that is left by longjmp or an exception loses is documented.
    export ASAN_OPTIONS=detect_leaks=0
    ;;
  *)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
library=$(realpath "$library")
export LD_LIBRARY_PATH=${library%/*}

build() {
  local source=$1 compiler=(${CC:-cc} -std=c11)
  [[ $source == *.cpp ]] && compiler=(${CXX:-c++} -std=c++17)
  "${compiler[@]}" -D_DEFAULT_SOURCE -Wall -Wextra -Werror -g -pthread ${flags[@]+"${flags[@]}"} -I allocators/capi/include \
    -c "$tests/$source" -o "$scratch/object"
  "${compiler[@]}" -pthread "$scratch/object" "$library" ${linked[@]+"${linked[@]}"} -o "$scratch/${source%.*}"
}

under() {
  local source=$1
  shift
  [ -x "$scratch/${source%.*}" ] || build "$source"
  echo "$mode: ${source%.*} $*"
  ${run[@]+"${run[@]}"} "$scratch/${source%.*}" "$@" > "$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
}

under restores.c caching remap pytorch bfc rmm-arena
under late.c thread "$scratch" caching
under late.c main "$scratch" remap
under events.c caching
under streams.c caching
under limits.c stream-ordered
if command -v "${CXX:-c++}" > /dev/null; then under throws.cpp caching remap; else echo "skipped: throws.cpp, there is no C++ compiler"; fi
# Under Valgrind, which runs one thread at a time, these take minutes.
if [ "$mode" != valgrind ]; then
  under callbacks.c caching remap
  under api.c "$scratch"
  under events.c remap naive stream-ordered
  under streams.c pytorch stream-ordered rmm-arena
  under readers.c "$scratch" caching pytorch stream-ordered
fi
