#!/usr/bin/env bash
# Compiles kernels/cuda/*.cu to kernels/ptx/*.ptx.xz with a pinned NVRTC from PyPI. Needs python3 with pip; no GPU, no CUDA.
#
#   kernels/ptx.sh          compile, and rewrite the committed PTX if it differs
#   kernels/ptx.sh --check  compile, and fail if the committed PTX differs
#
# The compiler is installed in $PTX_TOOLCHAIN (default: target/ptx-toolchain).
set -euo pipefail

# NVRTC 12.4 writes PTX ISA 8.4, which drivers 550 and newer accept; a newer compiler would require a newer driver.
# The kernels do not include headers of the toolkit, so its header packages are not needed.
packages=(nvidia-cuda-nvrtc-cu12==12.4.127)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
toolchain=${PTX_TOOLCHAIN:-$here/../target/ptx-toolchain}

case "${1:-}" in
"" | --check) ;;
*)
    echo "usage: kernels/ptx.sh [--check]" >&2
    exit 2
    ;;
esac

installed=$toolchain/${packages[0]}
if [[ ! -e $installed/complete ]]; then
    rm -rf "$installed"
    mkdir -p "$installed"
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --target "$installed" "${packages[@]}"
    touch "$installed/complete"
fi

python3 "$here/compile_ptx.py" "$installed" "$here/cuda" "$here/ptx" "$@"
