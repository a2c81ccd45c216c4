"""Whether every dependency states that this Rust will do. Reads `cargo metadata` on stdin.

usage: oldest.py VERSION
"""

import json
import sys


def number(version: str) -> list[int]:
    return [int(part) for part in (version.split(".") + ["0"])[:3]]


def main() -> int:
    ours = sys.argv[1]
    packages = json.load(sys.stdin)["packages"]
    newer = [
        f"{package['name']} {package['version']} needs Rust {package['rust_version']}"
        for package in packages
        if package["rust_version"] and number(package["rust_version"]) > number(ours)
    ]
    print("\n".join(newer) or f"{len(packages)} packages, none of which needs more than Rust {ours}")
    return 1 if newer else 0


if __name__ == "__main__":
    sys.exit(main())
