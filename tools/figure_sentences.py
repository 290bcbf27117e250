"""Sentences of README.md and docs/ with measured figures: found by their words, numbers come from the results."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

from figure_delivered import delivered
from figure_outcomes import success_at
from figure_values import number, percent, rates, results

SENTENCES: dict[str, Callable[[], list[str]]] = {}
_WORDS = "none one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


def page(path: str) -> Callable[[Callable[[], list[str]]], None]:
    """Register the sentences of a page."""

    def register(sentences: Callable[[], list[str]]) -> None:
        SENTENCES[path] = sentences

    return register


def count(value: int) -> str:
    """In words: eleven."""
    return _WORDS.split()[value]


@page("README.md")
def readme() -> list[str]:
    """HalfCheetah against SB3, with a GPU and without."""
    settings, on_host = results("cpu_bound")["settings"], results("two_cores")["training"]
    beast = {side: settings["beast"][side]["steps_per_second"] for side in ("off", "strict", "sb3")}
    off, strict = (beast[side] / beast["sb3"] for side in ("off", "strict"))
    if measured := delivered("beast"):
        off, strict = (measured["times_sb3"][side] for side in ("off", "delivered"))
    without = on_host["unidle"]["steps_per_second"] / on_host["sb3 dummy"]["steps_per_second"]
    return [
        f"PPO trains [{off:.1f} times](docs/benchmarks.md#halfcheetah-on-a-gpu) as fast",
        f"{strict:.1f} times if it also collects while it learns",
        f"[{without:.1f} times](docs/benchmarks.md#two-cores-without-a-gpu) as fast on two cores",
    ]


@page("docs/benchmarks.md")
def benchmarks() -> list[str]:
    """Speed-ups on a slower machine, seconds to a score, updates of SAC, MT10."""
    slower = results("cpu_bound")["also"]["settings"]
    gains = [slower[setting]["strict"]["steps_per_second"] for setting in ("beast", "wide")]
    beast, wide = (rate / slower["beast"]["sb3"]["steps_per_second"] for rate in gains)
    sides = results("time_to_score")["sides"]
    pairs = list(zip(sides["unidle"]["seconds"], sides["sb3"]["seconds"]))
    solved = [run["seconds"] for run in results("gpu_resident")["solved"]]
    updates = results("off_policy")["batch_sizes"]
    small, large = ([number(mean(updates[size][side])) for side in ("unidle", "sb3")] for size in ("512", "1280"))
    runs, paper = mt10()["mt10-paper-1024"], results("metaworld_training")["paper"]
    early = mean(success_at(run, 2_000_000) for run in runs.values())
    return [
        f"were [{number(beast, 1)} and {number(wide, 1)}](overlap.md#speed) times as fast",
        f"SB3 was faster on {sum(ours > theirs for ours, theirs in pairs)} of {len(pairs)} seeds",
        f"the policy reaches 475 after {min(solved):.2f} to {max(solved):.2f} s ({count(len(solved))} seeds",
        f"{small[0]} against {small[1]} with Stable-Baselines3 at batch size 512, and {large[0]} against "
        f"{large[1]} at 1,280",
        f"success rate {early:.3f} after 2 million steps (mean of {len(runs)} seeds), and "
        f"{success_at(runs['4'], 5_000_000):.3f} after 5 million",
        f"The paper's inter-quartile means are {paper['2000000']:.2f} and {paper['5000000']:.2f}.",
    ]


def mt10() -> Any:
    """The runs on MT10 by preset and seed."""
    return results("metaworld_training")["learning"]


@page("docs/device-environments.md")
def device_environments() -> list[str]:
    """Gaps between replays, steps of a rollout, trading."""
    sizes = results("gpu_resident")["n_envs"]
    large, parts = sizes["32768"], [size["parts"] for size in sizes.values()]
    gap = 1 - large["parts"]["iteration"]["ms"] * rates(large["unidle"]) / (32_768 * 32 * 1e3)
    steps = [part["rollout"]["ms"] * 1e3 / 32 for part in parts]
    trading = results("device_learning")["tasks"]["Trading"]
    returns = [run["return"] for run in trading["seeds"].values()]
    settings = trading["settings"]
    return [
        f"The gap between two replays is {percent(gap, 1)} of the time with 32,768",
        f"32 sequential steps of {min(steps):.0f} to {max(steps):.0f} µs each",
        f"({trading['machine']['date']}, [results](../benchmarks/results/device_learning.json)) {count(len(returns))} "
        f"seeds reached a mean return of {min(returns):.1f} to {max(returns):.1f} after "
        f"{settings['recipe']['timesteps'] / 1e6} million steps, where holding earns {settings['goal']}.",
    ]


@page("docs/diagnose.md")
def diagnose() -> list[str]:
    """Errors of predictions; planted causes."""
    predictions, planted = results("predictions_gpu"), results("planted_causes_diagnose_gpu")
    on_host = results("planted_causes_diagnose")
    off = [job["off_by"] for job in predictions["jobs"].values()]
    return [
        f"For {count(len(off))} of the twelve GPU jobs",
        f"by {percent(predictions['median_off_by'])} (median) and by at most {percent(max(off))}",
        f"named correctly: all {count(on_host['hits'])}, on two cores ({on_host['date']}, [results]",
        f"({planted['date']}, [results](../benchmarks/results/planted_causes_diagnose_gpu.json)) all "
        f"{count(planted['hits'])} are named correctly",
    ]


@page("docs/faults.md")
def faults() -> list[str]:
    """How disturbed runs failed."""
    trial = results("fault_trial")
    runs = [batch for batch in trial["batches"] if batch["part"] == "runs"]
    assert trial["differing"] == trial["loaded_as_something_else"] == trial["hangs"] == 0
    return [
        "No resumed run differed, no file was loaded as something else, and nothing hung.",
        f"{count(trial['tries'] - trial['held']).capitalize()} tries failed. "
        f"{count(trial['tracebacks']).capitalize()} were tracebacks",
        f"In {sum(run['too late'] for run in runs)} tries the run had ended before it was disturbed; "
        f"{sum(run['not compared'] for run in runs)} were not compared",
    ]


@page("docs/io-bound.md")
def io_bound() -> list[str]:
    """The spread of two measurements, and what limits crawling."""
    bound, on_gpu = results("io_bound"), results("io_bound_gpu")["sides"]["unidle 2048"]
    first, second = (run["steps_per_second"] for run in bound["sides"]["one loop"]["runs"])
    shares = bound["shares"]["kept pages"]
    return [
        f"one loop reached {number(first)} and {number(second)} steps/s",
        f"part of a step ({shares['network_ms']:.2f} of {shares['whole_ms']:.2f} ms)",
        f"the trainer process, which uses {on_gpu['trainer_cores']:.1f} of one core",
    ]


@page("docs/meter.md")
def meter() -> list[str]:
    """The meter's overhead; planted causes."""
    costs = results("meter")["cost"]
    cartpole, wide = costs["device"], costs["beast 1024x32 strict"]
    more = {
        name: [number(100 * (cost["without_over_with"][key] - 1), 1) for key in ("mean", "low", "high")]
        for name, cost in costs.items()
    }
    host = results("meter_without_gpu")
    beside = results("planted_causes_beside")
    busy = [job["others_cores"] for job in beside["jobs"]]
    first = sum(job["named"] == job["planted"] for job in beside["jobs"])
    (mean_one, low_one, high_one), (mean_wide, low_wide, high_wide) = more["device"], more["beast 1024x32 strict"]
    return [
        f"spends {percent(host['cost']['classic']['own_share'], 1)} of its time in the meter on two cores",
        f"environments, {host['machine']['date']}, [results]",
        f"on the H200 {percent(cartpole['own_share'], 1)} for CartPole on the GPU and "
        f"{percent(wide['own_share'], 1)} for",
        f"CartPole made {mean_one} % more steps per second without it (interval {low_one} … {high_one} %) and `beast` "
        f"{mean_wide} % ({low_wide} … {high_wide} %)",
        f"On two cores of which other programs took {min(busy):.1f} to {max(busy):.1f}",
        f"all {count(beside['hits'])} are named, {count(first)} of them first and {count(beside['hits'] - first)} as "
        f"*Also:* ({beside['date']}",
    ]


