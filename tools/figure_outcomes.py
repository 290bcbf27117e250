"""Tables of what runs reach: returns, success, survival. Each function writes the block of its name."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from figure_values import number, results, rows, source, sourced, table

SIDES = ("unidle", "sb3")


def verdict(task: dict[str, Any]) -> str:
    """By the rule in README; a bound within 1 % of what is allowed may be chance."""
    if abs(task["lower_95"] - task["margin"]) < 0.01 * abs(task["margin"]):
        return "borderline"
    return "no worse" if task["no_worse"] else "inconclusive"


@table
def learning() -> str:
    """PPO's returns against SB3's."""
    return against_sb3("learning", "PPO: return")


@table
def off_policy_learning() -> str:
    """Returns of SAC, TD3 and DQN against SB3's."""
    return against_sb3("off_policy_learning", "return")


@table
def drop_in_learning() -> str:
    """Returns of one script with either import."""
    return against_sb3("drop_in", "return", "learning")


@table
def drop_in_speed() -> str:
    """Speed of one script with either import, on a CPU."""
    measured = results("drop_in")["speed cpu"]
    body = []
    for name, task in measured.items():
        speeds = [number(task[side]["steps_per_second"]) for side in ("unidle", "sb3", "sb3, 1 thread")]
        body.append([name, *speeds, f"{number(task['ratio'], 1)} ×"])
    heads = ["", "unidle, steps/s", "SB3, steps/s", "SB3 with one thread", "against the faster one"]
    return sourced(rows(heads, *body), source("drop_in.py", "drop_in", measured))


@table
def drop_in_cpu_time() -> str:
    """CPU time of one script with either import and the default settings, on one thread."""
    measured = results("drop_in")["cpu"]
    body = [
        [name.split()[0], *(f"{number(task[what]['ratio'], 1)} ×" for what in ("learn", "start"))]
        for name, task in measured.items()
    ]
    heads = ["default settings", "`learn`", "a script of 1,000 steps"]
    return sourced(rows(heads, *body), source("drop_in.py", "drop_in", measured))


@table
def sweep_quality() -> str:
    """What `unidle sweep` and rl-zoo's own search find with the same CPU time."""
    names = {"unidle": "`unidle sweep --at-once 8`", "rl-zoo": "rl-zoo's own search"}
    body = [
        [
            names[search["side"]],
            *(number(search["trials"].get(state, 0)) for state in ("complete", "pruned")),
            number(search["best_value"], 1),
            number(search["mean"], 1),
        ]
        for search in sorted(results("sweep_quality")["searches"], key=lambda each: each["side"] != "unidle")
    ]
    heads = [
        "CartPole-v1, one search per row",
        "finished trials",
        "pruned trials",
        "best trial",
        "trained again, 5 seeds",
    ]
    return sourced(rows(heads, *body), source("sweep_quality.py", "sweep_quality"))


@table
def sb3_suite() -> str:
    """How many of Stable-Baselines3's own tests pass, for each file."""
    result = results("sb3_suite")
    kinds = ("passed", "failed", "not applicable", "skipped")
    counts = {f"`test_{name}.py`": found["counts"] for name, found in result["files"].items()}
    counts["all"] = result["total"]
    return sourced(
        rows(
            ["tests of", "passed", "fail, with a reason", "not applicable", "skipped"],
            *([name, *(number(count.get(kind, 0)) for kind in kinds)] for name, count in counts.items()),
        ),
        source("sb3_suite.py", "sb3_suite"),
    )


_WORDS = {"ppo": "PPO", "sac": "SAC", "td3": "TD3", "dqn": "DQN", "gsde": "gSDE", "prioritised": "`--per`"}


def against_sb3(benchmark: str, head: str, part: str = "tasks") -> str:
    """A row for each task whose seeds are all done."""
    result = results(benchmark)
    judged = {name: task for name, task in result[part].items() if "no_worse" in task}
    return sourced(
        rows(
            [
                head,
                "steps",
                "seeds",
                "unidle",
                "SB3",
                "95 % lower bound of the difference",
                "margin",
                "verdict",
                "measured",
            ],
            *(
                [
                    task_name(name),
                    number(task["timesteps"]),
                    number(len(task["unidle"])),
                    *(number(task[key], 1) for key in ("unidle_iqm", "sb3_iqm", "lower_95", "margin")),
                    verdict(task),
                    machines(task, result)[-1]["date"],
                ]
                for name, task in judged.items()
            ),
        ),
        source(f"{benchmark}.py", benchmark, [machines(task, result) for task in judged.values()]),
    )


