"""Renews the measured figures of README.md and docs/ from benchmarks/results/, and finds those that have no source.

    make figures

A table between `<!-- figures: NAME -->` and `<!-- /figures -->` is written by the function NAME of figure_speeds.py or
figure_outcomes.py. A sentence of figure_sentences.py is found in its page by its words, and its numbers are replaced.
Any other number that looks measured must be named in figure_exceptions.py, otherwise it is an error.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator

import figure_outcomes  # noqa: F401  # registers its tables
import figure_speeds  # noqa: F401
from figure_exceptions import CONSTANTS, OTHER_TABLES
from figure_sentences import SENTENCES
from figure_values import ROOT, TABLES

PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,])[−-]?\d+(?:,\d{3})*(?:\.\d+)?")
_REFERENCE = re.compile(r"<!-- reference: .*?<!-- /reference -->", re.DOTALL)  # from the code: tools/reference.py
_HIDDEN = re.compile(r"^```.*?^```$|<!--.*?-->|`[^`\n]*`|(?<=\])\([^)]*\)", re.DOTALL | re.MULTILINE)

# A number may be measured if it has decimals, a unit, or at least three digits and no noun of a setting behind it.
# Years, versions (torch 2.11) and sizes (64 × 512) are not.
_INTEGER = r"\d+(?:,\d{3})*(?![\d.,]*\d)"
_UNIT = r"\s*(?:%|×(?!\s*\d)|(?:[KMG]i?B|M|W|ms|s|µs|hours|million|minutes|seconds|times)\b|[a-z]+/s\b|of\s\d)"
_SETTING = (
    r"(?:\s+(?:million|consecutive|concurrent|evaluation|more|output|random|small|training)){0,2}"
    r"\s+(?:candidates|cores|days|entries|environments?|episodes?|features|iterations?|outputs|pages|processes|requests"
    r"|runs|samples?|seeds|steps?|tasks|tests|transitions|updates?|workers)\b(?! per|/s)"
)
_MEASURED = re.compile(
    r"(?<![\w.,×/-])(?<!torch )(?<!Python )(?<!SciPy )[−-]?(?:"
    r"\d+(?:,\d{3})*\.\d+(?!\.?\d)"
    rf"|(?<!×\s){_INTEGER}(?={_UNIT})(?!{_SETTING})"
    rf"|(?<!×\s)(?!(?:19|20)\d\d\b)(?=\d(?:,?\d){{2}}){_INTEGER}(?!{_SETTING})(?!\s×)"
    r")"
)
_CELL = re.compile(r"(?<=\| )[−-]?\d[^|]*(?= \|)")  # of a table: it starts with a number


def renewed(page: str, text: str) -> str:
    """The page with its tables and sentences as the results have them."""

    def written(block: re.Match[str]) -> str:
        if block[2] not in TABLES:
            raise ValueError(f"{page}: no function in tools/ writes the table {block[2]!r}.")
        return f"{block[1]}{_linked(page, TABLES[block[2]]())}\n{block[4]}"

    text = _BLOCK.sub(written, text)
    for sentence in SENTENCES.get(page, list)():
        found = _place(page, text, sentence)
        parts, end = [], found.start()
        for i, value in enumerate(_NUMBER.findall(sentence), 1):
            parts += [text[end : found.start(i)], value]
            end = found.end(i)
        text = text[: found.start()] + "".join(parts) + text[end:]
    return text


def untied(page: str, text: str) -> list[str]:
    """One message for each number that looks measured, but is neither from a result nor a known exception."""
    free = _masked(text, (block.span() for block in _BLOCK.finditer(text)))
    free = _masked(free, (block.span() for block in _REFERENCE.finditer(free)))
    free = _masked(free, (_place(page, text, sentence).span() for sentence in SENTENCES.get(page, list)()))
    free = _masked(free, (span for words in CONSTANTS.get(page, ()) for span in _spans(page, text, words)))
    free = _masked(free, _other_tables(free))
    free = _masked(free, (hidden.span() for hidden in _HIDDEN.finditer(free)))
    found: set[tuple[int, str]] = set()
    for pattern in (_MEASURED, _CELL):
        found |= {(free.count("\n", 0, match.start()) + 1, match[0]) for match in pattern.finditer(free)}
    advice = "write it with tools/figure_sentences.py or a table, or name it in tools/figure_exceptions.py"
    return [f"{page}:{line}: {figure} has no source; {advice}." for line, figure in sorted(found)]


def _place(page: str, text: str, sentence: str) -> re.Match[str]:
    """Where the page has this sentence, with any numbers (a group each) and any line breaks."""
    words = _NUMBER.split(sentence)
    pattern = rf"({_NUMBER.pattern})".join(re.escape(part).replace(r"\ ", r"\s+") for part in words)
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        advice = "one is needed: change the page or tools/figure_sentences.py."
        raise ValueError(f"{page} has {len(found)} places like {sentence!r}; {advice}")
    return found[0]


def _spans(page: str, text: str, words: str) -> Iterator[tuple[int, int]]:
    """Each place with exactly these words."""
    spans = [match.span() for match in re.finditer(re.escape(words).replace(r"\ ", r"\s+"), text)]
    if not spans:
        raise ValueError(f"{page} no longer has {words!r}; remove it from tools/figure_exceptions.py.")
    yield from spans


def _other_tables(text: str) -> Iterator[tuple[int, int]]:
    for table in re.finditer(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        if table[0].splitlines()[0] in OTHER_TABLES:
            yield table.span()


def _masked(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """The text with these parts blank; lines stay where they are."""
    for start, end in spans:
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text


def _linked(page: str, block: str) -> str:
    """Lines of prose wrapped, and links, which are relative to the root in a table, relative to the page."""
    if page.startswith("docs/"):
        block = block.replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/")
    lines = [
        line if line.startswith("|") else textwrap.fill(line, 120, break_on_hyphens=False)
        for line in block.splitlines()
    ]
    return "\n".join(lines)


def main() -> None:
    """Rewrite the pages, then list what has no source."""
    problems: list[str] = []
    for page in PAGES:
        path = ROOT / page
        try:
            text = renewed(page, path.read_text())
            path.write_text(text)
            problems += untied(page, text)
        except ValueError as problem:
            problems.append(str(problem))
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
