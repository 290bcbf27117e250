"""The report page and the terminal summary, compared with the records of a run."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard_runs import segment, write_lines
from report_pages import Page
from rich.console import Console

from unidle.config import Config
from unidle.errors import UsageError
from unidle.report.gpu_use import read_gpu_shares
from unidle.report.history import history_of, read_history
from unidle.report.page.report import write_report
from unidle.report.terminal.summary import print_summary


def run_folder(folder: Path, records: list[dict[str, Any]], **values: Any) -> Path:
    defaults = {"env": "CartPole-v1", "timesteps": 4000, "n_steps": 1000, "overlap": "off"}
    config = Config().with_values({**defaults, **values}, "test")
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return folder


def iteration(i: int, **extra: Any) -> dict[str, Any]:
    return {
        "kind": "iteration",
        "step": 1000 * i,
        "iteration": i,
        "wall": 2.0 * i,
        "rollout/return_mean": 20.5 + i,
        "rollout/steps_per_second": 500.0,
        "train/policy_loss": -0.01 / i,
        "train/value_loss": 3.0 / i,
        "time/environment": 1.2 * i,
        "time/inference": 0.2 * i,
        "time/learn": 0.5 * i,
        "time/other": 0.1 * i,
        **extra,
    }


def fault(step: int, kind: str) -> dict[str, Any]:
    text = "Environment 3 failed: <b>\nTraceback (most recent call last):\n"
    return {"kind": "fault", "step": step, "env": 3, "fault": kind, "text": text}


def evaluation(step: int, mean: float, std: float) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "step": step,
        "wall": step / 500,
        "eval/return_mean": mean,
        "eval/return_std": std,
        "eval/episodes": 10,
    }


RECORDS = [
    iteration(1),
    iteration(2),
    evaluation(2000, 180.25, 12.5),
    iteration(3),
    iteration(4),
    evaluation(4000, 150.75, 30.25),
]


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def summary_of(folder: Path) -> str:
    console = Console(width=60, record=True, file=io.StringIO())
    print_summary(console, folder)
    return console.export_text()


def test_key_figures_match_records(tmp_path: Path) -> None:
    figures = page_of(run_folder(tmp_path, RECORDS)).figures()
    assert figures["Steps"] == ("4,000", "100 % of 4k")
    assert figures["Wall time"][0] == "8.0 s"
    assert figures["Steps per second"][0] == "500"
    assert figures["Best evaluation"] == ("180.25", "± 12.50 at step 2k")
    assert figures["Final evaluation"] == ("150.75", "± 30.25 at step 4k")
    assert figures["Training return"][0] == "24.50"


def test_return_is_plotted_against_steps_and_wall_time(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, RECORDS))
    tips = page.of("title")
    assert "environment steps: 3,000\ntraining, last 100 episodes: 23.5" in tips
    assert "wall time (s): 6\ntraining, last 100 episodes: 23.5" in tips
    assert "environment steps: 2,000\nevaluation: 180.25" in tips
    assert "wall time (s): 4\nevaluation: 180.25" in tips


def test_time_is_shown_as_shares_per_phase(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, RECORDS))
    tips = page.of("title")
    shares = ["environment: 60 %", "inference: 10 %", "learn: 25 %", "other: 5.0 %"]
    assert [tip for tip in tips if tip in shares] == shares
    assert "environment steps: 3,000\n" + "\n".join(shares) in tips


def test_unattributed_time_is_shown(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, [iteration(1, wall=2.5)]))
    assert "unattributed: 20 %" in page.of("title")


def test_shares_over_time_are_per_interval(tmp_path: Path) -> None:
    parts = ("environment", "inference", "learn", "other")
    spent = [(2.0, 0.0, 0.0, 0.0), (2.0, 0.0, 2.0, 0.0)]  # first only stepping, then only learning
    records = [
        iteration(i + 1, **{f"time/{part}": seconds for part, seconds in zip(parts, row)})
        for i, row in enumerate(spent)
    ]
    tips = page_of(run_folder(tmp_path, records)).of("title")
    assert "environment steps: 1,000\nenvironment: 100 %\ninference: 0 %\nlearn: 0 %\nother: 0 %" in tips
    assert "environment steps: 2,000\nenvironment: 0 %\ninference: 0 %\nlearn: 100 %\nother: 0 %" in tips


def test_only_recorded_metrics_are_plotted(tmp_path: Path) -> None:
    records = [iteration(1, **{"train/entropy": 0.6}), iteration(2, **{"train/entropy": None})]
    titles = page_of(run_folder(tmp_path, records)).of("text", "chart-title")
    assert {"Policy loss", "Value loss", "Entropy"} <= set(titles)
    assert "Clip fraction" not in titles


@pytest.mark.parametrize(
    ("metrics", "titles"),
    [
        (("critic_loss", "value", "actor_loss", "entropy", "temperature"), ("Critic loss", "Entropy coefficient")),
        (("loss", "value", "epsilon"), ("Loss", "Q value", "Epsilon")),
    ],
)
def test_off_policy_learning_is_plotted_from_the_first_update(
    metrics: tuple[str, ...], titles: tuple[str, ...], tmp_path: Path
) -> None:
    filling = iteration(1, **{f"train/{name}": 0.0 for name in (*metrics, "updates")})
    learning = [
        iteration(i, **{f"train/{name}": 7.0 + i for name in metrics}, **{"train/updates": 8.0}) for i in (2, 3, 4)
    ]
    page = page_of(run_folder(tmp_path, [filling, *learning]))
    assert set(titles) <= set(page.of("text", "chart-title"))
    tips = [tip for tip in page.of("title") if "Q value" in tip]
    assert tips
    assert not any("environment steps: 1,000" in tip for tip in tips)


@pytest.mark.parametrize(("count", "remarks"), [(99, 0), (100, 2)])
def test_line_styles_are_explained_only_where_they_are_used(count: int, remarks: int, tmp_path: Path) -> None:
    write_report(run_folder(tmp_path, [iteration(i + 1) for i in range(count)]))
    page = (tmp_path / "report.html").read_text()
    assert page.count("faint: each iteration; bold: running mean") == remarks  # speed and learning
    assert ('class="line faint' in page) == bool(remarks)
    assert "one standard deviation" not in page  # there are no evaluations


def test_settings_of_other_algorithms_are_left_out(tmp_path: Path) -> None:
    """Versions in which all algorithms shared their settings wrote those of all."""
    folder = run_folder(tmp_path, [iteration(1)])
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["recipe"] |= {"buffer_size": 1_000_000, "tau": 0.005}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert ">clip_range<" in page
    assert ">buffer_size<" not in page
    assert ">tau<" not in page


def test_config_is_shown_completely_by_section(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [], env_kwargs={"gravity": -9.8}, net_arch=[128, 64])
    page = page_of(folder)
    shown = dict(zip(page.of("th"), page.of("td")))
    assert list(shown) == list(Config().flat())
    assert shown["net_arch"] == "[128, 64]"
    assert shown["env_kwargs"] == "{gravity: -9.8}"
    assert (shown["target_kl"], shown["workers"], shown["overlap"]) == ("none", "auto", "off")
    assert page.of("h3") == ["recipe", "engine", "run"]


def test_page_of_run_without_records_says_so(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [])
    (folder / "metrics.jsonl").unlink()
    page = page_of(folder)
    assert page.of("p", "note") == ["No iteration has been recorded yet."]
    assert page.figures()["Steps"] == ("0", "0 % of 4k")
    assert page.figures()["Best evaluation"] == ("–", "none yet")


def test_incomplete_records_and_unknown_keys_are_tolerated(tmp_path: Path) -> None:
    bare = {"kind": "iteration", "step": 1000}
    unusual = iteration(2, **{"train/value_loss": float("nan"), "train/new": "text", "extra": [1]})
    nan_evaluation = {"kind": "evaluation", "step": 2000, "eval/return_mean": float("nan")}
    folder = run_folder(tmp_path, [bare, unusual, {"kind": "note", "step": 1}, nan_evaluation])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "iteration", "st')  # truncated by a kill
    page = page_of(folder)
    assert page.figures()["Training return"][0] == "22.50"
    assert page.figures()["Final evaluation"][0] == "–"


def test_faults_are_summarised_in_one_note(tmp_path: Path) -> None:
    without_faults = page_of(run_folder(tmp_path, RECORDS))
    faults = [fault(0, "killed"), fault(2000, "exception"), fault(4000, "exception"), fault(9000, "hung")]
    counts = {"faults/exception": 2, "faults/killed": 1}
    records = [faults[0], *RECORDS[:3], faults[1], RECORDS[3], {**RECORDS[4], **counts}, RECORDS[5], *faults[2:]]
    page = page_of(run_folder(tmp_path, records))
    [note] = page.of("p", "note")
    assert "2 × exception or NaN, 1 × worker killed, 1 × worker hung" in note
    assert "metrics.jsonl" in note
    assert not without_faults.of("p", "note")
    assert page.figures() == without_faults.figures()
    assert page.of("title") == without_faults.of("title")
    assert page.of("text", "chart-title") == without_faults.of("text", "chart-title")


def test_page_of_run_with_only_faults(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, [fault(0, "killed"), {"kind": "fault", "step": 0}]))
    assert "1 × worker killed" in page.of("p", "note")[0]
    assert page.of("p", "note")[1] == "No iteration has been recorded yet."
    assert page.figures()["Steps"][0] == "0"


@pytest.mark.parametrize("overlap", ["off", "strict"])
def test_page_and_summary_show_overlap(overlap: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, RECORDS, overlap=overlap)
    page = page_of(folder)
    facts = dict(zip([text.strip() for text in page.of("span")], page.of("b")))
    assert facts["overlap"] == overlap
    assert re.search(rf"^overlap +{overlap}$", summary_of(folder), re.MULTILINE)


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    markup = '<script>alert("1")</script>&amp;'
    folder = run_folder(tmp_path, RECORDS, env=markup, run_name=markup, env_kwargs={markup: markup})
    text = write_report(folder).read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text
    assert page.of("h1") == [markup]
    assert markup in page.of("b")


def test_page_loads_no_external_resources(tmp_path: Path) -> None:
    text = write_report(run_folder(tmp_path, RECORDS)).read_text(encoding="utf-8")
    page = Page(text)
    assert not {name for name, _ in page.attributes} & {"src", "href", "data", "srcset", "onload"}
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, not fetched
    assert not re.search(r"@import|url\((?!#)", text)  # except its own hatch patterns


def test_page_is_replaced_atomically_without_temporary_files(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, RECORDS[:1])
    assert write_report(folder) == folder / "report.html"
    before = (folder / "report.html").stat().st_ino
    run_folder(folder, RECORDS)
    assert page_of(folder).figures()["Steps"][0] == "4,000"
    assert (folder / "report.html").stat().st_ino != before
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "report.html"}


def test_report_of_non_run_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.yaml"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_terminal_summary_shows_key_figures_and_full_paths(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, RECORDS)
    checkpoint = folder / ("long-" * 20) / "best.pt"
    console = Console(width=60, record=True, file=(tmp_path / "out").open("w"))
    print_summary(console, folder, report=folder / "report.html", checkpoint=checkpoint)
    lines = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in console.export_text().splitlines()}
    assert lines["steps"] == "4,000 in 8.0 s"
    assert lines["speed"].startswith("500 steps/s")
    assert lines["best evaluation"] == "180.25 ± 12.50 at step 2k"
    assert lines["final evaluation"] == "150.75 ± 30.25 at step 4k"
    assert lines["time"] == "environment 60 %  inference 10 %  learn 25 %  other 5 %"
    assert lines["report"] == str(folder / "report.html")
    assert lines["checkpoint"] == str(checkpoint)


def test_wait_for_evaluations_is_the_same_everywhere(tmp_path: Path) -> None:
    """Training waited 1 s for evaluations in iterations, and 2 s at the end."""
    waits = {"time/evaluate": 1.0, "wall": 9.0}
    last = {
        **iteration(4, **waits),
        **evaluation(4000, 150.75, 30.25),
        **waits,
        "wall": 8.5,
        "eval/seconds_behind": 2.5,
    }
    history = read_history(run_folder(tmp_path, [iteration(1), iteration(4, **waits), last]))
    assert history.wall == 11.0
    assert history.seconds["evaluate"] == history.evaluation_wait == 3.0
    assert history.time_shares["evaluate"] == pytest.approx(3 / 11)
    lines = {line[:16].strip(): line[16:].strip() for line in summary_of(tmp_path).splitlines()}
    assert lines["waited"] == "3.0 s for evaluations"
    assert "evaluate 27 %" in lines["time"]


def test_terminal_summary_shows_gpu_use(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, RECORDS)
    memory = {"memory_bytes": 2 * 2**30, "memory_total_bytes": 140 * 2**30}
    write_lines(folder / "meter.jsonl", [segment(1, busy=0.2), segment(2, busy=0.5, readings=memory)])
    assert re.search(r"^GPU +busy 35 %   memory 2.00 of 140 GiB$", summary_of(folder), re.MULTILINE)
    shares = read_gpu_shares(folder)
    assert shares is not None
    assert {name: share for name, share in shares.items() if share} == pytest.approx(
        {"busy": 0.35, "environment": 0.325, "learn (launch)": 0.1625, "unattributed": 0.1625}
    )
    write_lines(folder / "meter.jsonl", [segment(1, gpu=None)])
    assert read_gpu_shares(folder) is None


def test_terminal_summary_of_new_run_omits_unknown_figures(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [])
    shown = [line.split("  ")[0] for line in summary_of(folder).splitlines()[2:]]
    assert shown == ["steps", "overlap"]


def test_terminal_summary_counts_faults_and_names_their_file(tmp_path: Path) -> None:
    summary = summary_of(run_folder(tmp_path, [*RECORDS, fault(1000, "hung"), fault(1000, "hung")]))
    [line] = [line for line in summary.splitlines() if line.startswith("faults")]
    assert line.split(maxsplit=1)[1] == f"2 × worker hung; see {tmp_path / 'metrics.jsonl'} for details"
    assert "faults" not in summary_of(run_folder(tmp_path, RECORDS))


# -- success and plasticity --------------------------------------------------------------------------------------------


def task_evaluation(step: int, push: float, reach: float, dormant: float) -> dict[str, Any]:
    return {
        **evaluation(step, 10.0, 1.0),
        "eval/success": (push + reach) / 2,
        "eval/success/push": push,
        "eval/success/reach": reach,
        "eval/return/push": 100 * push,
        "eval/return/reach": 100 * reach,
        "plasticity/critic/dormant": dormant,
        "plasticity/critic/rank": 40,
        "plasticity/critic/weight_norm/0": 3.5,
        "plasticity/critic/grad_norm/0": 0.25,
        "plasticity/actor/dormant": 0.5,
        "plasticity/actor/rank": 30,
    }


def test_success_is_plotted_and_listed_by_task(tmp_path: Path) -> None:
    page = page_of(
        run_folder(tmp_path, [iteration(1), task_evaluation(1000, 0.8, 0.1, 0.1), task_evaluation(2000, 0.5, 0.3, 0.2)])
    )
    assert page.figures()["Success"] == ("40 %", "final evaluation; best 45 %")
    assert page.figures()["Best evaluation"] == ("10.00", "± 1.00 at step 1k, success 45 %")
    assert "environment steps: 1,000\nevaluation: 45 %" in page.of("title")
    cells = page.of("td")[:6]
    assert cells == ["50 %", "80 %", "50.00", "30 %", "30 %", "30.00"]  # last and best success, and return
    assert page.of("th")[4:6] == ["push", "reach"]
    assert "Tasks at step 2k" in page.of("h3")
    assert "success 40 % at step 2k" in summary_of(tmp_path)


def test_best_evaluation_is_that_of_the_kept_policy(tmp_path: Path) -> None:
    """The mark in the records decides; without marks, success decides, then return."""
    one, two, three = (evaluation(1000 * i, mean, 1.0) for i, mean in ((1, 30.0), (2, 20.0), (3, 25.0)))
    marked = [{**one, "eval/best": True}, {**two, "eval/best": True}, {**three, "eval/best": False}]
    assert history_of(tmp_path, {}, marked).best_evaluation == marked[1]
    with_success = [{**r, "eval/success": success} for r, success in ((one, 0.1), (two, 0.5), (three, 0.5))]
    assert history_of(tmp_path, {}, with_success).best_evaluation == with_success[2]
    assert history_of(tmp_path, {}, [one, two, three]).best_evaluation == one


def test_plasticity_is_plotted_and_noted_above_threshold(tmp_path: Path) -> None:
    page = page_of(
        run_folder(
            tmp_path, [iteration(1), task_evaluation(1000, 0.5, 0.5, 0.45), task_evaluation(2000, 0.5, 0.5, 0.3)]
        )
    )
    assert {"Dormant neurons", "Feature rank"} <= set(page.of("text", "chart-title"))
    assert "environment steps: 1,000\ncritic: 45 %" in page.of("title")
    assert "environment steps: 1,000\nactor: 50 %" in page.of("title")
    assert "environment steps: 2,000\nlayer 0: 3.5" in page.of("title")
    assert not page.of("p", "note")
    page = page_of(run_folder(tmp_path, [iteration(1), task_evaluation(1000, 0.5, 0.5, 0.31)]))
    (note,) = page.of("p", "note")
    assert note.startswith("31% of the critic's neurons are dormant")


def test_dormant_neurons_are_not_reported_after_few_updates(tmp_path: Path) -> None:
    few, enough = ({**iteration(1), "train/n_updates": float(n)} for n in (9_999, 10_000))
    evaluated = task_evaluation(1000, 0.5, 0.5, 0.31)
    assert not page_of(run_folder(tmp_path, [few, evaluated])).of("p", "note")
    assert len(page_of(run_folder(tmp_path, [enough, evaluated])).of("p", "note")) == 1


def test_sections_without_success_or_plasticity_are_omitted(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, RECORDS))
    assert "Success" not in page.figures()
    assert not {"Success", "Plasticity"} & set(page.of("h2"))