@table
def learning_in_full() -> str:
    """Every task and algorithm with intervals, means and tails."""
    algorithms = {"learning": "PPO, ", "off_policy_learning": ""}
    found = [
        (algorithm, name, task, machines(task, results(benchmark)))
        for benchmark, algorithm in algorithms.items()
        for name, task in results(benchmark)["tasks"].items()
    ]
    return sourced(
        rows(
            [
                *("", "steps", "seeds", "IQM: unidle", "SB3", "difference", "95 % interval", "margin", "verdict"),
                *("mean: unidle", "SB3", "worst tenth: unidle", "SB3", "measured"),
            ],
            *(
                [
                    task_name(name, algorithm),
                    number(task["timesteps"]),
                    number(task["seeds"]),
                    *(number(task[key], 1) for key in ("unidle_iqm", "sb3_iqm", "difference")),
                    f"{number(task['lower_95'], 1)} to {number(task['upper_95'], 1)}",
                    number(task["margin"], 1),
                    verdict(task),
                    *(number(task[f"{side}_{kind}"], 1) for kind in ("mean", "worst_decile") for side in SIDES),
                    measured[-1]["date"],
                ]
                for algorithm, name, task, measured in found
            ),
        ),
        *(
            source(f"{benchmark}.py", benchmark, [measured for of, *_, measured in found if of == algorithm])
            for benchmark, algorithm in algorithms.items()
        ),
    )


def task_name(name: str, algorithm: str = "") -> str:
    """Environment, algorithm and what is special: Pendulum-v1, SAC, `--per`."""
    env, _, rest = name.partition(" ")
    if rest == "without velocities":
        env, rest = f"{env} without velocities", "LSTM"
    words = ", ".join(_WORDS.get(word, word) for word in rest.split())
    return f"{env}, {algorithm}{words}".strip(", ")


