"""Each cause from facts that show it, and none from facts that lack the one thing it is told by."""

from __future__ import annotations

from typing import Any

import pytest
from hand_made import facts

from unidle.config import Config
from unidle.config.presets import load_preset
from unidle.tuning.advice import collecting, device, learning
from unidle.tuning.advice.facts import Table
from unidle.tuning.advice.finding import Advice, Finding, as_taken, ranked
from unidle.tuning.advice.verdict import CHECKS, NOTHING_TO_GAIN, verdict_on
from unidle.tuning.probes.profile import Pace, Stepping
from unidle.tuning.probes.stepping import Steps

GPU = {"on_gpu": True}
ON_GPU = Table(True, 0.5, {"environment": 0.3, "host→device": 0.1, "sync": 0.1}, 0.0)
QUIET = Table(True, 0.5, {"environment": 0.49, "host→device": 0.01}, 0.0)
FEW = {"n_envs": 4, "stepping": (Stepping(4, 4, 1.0, 1.0),), "collecting": 3.0}
ON_DEVICE = {**GPU, "on_device": True, "stepping": (), "collecting": 0.0}
SLOW = Steps(0.05, 0.2, 0.02, 0.0, 1)

# check, facts that show the cause, what takes the cause away.
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (collecting.environment_waits, {"of_profile": {"on_core": 0.1}}, {"of_profile": {"on_core": 0.9}}),
    (collecting.environment_computes, {}, {"of_profile": {"on_core": 0.1}}),
    (collecting.slow_target, {"requests": True, "steps": SLOW}, {"steps": SLOW}),
    (
        collecting.too_many_threads,
        {"steps": Steps(0.01, 0.02, 1.0, native=0.8, threads=16)},
        {"steps": Steps(0.01, 0.02, 1.0, native=0.05, threads=16)},
    ),
    (
        collecting.too_many_threads,
        {"of_profile": {"stepping": (Stepping(8, 16, 4.0, 4.0),)}, "engine": {"workers": 8}},
        {"of_profile": {"stepping": (Stepping(8, 16, 4.0, 4.0),), "cores": 8}, "engine": {"workers": 8}},
    ),
    (learning.torch_threads, {"engine": {"threads": 16}}, {"engine": {"threads": 5}}),
    (
        learning.torch_threads,
        {"of_profile": {"threads": 2, "learning_by_threads": ((1, 0.5),)}, "engine": {"threads": 2}},
        {"of_profile": {"threads": 2, "learning_by_threads": ((1, 1.9),)}, "engine": {"threads": 2}},
    ),
    (collecting.too_few_envs, {"of_profile": FEW}, {"of_profile": {**FEW, "collecting": 1.0}}),
    (
        collecting.inference_bound,
        {"of_profile": {"n_envs": 64, "collecting": 6.0}},
        {"of_profile": {"n_envs": 64, "collecting": 4.1}},
    ),
    (collecting.no_overlap, {}, {"of_profile": {"overlap": "strict"}}),
    (collecting.no_overlap, {}, {"of_profile": {"pace": Pace(0.002, 0.05)}}),
    (learning.small_batches, {"of_profile": {"update_overhead": 0.9}}, {"of_profile": {"update_overhead": 0.2}}),
    (
        device.graphs_off,
        {"of_profile": {**GPU, "graphs": False, "graphed": Pace(0.002, 0.2)}, "engine": {"graphs": False}},
        {"of_profile": {**GPU, "graphs": False, "graphed": Pace(0.002, 1.9)}, "engine": {"graphs": False}},
    ),
    (
        device.slow_fallbacks,
        {"slow_fallbacks": ("learning runs eagerly, which is slower: it asks the host.",)},
        {"slow_fallbacks": ()},
    ),
    (device.copies_and_syncs, {"of_profile": GPU, "table": ON_GPU}, {"of_profile": GPU, "table": QUIET}),
    (
        device.copies_and_syncs,
        {"of_profile": GPU, "table": QUIET, "to_device": 1e9, "replay_on_host": True},
        {"of_profile": GPU, "table": QUIET, "to_device": 2e10, "replay_on_host": True},
    ),
    (
        device.tf32_off,
        {"of_profile": GPU, "recipe": {"precision": "fp32"}},
        {"of_profile": GPU, "recipe": {"precision": "tf32"}},
    ),
    (device.tf32_off, {"of_profile": GPU, "recipe": {"precision": "fp32"}}, {"recipe": {"precision": "fp32"}}),
    (device.buffer_on_the_host, {"of_profile": GPU, "replay_on_host": True}, {"of_profile": GPU}),
    (device.memory, {"readings": {"gpu_memory": 0.95}}, {"readings": {"gpu_memory": 0.6}}),
    (device.memory, {"readings": {"host_memory": 0.95}}, {"readings": {"host_memory": 0.6}}),
    (
        device.memory,
        {"of_profile": GPU, "readings": {"gpu_memory": 0.05}, "table": Table(True, 0.2, {}, 0.8)},
        {"of_profile": GPU, "readings": {"gpu_memory": 0.05}, "table": Table(True, 0.9, {}, 0.1)},
    ),
    (
        device.throttled,
        {"of_profile": GPU, "readings": {"throttled": {"heat": 0.6}}},
        {"of_profile": GPU, "readings": {"throttled": {"heat": 0.02}}},
    ),
    (learning.learner_bound, {}, {"of_profile": {"update_overhead": 1.0}}),
    (learning.device_bound, {"of_profile": ON_DEVICE}, {"of_profile": {**ON_DEVICE, "collecting": 1.0}}),
    (
        learning.use_the_cpu,
        {"of_profile": {**GPU, "other_device": Pace(0.0001, 0.2)}},
        {"of_profile": {**GPU, "other_device": Pace(0.0001, 20.0)}},
    ),
    (learning.use_the_cpu, {"of_profile": {**GPU, "other_device": Pace(0.0001, 0.2)}}, {"of_profile": GPU}),
    (learning.upkeep, {"of_profile": {"rest": 3.0}}, {"of_profile": {"rest": 0.1}}),
]


