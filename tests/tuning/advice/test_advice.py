"""Each cause is found from facts that show it, and not from facts that lack its evidence."""

from __future__ import annotations

from typing import Any

import pytest
from job_facts import facts

from unidle.buffers.placement import ON_HOST as REPLAY_ON_HOST
from unidle.config import Config
from unidle.config.presets import load_preset
from unidle.engine.cuda_graphs import EAGERLY
from unidle.tuning.advice import collecting, device, learning
from unidle.tuning.advice.facts import Table
from unidle.tuning.advice.finding import Advice, Finding, ranked, with_valid_flags
from unidle.tuning.advice.verdict import CHECKS, NO_FASTER_SETTINGS, verdict_on
from unidle.tuning.probes.profile import Pace, SimulatorPace, Stepping
from unidle.tuning.probes.stepping import StepStats

GPU = {"on_gpu": True}
ON_GPU = Table(True, 0.5, {"environment": 0.3, "host→device": 0.1, "sync": 0.1}, 0.0)
FEW_COPIES = Table(True, 0.5, {"environment": 0.49, "host→device": 0.01}, 0.0)
FEW_ENVS = {"n_envs": 4, "stepping": (Stepping(4, 4, 1.0, 1.0),), "collecting": 3.0}
ON_DEVICE = {**GPU, "on_device": True, "stepping": (), "collecting": 0.0}
SIMULATOR = {**GPU, "on_device": True, "stepping": (), "collecting": 4.0, "simulator": SimulatorPace(0.02, (64, 0.03))}
SLOW_STEPS = StepStats(0.05, 0.2, 0.02, 0.0, 1)

# (check, facts that show the cause, facts that do not)
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (collecting.environment_waits, {"profile_changes": {"on_core": 0.1}}, {"profile_changes": {"on_core": 0.9}}),
    (collecting.environment_computes, {}, {"profile_changes": {"on_core": 0.1}}),
    (collecting.slow_server, {"requests": True, "steps": SLOW_STEPS}, {"steps": SLOW_STEPS}),
    (
        collecting.too_many_threads,
        {"steps": StepStats(0.01, 0.02, 1.0, native=0.8, threads=16)},
        {"steps": StepStats(0.01, 0.02, 1.0, native=0.05, threads=16)},
    ),
    (
        collecting.too_many_threads,
        {"profile_changes": {"stepping": (Stepping(8, 16, 4.0, 4.0),)}, "engine": {"workers": 8}},
        {"profile_changes": {"stepping": (Stepping(8, 16, 4.0, 4.0),), "cores": 8}, "engine": {"workers": 8}},
    ),
    (learning.torch_threads, {"engine": {"threads": 16}}, {"engine": {"threads": 5}}),
    (
        learning.torch_threads,
        {"profile_changes": {"threads": 2, "learning_by_threads": ((1, 0.5),)}, "engine": {"threads": 2}},
        {"profile_changes": {"threads": 2, "learning_by_threads": ((1, 1.9),)}, "engine": {"threads": 2}},
    ),
    (collecting.too_few_envs, {"profile_changes": FEW_ENVS}, {"profile_changes": {**FEW_ENVS, "collecting": 1.0}}),
    (
        collecting.inference_bound,
        {"profile_changes": {"n_envs": 64, "collecting": 6.0}},
        {"profile_changes": {"n_envs": 64, "collecting": 4.1}},
    ),
    (collecting.no_overlap, {}, {"profile_changes": {"overlap": "strict"}}),
    (collecting.no_overlap, {}, {"profile_changes": {"pace": Pace(0.002, 0.05)}}),
    (
        learning.small_batches,
        {"profile_changes": {"update_overhead": 0.9}},
        {"profile_changes": {"update_overhead": 0.2}},
    ),
    (
        device.graphs_off,
        {"profile_changes": {**GPU, "graphs": False, "graphed": Pace(0.002, 0.2)}, "engine": {"graphs": False}},
        {"profile_changes": {**GPU, "graphs": False, "graphed": Pace(0.002, 1.9)}, "engine": {"graphs": False}},
    ),
    (
        device.slow_fallbacks,
        {"slow_fallbacks": (f"learning {EAGERLY}, which is slower: it asks the host.",)},
        {"slow_fallbacks": ()},
    ),
    (device.copies_and_syncs, {"profile_changes": GPU, "table": ON_GPU}, {"profile_changes": GPU, "table": FEW_COPIES}),
    (
        device.copies_and_syncs,
        {"profile_changes": GPU, "table": FEW_COPIES, "to_device": 1e9, "replay_on_host": True},
        {"profile_changes": GPU, "table": FEW_COPIES, "to_device": 2e10, "replay_on_host": True},
    ),
    (
        device.tf32_off,
        {"profile_changes": GPU, "recipe": {"precision": "fp32"}},
        {"profile_changes": GPU, "recipe": {"precision": "tf32"}},
    ),
    (device.tf32_off, {"profile_changes": GPU, "recipe": {"precision": "fp32"}}, {"recipe": {"precision": "fp32"}}),
    (device.buffer_on_the_host, {"profile_changes": GPU, "replay_on_host": True}, {"profile_changes": GPU}),
    (device.memory, {"readings": {"gpu_memory": 0.95}}, {"readings": {"gpu_memory": 0.6}}),
    (device.memory, {"readings": {"host_memory": 0.95}}, {"readings": {"host_memory": 0.6}}),
    (
        device.memory,
        {"profile_changes": GPU, "readings": {"gpu_memory": 0.05}, "table": Table(True, 0.2, {}, 0.8)},
        {"profile_changes": GPU, "readings": {"gpu_memory": 0.05}, "table": Table(True, 0.9, {}, 0.1)},
    ),
    (
        device.throttled,
        {"profile_changes": GPU, "readings": {"throttled": {"heat": 0.6}}},
        {"profile_changes": GPU, "readings": {"throttled": {"heat": 0.02}}},
    ),
    (learning.learner_bound, {}, {"profile_changes": {"update_overhead": 1.0}}),
    (learning.device_bound, {"profile_changes": ON_DEVICE}, {"profile_changes": {**ON_DEVICE, "collecting": 1.0}}),
    (
        learning.use_the_cpu,
        {"profile_changes": {**GPU, "other_device": Pace(0.0001, 0.2)}},
        {"profile_changes": {**GPU, "other_device": Pace(0.0001, 20.0)}},
    ),
    (learning.use_the_cpu, {"profile_changes": {**GPU, "other_device": Pace(0.0001, 0.2)}}, {"profile_changes": GPU}),
    (learning.logging_overhead, {"profile_changes": {"rest": 3.0}}, {"profile_changes": {"rest": 0.1}}),
]


