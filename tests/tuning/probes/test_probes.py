"""Probes of real jobs on two cores or more: what is planted must be measured."""

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

from unidle.algos.registry import new_algorithm
from unidle.buffers import placement
from unidle.buffers.multitask import TaskReplay
from unidle.buffers.replay import Replay
from unidle.config import Config, Recipe
from unidle.config.machine import available_cores
from unidle.config.resolve import lay
from unidle.config.validate import validated
from unidle.engine.build import RunParts
from unidle.engine.collect.host import HostCollector
from unidle.engine.learn.learner import Learner
from unidle.tuning.job import endless
from unidle.tuning.pipeline_model import iteration_seconds
from unidle.tuning.probes import learning as probes_learning
from unidle.tuning.probes import stepping
from unidle.tuning.probes.device import if_it_fits
from unidle.tuning.probes.learning import LearningProbes, updates_of
from unidle.tuning.probes.probe_job import _Probes, measure_profile, probe_job
from unidle.tuning.probes.probe_results import ProbeResults
from unidle.tuning.probes.profile import Pace
from unidle.tuning.probes.stepping import _Use, one_round, step_alone
from unidle.tuning.probes.training import job_maker

SECONDS = 0.8  # of probing, in all


def job(env: str, **settings: Any) -> Config:
    small: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 32, "n_epochs": 2, "net_arch": (16, 16)}
    layers = lay("classic", None, False, env)
    return validated(layers.settled_with({**small, "env": env, **settings}), layers.preset_batch_size)


@pytest.fixture(scope="module")
def sleeping() -> ProbeResults:
    return probe_job(job("slow_envs:Sleeping", workers=1, n_steps=16), SECONDS)


def test_steps_that_sleep_are_seen_to_wait(sleeping: ProbeResults) -> None:
    assert sleeping.profile.waits
    assert sleeping.profile.step_seconds >= 0.01
    assert sleeping.steps is not None
    assert 0.01 <= sleeping.steps.median <= sleeping.steps.p95


def test_bare_stepping_is_measured_by_the_workers_there_are_and_by_all_cores(sleeping: ProbeResults) -> None:
    by_workers = {one.workers: one.seconds for one in sleeping.profile.stepping}
    # 16 steps of 4 environments, 10 ms each, one after the other; on a busy machine it takes longer, never shorter.
    assert by_workers[1] >= 0.64
    everything = min(4, available_cores())
    assert by_workers[everything] >= 0.64 / everything
    assert sleeping.profile.stepping[0].workers == 1


class Stalled:
    """Two slices of one worker, 10 ms a step, by a clock of their own; every fourth look at them is nearly as late."""

    bounds = ((0, 1), (1, 2))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.block = SimpleNamespace(actions=np.zeros((2, 1)))
        self._now, self._free, self._looks = 0.0, 0.0, 0
        self._done: list[tuple[float, int]] = []
        monkeypatch.setattr(stepping, "perf_counter", lambda: self._now)
        monkeypatch.setattr(stepping, "_draw", lambda *_: np.zeros((2, 1)))

    def send(self, slices: Sequence[int]) -> None:
        for slot in slices:
            self._free = max(self._free, self._now) + 0.01
            self._done.append((self._free, slot))

    def recv(self, at_least: int) -> list[int]:
        self._looks += 1
        self._now = max(self._now, self._done[0][0]) + (0.0099 if self._looks % 4 == 2 else 0.0)
        back = [slot for when, slot in self._done if when <= self._now]
        del self._done[: len(back)]
        return back


def test_a_round_is_never_quicker_than_its_steps_however_late_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, _ = stepping._freely(cast(Any, Stalled(monkeypatch)), np.random.default_rng(0), 0.15)
    assert seconds >= 0.0199


@pytest.mark.parametrize("threads", [1, 2])
def test_with_more_threads_than_one_learning_is_probed_with_one_too(threads: int) -> None:
    found = measure_profile(job("slow_envs:Cheap", threads=threads), SECONDS)
    assert (1 in dict(found.learning_by_threads)) == (threads == 2)
    assert found.threads == threads


def test_an_iteration_is_put_together_from_its_parts(sleeping: ProbeResults) -> None:
    profile = sleeping.profile
    assert profile.collecting >= 0.64
    whole = profile.collecting + profile.pace.learning + profile.rest
    found = iteration_seconds(profile, job("slow_envs:Sleeping", workers=1).engine, "off")
    assert found == pytest.approx(whole, rel=0.5)


