"""Probes of real jobs on two or more cores: planted properties are measured."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stand_in_simulators import STEP_S

from unidle.algos.registry import new_algorithm
from unidle.buffers import placement
from unidle.buffers.multitask import TaskReplay
from unidle.buffers.replay import Replay
from unidle.config import Config, Recipe
from unidle.config.machine import available_cores
from unidle.config.resolve import resolve_layers
from unidle.config.validate import validated
from unidle.engine.build import RunParts
from unidle.engine.collect.host import HostCollector
from unidle.engine.learn.learner import Learner
from unidle.tuning.job import endless
from unidle.tuning.pipeline_model import iteration_seconds
from unidle.tuning.probes import learning as probes_learning
from unidle.tuning.probes import stepping
from unidle.tuning.probes.device import none_if_out_of_memory, simulator_step
from unidle.tuning.probes.learning import LearningProbes, updates_of
from unidle.tuning.probes.probe_job import _Probes, measure_profile, probe_job
from unidle.tuning.probes.probe_results import ProbeResults
from unidle.tuning.probes.profile import Pace
from unidle.tuning.probes.stepping import _CpuTime, one_round, step_alone
from unidle.tuning.probes.training import job_maker

SECONDS = 0.8  # of probing in total


def job(env: str, **settings: Any) -> Config:
    small: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 32, "n_epochs": 2, "net_arch": (16, 16)}
    layers = resolve_layers("classic", None, False, env)
    return validated(layers.with_flags({**small, "env": env, **settings}), layers.preset_batch_size)


@pytest.fixture(scope="module")
def sleeping() -> ProbeResults:
    return probe_job(job("slow_envs:Sleeping", workers=1, n_steps=16), SECONDS)


def test_sleeping_steps_are_classified_as_waiting(sleeping: ProbeResults) -> None:
    assert sleeping.profile.waits
    assert sleeping.profile.step_seconds >= 0.01
    assert sleeping.steps is not None
    assert 0.01 <= sleeping.steps.median <= sleeping.steps.p95


def test_stepping_is_measured_with_current_workers_and_all_cores(sleeping: ProbeResults) -> None:
    by_workers = {one.workers: one.seconds for one in sleeping.profile.stepping}
    # 16 steps of 4 environments, 10 ms each, in sequence; a busy machine takes longer, never less.
    assert by_workers[1] >= 0.64
    everything = min(4, available_cores())
    assert by_workers[everything] >= 0.64 / everything
    assert sleeping.profile.stepping[0].workers == 1


class LatePolling:
    """Two slices of one worker, 10 ms a step, on a simulated clock; every fourth `recv` returns 9.9 ms late."""

    bounds = ((0, 1), (1, 2))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.block = SimpleNamespace(actions=np.zeros((2, 1)))
        self._now, self._free, self._calls = 0.0, 0.0, 0
        self._done: list[tuple[float, int]] = []
        monkeypatch.setattr(stepping, "perf_counter", lambda: self._now)
        monkeypatch.setattr(stepping, "_draw", lambda *_: np.zeros((2, 1)))

    def send(self, slices: Sequence[int]) -> None:
        for slot in slices:
            self._free = max(self._free, self._now) + 0.01
            self._done.append((self._free, slot))

    def recv(self, at_least: int) -> list[int]:
        self._calls += 1
        self._now = max(self._now, self._done[0][0]) + (0.0099 if self._calls % 4 == 2 else 0.0)
        back = [slot for when, slot in self._done if when <= self._now]
        del self._done[: len(back)]
        return back


def test_late_polling_never_makes_a_round_faster_than_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, _ = stepping._without_lockstep(cast(Any, LatePolling(monkeypatch)), np.random.default_rng(0), 0.15)
    assert seconds >= 0.0199


@pytest.mark.parametrize("threads", [1, 2])
def test_multithreaded_learning_is_also_probed_with_one_thread(threads: int) -> None:
    found = measure_profile(job("slow_envs:Cheap", threads=threads), SECONDS)
    assert (1 in dict(found.learning_by_threads)) == (threads == 2)
    assert found.threads == threads


def test_iteration_seconds_match_the_sum_of_the_probed_parts(sleeping: ProbeResults) -> None:
    profile = sleeping.profile
    assert profile.collecting >= 0.64
    whole = profile.collecting + profile.pace.learning + profile.rest
    found = iteration_seconds(profile, job("slow_envs:Sleeping", workers=1).engine, "off")
    assert found == pytest.approx(whole, rel=0.5)


def test_extra_threads_of_an_environment_are_detected() -> None:
    found = probe_job(job("slow_envs:Threaded", workers=1, n_envs=2, n_steps=8, batch_size=8), 5 * SECONDS)
    assert not found.profile.waits
    assert found.steps is not None
    assert found.steps.threads >= 16
    assert found.steps.native > 0.2


def test_fast_masked_steps_are_not_classified_as_waiting() -> None:
    found = probe_job(job("cli_envs:MaskedRenderingEnv"), SECONDS)
    assert found.profile.on_core == 1.0
    assert found.profile.stepping[0].workers == 0


def test_update_of_a_tiny_batch_is_mostly_overhead() -> None:
    tiny = measure_profile(job("slow_envs:Cheap", n_steps=64, batch_size=4), SECONDS)
    assert tiny.update_overhead is not None
    assert tiny.update_overhead > 0.5
    assert tiny.updates == 2 * 64


def test_other_program_that_ends_during_the_probe_is_not_overhead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def learn(_: object, algo: object, recipe: Recipe, *__: object) -> float:
        assert isinstance(recipe.batch_size, int)
        sizes.append(recipe.batch_size)
        alone = len(set(sizes)) == 2  # until the larger batch size is first probed, everything takes twice as long
        return updates_of(recipe) * recipe.batch_size * (1e-5 if alone else 2e-5)

    monkeypatch.setattr(LearningProbes, "learn_once", learn)
    found = measure_profile(job("slow_envs:Cheap", n_steps=64, batch_size=32), SECONDS)
    assert set(sizes) == {32, 256}
    assert found.update_overhead == pytest.approx(0.0, abs=1e-9)


def test_off_policy_probe_measures_updates_after_learning_starts() -> None:
    layers = resolve_layers("dqn", None, False, "slow_envs:Cheap", None, "dqn")
    wanted = {"env": "slow_envs:Cheap", "n_envs": 2, "buffer_size": 2000, "net_arch": (64, 64)}
    config = validated(layers.with_flags(wanted), layers.preset_batch_size)
    assert config.recipe.learning_starts > config.recipe.total_batch
    idle = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, utd_ratio=0.001))
    learning, little_learning = measure_profile(config, SECONDS), measure_profile(idle, SECONDS)
    assert learning.updates == config.recipe.total_batch * config.recipe.utd_ratio
    assert learning.pace.learning > 3 * little_learning.pace.learning


def test_device_environments_are_probed_together_with_learning() -> None:
    profile = measure_profile(job("unidle/CartPole-v1", n_envs=64, n_steps=8, batch_size=128), SECONDS)
    assert profile.on_device
    assert profile.stepping == ()
    assert profile.pace.learning > 0


@pytest.mark.parametrize("factory", ["of_any_size", "of_fixed_size"])
def test_simulator_is_probed_alone_and_with_more_environments_if_possible(factory: str) -> None:
    env = f"stand_in_simulators:{factory}"
    profile = measure_profile(job(env, n_envs=16, n_steps=16, batch_size=64), SECONDS)
    simulator = profile.simulator
    assert simulator is not None
    assert not simulator.takes_n_envs
    assert simulator.step >= STEP_S
    if factory == "of_fixed_size":
        assert simulator.larger is None
    else:
        assert simulator.larger is not None
        assert simulator.larger[0] == 64
        assert simulator.larger[1] >= STEP_S


class Walk:
    """Points that are pushed; an episode ends far from zero, which takes a push."""

    action_space = spaces.Box(-0.5, 0.5, (2,))

    def __init__(self) -> None:
        self.ended = 0
        self.largest = 0.0

    def begin(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        at = torch.zeros(8, 2)
        return {"at": at}, at

    def step(self, state: dict[str, torch.Tensor], action: torch.Tensor) -> tuple[dict[str, torch.Tensor], None]:
        at = state["at"] + action
        far = at.abs().amax(1) > 2
        self.ended += int(far.sum())
        self.largest = max(self.largest, float(action.abs().max()))
        return {"at": at * ~far.unsqueeze(1)}, None


def test_simulator_is_timed_while_episodes_end() -> None:
    env = Walk()
    seconds = simulator_step(cast(Any, env), 8, 2, torch.device("cpu"), share=0.05)
    assert seconds > 0
    assert env.ended > 0
    assert env.largest == 0.5


@pytest.mark.parametrize(("device", "runs"), [("cuda", 2), ("cpu", 1)])
def test_slow_learning_probe_excludes_graph_capture(device: str, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [9.0, 2.0, 1.9]  # on a GPU, the first run captures graphs
    done: list[float] = []

    def learn(*_: object) -> float:
        done.append(durations[len(done)])
        return done[-1]

    monkeypatch.setattr(probes_learning, "buffer_size_that_fits", lambda *_: 1)
    flat = SimpleNamespace(device=torch.device(device))
    algo = SimpleNamespace(parameters=SimpleNamespace(flat=flat), experience=None)
    parts = SimpleNamespace(algo=algo, env_spec=SimpleNamespace(obs_layout=SimpleNamespace(obs_bytes=1)))
    probes = LearningProbes(job("slow_envs:Cheap"), 1.0, cast(Any, parts), cast(Any, None))
    monkeypatch.setattr(probes, "learn_once", learn)
    assert probes.seconds() == durations[runs - 1]
    assert len(done) == runs


def test_too_slow_device_is_abandoned_after_one_part_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    config = job("slow_envs:Cheap", n_steps=256, net_arch=(256, 256))
    advances = 0
    advance = Learner.advance

    def counting_advance(learner: Learner) -> bool:
        nonlocal advances
        advances += 1
        return advance(learner)

    monkeypatch.setattr(Learner, "advance", counting_advance)
    rough_pace = _Probes(config, job_maker(config), share=1e-5)._pace_with(config.recipe, device="cpu")
    assert advances == 1
    assert rough_pace is not None
    assert rough_pace.learning > 0
    _Probes(config, job_maker(config), share=0.5)._pace_with(config.recipe, device="cpu")
    assert advances > updates_of(config.recipe)


def small_dqn() -> Config:
    layers = resolve_layers("dqn", None, False, "slow_envs:Cheap", None, "dqn")
    wanted = {"env": "slow_envs:Cheap", "n_envs": 2, "buffer_size": 2000}
    return endless(validated(layers.with_flags(wanted), layers.preset_batch_size))


@contextmanager
def learning(config: Config) -> Iterator[tuple[LearningProbes, RunParts]]:
    probes = _Probes(config, job_maker(config), share=0.01)
    with probes._built(config, lambda text: None) as parts:
        assert isinstance(parts.collector, HostCollector)
        yield LearningProbes(config, 0.01, parts, probes._slot(parts, parts.collector.envs)), parts


def test_other_recipe_is_measured_or_returns_none() -> None:
    with learning(small_dqn()) as (probes, _):
        assert (probes.seconds_with(buffer_size=1000) or 0.0) > 0
        assert probes.seconds_with(buffer_size=1) is None


def test_graphs_are_not_probed_with_the_replay_buffer_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_dqn()
    probes = _Probes(config, job_maker(config), share=0.01)
    monkeypatch.setattr(probes, "_pace_with", lambda *_, **__: Pace(1.0, 1.0))
    for place in ("device", "host"):
        monkeypatch.setattr(placement, "choose_buffer_device", lambda *_, place=place: place)
        with probes._built(config, lambda text: None) as parts:
            assert (probes._graphed(parts, config.recipe) is None) == (place == "host")


@pytest.mark.parametrize(
    ("on_host", "measured", "expected"),
    [
        (False, [1.0], (None, 1.0)),
        (True, [2.0, 1.0], (2.0, 1.0)),
        (True, [None], (None, None)),
    ],
)
def test_tf32_is_probed_only_with_a_baseline(
    on_host: bool, measured: list[float | None], expected: tuple[float | None, float | None]
) -> None:
    config = small_dqn()
    config = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, precision="fp32"))
    remaining = iter(measured)
    probed = SimpleNamespace(replay_on_host=on_host, learning_with_replay_on_gpu=None, learning_in_tf32=None)
    learner = SimpleNamespace(seconds_with=lambda **_: next(remaining))
    _Probes(config, job_maker(config), share=0.01)._time_learning_variants(cast(Any, probed), cast(Any, learner))
    assert (probed.learning_with_replay_on_gpu, probed.learning_in_tf32) == expected
    assert not list(remaining)


@pytest.mark.parametrize("job_is_slow_too", [True, False])
def test_probe_with_a_slower_fallback_than_the_job_is_discarded(
    job_is_slow_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(policy: Any, recipe: Recipe, capture: Any, fall_back: Any) -> Any:
        fall_back("updates", torch.OutOfMemoryError("CUDA out of memory."), "runs eagerly")
        return new_algorithm(policy, recipe, capture, fall_back)

    monkeypatch.setattr(probes_learning, "new_algorithm", slower)
    with learning(small_dqn()) as (probes, parts):
        if job_is_slow_too:
            parts.capture.fall_back("updates", RuntimeError("not permitted"), "runs eagerly")
        assert (probes.seconds_with() is not None) == job_is_slow_too
        assert (probes.update_overhead() is not None) == job_is_slow_too


# -- probes that run out of memory -------------------------------------------------------------------------------------


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_out_of_memory_probe_keeps_the_other_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_learning, "new_algorithm", out_of_memory)
    found = measure_profile(job("slow_envs:Cheap"), SECONDS)
    assert found.update_overhead is None
    assert found.pace.learning > 0
    assert found.collecting > 0


def test_out_of_memory_recipe_is_skipped_and_numerics_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_dqn()
    precisions: list[str] = []
    with learning(config) as (probes, parts):
        monkeypatch.setattr(probes_learning, "set_numerics", lambda _, recipe: precisions.append(recipe.precision))
        advance = Learner.advance

        def advance_job_only(learner: Learner) -> bool:
            if learner._algo is not parts.algo:
                out_of_memory()
            return advance(learner)

        monkeypatch.setattr(Learner, "advance", advance_job_only)
        assert probes.seconds_with(precision="bf16") is None
        assert precisions == ["bf16", config.recipe.precision]
        assert probes.seconds() > 0


def test_probes_are_skipped_if_the_replay_buffer_is_too_small() -> None:
    config = small_dqn()
    with learning(config) as (probes, _):
        assert probes.update_overhead() is not None
        probes._buffer_size = 1
        assert probes.seconds_with() is None
        assert probes.update_overhead() is None
        assert _Probes(config, job_maker(config), share=0.01)._pace_with(probes.recipe_with(), device="cpu") is None


def test_probes_are_skipped_if_their_replay_buffer_is_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_dqn()
    with learning(config) as (probes, _):
        # As if other programs now used the GPU memory.
        monkeypatch.setattr(placement, "choose_buffer_device", lambda *_: "host")
        assert probes.seconds_with() is None
        assert probes.update_overhead() is None
    with learning(config) as (probes, _):  # a job whose own buffer is on the host
        assert probes.seconds() > 0
        assert probes.seconds_with() is None
        assert _Probes(config, job_maker(config), share=0.01)._pace_with(probes.recipe_with(), device="cpu") is None


@pytest.mark.parametrize("n_tasks", [1, 4])
def test_probed_replay_buffer_uses_a_quarter_of_free_gpu_memory(n_tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2**26
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
    sizes = 2, 4000, 2, torch.device("cpu"), 0.99
    replay = TaskReplay(1000, n_tasks, *sizes) if n_tasks > 1 else Replay(1000, *sizes)
    parameters = SimpleNamespace(flat=SimpleNamespace(device=torch.device("cuda")))
    algo = SimpleNamespace(parameters=parameters, experience=SimpleNamespace(buffer=replay))
    env_spec = SimpleNamespace(obs_layout=SimpleNamespace(obs_bytes=4000), action_layout=SimpleNamespace(width=2))
    parts = SimpleNamespace(algo=algo, env_spec=env_spec)
    config = small_dqn()
    config = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, buffer_size=10**6))
    steps = LearningProbes(config, 1.0, cast(Any, parts), cast(Any, None)).recipe_with().buffer_size
    used_bytes = steps * sum(t.nbytes for t in vars(replay).values() if isinstance(t, torch.Tensor)) / 1000
    assert 0.95 * free / 4 < used_bytes < 1.05 * free / 4


def test_out_of_memory_engine_probe_closes_its_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = endless(job("slow_envs:Cheap", workers=1))
    closed: list[HostCollector] = []
    close = HostCollector.close

    def recording_close(collector: HostCollector) -> None:
        closed.append(collector)
        close(collector)

    monkeypatch.setattr(HostCollector, "close", recording_close)
    monkeypatch.setattr(Learner, "begin", out_of_memory)
    assert _Probes(config, job_maker(config), share=0.01)._pace_with(config.recipe, device="cpu") is None
    assert len(closed) == 1


def test_out_of_memory_probe_releases_its_memory() -> None:
    tried: list[weakref.ref[Any]] = []

    class Network:
        """Contains a reference cycle, as networks do."""

        def __init__(self) -> None:
            self.owner = self
            tried.append(weakref.ref(self))

    @none_if_out_of_memory
    def probe(size: int) -> float | None:
        network = Network()
        if size > 1:
            out_of_memory(network)
        return float(size)

    assert probe(1) == 1.0
    assert tried[-1]() is None  # the next probe needs the memory
    assert probe(size=2) is None
    assert tried[-1]() is None


def test_other_probe_errors_are_raised() -> None:
    @none_if_out_of_memory
    def probe() -> float | None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        probe()


def test_one_long_wait_for_a_core_does_not_distort_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of 10 ms, 2 or 3 ms of each on a core; one of them first waited half a second in the run queue.
    latencies = iter([0.01] * 9 + [0.51] + [0.01] * 100)
    usages = iter([_CpuTime(0.0, 0.0, 0.0, 1), _CpuTime(0.03, 0.03, 0.5, 1)])
    queued = iter([0.0] * 10 + [0.5] * 100)
    clock = iter(0.04 * n for n in range(100))
    monkeypatch.setattr(stepping, "make_envs", lambda *_: SimpleNamespace(start=lambda _: None, close=lambda: None))
    monkeypatch.setattr(stepping, "one_round", lambda *_: [next(latencies)])
    monkeypatch.setattr(stepping, "_draw", lambda *_: None)
    monkeypatch.setattr(stepping, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(_CpuTime, "of", lambda _: next(usages))
    monkeypatch.setattr(stepping, "_queued", lambda _: next(queued))
    maker, env_spec = SimpleNamespace(on_host=lambda: None), SimpleNamespace(step_seconds=0.01)
    found = step_alone(cast(Any, maker), cast(Any, env_spec), cast(Any, None), 0.1)
    assert found.median == 0.01
    assert 0.1 < found.on_core < 0.4


def test_strict_overlap_is_probed() -> None:
    profile = measure_profile(job("slow_envs:Cheap", overlap="strict", workers=1), SECONDS)
    assert profile.overlap == "strict"
    assert profile.collecting > 0


def test_endless_job_never_reaches_its_last_timestep() -> None:
    config = endless(job("slow_envs:Cheap", timesteps=128))
    assert config.run.timesteps > 10**9


class StaggeredSlices:
    """Four slices that return one after the other, 2 ms apart."""

    def __init__(self) -> None:
        self.bounds = [(0, 1), (1, 2), (2, 3), (3, 4)]
        self.block = SimpleNamespace(actions=np.zeros((4, 1)))
        self._sent: list[int] = []

    def send(self, slices: Sequence[int]) -> None:
        self._sent += slices

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        time.sleep(0.002)
        return [self._sent.pop(0)]


def test_one_round_measures_the_latency_of_each_slice() -> None:
    first, *_, last = one_round(StaggeredSlices(), np.ones((4, 1)))
    assert 0.002 <= first < last
    assert last >= 0.008
