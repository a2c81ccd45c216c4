"""Holds the documents to the records: every figure in them is computed, or is a version, a name, a date or a command.

A *piece* of a page is a table, a row of one, an item of a list or a paragraph. It is found by the words that it opens
with, and computed whole (`quoted`). What stands outside of pieces has no figures, but for what `RULES` name.

From the repository's root: `vramlab-analysis readme` compares pages and records; `--write` puts the pieces there.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from functools import cache

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError

# Pieces by the words that they open with; None where it cannot be told here, as without the history of the repository.
Pieces = Mapping[str, Callable[[], str | None]]
# What may have digits in it and is no figure.
RULES = {
    "a block of code; what `text` blocks show is compared with what programs print": r"^```[^`]*?^```$",
    "an indented block of commands": r"(?<=\n\n)(?: {4}.*\n)+",
    "code within a line": r"`[^`\n]+`",
    "the target of a link": r"\]\([^)\n]*\)|https?://\S+",
    "the number of a notebook": r"\[\d\d\](?=\(|_)|\b[Nn]otebooks? (?:\d\d(?:, | and )?)+",
    "the number of an item": r"^\d+\. ",
    "a date": r"\b20\d\d-\d\d-\d\d\b",
    "a version": r"\b(?:PyTorch|Rust|CUDA|Python|Linux|RMM|driver|protocol|compute capability)[ \n]\(?\d+(?:\.\d+)*",
    "a version in the table of versions": r"^\| 2\.\d+(?= )",
    "a commit": r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,40}\b",
    "an exit code": r"\bexit code \d+",
    "a name": r"\bApache-2\.0|\b[A-Za-z][A-Za-z_]*-?\d+\w*\b|\b(?:16|32|64)(?: bits?|-bit)\b",
}
_RULES = [re.compile(rule, re.MULTILINE) for rule in RULES.values()]
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@cache
def names() -> tuple[str, ...]:
    """The pages that are held to the records, from the repository's root."""
    root = repository.root()
    folder = root / "experiments"
    pages = [
        root / "README.md",
        root / "ARCHITECTURE.md",
        root / "app" / "README.md",
        *sorted(folder.glob("*.md")),
        *sorted(folder.glob("notes/*.md")),
    ]
    return tuple(str(page.relative_to(root)) for page in pages)


def pages() -> dict[str, str]:
    """The pages, by name."""
    return {name: (repository.root() / name).read_text() for name in names()}


@cache
def fresh() -> dict[str, dict[str, str | None]]:
    """What the records say for each piece of each page.

    Raises AnalysisError where a piece does not open with the words that it is found by, or is of no page.
    """
    from vramlab_analysis import quoted

    out: dict[str, dict[str, str | None]] = {}
    for page, pieces in quoted.PIECES.items():
        if page not in names():
            raise AnalysisError(f"{page}: figures are computed for it, and it is not there.")
        for opening, compute in pieces.items():
            text = compute()
            if text is not None and not text.startswith(opening):
                raise AnalysisError(f"{page}: what is computed for '{opening}' opens with '{text[:40]}'.")
            out.setdefault(page, {})[opening] = None if text is None else _folded(text)
    return out


def _folded(text: str) -> str:
    """A piece as it stands on the page: tables as they are, sentences in lines of at most 120 characters."""
    if text.startswith("|"):
        return text.rstrip("\n") + "\n"
    rest = "  " if text.startswith("- ") else ""
    words = textwrap.fill(text, 120, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
    return words + "\n"


def _place(page: str, text: str, opening: str, piece: str | None) -> re.Match[str]:
    """Where a piece stands on its page."""
    opens = "^" + re.escape(opening)
    if not opening.startswith("|"):
        rest = r"(?:  .*\n)*" if opening.startswith("- ") else r"(?:(?!\n|[-|#] |```).*\n)*"
        found = list(re.finditer(opens + r".*\n" + rest, text, re.MULTILINE))
    else:
        row = piece is not None and piece.count("\n") == 1
        found = list(re.finditer(opens + (r".*\n" if row else r".*\n(?:\|.*\n)*"), text, re.MULTILINE))
    if len(found) != 1:
        raise AnalysisError(f"{page}: has {len(found)} places for what opens with '{opening}', which should be one.")
    return found[0]


def rewritten(page: str, text: str) -> str:
    """A page with its pieces as the records have them.

    Raises AnalysisError when a piece has no place on the page, or two.
    """
    for opening, piece in fresh().get(page, {}).items():
        place = _place(page, text, opening, piece)
        if piece is not None:
            text = text[: place.start()] + piece + text[place.end() :]
    return text


def plain(page: str, text: str) -> str:
    """A page with a blank for every digit that a rule or a piece accounts for."""
    hidden = [_place(page, text, opening, piece).span() for opening, piece in fresh().get(page, {}).items()]
    hidden += [match.span() for rule in _RULES for match in rule.finditer(text)]
    characters = list(text)
    for start, end in hidden:
        characters[start:end] = [" " if one.isdigit() else one for one in characters[start:end]]
    return "".join(characters)


def typed(page: str, text: str) -> list[tuple[int, str]]:
    """Figures of a page that nothing computes: line, and figure."""
    lines = plain(page, text).splitlines()
    return [(number, match[0]) for number, line in enumerate(lines, 1) for match in _NUMBER.finditer(line)]


def check(page: str, text: str) -> str:
    """A page as the records have it.

    Raises AnalysisError for a figure that nothing computes.
    """
    new = rewritten(page, text)
    if left := typed(page, new):
        line, figure = left[0]
        raise AnalysisError(
            f"{page}:{line}: nothing computes {figure}; add it to the pieces of the page, or leave it out."
        )
    return new


def readme(write: bool) -> str:
    """Compares the documents with the records, or puts their figures there; what was found, in one line."""
    from vramlab_analysis import output, samples

    unbuilt = samples.check()
    left = f"; not built, so not compared with its sample: {', '.join(unbuilt)}" if unbuilt else ""
    unknown = [opening for pieces in fresh().values() for opening, piece in pieces.items() if piece is None]
    left += f"; cannot be told here: what opens with '{', '.join(unknown)}'" if unknown else ""
    old = pages()
    new = {name: check(name, text) for name, text in old.items()}
    stale = [name for name in old if old[name] != new[name]]
    if not stale:
        return f"{len(old)} pages say what the records and the programs say{left}"
    if not write:
        name = stale[0]
        pairs = zip(old[name].splitlines(), new[name].splitlines(), strict=False)
        first = next(number for number, (a, b) in enumerate([*pairs, ("", " ")], 1) if a != b)
        raise AnalysisError(f"{name}:{first}: is not what the records say; `vramlab-analysis readme --write` mends it.")
    for name in stale:
        output.write(repository.root() / name, new[name])
    return f"wrote {' and '.join(stale)}{left}"