def test_threads_beside_the_environments_own_are_seen() -> None:
    found = probe_job(job("slow_envs:Threaded", workers=1, n_envs=2, n_steps=8, batch_size=8), 5 * SECONDS)
    assert not found.profile.waits
    assert found.steps is not None
    assert found.steps.threads >= 16
    assert found.steps.native > 0.2


def test_quick_steps_are_not_taken_for_waiting_ones_and_masks_are_kept_to() -> None:
    found = probe_job(job("cli_envs:MaskedFilm"), SECONDS)
    assert found.profile.on_core == 1.0
    assert found.profile.stepping[0].workers == 0


def test_an_update_of_a_tiny_batch_is_nearly_all_overhead() -> None:
    tiny = measure_profile(job("slow_envs:Cheap", n_steps=64, batch_size=4), SECONDS)
    assert tiny.update_overhead is not None
    assert tiny.update_overhead > 0.5
    assert tiny.updates == 2 * 64


def test_another_program_that_ends_while_updates_are_probed_is_not_taken_for_overhead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def learn(_: object, algo: object, recipe: Recipe, *__: object) -> float:
        assert isinstance(recipe.batch_size, int)
        sizes.append(recipe.batch_size)
        alone = len(set(sizes)) == 2  # until the larger size has its first turn, everything takes twice as long
        return updates_of(recipe) * recipe.batch_size * (1e-5 if alone else 2e-5)

    monkeypatch.setattr(LearningProbes, "once", learn)
    found = measure_profile(job("slow_envs:Cheap", n_steps=64, batch_size=32), SECONDS)
    assert set(sizes) == {32, 256}
    assert found.update_overhead == pytest.approx(0.0, abs=1e-9)


def test_an_algorithm_that_first_acts_at_random_is_probed_while_it_learns() -> None:
    layers = lay("dqn", None, False, "slow_envs:Cheap", None, "dqn")
    wanted = {"env": "slow_envs:Cheap", "n_envs": 2, "buffer_size": 2000, "net_arch": (64, 64)}
    config = validated(layers.settled_with(wanted), layers.preset_batch_size)
    assert config.recipe.learning_starts > config.recipe.total_batch
    idle = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, utd_ratio=0.001))
    learning, hardly = measure_profile(config, SECONDS), measure_profile(idle, SECONDS)
    assert learning.updates == config.recipe.total_batch * config.recipe.utd_ratio
    assert learning.pace.learning > 3 * hardly.pace.learning


def test_environments_on_the_device_are_probed_with_their_learning() -> None:
    profile = measure_profile(job("unidle/CartPole-v1", n_envs=64, n_steps=8, batch_size=128), SECONDS)
    assert profile.on_device
    assert profile.stepping == ()
    assert profile.pace.learning > 0


