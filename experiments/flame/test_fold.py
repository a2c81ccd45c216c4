"""What `fold.py` makes of samples.

python3 -m pytest experiments/flame
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from fold import fold  # noqa: E402

SAMPLES = """\
trainer 100\x20
\t   1f00 cuMemAlloc_v2 (/usr/lib/libcuda.so.1)
\t   2f00 allocators::backend::naive::Naive::allocate::h0123456789abcdef (/opt/trainer)
\t   3f00 trainer::train::epoch::Pass::run (/opt/trainer)
\t   4f00 main (/opt/trainer)
\tffffffffffffffff [unknown] ([unknown])

trainer 100\x20
\t   1f04 cuMemAlloc_v2 (/usr/lib/libcuda.so.1)
\t   2f08 allocators::backend::naive::Naive::allocate::hfedcba9876543210 (/opt/trainer)
\t   3f00 trainer::train::epoch::Pass::run (/opt/trainer)
\t   4f00 main (/opt/trainer)

cuda worker 101\x20
\tffffffff8000 do_syscall_64 ([kernel.kallsyms])
\t   1100 [unknown] (/usr/lib/libcuda.so.580.1 (deleted))
\t   1200 [unknown] (/usr/lib/libcuda.so.580.1 (deleted))
\t   1300 <A as B>::call; more (/opt/trainer)

trainer 100\x20
\t   5f00 exit (/usr/lib/libc.so.6)
\t   4f00 main (/opt/trainer)
"""


def lines(out):
    return [f"{';'.join(stack)} {count}" for stack, count in out]


def test_equal_stacks_are_counted_and_named_without_the_machine():
    out, facts = fold(SAMPLES.splitlines(True))
    assert lines(out) == [
        "trainer;main;trainer::train::epoch::Pass::run;allocators::backend::naive::Naive::allocate;cuMemAlloc_v2 2",
        "cuda worker;<A as B>::call: more;[libcuda.so.580.1];do_syscall_64_[k] 1",
        "trainer;main;exit 1",
    ]
    assert facts == {"samples": 4, "kept": 4, "stacks": 3, "in_others": 0}


def test_stacks_under_a_frame_begin_there():
    out, facts = fold(SAMPLES.splitlines(True), under="Pass::run")
    assert lines(out) == ["trainer;trainer::train::epoch::Pass::run;allocators::backend::naive::Naive::allocate;cuMemAlloc_v2 2"]
    assert facts["samples"] == 4 and facts["kept"] == 2


def test_rare_stacks_become_one_line_and_counts_add_up():
    out, facts = fold(SAMPLES.splitlines(True), top=1)
    assert lines(out)[1:] == ["cuda worker;[others] 1", "trainer;[others] 1"]
    assert sum(count for _, count in out) == facts["kept"] and facts["in_others"] == 2


def test_input_without_samples_is_one_line_and_exit_code_2():
    for text, options in (("", []), (SAMPLES, ["--under", "nowhere"])):
        done = subprocess.run([sys.executable, HERE / "fold.py", *options], input=text, capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