@pytest.mark.parametrize(("check", "present", "absent"), CASES, ids=lambda part: getattr(part, "__name__", ""))
def test_check_finds_its_cause_only_if_present(check: Any, present: dict[str, Any], absent: dict[str, Any]) -> None:
    found = check(facts(**present))
    assert found is not None
    assert 0.0 <= found.weight <= 1.05
    assert found.sentence.endswith(".")
    assert found.sentence[0].isupper() or found.sentence[0].isdigit()
    assert check(facts(**absent)) is None


def test_every_check_has_a_case() -> None:
    assert {check for check, _, _ in CASES} == set(CHECKS)


def advice_of(finding: Finding | None, flags: str) -> Advice:
    assert finding is not None
    return next(advice for advice in finding.advice if advice.flags == flags)


def test_environment_computes_advises_the_best_worker_count() -> None:
    few = facts(profile_changes={"stepping": (Stepping(1, 2, 16.0, 16.0),), "collecting": 16.0}, engine={"workers": 1})
    # 16 environments on 1 worker: 16 s of stepping; on 5: 4 s on the busiest one; plus 2 s of learning.
    found = advice_of(collecting.environment_computes(few), "--workers 5")
    assert (found.kind, found.speedup) == ("engine", pytest.approx(18 / 6, rel=0.05))


