#!/usr/bin/env python3
"""A report for `nsys stats`: which calls waited for the device, and for which kernel.

    nsys stats --report experiments/nsight/reports/sync_attribution.py CAPTURE.nsys-rep

or by name, with this folder in `NSYS_STATS_REPORT_PATH` or `--report-dir`. Nsight Systems starts it; alone it does
nothing. The attribution is that of `vramlab_analysis.nsight`, so the report needs the repository around it.
"""

import pathlib
import sys

import nsysstats

# Nsight Systems starts the file where it lies.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "analysis/src"))
sys.dont_write_bytecode = True

from vramlab_analysis.errors import AnalysisError  # noqa: E402
from vramlab_analysis.nsight import attribution, export  # noqa: E402
from vramlab_analysis.nsight.allocator import general  # noqa: E402


class SyncAttribution(nsysstats.StatsReport):
    """Waiting by call, work waited for, and place in the run; with `calls`, call by call."""

    display_name = "Calls that waited for the device"
    usage = """{SCRIPT}[:calls] -- {DISPLAY_NAME}

    calls - One row for each call that waited, instead of one for each call, kernel and place

    Output: All time values default to nanoseconds
        Call : Function of the driver or the runtime
        Waited For : Kernel or copy: of the work queued before the call, that which ended last
        NVTX Path : Ranges around the call, without the numbers of steps
        Num Calls : Number of calls that waited
        Waited : Time from the start of the call to the end of the work
        Blocked : Time lost, with the way back, beyond what the call costs with nothing queued
        Med : Median time lost
        Max : Largest time lost
        Start, Launch Path, CorrID : With 'calls': start of the call, ranges around the launch of the kernel that it
            waited for, correlation id of that launch

    What the terms mean is in analysis/src/vramlab_analysis/nsight/attribution.py.
"""

    query = """
SELECT
    call AS "Call",
    waited_for AS "Waited For",
    count(*) AS "Num Calls",
    sum(waited_ns) AS "Waited:dur_ns",
    sum(blocked_ns) AS "Blocked:dur_ns",
    round(median(blocked_ns), 1) AS "Med:dur_ns",
    max(blocked_ns) AS "Max:dur_ns",
    place AS "NVTX Path"
FROM blocked_calls
GROUP BY call, waited_for, place
ORDER BY sum(blocked_ns) DESC, call, waited_for, place
"""
    query_calls = """
SELECT
    start AS "Start:ts_ns",
    call AS "Call",
    bytes AS "Bytes",
    waited_ns AS "Waited:dur_ns",
    blocked_ns AS "Blocked:dur_ns",
    waited_for AS "Waited For",
    correlation AS "CorrID",
    path AS "NVTX Path",
    launch_path AS "Launch Path"
FROM blocked_calls
ORDER BY start
"""
    table_checks = {  # noqa: RUF012
        "StringIds": "{DBFILE} does not contain the table StringIds.",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "{DBFILE} does not contain CUDA calls; capture with --trace=cuda.",
    }
    _arg_opts = [[["calls"], {"action": "store_true", "help": "one row for each call"}]]  # noqa: RUF012

    def setup(self):
        """Fills the table that the queries read."""
        problem = super().setup()
        if problem is not None:
            return problem
        try:
            result = attribution.attribute(export.read_connection(self._dbcon, str(self._dbfile)))
        except AnalysisError as error:
            return str(error)
        rows = result.rows()
        if not rows:
            said = " ".join(result.capture.notes)
            return "{DBFILE} does not contain a call that waited for the device. " + said
        self._dbcon.execute(
            "CREATE TEMP TABLE blocked_calls (start, call, bytes, waited_ns, blocked_ns, waited_for, correlation, "
            "path, place, launch_path)"
        )
        self._dbcon.executemany(
            "INSERT INTO blocked_calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    row["start_ns"], row["call"], row["bytes"], row["waited_ns"], row["blocked_ns"], row["waited_for"],
                    row["correlation"], row["path"], general(row["path"]), row["launch_path"],
                )
                for row in rows
            ],
        )  # fmt: skip
        if getattr(self._parsed_args, "calls", False):
            self.query = self.query_calls
        return None


if __name__ == "__main__":
    SyncAttribution.Main()