@pytest.mark.parametrize(("device", "learned"), [("cuda", 2), ("cpu", 1)])
def test_learning_that_takes_long_is_measured_without_its_captures(
    device: str, learned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [9.0, 2.0, 1.9]  # on a GPU, graphs are captured the first time
    done: list[float] = []

    def learn(*_: object) -> float:
        done.append(taken[len(done)])
        return done[-1]

    monkeypatch.setattr(probes_learning, "steps_with_room", lambda *_: 1)
    flat = SimpleNamespace(device=torch.device(device))
    algo = SimpleNamespace(parameters=SimpleNamespace(flat=flat), experience=None)
    parts = SimpleNamespace(algo=algo, env_spec=SimpleNamespace(obs_layout=SimpleNamespace(obs_bytes=1)))
    probes = LearningProbes(job("slow_envs:Cheap"), 1.0, cast(Any, parts), cast(Any, None))
    monkeypatch.setattr(probes, "once", learn)
    assert probes.seconds() == taken[learned - 1]
    assert len(done) == learned


def test_a_device_on_which_learning_takes_far_too_long_is_left_after_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    config = job("slow_envs:Cheap", n_steps=256, net_arch=(256, 256))
    pieces = 0
    advance = Learner.advance

    def counted(learner: Learner) -> bool:
        nonlocal pieces
        pieces += 1
        return advance(learner)

    monkeypatch.setattr(Learner, "advance", counted)
    roughly = _Probes(config, job_maker(config), share=1e-5)._pace_with(config.recipe, device="cpu")
    assert pieces == 1
    assert roughly is not None
    assert roughly.learning > 0
    _Probes(config, job_maker(config), share=0.5)._pace_with(config.recipe, device="cpu")
    assert pieces > updates_of(config.recipe)


def small_dqn() -> Config:
    layers = lay("dqn", None, False, "slow_envs:Cheap", None, "dqn")
    wanted = {"env": "slow_envs:Cheap", "n_envs": 2, "buffer_size": 2000}
    return endless(validated(layers.settled_with(wanted), layers.preset_batch_size))


@contextmanager
def learning(config: Config) -> Iterator[tuple[LearningProbes, RunParts]]:
    probes = _Probes(config, job_maker(config), share=0.01)
    with probes._built(config, lambda text: None) as parts:
        assert isinstance(parts.collector, HostCollector)
        yield LearningProbes(config, 0.01, parts, probes._slot(parts, parts.collector.envs)), parts


def test_learning_by_another_recipe_is_measured_or_nothing_is_said() -> None:
    with learning(small_dqn()) as (probes, _):
        assert (probes.seconds_with(buffer_size=1000) or 0.0) > 0
        assert probes.seconds_with(buffer_size=1) is None


def test_graphs_are_not_tried_out_of_another_memory_than_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_dqn()
    probes = _Probes(config, job_maker(config), share=0.01)
    monkeypatch.setattr(probes, "_pace_with", lambda *_, **__: Pace(1.0, 1.0))
    for place in ("device", "host"):
        monkeypatch.setattr(placement, "choose_place", lambda *_, place=place: place)
        with probes._built(config, lambda text: None) as parts:
            assert (probes._graphed(parts, config.recipe) is None) == (place == "host")


@pytest.mark.parametrize(
    ("on_host", "told", "found"),
    [
        (False, [1.0], (None, 1.0)),
        (True, [2.0, 1.0], (2.0, 1.0)),
        (True, [None], (None, None)),
    ],
)
def test_tf32_is_tried_where_there_is_something_to_compare_it_with(
    on_host: bool, told: list[float | None], found: tuple[float | None, float | None]
) -> None:
    config = small_dqn()
    config = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, precision="fp32"))
    left = iter(told)
    probed = SimpleNamespace(replay_on_host=on_host, learning_with_replay_on_gpu=None, learning_in_tf32=None)
    learner = SimpleNamespace(seconds_with=lambda **_: next(left))
    _Probes(config, job_maker(config), share=0.01)._learn_otherwise(cast(Any, probed), cast(Any, learner))
    assert (probed.learning_with_replay_on_gpu, probed.learning_in_tf32) == found
    assert not list(left)


@pytest.mark.parametrize("slow_in_the_job", [True, False])
def test_what_takes_a_slower_way_than_the_job_is_not_told(
    slow_in_the_job: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(policy: Any, recipe: Recipe, capture: Any, fall_back: Any) -> Any:
        fall_back("updates", torch.OutOfMemoryError("CUDA out of memory."), "runs eagerly")
        return new_algorithm(policy, recipe, capture, fall_back)

    monkeypatch.setattr(probes_learning, "new_algorithm", slower)
    with learning(small_dqn()) as (probes, parts):
        if slow_in_the_job:
            parts.capture.fall_back("updates", RuntimeError("not permitted"), "runs eagerly")
        assert (probes.seconds_with() is not None) == slow_in_the_job
        assert (probes.update_overhead() is not None) == slow_in_the_job


# -- what does not fit in memory beside the job ------------------------------------------------------------------------


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_job_is_probed_though_what_is_tried_beside_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_learning, "new_algorithm", out_of_memory)
    found = measure_profile(job("slow_envs:Cheap"), SECONDS)
    assert found.update_overhead is None
    assert found.pace.learning > 0
    assert found.collecting > 0


def test_another_recipe_that_does_not_fit_is_left_and_the_numerics_are_the_jobs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_dqn()
    precisions: list[str] = []
    with learning(config) as (probes, parts):
        monkeypatch.setattr(probes_learning, "set_numerics", lambda _, recipe: precisions.append(recipe.precision))
        advance = Learner.advance

        def of_the_job_only(learner: Learner) -> bool:
            if learner._algo is not parts.algo:
                out_of_memory()
            return advance(learner)

        monkeypatch.setattr(Learner, "advance", of_the_job_only)
        assert probes.seconds_with(precision="bf16") is None
        assert precisions == ["bf16", config.recipe.precision]
        assert probes.seconds() > 0


def test_a_memory_for_which_there_is_too_little_room_is_left_and_nothing_said_of_it() -> None:
    config = small_dqn()
    with learning(config) as (probes, _):
        assert probes.update_overhead() is not None
        probes._few = 1
        assert probes.seconds_with() is None
        assert probes.update_overhead() is None
        assert _Probes(config, job_maker(config), share=0.01)._pace_with(probes.recipe_with(), device="cpu") is None


