"""Checks the pages against the recorded results: each figure, and each word that depends on figures.

A page is written by people. A figure stands between markers that GitHub does not show, with the rule that computes it:

    The step takes <!--v 1e3 * compare.naive.epoch_s as .0f-->585<!--/v--> ms, which is
    <!--v compare.naive.epoch_s > compare.caching.epoch_s ? longer : shorter-->longer<!--/v-->.

A rule is an expression of values (`pages.lookup`), numbers, `+ - * /`, `min`, `max` and parentheses. `as` gives the
format: one of Python's, `%` after it for a share in percent, or `time` for nanoseconds in the unit that fits. Without
it a value is an integer or a text. `CONDITION ? WORDS : OTHER WORDS` chooses words. Where the sentence would be wrong
as a whole if the condition failed, the second words are left out, and a failed condition is an error.

A whole table stands between `<!--table NAME-->` and `<!--/table-->`. Outside of markers a page has no figures, except
those that `RULES` name, and the pages of results have no comparatives (`COMPARATIVE`), except in sections that open
with `<!--no record-->`: their measurements were not kept.

From the repository's root: `vramlab-analysis readme` compares pages and records; `--write` updates the pages.
"""

from __future__ import annotations

import re
from functools import cache

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages import lookup
from vramlab_analysis.pages.registry import Scalar
from vramlab_analysis.style import si_time

MARKER = re.compile(r"<!--v (?P<rule>[^\n|]+?)-->(?P<text>[^\n]*?)<!--/v-->")
TABLE = re.compile(r"^<!--table (?P<name>[\w-]+)-->\n(?P<text>(?:\|.*\n)*)<!--/table-->$", re.MULTILINE)
NO_RECORD = re.compile(r"^<!--no record-->\n(?:(?!#).*\n)*", re.MULTILINE)
COMPARATIVE = re.compile(r"\b(?:faster|fastest|slower|slowest|quicker|longest|shortest)\b")
# Text that may contain digits without being a figure.
RULES = {
    "a block of code; `text` blocks are compared with the output of programs": r"^```[^`]*?^```$",
    "an indented block of commands": r"(?<=\n\n)(?: {4}.*\n)+",
    "code within a line": r"`[^`\n]+`",
    "the target of a link": r"\]\([^)\n]*\)|https?://\S+",
    "the number of a notebook": r"\[\d\d(?=(?: [A-Z][^\]\n]*)?\](?:\(|_))|\b[Nn]otebooks? (?:\d\d(?:, | and )?)+",
    "the number of an item": r"^\d+\. ",
    "a date": r"\b20\d\d-\d\d-\d\d\b",
    "a version": r"\b(?:PyTorch|Rust|CUDA|Python|Linux|RMM|driver|protocol|compute capability)[ \n]\(?\d+(?:\.\d+)*",
    "a version in the table of versions": r"^\| 2\.\d+(?= )",
    "a commit": r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,40}\b",
    "a setting of a run": r"\b(?:widths?|batch(?: of)?|learning rate|threshold) \d[\d.]*\b",
    "the level of an interval": r"\b95 % intervals?\b",
    "an exit code": r"\bexit code \d+",
    "a name": r"\bApache-2\.0|\b[A-Za-z][A-Za-z_]*-?\d+\w*\b|\b(?:16|32|64)(?: bits?|-bit)\b",
}
_RULES = [re.compile(rule, re.MULTILINE) for rule in RULES.values()]
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_NAME = re.compile(r"[a-z][\w-]*(?:\.[\w:=+,/-]*[\w])+")
_EXPRESSION = re.compile(r"(?:v\d+|\d+(?:\.\d+)?(?:e\d+)?|min|max|and|or|[-+*/()<>=,\s])+")


@cache
def names() -> tuple[str, ...]:
    """The pages that are checked, from the repository's root."""
    root = repository.root()
    fixed = ["README.md", "ARCHITECTURE.md", "app/README.md", "kernels/README.md"]
    folders = ("analysis", "analysis/notebooks", "experiments", "experiments/notes")
    found = (path for folder in folders for path in sorted((root / folder).glob("*.md")))
    return (*fixed, *(str(path.relative_to(root)) for path in found if path.name != "schema.md"))


def pages() -> dict[str, str]:
    """The pages, by name."""
    return {name: (repository.root() / name).read_text() for name in names()}


def evaluate(expression: str) -> Scalar:
    """The value of an expression of values and numbers.

    Raises AnalysisError for anything else.
    """
    if _NAME.fullmatch(expression):
        return lookup.value(expression)
    found: dict[str, Scalar] = {}

    def variable(match: re.Match[str]) -> str:
        found[name := f"v{len(found)}"] = lookup.value(match[0])
        return name

    text = _NAME.sub(variable, expression)
    if not _EXPRESSION.fullmatch(text):
        raise AnalysisError(f"'{expression}': not an expression of values and numbers.")
    try:
        result: Scalar = eval(text, {"__builtins__": {"min": min, "max": max}}, found)
    except (SyntaxError, TypeError, ZeroDivisionError) as error:
        raise AnalysisError(f"'{expression}': cannot be computed ({error}).") from error
    return result