@pytest.mark.parametrize(("check", "there", "gone"), CASES, ids=lambda part: getattr(part, "__name__", ""))
def test_a_cause_is_found_where_it_is_and_not_where_it_is_not(
    check: Any, there: dict[str, Any], gone: dict[str, Any]
) -> None:
    found = check(facts(**there))
    assert found is not None
    assert 0.0 <= found.weight <= 1.05
    assert found.sentence.endswith(".")
    assert found.sentence[0].isupper() or found.sentence[0].isdigit()
    assert check(facts(**gone)) is None


def test_every_check_has_a_case() -> None:
    assert {check for check, _, _ in CASES} == set(CHECKS)


def advice_of(finding: Finding | None, flags: str) -> Advice:
    assert finding is not None
    return next(advice for advice in finding.advice if advice.flags == flags)


def test_environments_that_compute_are_told_how_many_workers_are_worth_it() -> None:
    few = facts(of_profile={"stepping": (Stepping(1, 2, 16.0, 16.0),), "collecting": 16.0}, engine={"workers": 1})
    # 16 environments on 1 worker or 5: 16 s of stepping, or 4 of the busiest one, beside 2 s of learning.
    found = advice_of(collecting.environment_computes(few), "--workers 5")
    assert (found.kind, found.speedup) == ("engine", pytest.approx(18 / 6, rel=0.05))


def test_no_more_workers_are_advised_than_help() -> None:
    found = collecting.environment_computes(facts(of_profile={"cores": 4}))
    assert found is not None
    assert not [advice for advice in found.advice if advice.flags]


def test_those_that_wait_are_told_to_wait_side_by_side() -> None:
    found = advice_of(collecting.environment_waits(facts(of_profile={"on_core": 0.1})), "--workers 16")
    assert found.speedup == pytest.approx(6 / (1.3 + 2))  # 10 ms of a step, and 1.5 services of 2 ms


def test_workers_that_wait_are_no_more_than_a_few_for_each_core() -> None:
    found = advice_of(collecting.environment_waits(facts(of_profile={"on_core": 0.1, "n_envs": 1000})), "--workers 20")
    assert found.speedup is not None


