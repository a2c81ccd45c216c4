#!/usr/bin/env python3
"""Writes out of bounds into a neighbouring tensor, which a memory checker should report and PyTorch does not.

    compute-sanitizer --nvtx=yes --force-blocking-launches python3 experiments/pytorch/programs/overrun.py

Two tensors of a thousand floats are adjacent in a segment; a kernel fills the first and continues into the second. Without
information about blocks a checker sees writes to valid memory. With it, the first float after the tensor is out of bounds: it
belongs to no tensor, as blocks are rounded up. Prints the contents of the second; exit code 0.
"""

import argparse
import json

import torch
import triton
import triton.language as tl


@triton.jit
def fill(start, count, value, block: tl.constexpr):
    """Writes `value` at each of `start[0..count]`."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(start + place, value, mask=place < count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", action="store_true", help="fill only the first tensor")
    options = parser.parse_args()
    first = torch.zeros(1000, device="cuda")
    second = torch.zeros(1000, device="cuda")
    apart = (second.data_ptr() - first.data_ptr()) // first.element_size()
    count = first.numel() if options.inside else apart + 1
    fill[(triton.cdiv(count, 256),)](first, count, 7.0, block=256)
    torch.cuda.synchronize()
    found = {
        "apart": apart,
        "written": count,
        "neighbour": float(second[0]),
        "own": float(first[-1]),
        "backend": torch.cuda.get_allocator_backend(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