@page("docs/metaworld.md")
def metaworld() -> list[str]:
    """Stepping, and the longest run."""
    longest = mt10()["mt10-paper-1024"]["4"]
    last = longest["evaluations"][-1]
    shortest = min(run["steps"] for run in mt10()["mt10-paper-1024"].values())
    paper = results("metaworld_training")["paper"]["5000000"]
    stepping, at_once = results("metaworld_stepping"), number(longest["steps_per_second"])
    training, evaluated = longest["steps"] / longest["steps_per_second"], last["step"] / longest["seconds"]
    return [
        f"{stepping['ratio']:.1f} times as fast on one core of an AMD EPYC with SciPy "
        f"{stepping['machine']['versions']['scipy'][:4]}, {stepping['machine']['date']},",
        f"trained for {longest['steps'] / 1e6:.1f} million steps without interruption. Success was "
        f"{success_at(longest, 5_000_000):.3f} after 5 million steps, where the paper reports {paper:.2f}, and "
        f"{last['eval/success']:.3f} after {last['step'] / 1e6} million.",
        f"push succeeds in {50 * last['eval/success/push-v3']:.0f} of 50 episodes",
        f"training ran at {at_once} steps/s and took {training / 60:.1f} minutes",
        f"The one at {last['step'] / 1e6} million steps finished after {longest['seconds'] / 60:.0f} minutes; "
        f"counted up to then, the run made {number(evaluated)} steps/s.",
        f"20 million steps would take {20e6 / longest['steps_per_second'] / 60:.0f} minutes, or "
        f"{20e6 / evaluated / 60:.0f} with their evaluations",
        f"and end after {shortest / 1e6:.0f} to {longest['steps'] / 1e6:.1f} million of its 20 million steps",
    ]