def test_simulator_gets_its_share_and_the_gain_of_more_environments() -> None:
    # 100 steps: 2 s of the simulator, 2 s of inference and storage, 2 s of learning. With 64 environments instead of
    # 16, 25 steps make the same batch: 25 × 30 ms of the simulator, 25 × 20 ms of inference, and the same learning.
    given = facts(profile_changes=SIMULATOR)
    found = collecting.environment_computes(given)
    assert found is not None
    assert found.weight == pytest.approx(2 / 6)
    assert "one step of all 16 takes 20.0 ms, of 64 30.0 ms" in found.sentence
    assert "83 % of that is Python and kernel launches" in found.sentence
    more = advice_of(found, "--n-envs 64 --n-steps 25")
    assert (more.kind, more.speedup) == ("recipe", pytest.approx(6 / (0.75 + 0.5 + 2)))
    beside = collecting.inference_bound(given)
    assert beside is not None
    assert (beside.weight, advice_of(beside, more.flags)) == (pytest.approx(2 / 6), more)


def test_simulator_of_own_factory_is_advised_without_a_flag_that_would_not_apply() -> None:
    own = {**SIMULATOR, "simulator": SimulatorPace(0.02, (64, 0.03), takes_n_envs=False)}
    found = advice_of(collecting.environment_computes(facts(profile_changes=own)), "")
    assert "create 64 in your factory, and use --n-steps 25" in found.text


def test_more_environments_of_simulator_are_not_advised_if_steps_take_longer_in_proportion() -> None:
    slower = {**SIMULATOR, "simulator": SimulatorPace(0.04, (64, 0.16))}
    found = collecting.environment_computes(facts(profile_changes=slower))
    assert found is not None
    assert [advice.kind for advice in found.advice] == ["engine"]
    assert "kernel launches" not in found.sentence


def test_workers_are_not_advised_if_they_do_not_help() -> None:
    found = collecting.environment_computes(facts(profile_changes={"cores": 4}))
    assert found is not None
    assert not [advice for advice in found.advice if advice.flags]


def test_waiting_environments_are_advised_one_worker_each() -> None:
    found = advice_of(collecting.environment_waits(facts(profile_changes={"on_core": 0.1})), "--workers 16")
    assert found.speedup == pytest.approx(6 / (1.3 + 2))  # a step of 10 ms and 1.5 inference calls of 2 ms


def test_waiting_workers_are_limited_to_a_few_per_core() -> None:
    found = advice_of(
        collecting.environment_waits(facts(profile_changes={"on_core": 0.1, "n_envs": 1000})), "--workers 20"
    )
    assert found.speedup is not None


def test_advised_rollout_size_is_divisible_by_the_batch_size() -> None:
    # 4 environments on 5 cores: 20 are advised, with a fifth of the steps; 20 × 20 is no multiple of 96, 20 × 24 is.
    few = facts(profile_changes=FEW_ENVS, recipe={"batch_size": 96, "n_steps": 120})
    assert advice_of(collecting.too_few_envs(few), "--n-envs 20 --n-steps 24").kind == "recipe"


def test_memory_advice_is_divisible_by_the_batch_size() -> None:
    full = {"readings": {"gpu_memory": 0.95}}
    # 12 × 100 steps are not a multiple of 800, 8 × 100 are; neither is a multiple of 1600.
    assert advice_of(device.memory(facts(**full, recipe={"batch_size": 800})), "--n-envs 8").kind == "recipe"
    assert advice_of(device.memory(facts(**full, recipe={"batch_size": 1600})), "").kind == "recipe"


def test_invalid_settings_are_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_advice_for_a_fixed_preset_adds_allow_recipe_change() -> None:
    fixed = load_preset("mt10-2m").apply(Config())
    assert isinstance(fixed.recipe.batch_size, int)
    advice = Advice("recipe", "larger", f"--batch-size {2 * fixed.recipe.batch_size}")
    changed = with_valid_flags(advice, fixed.with_values({"env": "any", "preset": "mt10-2m"}, "test"))
    assert changed is not None
    assert changed.flags == f"{advice.flags} --allow-recipe-change"


def test_no_tensorboard_is_advised_only_if_it_is_on() -> None:
    assert advice_of(learning.logging_overhead(facts(profile_changes={"rest": 3.0})), "--no-tensorboard").at_most
    assert advice_of(
        learning.logging_overhead(facts(profile_changes={"rest": 3.0}, run={"tensorboard": False})), ""
    ).at_most


