"""The pages agree with the records: markers, tables, typed figures, samples of programs, and the timeline's figures."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import polars as pl
import pytest

from tests.conftest import write_experiment
from vramlab_analysis import agreement, documents, experiments, readme_figure, repository, samples, style, truth
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import results
from vramlab_analysis.measures import train_pace
from vramlab_analysis.pages import lookup, replays, training
from vramlab_analysis.plots import timeline

ANSWERS = "experiments/answers.md"
TRAINER = "experiments/notes/trainer.md"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return documents.pages()


def figures(text: str) -> list[re.Match[str]]:
    """The figures of a page: every number that no rule calls a version, a name, a date or a command."""
    rules = [re.compile(rule, re.MULTILINE) for rule in documents.RULES.values()]
    hidden = [match.span() for rule in rules for match in rule.finditer(text)]
    hidden += [match.span() for match in re.finditer("<!--.*?-->", text)]
    return [
        match
        for match in re.finditer(r"\d+(?:[.,]\d+)*", text)
        if not any(start <= match.start() < end for start, end in hidden)
    ]


def by_hand(figure: str) -> str:
    """Another figure of the same look."""
    return figure[:-1] + str((int(figure[-1]) + 1) % 10)


def is_noticed(page: str, mutant: str) -> bool:
    try:
        return documents.check(page, mutant) != mutant
    except AnalysisError:
        return True


@pytest.mark.parametrize("page", documents.names())
def test_page_agrees_with_the_records(pages: dict[str, str], page: str) -> None:
    assert documents.check(page, pages[page]) == pages[page]


@pytest.mark.parametrize("page", documents.names())
def test_each_figure_and_each_word_changed_by_hand_is_noticed(pages: dict[str, str], page: str) -> None:
    text, unnoticed = pages[page], []
    changes = [(*match.span(), by_hand(match[0])) for match in figures(text)]
    changes += [(*match.span("text"), f"not {match['text']}") for match in documents.MARKER.finditer(text)]
    cells = re.compile(r"(?<=\| )[^|\n]+(?= \|)")
    changes += [
        (match.start("text") + cell.start(), match.start("text") + cell.end(), f"not {cell[0]}")
        for match in documents.TABLE.finditer(text)
        for cell in cells.finditer(match["text"])
    ]
    for start, end, other in changes:
        if not is_noticed(page, text[:start] + other + text[end:]):
            unnoticed.append((text[:start].count("\n") + 1, text[start:end]))
    assert not unnoticed


@pytest.mark.parametrize("word", ["faster", "slowest", "quicker"])
def test_a_comparative_is_noticed_unless_its_section_has_no_record(pages: dict[str, str], word: str) -> None:
    sentence = f"It is the {word} one.\n"
    for page in ("README.md", ANSWERS, "experiments/notes/expandable.md"):
        with pytest.raises(AnalysisError, match=f"nothing computes '{word}'"):
            documents.check(page, f"{pages[page]}\n{sentence}")
        with pytest.raises(AnalysisError, match=f"nothing computes '{word}'"):
            documents.check(page, f"{pages[page]}\n| a | {word} |\n")
    page = "experiments/notes/caching.md"
    assert not documents.typed(page, f"## A\n<!--no record-->\n{sentence}")
    assert documents.typed(page, f"## A\n<!--no record-->\nText.\n## B\n{sentence}") == [(5, word)]


def test_figures_are_many() -> None:
    # A rule that covered all of them would leave the tests above nothing to do.
    found = {page: len(figures(text)) for page, text in documents.pages().items()}
    assert found["README.md"] >= 60
    assert found[ANSWERS] >= 60
    assert found[TRAINER] >= 120


def test_a_changed_record_changes_the_page(
    pages: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(experiments.newest("cuda.json").read_text())
    rows[0]["driver_calls"]["mem_free"]["blocked_ns"] *= 2
    (tmp_path / "2026-01-01-gpu").mkdir()
    (tmp_path / "2026-01-01-gpu/cuda.json").write_text(json.dumps(rows))
    rule = "compare.naive.driver_calls.mem_free.blocked_ns / 1e6 as .0f"
    before = documents.computed(rule)
    assert f"<!--v {rule}-->{before}<!--/v-->" in pages[TRAINER]
    monkeypatch.setenv("RESULTS", str(tmp_path))
    lookup.group.cache_clear()
    after = documents.computed(rule)
    monkeypatch.undo()
    lookup.group.cache_clear()
    assert int(after) == pytest.approx(2 * int(before), abs=1)


def test_a_rule_computes_a_value_in_its_format_or_words(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, float | str] = {"a.b": 1500.0, "a.share": 0.123, "a.remap:steal=always": 2, "a.text": "GPT-2"}
    monkeypatch.setattr(lookup, "value", lambda name: values[name])
    for rule, text in [
        ("a.b", "1,500"),
        ("a.share as %", "12 %"),
        ("a.share as +.1%", "+12.3 %"),
        ("1e3 * a.share - 3 as .1f", "120.0"),
        ("a.b as time", "1.5 µs"),
        ("a.text", "GPT-2"),
        ("max(a.b / a.remap:steal=always, 10) as .0f", "750"),
        ("a.b > 1 and a.share < 1 ? faster : slower", "faster"),
        ("a.b < 1 ? faster : slower", "slower"),
        ("a.b > 1 ? only so", "only so"),
    ]:
        assert documents.computed(rule) == text, rule
    for rule, error in [
        ("a.share", "needs a format"),
        ("a.b < 1 ? only so", "'only so' is wrong: not a.b < 1"),
        ("__import__('os')", "not an expression"),
        ("a.b / 0", "cannot be computed"),
        ("a.b +", "cannot be computed"),
    ]:
        with pytest.raises(AnalysisError, match=re.escape(error)):
            documents.computed(rule)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("A value of <!--v compare.naive.steps-->1 us.", "lacks its end"),
        ("A value of <!--v compare.naive.steps-->1<!--/v--> and 2<!--/v-->.", "lacks its end"),
        ("Text\n<!--v compare.naive.steps-->1<!--/v--> steps.", "README.md:2: begins with a marker"),
        ("Text\n\n- <!--v compare.naive.steps-->1<!--/v--> steps.", "README.md:3: begins with a marker"),
        ("| <!--v compare.naive.steps | compare.day-->1<!--/v--> |", "lacks its end"),
        ("Of <!--v compare.naive.unheard-->1<!--/v--> steps.", "README.md:1: compare.naive.unheard: unknown value"),
        ("Of <!--v unheard.steps-->1<!--/v--> steps.", "unheard: unknown group of values; the groups are"),
        ("<!--table unheard-->\n<!--/table-->", "unheard: unknown table; the tables are"),
        ("<!--table epochs-->\nText\n<!--/table-->", "needs a table below it"),
    ],
)
def test_a_damaged_marker_is_named(text: str, error: str) -> None:
    with pytest.raises(AnalysisError, match=re.escape(error)):
        documents.check("README.md", text)


@pytest.mark.parametrize(
    "typed",
    [
        "A call takes 88 ns.",
        "It is 1.3 % slower at width 2048.",
        "| GPT-2 | 1,024 MiB |",
        "Of 52 cells 80 are right.",
        "- Loss 2e-7, 16 of 20.",
        "PyTorch takes 41 us.",
        "On the H200 it took 3.5 times as long.",
        "As of 2026-11-24 there are 7.",
    ],
)
def test_a_typed_figure_is_named(pages: dict[str, str], typed: str) -> None:
    for page in ("README.md", "ARCHITECTURE.md"):
        with pytest.raises(AnalysisError, match=rf"{page}:\d+: nothing computes"):
            documents.check(page, f"{pages[page]}\n{typed}\n")


def test_digits_that_are_not_figures_may_be_typed(pages: dict[str, str]) -> None:
    words = (
        "With PyTorch 2.11, Python 3.11 and driver 580.159.04 of 2026-11-24, GPT-2 in f16 on an H200: `--repeats 5`,"
        " [12](notebooks/12.ipynb), commit 6e401748, exit code 3, 32-bit links, width 784, batch of 32, 95 % intervals."
    )
    assert not documents.typed("ARCHITECTURE.md", f"{pages['ARCHITECTURE.md']}\n{words}\n")


def test_the_example_for_a_paper_writes_a_table_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (repository.root() / "analysis/README.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    recorded = results("rules", "sim").directories[0]
    assert code.count('"runs/paper"') == 1
    monkeypatch.chdir(tmp_path)
    exec(code.replace('"runs/paper"', repr(str(recorded))), {})
    head, *rows = (tmp_path / "table.csv").read_text().splitlines()
    assert head.startswith("history,lab,")
    assert len(rows) == 6
    assert (tmp_path / "figure.pdf").stat().st_size > 1000


def test_values_are_listed_by_name() -> None:
    assert lookup.group("compare")["naive.steps"] == lookup.value("compare.naive.steps")


def test_samples_of_the_readme_match_the_programs() -> None:
    if missing := samples.check():
        pytest.skip(f"not built, so the README's samples were NOT compared: {', '.join(missing)}; cargo build")


def test_sample_that_a_program_does_not_print_is_named() -> None:
    printed = "What happened\n  At most 7 GiB were reserved, and more.\nWhat would help\n  nothing\n"
    assert samples.stale("What happened\n  At most 7 GiB were reserved, ...\n...\n  nothing\n", printed) is None
    assert (
        samples.stale("What happened\n  At most 8 GiB were reserved, ...\n", printed)
        == "  At most 8 GiB were reserved, ..."
    )
    assert samples.stale("What would help\nWhat happened\n", printed) == "What happened", "out of turn"
    with pytest.raises(AnalysisError, match="shows what 'vramlab unheard of' prints"):
        samples.check("# Page\n\n```sh\nvramlab unheard of\n```\n```text\na\n```\n")
    with pytest.raises(AnalysisError, match="must follow"):
        samples.check("# Page\n\nA sample:\n\n```text\na\n```\n")


@pytest.mark.parametrize(("page", "most"), [("README.md", 900), ("ARCHITECTURE.md", 2000)])
def test_the_first_pages_are_short(pages: dict[str, str], page: str, most: int) -> None:
    assert len(re.sub(r"<!--.*?-->", "", pages[page]).split()) <= most


def test_each_figure_of_a_sample_that_is_changed_by_hand_is_noticed() -> None:
    text = (repository.root() / samples.PAGE).read_text()
    if missing := samples.check(text):
        pytest.skip(f"not built, so the README's samples were NOT compared: {', '.join(missing)}; cargo build")
    shown = [match.span(2) for match in samples.BLOCK.finditer(text)]
    unnoticed = []
    for match in re.finditer(r"\d+(?:[.,]\d+)*", text):
        if any(start <= match.start() < end for start, end in shown):
            try:
                samples.check(text[: match.start()] + by_hand(match[0]) + text[match.end() :])
                unnoticed.append(match[0])
            except AnalysisError:
                continue
    assert shown
    assert not unnoticed


def test_fitted_cells_do_not_count_as_agreement() -> None:
    told = agreement.held_out(*agreement.OTHERS)
    assert agreement.FIDELITY not in agreement.OTHERS
    assert told.cells >= 40
    assert 0 < told.within < 1
    assert told.contrast > 1
    assert 0 < told.pairs_within < 1
    assert abs(told.worst) > agreement.TOLERANCE
    # `fit-program` takes the program's own time from these networks, which `fidelity` has too.
    fitted = {key[:4] for key in agreement.paces(agreement.FIT, "gpu")}
    assert fitted == {("caching", 128, 4, 64), ("stream-ordered", 128, 4, 64)}
    assert fitted < {key[:4] for key in agreement.paces(agreement.FIDELITY, "sim")}
    for spec in (agreement.FIDELITY, *agreement.OTHERS, *agreement.SESSIONS):
        assert not {key[:4] for key in agreement.off(spec)} & fitted, spec


def test_the_simulated_runs_are_of_their_sessions_profile_or_of_the_built_in_one() -> None:
    for spec in (agreement.FIDELITY, *agreement.OTHERS):
        built_in = experiments.results(spec, "sim").document["device"] == "sim"
        assert agreement.in_session(spec) is not built_in, spec
        assert agreement.paces(spec, "sim").keys() <= agreement.paces(spec, "gpu").keys(), spec


def test_costs_of_kernels_in_the_built_in_profile_are_fits_of_their_timings(tmp_path: Path) -> None:
    program = repository.built("experiments")
    assert program is not None
    folder = repository.results()
    costs = json.loads((repository.root() / "allocators/device/src/profiles/h200.json").read_text())["kernels"]
    # Kernels without timings of the first machine are of the second.
    for label in ("2026-11-21-h200", "2026-11-29-h200"):
        fitted = tmp_path / f"{label}.json"
        command: list[str | Path] = [program, "fit-kernels", folder / label / "kernels.jsonl", "--out", fitted]
        subprocess.run(command, check=True, capture_output=True)
        timed = {json.loads(line)["kernel"] for line in (folder / label / "kernels.jsonl").read_text().splitlines()}
        fits = json.loads(fitted.read_text())["kernels"]
        here = timed & costs.keys()
        assert len(here) > 10
        assert {name: costs.pop(name) for name in here} == {name: fits[name] for name in here}, label
    assert not costs


def test_held_out_cells_are_of_networks_that_no_profile_saw() -> None:
    both = agreement.held_out(*agreement.SESSIONS)
    assert both.cells == sum(agreement.held_out(spec).cells for spec in agreement.SESSIONS) >= 100
    for spec in agreement.SESSIONS:
        measured = agreement.paces(spec, "gpu")
        # `time_kernels` times these widths and, at them, batches of 32 and 64; `agreement-fit` is of the first of them.
        assert not {network[1] for network in measured} & {128, 256, 784, 2048}, spec
        assert agreement.paces(spec, "sim").keys() == measured.keys(), spec


def test_ratios_that_are_off_are_those_that_the_agreement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in agreement.SESSIONS:
        cells, passes = agreement.held_out(spec), agreement.passes(spec)
        assert passes.off == round((1 - cells.pairs_within) * cells.pairs), spec
        # Each pair has a ratio in each pass.
        runs = {len(values) for values in agreement.paces(spec, "gpu").values()}
        assert len(runs) == 1, spec
        assert passes.ratios == cells.pairs * runs.pop(), spec
    # Of one and the same runs no ratio is off.
    measured = agreement.paces
    monkeypatch.setattr(agreement, "paces", lambda spec, _device: measured(spec, "gpu"))
    alike = agreement.passes(agreement.SESSIONS[0])
    assert alike.off == alike.between == 0


def test_small_blocks_lie_where_the_driver_put_them() -> None:
    page = agreement.profile()["plain"]["page_bytes"]
    places: dict[str, dict[str, list[int]]] = {}
    for device in ("gpu", "sim"):
        for entry in results("addresses", device).select(program="trainer"):
            calls = entry.record.calls
            small = calls.filter((pl.col("call") == "mem_alloc") & (pl.col("bytes") < page))
            places.setdefault(device, {})[entry.id] = [addr % page for addr in small["addr"]]
    assert len(places["gpu"]) == 14
    assert all(len(set(offsets)) > 10 for offsets in places["gpu"].values())
    assert places["gpu"] == places["sim"]


def test_time_of_the_profiler_is_the_excess_over_runs_without_it() -> None:
    drawn = style.svg(readme_figure.three_timelines())
    assert len(drawn) < 150_000
    assert "<image" not in drawn
    said = re.findall(
        r">([a-z-]+): (\d+) µs as captured, of which (\d+) µs \((\d+) %\) are .* a step takes (\d+) µs", drawn
    )
    assert [one[0] for one in said] == ["naive", "caching", "stream-ordered"]
    for allocator, *numbers in said:
        captured, own, share, plain = map(int, numbers)
        runs = experiments.results("latency", "gpu").select(alloc=allocator)
        paces = sorted(pace for run in runs if (pace := train_pace(run.record)) is not None)
        assert paces[0] <= plain + 1
        assert paces[-1] >= plain - 1
        assert abs(captured - own - plain) <= 1
        assert abs(100 * own / captured - share) <= 1


def test_runs_of_other_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = readme_figure.captured("naive")
    other = dataclasses.replace(capture, path=f"{capture.path}-hidden-2048")
    assert Path(other.path).is_dir()
    with pytest.raises(AnalysisError, match=r"different work than .* \(hidden\)"):
        readme_figure.under_the_profiler("naive", other, timeline.window(capture).length)


def test_passes_are_read_by_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_experiment(tmp_path / "2026-12-01-h200" / "expandable-steps", [], name="expandable-steps")
    for number, alloc in enumerate(("native", "expandable")):
        run = folder / "runs" / f"{number:02}"
        run.mkdir(parents=True)
        meta = {"schema_version": 1, "id": run.name, "arm": "setting", "program": "inside", "repeat": 0,
                "status": "done", "options": {"program": "passes", "alloc": alloc}}  # fmt: skip
        (run / "run.json").write_text(json.dumps(meta))
        (run / "result.json").write_text(json.dumps({"rows": [[0, 2, 128, 5.0, number]]}))
    monkeypatch.setenv("RESULTS", str(tmp_path))
    assert replays._expandable_runs() == {"default": [[[0, 2, 128, 5.0, 0]]], "expandable": [[[0, 2, 128, 5.0, 1]]]}


def test_the_table_of_epochs_has_middle_halves_where_the_record_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(experiments.newest("cuda.json").read_text())
    for row in rows:
        row["middle_half"] = {"epoch_s": [0.1, 0.3], "blocked_ns": [1e6, 5e6], "allocate_p99_ns": [100, 2000]}
    (tmp_path / "2026-01-01-gpu").mkdir()
    (tmp_path / "2026-01-01-gpu/cuda.json").write_text(json.dumps(rows))
    monkeypatch.setenv("RESULTS", str(tmp_path))
    table, columns = training.epochs(), training.compare()["columns"]
    del rows[0]["middle_half"]
    (tmp_path / "2026-01-01-gpu/cuda.json").write_text(json.dumps(rows))
    assert "middle halves" in columns
    for words in (" ms (100–300) |", " ms (1–5), `", "(100 ns–2 µs) |"):
        assert table.count(words) == len([row for row in rows if "--" not in row["arm"]]), (words, table)
    # One row without them, and the columns are not all medians.
    assert "of the last run" in training.compare()["columns"]


def test_questions_count_a_program_once_and_always_expandable(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = pl.DataFrame({
        "program": ["a", "a", "b"], "limit_bytes": [None, None, 5], "first_choice_right": [True, True, False],
    })  # fmt: skip

    def run(program: str, conf: str, peak: int, limit: int | None = None, *, out: bool = False) -> dict[str, object]:
        return {
            "program": program,
            "conf": conf,
            "limit_bytes": limit,
            "peak_reserved_bytes": peak,
            "out_of_memory": out,
        }

    runs = [
        run("a", "", 1000),
        run("a", truth.ALWAYS, 1010),
        run("b", "", 1000, 5),
        run("b", truth.ALWAYS, 900, 5, out=True),
    ]
    monkeypatch.setattr(truth, "runs", lambda: runs)
    assert truth.questions(choices) == {"questions": 2, "within": 1, "answered": 1, "expandable": 1}
    runs[1]["peak_reserved_bytes"] = 1011
    assert truth.questions(choices)["expandable"] == 0


def test_cells_with_uneven_repeats_have_a_mark() -> None:
    rows = {"median": 100, "min": 90, "max": 115}, {"median": 100, "min": 90, "max": 116}
    assert [replays._is_wide(row) for row in rows] == [False, True]
    marked = replays.call_times().count(replays.WIDE) + replays.call_rates().count(replays.WIDE)
    assert marked == replays.bench()["wide"]


# A form of record that a part of the campaign replaces with the spec `training-beside`.
OLDER = ("*-training-beside.jsonl",)
# What belongs to another record: profiles from it, and the runs that `advise-truth` reads.
BESIDE = ("*/profile-after.json", "*/links-profile.json", "advise-truth.jsonl")


def test_every_record_is_made_by_a_part_of_the_campaign() -> None:
    # A record of which no command is kept cannot be made again.
    with (repository.root() / "experiments" / "campaign.toml").open("rb") as file:
        parts = tomllib.load(file)["part"]
    kept = [
        record["kept"].replace("{spec}", spec)
        for part in parts
        for record in part["record"]
        for spec in record.get("specs", [""])
    ]
    # A directory beside a kept file of it, such as that of a capture, is kept as a whole.
    folders = [f"{pattern.split('/')[0]}/{pattern.split('/')[1]}" for pattern in kept if pattern.count("/") > 1]
    made = [*kept, *folders, *OLDER, *BESIDE]
    found = []
    for path in repository.results().iterdir():
        if path.is_dir():
            found += [f"{path.name}/{one.name}" for one in path.iterdir() if not one.name.startswith(".")]
        elif not path.name.endswith((".md", ".tar.xz")):
            found.append(path.name)
    assert len(found) > 80
    assert [name for name in sorted(found) if not any(fnmatch(name, pattern) for pattern in made)] == []