def shown(value: Scalar, how: str = "") -> str:
    """A value as a page shows it.

    Raises AnalysisError for a number with a fraction and no format.
    """
    if isinstance(value, str):
        return value
    if how == "time":
        return si_time(value)
    if not how and value != int(value):
        raise AnalysisError(f"{value:g} has a fraction; the marker needs a format such as `as .1f`.")
    if how.endswith("%"):
        return f"{100 * value:{how[:-1] or '.0'}f} %"
    return format(value, how) if how else f"{int(value):,}"


def computed(rule: str) -> str:
    """The text that a rule puts between its markers.

    Raises AnalysisError for a rule that cannot be computed, and for a condition without other words that fails.
    """
    condition, question, words = rule.partition(" ? ")
    if question:
        true, _, false = words.partition(" : ")
        if evaluate(condition):
            return true.strip()
        if not false:
            raise AnalysisError(f"'{true.strip()}' is wrong: not {condition}; write the sentence anew.")
        return false.strip()
    expression, _, how = rule.partition(" as ")
    return shown(evaluate(expression.strip()), how.strip())


def rewritten(page: str, text: str) -> str:
    """A page with the values, words and tables of the records.

    Raises AnalysisError for a marker that is damaged, at the start of a line, or cannot be computed.
    """
    if text.count("<!--v ") + text.count("<!--/v-->") != 2 * len(MARKER.findall(text)):
        raise AnalysisError(f"{page}: a marker <!--v …--> lacks its end <!--/v--> on the same line, or has two.")
    if text.count("<!--table ") + text.count("<!--/table-->") != 2 * len(TABLE.findall(text)):
        raise AnalysisError(f"{page}: a marker <!--table …--> needs a table below it and then <!--/table-->.")
    if start := re.search(r"^ *(?:(?:[-*>]|\d+\.) +)*<!--/?v", text, re.MULTILINE):
        line = text.count("\n", 0, start.end()) + 1
        raise AnalysisError(
            f"{page}:{line}: begins with a marker, which ends a paragraph on GitHub; begin with a word."
        )

    def value(match: re.Match[str]) -> str:
        try:
            return f"<!--v {match['rule']}-->{computed(match['rule'])}<!--/v-->"
        except AnalysisError as error:
            line = text.count("\n", 0, match.start()) + 1
            raise AnalysisError(f"{page}:{line}: {error}") from error

    text = MARKER.sub(value, text)
    return TABLE.sub(lambda match: f"<!--table {match['name']}-->\n{lookup.table(match['name'])}<!--/table-->", text)


def _blank(text: str, rules: list[re.Pattern[str]]) -> str:
    """A page with a blank for each character that a rule covers, line breaks excepted."""
    for rule in rules:
        text = rule.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def typed(page: str, text: str) -> list[tuple[int, str]]:
    """Figures and comparatives of a page that nothing computes: line, and text."""
    text = _blank(text, [TABLE, MARKER])
    found = [(_NUMBER, _digits(text))]
    if page == "README.md" or page.startswith(("experiments/answers", "experiments/notes/")):
        found.append((COMPARATIVE, _blank(text, [NO_RECORD])))
    lines = ((rule, number, line) for rule, rest in found for number, line in enumerate(rest.splitlines(), 1))
    return [(number, match[0]) for rule, number, line in lines for match in rule.finditer(line)]


def _digits(text: str) -> str:
    """A page with a blank for each digit that `RULES` cover."""
    spans = [match.span() for rule in _RULES for match in rule.finditer(text)]
    characters = list(text)
    for start, end in spans:
        characters[start:end] = [" " if character.isdigit() else character for character in characters[start:end]]
    return "".join(characters)


def check(page: str, text: str) -> str:
    """A page as the records have it.

    Raises AnalysisError for a figure or a comparative that nothing computes.
    """
    new = rewritten(page, text)
    if left := typed(page, new):
        line, figure = left[0]
        raise AnalysisError(f"{page}:{line}: nothing computes '{figure}'; put it between markers, or leave it out.")
    return new


def readme(write: bool) -> str:
    """Compares the pages with the records, or updates them; returns the result in one line."""
    from vramlab_analysis import output, samples

    unbuilt = samples.check()
    left = f"; not built, so not compared with its sample: {', '.join(unbuilt)}" if unbuilt else ""
    old = pages()
    new = {name: check(name, text) for name, text in old.items()}
    stale = [name for name in old if old[name] != new[name]]
    if not stale:
        return f"{len(old)} pages agree with the records and the programs{left}"
    if not write:
        name = stale[0]
        lines = zip(old[name].splitlines(), new[name].splitlines(), strict=False)
        first = next(number for number, (a, b) in enumerate([*lines, ("", " ")], 1) if a != b)
        raise AnalysisError(f"{name}:{first}: differs from the records; `vramlab-analysis readme --write` updates it.")
    for name in stale:
        output.write(repository.root() / name, new[name])
    return f"wrote {' and '.join(stale)}{left}"