@page("docs/off-policy.md")
def off_policy() -> list[str]:
    """Learning and updates."""
    tasks, updates = results("off_policy_learning")["tasks"], results("off_policy")["batch_sizes"]
    small, large = ([number(mean(updates[size][side])) for side in ("unidle", "sb3")] for size in ("512", "1280"))
    cartpole, lander = tasks["CartPole-v1 dqn prioritised"], tasks["LunarLander-v3 dqn"]
    prioritised = tasks["LunarLander-v3 dqn prioritised"]
    low = [sum(value < 450 for value in cartpole[side].values()) for side in ("unidle", "sb3")]
    ends = [
        f"between {min(values):.0f} and {max(values):.0f}" for values in (lander[s].values() for s in ("unidle", "sb3"))
    ]
    return [
        f"{count(low[0])} of {len(cartpole['unidle'])} seeds end below 450 with `--per`, and {count(low[1])} with",
        f"Seeds end {ends[0]} with unidle, and {ends[1]} with Stable-Baselines3",
        f"With {len(lander['unidle'])} seeds, a loss of more than {-lander['lower_95']:.1f} is ruled out, where "
        f"{-lander['margin']:.1f} is allowed.",
        f"(against {len(prioritised['sb3'])} seeds, {prioritised['sb3_iqm']:.1f}), a loss of more than "
        f"{-prioritised['lower_95']:.0f} is ruled out",
        f"({results('off_policy')['machine']['date']}, [`off_policy.py`]",
        f"unidle makes {small[0]} updates/s at batch size 512, against {small[1]} for Stable-Baselines3's `train()` "
        f"alone, and {large[0]} against {large[1]} at 1,280: {updates['512']['ratio']:.0f} and "
        f"{updates['1280']['ratio']:.0f} times",
        f"a batch of 512 takes {1e3 / mean(updates['512']['unidle']):.2f} ms. At the GPU's peak rate it would "
        f"take at least {updates['512']['least_seconds'] * 1e3:.3f} ms",
    ]


@page("docs/learning.md")
def learning() -> list[str]:
    """How often CartPole's policy falls back."""
    result = results("learning")
    # The row with training returns: in `unfinished` until all of its seeds are done.
    row = result["unfinished"].get("CartPole-v1") or result["tasks"]["CartPole-v1"]
    sides = [(row[side], row["training"][side]) for side in ("unidle", "sb3")]
    fell = [f"{sum(map(fell_back, training.values()))} of {len(training)} seeds" for _, training in sides]
    low = [
        f"{sum(end < 475 for end in ends.values())} of {len(ends)}, the lowest at {min(ends.values()):.0f}"
        for ends, _ in sides
    ]
    return [
        f"That happened to {fell[0]} with unidle and {fell[1]} with Stable-Baselines3.",
        f"At the end {low[0]}, with unidle, and {low[1]}, with Stable-Baselines3, are below 475.",
    ]


def fell_back(training: list[float | None]) -> bool:
    """Whether a part of training is below 400 after one in which nearly every episode reached 500."""
    means = [mean for mean in training if mean is not None]
    return any(mean < 400 and max(means[:i], default=0) >= 495 for i, mean in enumerate(means))


