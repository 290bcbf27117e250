"""Measured figures of README.md and docs/: each is that of a result, or known not to be measured."""

from __future__ import annotations

import re
import sys

import pytest
from paths import BENCHMARKS, ROOT

sys.path.insert(0, str(ROOT / "tools"))
import figures
from figure_exceptions import CONSTANTS, OTHER_TABLES
from figure_sentences import SENTENCES, fell_back
from figure_values import TABLES

TEXTS = {page: (ROOT / page).read_text() for page in figures.PAGES}


@pytest.mark.parametrize("page", figures.PAGES)
def test_figures_are_those_of_results(page: str) -> None:
    assert figures.renewed(page, TEXTS[page]) == TEXTS[page], "run `make figures`"


@pytest.mark.parametrize("page", figures.PAGES)
def test_every_number_that_looks_measured_has_a_source(page: str) -> None:
    assert figures.untied(page, TEXTS[page]) == []


def test_every_table_and_exception_is_used() -> None:
    used = [name for text in TEXTS.values() for name in re.findall(r"<!-- figures: ([\w-]+) -->", text)]
    assert sorted(used) == sorted(TABLES)
    lines = {line for text in TEXTS.values() for line in text.splitlines()}
    assert lines >= OTHER_TABLES
    assert TEXTS.keys() >= CONSTANTS.keys() | SENTENCES.keys()


@pytest.mark.parametrize("name", sorted(TABLES.keys() - {"speed-in-short"}))
def test_table_names_script_results_machine_and_date(name: str) -> None:
    sources = TABLES[name]().partition("\n\n")[2].splitlines()
    assert sources
    for source in sources:
        scripts, files = (
            re.findall(r"\(benchmarks/(\w+\.py)\)", source),
            re.findall(r"\(benchmarks/results/(.+?)\)", source),
        )
        assert len(scripts) == len(files) == 1
        assert (BENCHMARKS / scripts[0]).exists()
        assert (BENCHMARKS / "results" / files[0]).exists()
        assert re.search(r": .+ cores.*, \d{4}-\d\d-\d\d", source)


def test_each_row_of_the_short_table_links_to_a_section_with_its_source() -> None:
    _, _, *rows = TABLES["speed-in-short"]().splitlines()
    assert 0 < len(rows) <= 5
    for row in rows:
        page, heading = re.search(r"\((docs/[\w-]+\.md)#([\w-]+)\) \|$", row).groups()
        sections = re.split(r"^##+ (.+)\n", TEXTS[page], flags=re.MULTILINE)
        text = dict(zip((title.lower().replace(" ", "-") for title in sections[1::2]), sections[2::2]))[heading]
        assert re.search(r"^Measured by .+ \d{4}-\d\d-\d\d", text, re.MULTILINE | re.DOTALL), row


# A changed figure is found and set right, in a table, a sentence, and a sentence with a line break in it.
@pytest.mark.parametrize(
    ("page", "figure", "other"),
    [
        ("README.md", "| [10.4 ×]", "| [14.0 ×]"),
        ("README.md", "13.2 times if it also", "31.2 times if it\nalso"),
        ("docs/benchmarks.md", "| −82.9 |", "| 82.9 |"),
        ("docs/benchmarks.md", "2,613 against 80", "9,613 against 80"),
        ("docs/off-policy.md", "1,574 against 76 at 1,280", "1,574\nagainst 75 at 1,280"),
        ("docs/overlap.md", "lower bound of −7.3", "lower bound of 7.3"),
    ],
)
def test_changed_figure_is_set_right(page: str, figure: str, other: str) -> None:
    assert figure in TEXTS[page]
    changed = TEXTS[page].replace(figure, other)
    assert figures.renewed(page, changed).split() == TEXTS[page].split()


@pytest.mark.parametrize(
    "text",
    [
        "Training is 3 times faster.",
        "A speed-up of 3 ×.",
        "It makes 12 steps/s.",
        "It makes 12,500 steps per second.",
        "The GPU is busy 40 % of the time.",
        "An update takes 2 ms, a run 5 minutes.",
        "Returns rise to 643.",
        "Returns rise to −82.9.",
        "It needs 2 GiB.",
        "It takes\n12\nseconds.",
        "| HalfCheetah-v5 | 12 |",
        "| HalfCheetah-v5 | 7 to 9 |",
    ],
)
def test_new_figure_without_source_is_found(text: str) -> None:
    [*found] = figures.untied("docs/new.md", f"# New\n\n{text}\n")
    assert found
    assert re.match(r"docs/new\.md:[3-5]: .* has no source; write it .* or name it in tools/", found[0])


@pytest.mark.parametrize(
    "text",
    [
        "After 100,000 steps of 64 environments (2026-11-19, torch 2.11.0, Python 3.11), 1024 × 32, 50 seeds.",
        "Run `unidle train --timesteps 4000000`.",
        "```text\n3,206 steps/s\n```",
        "See [results](results/2.5.json), McLean et al. 2025, `| 12 |`.",
        "| `n_envs` | number of environments |",
    ],
)
def test_settings_code_dates_and_versions_are_no_figures(text: str) -> None:
    assert figures.untied("docs/new.md", f"# New\n\n{text}\n") == []


def test_unknown_table_and_missing_sentence_are_named() -> None:
    with pytest.raises(ValueError, match=r"docs/new\.md: no function in tools/ writes the table 'nothing'\."):
        figures.renewed("docs/new.md", "<!-- figures: nothing -->\n<!-- /figures -->\n")
    with pytest.raises(ValueError, match=r"docs/tune\.md has 0 places like 'went from .*'; one is needed: change"):
        figures.renewed("docs/tune.md", TEXTS["docs/tune.md"].replace("went from", "rose from"))


def test_exception_that_is_gone_is_named() -> None:
    with pytest.raises(ValueError, match=r"docs/spaces\.md no longer has 'divided by 255'; remove it from tools/"):
        figures.untied("docs/spaces.md", TEXTS["docs/spaces.md"].replace("divided by 255", "divided"))


@pytest.mark.parametrize(
    ("training", "fell"),
    [
        ([80.0, 500.0, 380.0, 500.0], True),
        ([80.0, 495.0, None, 399.0], True),
        ([80.0, 500.0, 420.0, 500.0], False),
        ([80.0, 494.0, 380.0, 500.0], False),
        ([500.0, 500.0], False),
        ([None, None], False),
    ],
)
def test_policy_fell_back_if_mean_drops_after_it_had_solved_task(training: list[float | None], fell: bool) -> None:
    assert fell_back(training) is fell