def test_more_environments_are_advised_with_steps_that_minibatches_divide() -> None:
    # 4 environments on 5 cores: 20 are wanted, and a fifth of 100 steps; 20 × 20 is no multiple of 96, 20 × 24 is.
    few = facts(of_profile=FEW, recipe={"batch_size": 96, "n_steps": 120})
    assert advice_of(collecting.too_few_envs(few), "--n-envs 20 --n-steps 24").kind == "recipe"


def test_the_way_out_of_a_full_memory_divides_too() -> None:
    full = {"readings": {"gpu_memory": 0.95}}
    # 12 of 16 environments and 100 steps are no multiple of 800, 8 are; of 1600 neither.
    assert advice_of(device.memory(facts(**full, recipe={"batch_size": 800})), "--n-envs 8").kind == "recipe"
    assert advice_of(device.memory(facts(**full, recipe={"batch_size": 1600})), "").kind == "recipe"


def test_what_training_would_refuse_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (
        Advice("recipe", "whole", "--n-envs 8 --batch-size 800"),
        Advice("recipe", "broken", "--n-envs 7"),
        Advice("engine", "plain", "--no-tensorboard --compile"),
        Advice("engine", "by hand"),
    )
    monkeypatch.setattr("unidle.tuning.advice.verdict.CHECKS", (lambda _: Finding("cause", 1.0, "It is.", parts),))
    found = verdict_on(facts())
    assert [advice.text for advice in (*found.recipe, *found.engine)] == ["whole", "plain", "by hand"]
    assert [advice.flags for advice in (*found.recipe, *found.engine)] == [parts[0].flags, parts[2].flags, ""]


def test_a_preset_of_fixed_numbers_is_changed_only_in_so_many_words() -> None:
    fixed = load_preset("mt10-2m").apply(Config())
    assert isinstance(fixed.recipe.batch_size, int)
    advice = Advice("recipe", "larger", f"--batch-size {2 * fixed.recipe.batch_size}")
    taken = as_taken(advice, fixed.with_values({"env": "any", "preset": "mt10-2m"}, "test"))
    assert taken is not None
    assert taken.flags == f"{advice.flags} --allow-recipe-change"


def test_no_log_is_advised_against_that_is_not_kept() -> None:
    assert advice_of(learning.upkeep(facts(of_profile={"rest": 3.0})), "--no-tensorboard").at_most
    assert advice_of(learning.upkeep(facts(of_profile={"rest": 3.0}, run={"tensorboard": False})), "").at_most


def test_threads_that_wait_for_each_other_are_not_taken_for_a_batch_of_too_little_work() -> None:
    slow = {"threads": 2, "pace": Pace(0.002, 40.0), "update_overhead": 0.95}
    found = verdict_on(facts(of_profile={**slow, "learning_by_threads": ((1, 4.0),)}, engine={"threads": 2}))
    assert found.cause == "too many threads"
    assert found.engine[0].flags == "--threads 1"
    assert found.engine[0].speedup == pytest.approx(44 / 8, rel=0.05)
    assert "small batches" not in [finding.cause for finding in found.findings]
    fine = verdict_on(facts(of_profile={**slow, "learning_by_threads": ((1, 80.0),)}, engine={"threads": 2}))
    assert fine.cause == "small batches"
    assert "--threads 1" not in [advice.flags for advice in fine.engine]


def test_larger_minibatches_are_predicted_from_what_they_save() -> None:
    # Learning is a third of the time, nine tenths of an update are the same for any batch; a quarter of the updates.
    found = advice_of(learning.small_batches(facts(of_profile={"update_overhead": 0.9})), "--batch-size 1600")
    assert found.kind == "recipe"
    assert found.speedup == pytest.approx(1 / (1 - (1 / 3) * (1 - 0.9 / 4 - 0.1)))


def test_a_minibatch_is_never_advised_that_does_not_divide_the_rollout() -> None:
    whole = facts(of_profile={"update_overhead": 0.9}, recipe={"batch_size": 1600})
    found = learning.small_batches(whole)
    assert found is not None
    assert found.advice == ()


def test_updates_of_an_off_policy_algorithm_become_fewer_and_larger() -> None:
    sac = facts(of_profile={"update_overhead": 1.0}, recipe={"algo": "sac", "batch_size": 256})
    found = advice_of(learning.small_batches(sac), "--utd-ratio 0.5 --batch-size 512")
    assert found.speedup == pytest.approx(1 / (1 - (1 / 3) / 2))


