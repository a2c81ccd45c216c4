#!/usr/bin/env python3
"""Writes beyond a tensor into its neighbour, which a memory checker should see and PyTorch does not.

    compute-sanitizer --force-blocking-launches yes python3 experiments/inside/programs/overrun.py

Two tensors of a thousand floats lie side by side in a segment; a kernel writes one float that many behind the first. Without
knowledge of blocks a checker sees a write into valid memory. Prints what became of the second; exit code 0.
"""

import argparse
import json

import torch
import triton
import triton.language as tl


@triton.jit
def write_one(start, place, value):
    """Writes `value` at `start[place]`."""
    tl.store(start + place, value)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", action="store_true", help="write to the last float of the first tensor instead")
    options = parser.parse_args()
    first = torch.zeros(1000, device="cuda")
    second = torch.zeros(1000, device="cuda")
    apart = (second.data_ptr() - first.data_ptr()) // first.element_size()
    place = first.numel() - 1 if options.inside else apart
    write_one[(1,)](first, place, 7.0)
    torch.cuda.synchronize()
    found = {
        "apart": apart,
        "written": place,
        "neighbour": float(second[0]),
        "own": float(first[-1]),
        "backend": torch.cuda.get_allocator_backend(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