def test_too_many_threads_are_not_mistaken_for_small_batches() -> None:
    slow = {"threads": 2, "pace": Pace(0.002, 40.0), "update_overhead": 0.95}
    found = verdict_on(facts(profile_changes={**slow, "learning_by_threads": ((1, 4.0),)}, engine={"threads": 2}))
    assert found.cause == "too many threads"
    assert found.engine[0].flags == "--threads 1"
    assert found.engine[0].speedup == pytest.approx(44 / 8, rel=0.05)
    assert "small batches" not in [finding.cause for finding in found.findings]
    fine = verdict_on(facts(profile_changes={**slow, "learning_by_threads": ((1, 80.0),)}, engine={"threads": 2}))
    assert fine.cause == "small batches"
    assert "--threads 1" not in [advice.flags for advice in fine.engine]


def test_larger_batch_speedup_follows_from_the_update_overhead() -> None:
    # Learning is a third of the time, nine tenths of an update are overhead; a quarter of the updates remain.
    found = advice_of(learning.small_batches(facts(profile_changes={"update_overhead": 0.9})), "--batch-size 1600")
    assert found.kind == "recipe"
    assert found.speedup == pytest.approx(1 / (1 - (1 / 3) * (1 - 0.9 / 4 - 0.1)))


def test_advised_batch_size_divides_the_rollout() -> None:
    whole = facts(profile_changes={"update_overhead": 0.9}, recipe={"batch_size": 1600})
    found = learning.small_batches(whole)
    assert found is not None
    assert found.advice == ()


def test_off_policy_advice_is_fewer_and_larger_updates() -> None:
    sac = facts(profile_changes={"update_overhead": 1.0}, recipe={"algo": "sac", "batch_size": 256})
    found = advice_of(learning.small_batches(sac), "--utd-ratio 0.5 --batch-size 512")
    assert found.speedup == pytest.approx(1 / (1 - (1 / 3) / 2))


def test_overlap_is_a_recipe_change() -> None:
    found = advice_of(collecting.no_overlap(facts()), "--overlap strict")
    assert (found.kind, found.speedup) == ("recipe", pytest.approx(6 / 4))


def test_slow_server_is_reported_with_latencies_and_failures() -> None:
    given = facts(requests=True, steps=SLOW_STEPS, request_counts={"ok": 90, "timeout": 10})
    found = collecting.slow_server(given)
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
        ({"profile_changes": {"on_core": 0.1}}, "environment waits"),
        ({"profile_changes": {"on_core": 0.1}, "requests": True, "steps": SLOW_STEPS}, "slow server"),
        ({"steps": StepStats(0.01, 0.02, 1.0, native=0.8, threads=16)}, "too many threads"),
        ({"profile_changes": {"pace": Pace(0.002, 40.0), "update_overhead": 0.95}}, "small batches"),
        ({"profile_changes": {"pace": Pace(0.002, 40.0), "update_overhead": 0.1}}, NO_FASTER_SETTINGS),
        (
            {
                "profile_changes": {
                    "pace": Pace(0.002, 40.0),
                    "update_overhead": 0.1,
                    "learning_by_threads": ((5, 10.0),),
                }
            },
            "learner-bound",
        ),
        ({"profile_changes": {**GPU, "other_device": Pace(0.0001, 0.2)}}, "use the CPU"),
        ({"profile_changes": FEW_ENVS}, "too few environments"),
    ],
)
def test_verdict_is_the_largest_cause(given: dict[str, Any], cause: str) -> None:
    assert verdict_on(facts(**given)).cause == cause


# -- on a GPU with 16 cores: figures of one iteration, as on an H200 ---------------------------------------------------

