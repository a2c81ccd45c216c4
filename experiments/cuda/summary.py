"""Rows of the record from one line a run, "PROGRAM/VARIANT <tab> output": summary.py FILE PROGRAM..."""

import collections
import re
import statistics
import sys

times, results = collections.defaultdict(list), collections.defaultdict(lambda: collections.defaultdict(set))
with open(sys.argv[1]) as lines:
    for line in lines:
        label, _, text = line.rstrip("\n").partition("\t")
        program, _, variant = label.partition("/")
        if program not in sys.argv[2:]:
            continue
        found = re.findall(r"([\d.]+) (?:us a step|ns a launch)", text)
        for number, value in enumerate(found or [""]):
            name = f"{label}[{number}]" if len(found) > 1 else label
            times[name] += [float(value)] if value else []
        for result in re.findall(r"(?:total|loss) ([^\s,]+)", text):
            results[program][variant].add(result)
for label, values in times.items():
    if values:
        middle, least, most = statistics.median(values), min(values), max(values)
        print(f"{label:28} median {middle:9.1f}  min {least:9.1f}  max {most:9.1f}  n {len(values)}")
    else:
        print(f"{label}: no result")
for program, variants in results.items():
    if len(set.union(*variants.values())) == 1:
        print(f"results of {program}: equal")
    else:
        print(
            f"results of {program}: " + "; ".join(f"{key} {' '.join(sorted(found))}" for key, found in variants.items())
        )