def test_overlap_is_a_recipe_change() -> None:
    found = advice_of(collecting.no_overlap(facts()), "--overlap strict")
    assert (found.kind, found.speedup) == ("recipe", pytest.approx(6 / 4))


def test_a_slow_target_is_told_with_its_latencies_and_failures() -> None:
    asked = facts(requests=True, steps=SLOW, request_counts={"ok": 90, "timeout": 10})
    found = collecting.slow_target(asked)
    assert found is not None
    assert "50.0 ms" in found.sentence
    assert "200.0 ms" in found.sentence
    assert "10 × timeout" in found.sentence
    assert "90" not in found.sentence


# -- the verdict ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({}, "environment computes"),
        ({"of_profile": {"on_core": 0.1}}, "environment waits"),
        ({"of_profile": {"on_core": 0.1}, "requests": True, "steps": SLOW}, "slow target"),
        ({"steps": Steps(0.01, 0.02, 1.0, native=0.8, threads=16)}, "too many threads"),
        ({"of_profile": {"pace": Pace(0.002, 40.0), "update_overhead": 0.95}}, "small batches"),
        ({"of_profile": {"pace": Pace(0.002, 40.0), "update_overhead": 0.1}}, NOTHING_TO_GAIN),
        (
            {"of_profile": {"pace": Pace(0.002, 40.0), "update_overhead": 0.1, "learning_by_threads": ((5, 10.0),)}},
            "learner-bound",
        ),
        ({"of_profile": {**GPU, "other_device": Pace(0.0001, 0.2)}}, "use the CPU"),
        ({"of_profile": FEW}, "too few environments"),
    ],
)
def test_the_verdict_is_the_largest_cause(given: dict[str, Any], cause: str) -> None:
    assert verdict_on(facts(**given)).cause == cause


# -- on a GPU with 16 cores: the figures of one iteration, as an H200 may have them ------------------------------------