@page("docs/overlap.md")
def overlap() -> list[str]:
    """HalfCheetah against bare stepping, the race, and tails of returns."""
    bound, learned, curves = results("cpu_bound"), results("overlap")["tasks"], results("race")["curves"]
    settings, bare, also = bound["settings"], bound["ceiling"], bound["also"]
    sb3, old_sb3 = (one["settings"]["beast"]["sb3"]["steps_per_second"] for one in (bound, also))
    wide, old_wide = (one["settings"]["wide"]["strict"]["steps_per_second"] for one in (bound, also))
    ceiling, old_ceiling = (max(one["ceiling"]["wide"][n] for n in ("8", "15", "16")) for one in (bound, also))
    beast, old_beast = settings["beast"]["strict"], also["settings"]["beast"]["strict"]["steps_per_second"]
    few = max(bare["beast"][n] for n in ("8", "15", "16"))
    millions = {side: curve[-1][1] / 1e6 for side, curve in curves.items()}
    reached = {
        (side, goal): next(seconds for seconds, _, value in curves[side] if value >= goal)
        for side in ("strict", "off")
        for goal in (500, 1000)
    }
    hopper, pendulum = learned["Hopper-v5"], learned["Pendulum-v1"]
    spread = {side: stdev(run["return"] for run in hopper[side].values()) for side in ("strict", "off")}
    worst = {side: sorted(run["return"] for run in pendulum[side].values()) for side in ("strict", "off")}
    again = results("before_after")["cpu_bound"]["rates"]["beast, strict"]
    repeated = again["before"]
    return [
        f"training reaches {wide / ceiling:.2f} of the speed of bare stepping (the same environments in 15 processes "
        f"that do nothing else: {number(ceiling)} steps/s), and is {wide / sb3:.1f} times as fast as SB3's `beast`",
        f"1024 environments reached {old_wide / old_ceiling:.2f} and {old_wide / old_sb3:.1f} times "
        f"({number(old_wide)} steps/s, against {number(old_ceiling)} for bare stepping and {number(old_sb3)} for SB3), "
        "and `beast` was "
        f"{old_beast / old_sb3:.1f} times as fast",
        f"{count(len(repeated))} measurements of `beast` with the same code on one such machine differ by up to "
        f"{percent(max(repeated) / min(repeated) - 1)} ({again['machine']['date']},",
        f"training reaches only {beast['steps_per_second'] / few:.2f} of bare stepping** ({number(few)})",
        f"After {curves['strict'][-1][0]:.0f} seconds, strict has learned from {millions['strict']:.1f} million steps, "
        f"off from {millions['off']:.1f} million and Stable-Baselines3 from {millions['sb3']:.2f} million.",
        f"Strict reached a return of 500 after {reached['strict', 500]:.0f} seconds and 1,000 after "
        f"{reached['strict', 1000]:.0f}; off needed {reached['off', 500]:.0f} and {reached['off', 1000]:.0f}.",
        f'would be judged "no worse" in {percent(learned["HalfCheetah-v5 beast, lambda 0.8"]["chance"])} of cases',
        f"would pass in only {percent(hopper['chance'])} of cases. Strict was {hopper['difference']:.0f} ahead, "
        f"with a lower bound of {number(hopper['lower_95'], 1)}, where {number(hopper['margin'], 1)} was allowed.",
        f"(standard deviation {spread['off']:.0f}) than with strict ({spread['strict']:.0f})",
        f"With {len(pendulum['strict'])} seeds, the lower bound is {number(pendulum['lower_95'], 1)}, where "
        f"{number(pendulum['margin'], 1)} is allowed.",
        f"Two of the {len(pendulum['strict'])} seeds ended at {number(worst['strict'][1])} and "
        f"{number(worst['strict'][0])}, and none of off's below {number(worst['off'][0])}",
        f"({results('race')['machine']['date']}, [`race.py`]",
    ]


@page("docs/training.md")
def training() -> list[str]:
    """rl-zoo's entries."""
    entries = [entry for file in results("rl_zoo_configs")["files"].values() for entry in file.values()]
    used = sum("refused" not in entry for entry in entries)
    return [f"Of rl-zoo's {len(entries)} entries for PPO, RecurrentPPO, SAC, TD3 and DQN, {used} can be used"]


@page("docs/tune.md")
def tune() -> list[str]:
    """A tuned job."""
    tuned = results("tuning")
    rate, change = tuned["steps_per_second"], {one["change"]: one for one in tuned["changes"]}
    kept = [change["workers 1 → auto"], change["graphs off → on"]]
    (workers, workers_predicted), (graphs, graphs_predicted) = ((k["measured"]["mean"], k["predicted"]) for k in kept)
    return [
        f"went from {number(rate['before'])} to {number(rate['after'])} steps/s in {tuned['seconds']:.0f} seconds, "
        f"through the default number of workers (× {workers:.2f}, predicted × {workers_predicted:.2f}) and graphs "
        f"(× {graphs:.2f}, predicted × {graphs_predicted:.2f}).",
        f"with a predicted ratio of {change['workers auto → 7']['predicted']:.2f}, were tried and not kept",
    ]


@page("docs/vector-environments.md")
def vector_environments() -> list[str]:
    """Gymnasium's own tests."""
    counts = results("gymnasium_vector_suite")["counts"]
    return [
        f"Of {counts['passed'] + counts['failed']} tests from `test_async_vector_env.py` and "
        f"`test_observation_mode.py`, {counts['passed']} pass. {count(counts['failed']).capitalize()} fail by design",
    ]