def machines(task: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a row, the latest one last; a row without one was measured by the run that the file began with."""
    return task.get("machines") or [task.get("machine") or result["machine"]]


@table
def overlap_returns() -> str:
    """Returns with strict overlap and without."""
    names = {
        "HalfCheetah-v5 beast": "HalfCheetah-v5, `beast`",
        "HalfCheetah-v5 beast 1024x32": "HalfCheetah-v5, `beast` as 1024 × 32",
        "HalfCheetah-v5 beast, lambda 0.8": "HalfCheetah-v5, `beast` with `--gae-lambda 0.8`",
    }
    return sourced(
        rows(
            ["", "steps", "seeds", "strict", "off", ""],
            *(
                [
                    names.get(name, name),
                    number(task["settings"]["timesteps"]),
                    number(len(task["strict"])),
                    number(task["strict_iqm"], 1),
                    number(task["off_iqm"], 1),
                    verdict(task),
                ]
                for name, task in results("overlap")["tasks"].items()
            ),
        ),
        source("overlap.py", "overlap"),
    )


def success_at(run: dict[str, Any], steps: int) -> float:
    """The success rate of the evaluation at this step."""
    [success] = [one["eval/success"] for one in run["evaluations"] if one["step"] == steps]
    return float(success)


@table
def mt10_success() -> str:
    """Success on MT10 after 2 million steps."""
    presets = results("metaworld_training")["learning"]
    paper = results("metaworld_training")["paper"]["2000000"]
    body, successes = [], []
    for preset, seeds in presets.items():
        for i, (seed, run) in enumerate(seeds.items()):
            success = success_at(run, 2_000_000)
            body.append(
                [
                    "" if i else f"`{preset}`",
                    seed,
                    # Without --n-envs a preset has its own number.
                    number(run["n_envs"] or 32),
                    f"{number(success, 3)}",
                    number(run["evaluations"][-1]["eval/episodes"]),
                    "two runs at once" if run["at_once"] > 1 else number(run["steps_per_second"]),
                ]
            )
            if preset == "mt10-paper-1024":
                successes.append(success)
        if preset == "mt10-paper-1024":
            body.append(["", "mean", "", f"**{number(mean(successes), 3)}**", "", ""])
            body.append(["the paper (inter-quartile mean)", "", "10", number(paper, 2), "", ""])
    return sourced(
        rows(
            [
                "preset",
                "seed",
                "environments",
                "success after 2 million steps",
                "evaluation episodes",
                "training steps/s, with asynchronous evaluations",
            ],
            *body,
        ),
        source("metaworld_training.py", "metaworld_training"),
    )


@table
def site_explore() -> str:
    """What PPO and crawlers find on unseen sites."""
    found, advantage = (
        results("site_explore_learning")["relevant_per_request"],
        results("site_explore_learning")["ppo_times"],
    )
    names = {
        "PPO": "PPO",
        "breadth-first": "breadth-first",
        "random": "random",
        "random candidate": "random among the 16",
        "best candidate": "best-ranked of the 16",
    }
    return sourced(
        rows(
            ["", "relevant pages per request: median", "min", "max", "PPO's advantage: median", "min"],
            *(
                [
                    name,
                    *(number(of(found[key]), 3) for of in (median, min, max)),
                    *(f"{number(of(advantage[key]), 1)} ×" if key in advantage else "" for of in (median, min)),
                ]
                for key, name in names.items()
            ),
        ),
        source("site_explore_learning.py", "site_explore_learning"),
    )


@table
def population_based_training() -> str:
    """Populations with and without comparisons."""
    result = results("pbt")
    arguments, pairs = result["arguments"], list(zip(result["pbt"], result["without"], strict=True))
    head = f"{arguments['env']}, {arguments['members']} members, {number(arguments['timesteps'])} steps each"
    body = [
        [
            f"population {i}",
            *(number(side[key], 1) for key in ("mean", "best") for side in pair),
            number(pair[0]["exploits"]),
        ]
        for i, pair in enumerate(pairs, 1)
    ]
    means = [number(mean(side[key] for side in sides), 1) for key in ("mean", "best") for sides in zip(*pairs)]
    columns = ["mean of the members, with `--pbt`", "without", "best member, with `--pbt`", "without", "replacements"]
    return sourced(
        rows([head, *columns], *body, ["mean", *means, number(mean(pair[0]["exploits"] for pair in pairs), 1)]),
        source("pbt.py", "pbt"),
    )


@table
def disturbed_runs() -> str:
    """The fault trial by kind of disturbance."""
    batches = results("fault_trial")["batches"]
    disks = ("full", "small", "read-only", "limit", "KB")

    def tries(part: str) -> list[str]:
        found = [batch for batch in batches if batch["part"] == part]
        return [number(sum(batch[count] for batch in found)) for count in ("tries", "held")]

    runs = [batch for batch in batches if batch["part"] == "runs"]
    on_disks = sum(n for run in runs for what, n in run["what"].items() if any(word in what for word in disks))
    failed_on_disks = sum(any(word in failure["what"] for word in disks) for run in runs for failure in run["failures"])
    all_runs = sum(run["tries"] for run in runs)
    failed = sum(len(run["failures"]) for run in runs)
    return sourced(
        rows(
            ["what", "tries", "held"],
            [
                "signals (INT, TERM, HUP, USR1, KILL, STOP) to the trainer, its process group, a worker or an "
                "evaluator, at start-up, during training, during a checkpoint and at the end; half of the runs "
                "wrote to a killed `tee`, to `head`, to a closed descriptor or to a full disk, and half had "
                "environments that fork, start programs, leave children behind or install signal handlers",
                number(all_runs - on_disks),
                number(all_runs - on_disks - (failed - failed_on_disks)),
            ],
            [
                "disks: too small, full or read-only from some moment on, a limit on file sizes, a full, read-only "
                "or 4 KB `/dev/shm`, a full `TMPDIR`",
                number(on_disks),
                number(on_disks - failed_on_disks),
            ],
            [
                "groups of three runs (PPO, also with workers and with overlap, and SAC), killed at a random moment, "
                "many once more after they were resumed",
                *tries("groups"),
            ],
            ["sweeps, killed at a random moment: no finished trial may be lost or change", *tries("sweeps")],
            [
                "checkpoints: flipped bits, cut ends, swapped blocks, zeroed ranges, pieces of other checkpoints, "
                "edited headers",
                *tries("checkpoints"),
            ],
            [
                "config files, engine files and the JSON lines of a run: flipped bytes, other values, nesting, huge "
                "numbers, invalid UTF-8, lost lines, aliases",
                *tries("texts"),
            ],
        ),
        source("fault_trial.py", "fault_trial"),
    )