def test_what_would_learn_from_the_host_instead_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_dqn()
    with learning(config) as (probes, _):
        monkeypatch.setattr(placement, "choose_place", lambda *_: "host")  # by now others have taken the room
        assert probes.seconds_with() is None
        assert probes.update_overhead() is None
    with learning(config) as (probes, _):  # of a job that does so itself
        assert probes.seconds() > 0
        assert probes.seconds_with() is None
        assert _Probes(config, job_maker(config), share=0.01)._pace_with(probes.recipe_with(), device="cpu") is None


@pytest.mark.parametrize("n_tasks", [1, 4])
def test_what_is_tried_remembers_no_more_than_a_quarter_of_the_room_on_the_gpu(
    n_tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    taken = steps * sum(t.nbytes for t in vars(replay).values() if isinstance(t, torch.Tensor)) / 1000
    assert 0.95 * free / 4 < taken < 1.05 * free / 4


def test_other_engine_settings_that_do_not_fit_are_left_and_their_environments_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = endless(job("slow_envs:Cheap", workers=1))
    closed: list[HostCollector] = []
    close = HostCollector.close

    def noted(collector: HostCollector) -> None:
        closed.append(collector)
        close(collector)

    monkeypatch.setattr(HostCollector, "close", noted)
    monkeypatch.setattr(Learner, "begin", out_of_memory)
    assert _Probes(config, job_maker(config), share=0.01)._pace_with(config.recipe, device="cpu") is None
    assert len(closed) == 1


def test_nothing_stays_in_memory_of_what_did_not_fit_in_it() -> None:
    tried: list[weakref.ref[Any]] = []

    class Network:
        """Which, as networks do, knows itself by some detour."""

        def __init__(self) -> None:
            self.owner = self
            tried.append(weakref.ref(self))

    @if_it_fits
    def probe(size: int) -> float | None:
        network = Network()
        if size > 1:
            out_of_memory(network)
        return float(size)

    assert probe(1) == 1.0
    assert tried[-1]() is None  # what comes next needs the room
    assert probe(size=2) is None
    assert tried[-1]() is None


def test_any_other_error_of_a_probe_is_told() -> None:
    @if_it_fits
    def probe() -> float | None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        probe()


def test_one_long_wait_for_a_core_is_not_taken_off_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of 10 ms, 2 or 3 ms of each on a core; before one of them, half a second went by in the queue for it.
    back = iter([0.01] * 9 + [0.51] + [0.01] * 100)
    looks = iter([_Use(0.0, 0.0, 0.0, 1), _Use(0.03, 0.03, 0.5, 1)])
    queued = iter([0.0] * 10 + [0.5] * 100)
    clock = iter(0.04 * n for n in range(100))
    monkeypatch.setattr(stepping, "make_envs", lambda *_: SimpleNamespace(start=lambda _: None, close=lambda: None))
    monkeypatch.setattr(stepping, "one_round", lambda *_: [next(back)])
    monkeypatch.setattr(stepping, "_draw", lambda *_: None)
    monkeypatch.setattr(stepping, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(_Use, "of", lambda _: next(looks))
    monkeypatch.setattr(stepping, "_queued", lambda _: next(queued))
    maker, env_spec = SimpleNamespace(on_host=lambda: None), SimpleNamespace(step_seconds=0.01)
    found = step_alone(cast(Any, maker), cast(Any, env_spec), cast(Any, None), 0.1)
    assert found.median == 0.01
    assert 0.1 < found.on_core < 0.4


def test_strict_overlap_is_probed_too() -> None:
    profile = measure_profile(job("slow_envs:Cheap", overlap="strict", workers=1), SECONDS)
    assert profile.overlap == "strict"
    assert profile.collecting > 0


def test_a_probed_job_never_comes_to_its_end() -> None:
    config = endless(job("slow_envs:Cheap", timesteps=128))
    assert config.run.timesteps > 10**9


class Later:
    """Four slices that come back one after the other, 2 ms apart."""

    def __init__(self) -> None:
        self.bounds = [(0, 1), (1, 2), (2, 3), (3, 4)]
        self.block = SimpleNamespace(actions=np.zeros((4, 1)))
        self._sent: list[int] = []

    def send(self, slices: Sequence[int]) -> None:
        self._sent += slices

    def recv(self, at_least: int, seconds: float | None = None) -> list[int]:
        time.sleep(0.002)
        return [self._sent.pop(0)]


def test_each_slice_has_its_own_latency_though_all_are_waited_for() -> None:
    first, *_, last = one_round(Later(), np.ones((4, 1)))
    assert 0.002 <= first < last
    assert last >= 0.008