ROOMY: dict[str, Any] = {"workers": None, "slices": None}
WHOLE = {"batch_size": 16}  # which divides all of them
LAUNCHED = {  # learning that is launches, 2,048 steps in 32 updates of 3 ms; a CPU would need 50 ms for each
    **GPU,
    "cores": 16,
    "n_envs": 64,
    "n_steps": 32,
    "step_seconds": 1e-6,
    "stepping": (Stepping(0, 1, 0.004, 0.004),),
    "pace": Pace(0.0006, 0.1),
    "collecting": 0.03,
    "updates": 32,
    "update_overhead": 0.96,
    "other_device": Pace(0.003, 1.6),
}
EAGER = "could not be captured as a CUDA graph and runs eagerly, which is slower: not permitted (at `x.item()`, own.py)"
WIDE = {  # 15 workers copy 4 MB in half a millisecond, and each of three services sends all 30 of these
    **GPU,
    "cores": 16,
    "n_envs": 30,
    "n_steps": 8,
    "step_seconds": 5e-4,
    "stepping": (Stepping(15, 30, 0.0072, 0.0080),),
    "pace": Pace(0.0024, 0.006),
    "collecting": 0.058,
    "other_device": Pace(0.03, 4.0),
}
REMEMBERED = {  # 32 updates, for which the host draws batches in 6 ms each
    **GPU,
    "cores": 16,
    "n_envs": 16,
    "n_steps": 8,
    "step_seconds": 3e-5,
    "stepping": (Stepping(0, 1, 0.002, 0.002),),
    "pace": Pace(0.0002, 0.2),
    "collecting": 0.005,
    "other_device": Pace(0.02, 14.0),
}
ON_HOST: dict[str, Any] = {
    "of_profile": REMEMBERED,
    "recipe": {"algo": "dqn", "batch_size": 256},
    "engine": ROOMY,
    "replay_on_host": True,
    "slow_fallbacks": ("The memory lies on the host, from where each batch is sent, which is slower: 8 GiB.",),
}
ON_HOST_IN_FP32 = {**ON_HOST, "recipe": {**ON_HOST["recipe"], "precision": "fp32"}}
SMALL_EAGER = {**LAUNCHED, "pace": Pace(0.0003, 0.3), "graphs": False, "other_device": Pace(0.0003, 0.1)}
NO_GRAPHS = {**ROOMY, "graphs": False}
LAUNCHED_ONE_BY_ONE = {  # as an H200 had it, but for the rollout with graphs
    **GPU,
    "cores": 16,
    "n_envs": 64,
    "n_steps": 64,
    "step_seconds": 3e-7,
    "stepping": (Stepping(0, 1, 0.0087, 0.0087),),
    "pace": Pace(0.00045, 0.0285),
    "collecting": 0.0858,
    "rest": 0.0086,
    "updates": 160,
    "update_overhead": 0.79,
    "graphs": False,
    "graphed": Pace(0.00007, 0.0041, collecting=0.02),
    "other_device": Pace(0.00014, 0.32),
}
CROWDED = {  # as an H200 and its 16 cores had it: the CPU would do nothing faster
    **GPU,
    "cores": 16,
    "n_envs": 4,
    "n_steps": 64,
    "step_seconds": 0.0004,
    "stepping": (Stepping(4, 4, 4.97, 4.21),),
    "pace": Pace(0.00007, 0.002),
    "collecting": 3.82,
    "other_device": Pace(0.00018, 0.029),
}
IN_THREADS = Steps(0.0006, 0.0021, 1.0, 0.95, 31)
HEAVY = {**LAUNCHED, "pace": Pace(0.0002, 0.18), "update_overhead": 0.05, "other_device": Pace(0.03, 300.0)}
FP32 = {**WHOLE, "precision": "fp32"}


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"of_profile": LAUNCHED, "slow_fallbacks": (f"inference {EAGER}", f"learning {EAGER}")}, "not captured"),
        ({"of_profile": LAUNCHED, "slow_fallbacks": (f"learning {EAGER}",)}, "not captured"),
        ({"of_profile": LAUNCHED}, "small batches"),
        ({"of_profile": WIDE, "to_device": 5.5e10, "sent_bytes": 30 * 2**22}, "copies and syncs"),
        ({"of_profile": WIDE, "to_device": 5.5e10, "sent_bytes": 30 * 2**10}, "too few environments"),
        ({**ON_HOST, "learning_with_replay_on_gpu": 0.03}, "buffer on the host"),
        ({**ON_HOST, "learning_with_replay_on_gpu": 0.19}, NOTHING_TO_GAIN),
        ({**ON_HOST_IN_FP32, "learning_with_replay_on_gpu": 0.03, "learning_in_tf32": 0.03}, "buffer on the host"),
        ({**ON_HOST_IN_FP32, "learning_with_replay_on_gpu": 0.19, "learning_in_tf32": 0.03}, "TF32 off"),
        (ON_HOST, "buffer on the host"),
        (ON_HOST_IN_FP32, "buffer on the host"),
        ({**ON_HOST, "readings": {"learning_busy": 0.1}}, "buffer on the host"),
        ({**ON_HOST, "readings": {"learning_busy": 0.95}}, NOTHING_TO_GAIN),
        ({"of_profile": {**SMALL_EAGER, "graphed": Pace(0.0001, 0.012)}, "engine": NO_GRAPHS}, "small batches"),
        ({"of_profile": {**SMALL_EAGER, "graphed": Pace(0.0003, 0.28)}, "engine": NO_GRAPHS}, "use the CPU"),
        ({"of_profile": LAUNCHED_ONE_BY_ONE, "engine": NO_GRAPHS}, "small batches"),
        ({"of_profile": CROWDED, "engine": {"workers": 4}, "steps": IN_THREADS}, "too many threads"),
        ({"of_profile": HEAVY, "recipe": FP32, "learning_in_tf32": 0.04}, "TF32 off"),
        ({"of_profile": HEAVY, "recipe": FP32, "learning_in_tf32": 0.17}, NOTHING_TO_GAIN),
        ({"of_profile": HEAVY}, NOTHING_TO_GAIN),
    ],
)
def test_the_verdict_on_a_gpu_is_the_largest_cause(given: dict[str, Any], cause: str) -> None:
    assert verdict_on(facts(**{"engine": ROOMY, "recipe": WHOLE, **given})).cause == cause


