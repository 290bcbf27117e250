"""Measured figures of README.md and docs/: each is that of a result, or known not to be measured."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
from paths import BENCHMARKS, ROOT

sys.path.insert(0, str(ROOT / "tools"))
import figure_delivered
import figure_speeds
import figure_values
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


def delivered_json(*presets: str) -> dict[str, Any]:
    """A made-up delivered.json: beast's fastest SB3 is on the GPU, the others' on the CPU."""
    machine = {
        "date": "2026-11-20",
        "cpu": "made up",
        "cores": 16,
        "gpu": "NVIDIA H200",
        "versions": {"torch": "9.9.9"},
    }
    rates = {"delivered": [40_000, 50_000], "off": [45_000], "loop": [50_000], "sb3 cuda": [5000], "sb3 cpu": [6000]}
    made_up: dict[str, Any] = {}
    for preset in presets:
        sides = {side: rate for side, rate in rates.items() if side != "off" or preset == "beast"}
        if preset == "beast":
            sides["sb3 cpu"] = [3000]
        runs = {side: [{"steps_per_second": float(one)} for one in rate] for side, rate in sides.items()}
        medians = {
            side: {"steps_per_second": sum(rate) / len(rate), "gpu_percent": 25.0, "start_up": 7.5}
            for side, rate in sides.items()
        }
        sb3 = "sb3 cuda" if preset == "beast" else "sb3 cpu"
        best = medians[sb3]["steps_per_second"]
        ratios = {side: medians[side]["steps_per_second"] / best for side in ("delivered", "off") if side in medians}
        made_up[preset] = {
            "machine": machine,
            "runs": runs,
            "medians": medians,
            "sb3": sb3,
            "ratio": 0.9,
            "times_sb3": ratios,
        }
    return made_up


def test_rows_of_measured_presets_are_what_unidle_train_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = delivered_json("heavy", "beast")
    monkeypatch.setattr(figure_delivered, "results", lambda name: made_up)
    rows = TABLES["speed-on-a-gpu"]().splitlines()
    fast, heavy, beast, off, wide = rows[2:7]
    before = TEXTS["docs/benchmarks.md"].splitlines()
    assert fast in before
    full = "`unidle train` with evaluation, checkpoints and TensorBoard"
    assert heavy == (
        f"| HalfCheetah-v5, preset `heavy`: {full} | 45,000 (40,000 to 50,000; NVML 25 %) "
        "| 6,000 on the CPU (NVML 25 %) | 7.5 times faster |"
    )
    assert "| 45,000 (40,000 to 50,000; NVML 25 %) | 5,000 (NVML 25 %) | 9.0 times faster |" in beast
    assert off == "| the same with `--overlap off` | 45,000 (NVML 25 %) | 5,000 (NVML 25 %) | 9.0 times faster |"
    assert "training loop only" in wide
    assert "(benchmarks/results/delivered.json)" in rows[-3]
    assert "2026-11-20" in rows[-3]
    assert "reaches 0.90 (`heavy`), 0.90 (`beast`) of the speed of the training loop" in rows[-3]
    assert "45,000 steps/s | 5,000 steps/s, Stable-Baselines3 | [9.0 ×]" in TABLES["speed-in-short"]()
    assert "PPO trains [9.0 times]" in figures.renewed("README.md", TEXTS["README.md"])


@pytest.mark.parametrize("missing", ["sb3 cpu", "sb3 cuda", "off", "loop", "delivered"])
def test_preset_that_is_not_completely_measured_keeps_its_row(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    made_up = delivered_json("beast")
    del made_up["beast"]["runs"][missing]
    before = TABLES["speed-on-a-gpu"]()
    monkeypatch.setattr(figure_delivered, "results", lambda name: made_up)
    assert TABLES["speed-on-a-gpu"]() == before


def test_faster_generator_counts_as_jax_and_share_of_rsl_rl_environment_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = copy.deepcopy(figure_speeds.results("gpu_resident"))
    for size in measured["n_envs"].values():
        size["jax"], size["jax-rbg"] = ([{"steps_per_second": rate, "jax": "0.99.0"}] for rate in (20e6, 40e6))
        size["rsl-rl"] = [{"steps_per_second": 1e6, "environment_share": 0.1, "rsl-rl-lib": "9.9"}]
    monkeypatch.setattr(
        figure_speeds, "results", lambda name: measured if name == "gpu_resident" else figure_values.results(name)
    )
    assert "steps/s | 40.0 M steps/s, PureJaxRL-style JAX" in TABLES["speed-in-short"]()
    table = TABLES["cartpole-on-a-gpu"]()
    assert "JAX 0.99, rbg, gymnax | 40.0 M" in table
    assert "RSL-RL 9.9, its own settings, captured environment, which takes 10 % and 10 % of the time | 1.0 M" in table


def test_crawling_is_compared_with_fastest_sb3_and_all_sides_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = copy.deepcopy(figure_speeds.results("io_bound_gpu"))
    ours = measured["sides"]["unidle 2048"]
    for name, rate in {"sb3 128 selectolax": 2_000, "sb3 512 selectolax": 3_000, "unidle 2048 no cache": 6_000}.items():
        measured["sides"][name] = {**ours, "steps_per_second": rate}
    ours["steps_per_second"] = 9_000
    monkeypatch.setattr(
        figure_speeds, "results", lambda name: measured if name == "io_bound_gpu" else figure_values.results(name)
    )
    short = TABLES["speed-in-short"]()
    assert "2,048 concurrent episodes against 512 processes with selectolax" in short
    assert "9,000 steps/s | 3,000 steps/s, Stable-Baselines3 | [3.0 ×]" in short
    assert (
        "against 512 processes with selectolax, network and epochs of `max-gpu` | 9,000" in TABLES["speed-on-a-gpu"]()
    )
    table = TABLES["crawling-on-a-gpu"]().splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in table[2:8]] == [
        "SB3, 32 processes",
        "SB3, 128 processes, selectolax",
        "SB3, 512 processes, selectolax",
        "512 episodes",
        "2,048 episodes",
        "2,048 episodes, `keep_pages: false`",
    ]
    assert table[7].startswith("| 2,048 episodes, `keep_pages: false` | 6,000 | 2.0 × |")


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