DEFAULT_WORKERS: dict[str, Any] = {"workers": None, "slices": None}
SMALL_BATCH = {"batch_size": 16}  # divides every rollout below
LAUNCH_BOUND = {  # learning is mostly kernel launches: 2,048 steps in 32 updates of 3 ms; 50 ms each on a CPU
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
EAGER = f"{EAGERLY}, which is slower: not permitted (at `x.item()`, own.py)"
LARGE_OBSERVATIONS = {  # 15 workers copy 4 MB in 0.5 ms, and each of three inference calls sends all 30 observations
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
REPLAY_BATCHES_FROM_HOST = {  # 32 updates, whose batches the host samples in 6 ms each
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
JOB_WITH_REPLAY_ON_HOST: dict[str, Any] = {
    "profile_changes": REPLAY_BATCHES_FROM_HOST,
    "recipe": {"algo": "dqn", "batch_size": 256},
    "engine": DEFAULT_WORKERS,
    "replay_on_host": True,
    "slow_fallbacks": (f"The replay buffer {REPLAY_ON_HOST}, which is slower: 8 GiB.",),
}
JOB_WITH_REPLAY_ON_HOST_IN_FP32 = {
    **JOB_WITH_REPLAY_ON_HOST,
    "recipe": {**JOB_WITH_REPLAY_ON_HOST["recipe"], "precision": "fp32"},
}
SMALL_EAGER = {**LAUNCH_BOUND, "pace": Pace(0.0003, 0.3), "graphs": False, "other_device": Pace(0.0003, 0.1)}
NO_GRAPHS = {**DEFAULT_WORKERS, "graphs": False}
LAUNCH_BOUND_WITHOUT_GRAPHS = {  # measured on an H200, except the rollout with graphs
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
TOO_MANY_THREADS = {  # measured on an H200 with 16 cores: nothing would be faster on the CPU
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
THREADED_STEPS = StepStats(0.0006, 0.0021, 1.0, 0.95, 31)
COMPUTE_BOUND = {**LAUNCH_BOUND, "pace": Pace(0.0002, 0.18), "update_overhead": 0.05, "other_device": Pace(0.03, 300.0)}
FP32 = {**SMALL_BATCH, "precision": "fp32"}


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (
            {"profile_changes": LAUNCH_BOUND, "slow_fallbacks": (f"inference {EAGER}", f"learning {EAGER}")},
            "not captured",
        ),
        ({"profile_changes": LAUNCH_BOUND, "slow_fallbacks": (f"learning {EAGER}",)}, "not captured"),
        ({"profile_changes": LAUNCH_BOUND}, "small batches"),
        ({"profile_changes": LARGE_OBSERVATIONS, "to_device": 5.5e10, "sent_bytes": 30 * 2**22}, "copies and syncs"),
        (
            {"profile_changes": LARGE_OBSERVATIONS, "to_device": 5.5e10, "sent_bytes": 30 * 2**10},
            "too few environments",
        ),
        ({**JOB_WITH_REPLAY_ON_HOST, "learning_with_replay_on_gpu": 0.03}, "buffer on the host"),
        ({**JOB_WITH_REPLAY_ON_HOST, "learning_with_replay_on_gpu": 0.19}, NO_FASTER_SETTINGS),
        (
            {**JOB_WITH_REPLAY_ON_HOST_IN_FP32, "learning_with_replay_on_gpu": 0.03, "learning_in_tf32": 0.03},
            "buffer on the host",
        ),
        (
            {**JOB_WITH_REPLAY_ON_HOST_IN_FP32, "learning_with_replay_on_gpu": 0.19, "learning_in_tf32": 0.03},
            "TF32 off",
        ),
        (JOB_WITH_REPLAY_ON_HOST, "buffer on the host"),
        (JOB_WITH_REPLAY_ON_HOST_IN_FP32, "buffer on the host"),
        ({**JOB_WITH_REPLAY_ON_HOST, "readings": {"learning_busy": 0.1}}, "buffer on the host"),
        ({**JOB_WITH_REPLAY_ON_HOST, "readings": {"learning_busy": 0.95}}, NO_FASTER_SETTINGS),
        ({"profile_changes": {**SMALL_EAGER, "graphed": Pace(0.0001, 0.012)}, "engine": NO_GRAPHS}, "small batches"),
        ({"profile_changes": {**SMALL_EAGER, "graphed": Pace(0.0003, 0.28)}, "engine": NO_GRAPHS}, "use the CPU"),
        ({"profile_changes": LAUNCH_BOUND_WITHOUT_GRAPHS, "engine": NO_GRAPHS}, "small batches"),
        ({"profile_changes": TOO_MANY_THREADS, "engine": {"workers": 4}, "steps": THREADED_STEPS}, "too many threads"),
        ({"profile_changes": COMPUTE_BOUND, "recipe": FP32, "learning_in_tf32": 0.04}, "TF32 off"),
        ({"profile_changes": COMPUTE_BOUND, "recipe": FP32, "learning_in_tf32": 0.17}, NO_FASTER_SETTINGS),
        ({"profile_changes": COMPUTE_BOUND}, NO_FASTER_SETTINGS),
    ],
)
def test_verdict_on_a_gpu_is_the_largest_cause(given: dict[str, Any], cause: str) -> None:
    assert verdict_on(facts(**{"engine": DEFAULT_WORKERS, "recipe": SMALL_BATCH, **given})).cause == cause


def test_failed_capture_is_reported_with_its_line() -> None:
    messages = (f"inference {EAGER}.", f"learning {EAGER}.")
    found = verdict_on(
        facts(profile_changes=LAUNCH_BOUND, engine=DEFAULT_WORKERS, recipe=SMALL_BATCH, slow_fallbacks=messages)
    )
    assert found.sentence.startswith("The engine uses a slower implementation: learning could not be captured")
    assert found.sentence.endswith("(at `x.item()`, own.py).")


def test_replay_buffer_on_host_is_not_reported_as_failed_capture() -> None:
    found = verdict_on(facts(**JOB_WITH_REPLAY_ON_HOST, learning_with_replay_on_gpu=0.03))
    assert "not captured" not in [finding.cause for finding in found.findings]
    assert found.findings[0].weight == pytest.approx(0.17 / 0.205, rel=0.02)
    assert "200.0 ms, but 30.0 ms" in found.sentence


def test_large_observations_are_reported_without_advising_more_environments() -> None:
    found = verdict_on(
        facts(
            profile_changes=LARGE_OBSERVATIONS,
            engine=DEFAULT_WORKERS,
            recipe=SMALL_BATCH,
            to_device=5.5e10,
            sent_bytes=30 * 2**22,
        )
    )
    assert "126 MB per inference call" in found.sentence
    assert found.basis == "by probes"
    assert "too few environments" not in [finding.cause for finding in found.findings]


def test_kernel_launch_overhead_is_not_blamed_on_inference() -> None:
    found = verdict_on(facts(profile_changes=LAUNCH_BOUND_WITHOUT_GRAPHS, engine=NO_GRAPHS, recipe=SMALL_BATCH))
    assert "inference" not in [finding.cause for finding in found.findings]
    assert found.engine[0].flags == "--graphs"
    assert found.engine[0].speedup == pytest.approx((0.0858 + 0.0285 + 0.0086) / (0.02 + 0.0041 + 0.0086), rel=0.01)


def test_graphs_are_advised_before_the_cpu_if_faster() -> None:
    found = verdict_on(
        facts(profile_changes={**SMALL_EAGER, "graphed": Pace(0.0001, 0.012)}, engine=NO_GRAPHS, recipe=SMALL_BATCH)
    )
    assert found.engine[0].flags == "--graphs"
    assert "use the CPU" not in [finding.cause for finding in found.findings]


def test_tf32_speedup_is_predicted_from_its_probe() -> None:
    found = device.tf32_off(
        facts(profile_changes=COMPUTE_BOUND, engine=DEFAULT_WORKERS, recipe=FP32, learning_in_tf32=0.04)
    )
    advice = advice_of(found, "--precision tf32")
    assert (advice.speedup, advice.at_most) == (pytest.approx(0.21 / 0.07), False)


def test_tf32_speedup_excludes_the_gain_from_a_replay_buffer_on_gpu() -> None:
    tried = {"learning_with_replay_on_gpu": 0.03, "learning_in_tf32": 0.03}
    assert device.tf32_off(facts(**JOB_WITH_REPLAY_ON_HOST_IN_FP32, **tried)) is None
    tried["learning_in_tf32"] = 0.01
    found = device.tf32_off(facts(**JOB_WITH_REPLAY_ON_HOST_IN_FP32, **tried))
    assert found is not None
    assert found.weight == pytest.approx(0.02 / 0.205, rel=0.02)
    assert "from a replay buffer on the GPU takes 30.0 ms, but 10.0 ms in TF32" in found.sentence
    assert advice_of(found, "--precision tf32").at_most  # less while learning waits for the host


def test_no_faster_settings_advises_no_flags() -> None:
    found = verdict_on(facts(profile_changes={"pace": Pace(0.002, 40.0), "update_overhead": 0.1}))
    assert found.sentence.startswith("No engine setting would make this job faster")
    assert not [advice for advice in found.engine if advice.flags]


def test_advice_is_ranked_by_prediction_then_by_bound() -> None:
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