def test_what_asks_the_host_is_named_with_its_line() -> None:
    ways = (f"inference {EAGER}.", f"learning {EAGER}.")
    found = verdict_on(facts(of_profile=LAUNCHED, engine=ROOMY, recipe=WHOLE, slow_fallbacks=ways))
    assert found.sentence.startswith("The engine uses a slower implementation: learning could not be captured")
    assert found.sentence.endswith("(at `x.item()`, own.py).")


def test_a_memory_on_the_host_is_no_graph_that_failed() -> None:
    found = verdict_on(facts(**ON_HOST, learning_with_replay_on_gpu=0.03))
    assert "not captured" not in [finding.cause for finding in found.findings]
    assert found.findings[0].weight == pytest.approx(0.17 / 0.205, rel=0.02)
    assert "200.0 ms, but 30.0 ms" in found.sentence


def test_large_observations_are_told_by_their_size_and_are_no_reason_for_more_environments() -> None:
    found = verdict_on(facts(of_profile=WIDE, engine=ROOMY, recipe=WHOLE, to_device=5.5e10, sent_bytes=30 * 2**22))
    assert "126 MB per inference call" in found.sentence
    assert found.basis == "by probes"
    assert "too few environments" not in [finding.cause for finding in found.findings]


def test_launches_that_a_graph_would_save_are_no_fault_of_inference() -> None:
    found = verdict_on(facts(of_profile=LAUNCHED_ONE_BY_ONE, engine=NO_GRAPHS, recipe=WHOLE))
    assert "inference" not in [finding.cause for finding in found.findings]
    assert found.engine[0].flags == "--graphs"
    assert found.engine[0].speedup == pytest.approx((0.0858 + 0.0285 + 0.0086) / (0.02 + 0.0041 + 0.0086), rel=0.01)


def test_graphs_are_advised_before_the_cpu_where_they_are_faster_still() -> None:
    found = verdict_on(
        facts(of_profile={**SMALL_EAGER, "graphed": Pace(0.0001, 0.012)}, engine=NO_GRAPHS, recipe=WHOLE)
    )
    assert found.engine[0].flags == "--graphs"
    assert "use the CPU" not in [finding.cause for finding in found.findings]


def test_tf32_is_predicted_from_what_was_tried() -> None:
    found = device.tf32_off(facts(of_profile=HEAVY, engine=ROOMY, recipe=FP32, learning_in_tf32=0.04))
    advice = advice_of(found, "--precision tf32")
    assert (advice.speedup, advice.at_most) == (pytest.approx(0.21 / 0.07), False)


def test_tf32_is_not_credited_with_a_memory_that_it_was_tried_with() -> None:
    tried = {"learning_with_replay_on_gpu": 0.03, "learning_in_tf32": 0.03}
    assert device.tf32_off(facts(**ON_HOST_IN_FP32, **tried)) is None
    tried["learning_in_tf32"] = 0.01
    found = device.tf32_off(facts(**ON_HOST_IN_FP32, **tried))
    assert found is not None
    assert found.weight == pytest.approx(0.02 / 0.205, rel=0.02)
    assert "from a replay buffer on the GPU takes 30.0 ms, but 10.0 ms in TF32" in found.sentence
    assert advice_of(found, "--precision tf32").at_most  # as long as the host is waited for, less


def test_nothing_to_gain_says_so() -> None:
    found = verdict_on(facts(of_profile={"pace": Pace(0.002, 40.0), "update_overhead": 0.1}))
    assert found.sentence.startswith("Nothing to gain")
    assert not [advice for advice in found.engine if advice.flags]


def test_advice_is_ranked_by_what_is_predicted_then_by_bounds() -> None:
    parts = (
        Advice("engine", "unknown"),
        Advice("engine", "bound", speedup=9.0, at_most=True),
        Advice("engine", "small", speedup=1.2),
        Advice("recipe", "other", speedup=3.0),
        Advice("engine", "large", speedup=1.5),
        Advice("engine", "large", speedup=1.5),
    )
    found = ranked([Finding("cause", 1.0, "It is.", parts)], "engine")
    assert [advice.text for advice in found] == ["large", "small", "bound", "unknown"]
