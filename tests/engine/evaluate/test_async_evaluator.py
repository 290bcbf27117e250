"""Evaluation in processes of its own: the same to the last bit, never in training's way, never lost and never twice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from paths import SOURCE, TESTS
from resumed_runs import StopAfter, assert_same, final_state
from task_envs import Errands

import unidle
from unidle.config import Config, SACRecipe
from unidle.engine.build import make_envs
from unidle.engine.checkpoint.run_folder import load_checkpoint, save_checkpoint
from unidle.engine.evaluate.async_evaluator import AsyncEvaluator
from unidle.engine.evaluate.best_policy import BestPolicyTracker
from unidle.engine.evaluate.evaluations import Evaluations, FinishedEvaluation, choose_processes
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, Evaluation, n_evaluation_envs, play
from unidle.engine.evaluate.worker import EvaluationJob, Evaluator, Snapshots, shapes_of, shares
from unidle.engine.progress import Progress
from unidle.engine.run_facts import run_facts
from unidle.envs.make import env_maker
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.slot import episode_seed
from unidle.envs.protocol import HostEnvs
from unidle.envs.shared_block import shared_memory
from unidle.envs.spec import probe
from unidle.errors import TrainingError, UsageError
from unidle.nn.sac_policy import SACPolicy
from unidle.report.history import read_history
from unidle.timeline import EVALUATE, OTHER, Timeline

SMALL: dict[str, Any] = {
    "preset": "sac",
    "n_tasks": 3,
    "n_envs": 3,
    "n_steps": 8,
    "batch_size": 15,
    "net_arch": (32, 32),
    "buffer_size": 900,
    "learning_starts": 60,
    "utd_ratio": 0.3,
    "timesteps": 480,
    "eval_every": 120,
    "eval_episodes": 13,
    "subproc": False,
    "tensorboard": False,
    "device": "cpu",
    "seed": 3,
    "quiet": True,
}


def evaluations(run: unidle.TrainedRun) -> list[dict[str, Any]]:
    """Their records, without what a clock wrote."""
    records = [record for record in run.records if record["kind"] == "evaluation"]
    return [
        {k: v for k, v in record.items() if "time/" not in k and "second" not in k and k != "wall"}
        for record in records
    ]


def by_hand(policy: SACPolicy, n_envs: int, env: int, episode: int) -> tuple[float, bool, int]:
    """Return, success and task of one episode with the mode action."""
    errands, obs = Errands(n_envs), policy.obs_layout
    number = FIRST_EVALUATION_ENV + env
    seen, _ = errands.reset(seed=episode_seed(0, number, episode), options={"env": number, "episode": episode})
    total, succeeded, over = 0.0, False, False
    while not over:
        with torch.no_grad():
            params, _ = policy.act(torch.from_numpy(obs.pack(seen)).unsqueeze(0))
            action = policy.distribution.to_env(policy.distribution.mode(params))
        seen, reward, _, over, info = errands.step(action[0].numpy())
        total, succeeded = total + reward, succeeded or info["success"] > 0
    return total, succeeded, errands.task


def walker(**kwargs: Any) -> tuple[SACPolicy, Any, Any]:
    """A policy that goes far enough to meet some of the places, with its environments' maker and contract."""
    maker = env_maker(Errands, kwargs)
    env_spec = probe(maker)
    torch.manual_seed(1)
    recipe = SACRecipe(n_tasks=3, net_arch=(16,))
    policy = SACPolicy(env_spec.obs_layout, env_spec.action_layout, recipe)
    torch.nn.init.normal_(policy.actor_head.weight)
    return policy, maker, env_spec


def config_of(**run: Any) -> Config:
    return Config(recipe=SACRecipe(n_tasks=3, net_arch=(16,))).with_values(run, "test")


# -- success -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_envs", [1, 4, 10])
def test_every_task_gets_its_share_and_success_is_that_at_any_step(n_envs: int) -> None:
    policy, maker, env_spec = walker()
    envs = SerialEnvs(maker.for_n_envs(n_envs), env_spec, n_envs, 0, FIRST_EVALUATION_ENV)
    result = play(policy, envs, 20)
    quotas = [20 // n_envs + (env < 20 % n_envs) for env in range(n_envs)]
    expected = [by_hand(policy, n_envs, env, episode) for env, quota in enumerate(quotas) for episode in range(quota)]
    assert result.returns == pytest.approx([total for total, _, _ in expected], rel=1e-4)
    assert result.successes == [succeeded for _, succeeded, _ in expected]
    assert result.tasks == [task for _, _, task in expected]
    assert sorted(Counter(result.tasks).values()) == [6, 7, 7]
    assert 0 < sum(result.successes) < 20


def test_success_is_read_under_either_name_and_omitted_where_not_reported() -> None:
    results = []
    for tells in ("success", "is_success", "luck"):
        policy, maker, env_spec = walker(tells=tells)
        results.append(play(policy, SerialEnvs(maker, env_spec, 2, 0), 6))
    assert results[0].successes
    assert results[1] == results[0]
    assert results[2].successes == []
    assert results[2].success is None
    assert not any("success" in name for name in results[2].metrics())


def test_metrics_are_means_by_task_and_over_all() -> None:
    result = Evaluation([1.0, 2.0, 6.0], [5, 5, 5], [True, False, True], [1, 0, 1])
    metrics = result.metrics(["open", "close"])
    assert metrics["eval/success"] == pytest.approx(2 / 3)
    assert metrics["eval/success/open"] == 0.0
    assert metrics["eval/success/close"] == 1.0
    assert metrics["eval/return/open"] == 2.0
    assert metrics["eval/return/close"] == 3.5
    assert metrics["eval/episodes"] == 3


@pytest.mark.parametrize(
    ("episodes", "n_envs"), [(1, 1), (7, 7), (50, 10), (100, 10), (300, 30), (500, 50), (2500, 50)]
)
def test_the_number_of_environments_hangs_on_the_number_of_episodes_alone(episodes: int, n_envs: int) -> None:
    assert n_evaluation_envs(episodes) == n_envs


# -- asynchronous -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_envs", "processes"), [(10, 4), (50, 6), (3, 3), (7, 1)])
def test_shares_are_all_of_the_environments_and_nearly_equal(n_envs: int, processes: int) -> None:
    parts = list(shares(n_envs, processes))
    assert [line for part in parts for line in part] == list(range(n_envs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_it_equals_evaluation_by_the_trainer_bit_for_bit_and_changes_nothing_of_training(tmp_path: Path) -> None:
    runs = {
        workers: unidle.train(Errands, run_name=str(workers), runs_dir=str(tmp_path), eval_workers=workers, **SMALL)
        for workers in (0, 2)
    }
    here, asynchronous = evaluations(runs[0]), evaluations(runs[2])
    assert [record["step"] for record in here] == [120, 240, 360, 480]
    assert any(0 < record.get("rollout/success", 0) < 1 for record in runs[0].records)  # of training's own episodes
    assert asynchronous == here
    assert all(record["eval/seconds_behind"] > 0 for record in runs[2].records if record["kind"] == "evaluation")
    assert read_history(runs[2].path).wall > max(record.get("wall", 0) for record in runs[2].records)
    assert {"eval/success", "eval/success/left", "eval/return/right", "plasticity/critic/dormant"} <= here[0].keys()
    assert_same(final_state(runs[2].path), final_state(runs[0].path))
    best = [load_checkpoint(run.folder.best) for run in runs.values()]
    assert_same(best[1], best[0])
    assert best[0]["step"] == max(here, key=lambda record: record["eval/return_mean"])["step"]
    never = unidle.train(Errands, run_name="never", runs_dir=str(tmp_path), **{**SMALL, "eval_every": 0})
    assert_same(final_state(never.path)["algo"], final_state(runs[2].path)["algo"])


def test_training_does_not_wait_and_results_are_of_the_weights_at_the_time(tmp_path: Path) -> None:
    """Steps take so long in other processes that all is collected and learned before the first evaluation is done."""
    policy, maker, env_spec = walker(seconds=0.02)
    config = config_of(eval_episodes=4, seed=0)
    said: list[str] = []
    evaluator = AsyncEvaluator(config, maker, env_spec, None, policy.state_dict(), 2, said.append)
    try:
        expected = []
        for step in range(3):
            expected.append(play(policy, SerialEnvs(maker.for_n_envs(4), env_spec, 4, 0, FIRST_EVALUATION_ENV), 4))
            began = time.monotonic()
            evaluator.request(step, {"at": float(step)}, policy.state_dict())
            assert time.monotonic() - began < 0.5
            torch.nn.init.normal_(policy.actor_head.weight)  # after it was asked for
        found = []
        while evaluator.requests:
            taken = evaluator.take(30.0)
            assert taken is not None
            found.append((taken[0].step, taken[0].about, taken[1]))
            evaluator.release()
        evaluators = [
            child for child in psutil.Process().children() if "evaluate.worker_main" in " ".join(child.cmdline())
        ]
        yields_core = min(19, psutil.Process().nice() + 10)
        assert [child.nice() for child in evaluators] == [yields_core, yields_core]
        assert found == [(step, {"at": float(step)}, result) for step, result in enumerate(expected)]
        assert len({tuple(result.returns) for result in expected}) == 3
    finally:
        evaluator.close()
    assert not said


def test_a_process_that_dies_repeats_its_part_and_too_many_deaths_end_it(tmp_path: Path) -> None:
    deadly = tmp_path / "deadly"
    policy, maker, env_spec = walker(deadly=str(deadly))
    expected = play(policy, SerialEnvs(maker.for_n_envs(4), env_spec, 4, 0, FIRST_EVALUATION_ENV), 4)
    said: list[str] = []
    config = config_of(eval_episodes=4, seed=0, max_env_restarts=1)
    evaluator = AsyncEvaluator(config, maker, env_spec, None, policy.state_dict(), 2, said.append)
    try:
        deadly.touch()
        for step in range(2):
            evaluator.request(step, {}, policy.state_dict())
        for _ in range(2):
            taken = evaluator.take(60.0)
            assert taken is not None
            assert taken[1] == expected
            evaluator.release()
        assert len(said) == 1
        assert "exit status 9" in said[0]
        deadly.touch()
        evaluator.request(2, {}, policy.state_dict())
        with pytest.raises(TrainingError, match="An evaluation failed"):
            evaluator.take(60.0)
    finally:
        evaluator.close()


class Closing(Errands):
    """Notes in a file that it was closed; can be made in one process only, if asked to."""

    def __init__(self, n_slots: int = 1, note: str = "", only_in: int = 0) -> None:
        super().__init__(n_slots)
        self._note = note
        if only_in not in (0, os.getpid()):
            raise UsageError("The simulator's licence is for one process.")

    def close(self) -> None:
        if self._note:
            Path(self._note).touch()


def closing(**kwargs: Any) -> tuple[SACPolicy, Any, Any]:
    policy, _, env_spec = walker()
    return policy, env_maker(Closing, kwargs), env_spec


def evaluations_of(
    policy: SACPolicy, maker: Any, env_spec: Any, processes: int, in_workers: bool = False, **run: Any
) -> Evaluations:
    return Evaluations(
        config_of(seed=0, **run),
        maker,
        env_spec,
        policy,
        None,
        in_workers=in_workers,
        processes=processes,
        clock=lambda: {"wall": 1.0},
        say=lambda text: None,
        on_fault=lambda fault: None,
        stop=lambda: False,
    )


@pytest.mark.parametrize(("in_workers", "workers"), [(True, 10), (False, 0)])
def test_evaluation_here_has_as_many_workers_as_suit_its_own_environments(
    in_workers: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidle.engine.placement.available_cores", lambda: 16)  # which 16 of training share as eight
    made: list[int] = []

    def make(maker: Any, env_spec: Any, n_envs: int, seed: int, workers: int, *rest: Any) -> HostEnvs:
        made.append(workers)
        return make_envs(maker, env_spec, n_envs, seed, 0, *rest)

    monkeypatch.setattr("unidle.engine.evaluate.evaluations.make_envs", make)
    policy, maker, env_spec = walker()
    env_spec = replace(env_spec, step_seconds=1e-3)
    with contextlib.closing(evaluations_of(policy, maker, env_spec, 0, in_workers, eval_episodes=10)) as them:
        them.request(10, {})
        assert [each.step for each in them.done()] == [10]
    assert made == [workers]


def test_what_finds_no_place_is_done_later_in_order_and_idle_processes_close_their_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidle.engine.evaluate.async_evaluator._QUEUE_LENGTH", 2)
    note = tmp_path / "closed"
    policy, maker, env_spec = closing(note=str(note))
    them = evaluations_of(policy, maker, env_spec, 1, eval_episodes=2)
    with contextlib.closing(them):
        note.unlink(missing_ok=True)  # left by the one that was asked for the names of its tasks
        them.load_pending({"step": step, "about": {}, "weights": policy.state_dict()} for step in (10, 20, 30))
        them.run_pending()
        them.request(40, {})
        assert them.is_full
        assert them.n_open == 4
        assert [owed["step"] for owed in them.state()] == [10, 20, 30, 40]
        steps: list[int] = []
        until = time.monotonic() + 60
        while them.n_open and time.monotonic() < until:
            steps += [evaluated.step for evaluated in them.done(1.0)]
        assert steps == [10, 20, 30, 40]
        assert not them.is_full
        assert not note.exists()
    assert note.exists()


def test_a_mistake_that_an_evaluator_finds_ends_training_with_a_checkpoint() -> None:
    """The trainer saves when it meets a TrainingError, and only then."""
    policy, maker, env_spec = closing(only_in=os.getpid())
    evaluator = AsyncEvaluator(config_of(eval_episodes=1, seed=0), maker, env_spec, None, policy.state_dict(), 1, print)
    with contextlib.closing(evaluator):
        evaluator.request(0, {}, policy.state_dict())
        with pytest.raises(TrainingError, match=r"An evaluation failed\. .*licence is for one process"):
            evaluator.take(60.0)


def test_an_evaluator_has_as_many_threads_as_the_trainer() -> None:
    policy, maker, env_spec = walker()
    config, shapes, before = config_of(threads=2), shapes_of(policy.state_dict()), torch.get_num_threads()
    memory = shared_memory(Snapshots.nbytes(shapes, 1, 1))
    cargo = cloudpickle.dumps((maker, env_spec, config, None))
    job = EvaluationJob(os.getpid(), sys.path, cargo, memory, shapes, 1, 0, 1, n_envs=2, env_ids=range(2), episodes=2)
    try:
        torch.set_num_threads(1)
        with contextlib.closing(Evaluator(job)):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        os.close(memory)


class Slow:
    """Three evaluations, of which one is done whenever somebody waits; notes which phase that one is in."""

    task_names = ()
    is_async = False

    def __init__(self, timeline: Timeline, policy: SACPolicy) -> None:
        self.n_open, self.phases = 3, list[int]()
        self._timeline, self._policy = timeline, policy

    @property
    def is_full(self) -> bool:
        return self.n_open > 0

    def done(self, seconds: float = 0.0) -> Iterator[FinishedEvaluation]:
        if seconds:
            self.phases.append(self._timeline._phase)
            self.n_open -= 1
            result = Evaluation([-float(self.n_open)], [1])  # better than the last: it is saved
            yield FinishedEvaluation(self.n_open, {}, result, {}, self._policy)

    def request(self, step: int, about: dict[str, Any]) -> None:
        self.phases.append(self._timeline._phase)


@pytest.mark.parametrize("ends", [True, False])
def test_all_waiting_for_evaluations_counts_as_evaluating(ends: bool) -> None:
    timeline, (policy, _, _) = Timeline(), walker()
    slow, silent = Slow(timeline, policy), lambda *_: None
    parts: Any = {
        "evaluations": slow,
        "saver": SimpleNamespace(save_best=silent),
        "folder": None,
        "log": SimpleNamespace(write=silent),
        "display": SimpleNamespace(on_evaluation=silent, on_message=silent),
    }
    hooks: Any = {"report_fault": silent, "save": silent, "stop": silent, "is_stopping": lambda: False}
    algo: Any = SimpleNamespace(plasticity=lambda *_: {})
    tracker = BestPolicyTracker(
        config_of(), algo, progress=Progress(), timeline=timeline, callbacks=(), **parts, **hooks
    )
    if ends:
        tracker.finish(lambda: False)
    else:
        tracker.evaluate()
    assert slow.phases == [EVALUATE] * (3 if ends else 4)
    assert timeline._phase == OTHER


def owing(run: unidle.TrainedRun, step: int, weights: dict[str, Any], **changes: Any) -> None:
    """Change a run's last checkpoint as if the evaluation at `step` had not been done when it was written."""
    path = run.folder.latest()
    assert path is not None
    state = {name: value for name, value in load_checkpoint(path).items() if name != "format"}
    owed = {"step": step, "about": {"wall": 1.0}, "weights": weights}
    save_checkpoint(path, {**state, "evaluations": [owed], **changes})


def test_what_was_recorded_after_the_last_checkpoint_is_not_done_again_and_may_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "unidle.engine.evaluate.async_evaluator._QUEUE_LENGTH", 1
    )  # so that training has to wait for one to be done
    settings = {**SMALL, "runs_dir": str(tmp_path), "eval_workers": 1}
    whole = unidle.train(Errands, run_name="whole", **settings)
    parts = unidle.train(Errands, run_name="parts", after_iteration=[StopAfter(6)], **{**settings, "eval_workers": 0})
    nothing = {
        name: torch.full_like(value, torch.nan) for name, value in final_state(parts.path)["algo"]["policy"].items()
    }
    owing(parts, 120, nothing, best_success=-np.inf, best_return=-np.inf, best_step=-1, highest_return=-np.inf)
    resumed = unidle.resume(parts.path, env=Errands, quiet=True)
    assert evaluations(resumed) == evaluations(whole)
    assert_same(final_state(resumed.path), final_state(whole.path))


def test_what_was_not_recorded_is_done_by_a_resume_with_the_weights_it_was_asked_for(tmp_path: Path) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), "timesteps": 240}
    run = unidle.train(Errands, run_name="r", eval_workers=0, **settings)
    early = unidle.train(Errands, run_name="early", eval_workers=0, **{**settings, "timesteps": 120})
    weights = final_state(early.path)["algo"]["policy"]
    first, second = evaluations(run)
    metrics = run.path / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if '"evaluation", "step": 120' not in line]
    measures = [name for name in first if name.startswith("plasticity/") or name == "eval/best"]
    for workers in (0, 1):
        metrics.write_text("".join(lines))
        owing(run, 120, weights)
        handed: list[Any] = []
        callbacks: Any = [lambda context, handed=handed: handed.append(context.policy.state_dict())]
        resumed = unidle.resume(run.path, env=Errands, quiet=True, eval_workers=workers, after_evaluation=callbacks)
        assert_same(handed, [weights])
        after, redone = evaluations(resumed)
        assert after == second
        assert {k: v for k, v in redone.items() if k not in measures} == {
            k: v for k, v in first.items() if k not in measures
        }
        assert final_state(run.path)["evaluations"] == []


def is_running(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"


def processes_of(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def test_no_process_is_left_when_the_trainer_is_killed_and_ctrl_c_ends_it_soon(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import unidle\nfrom task_envs import Errands\nsettings = {SMALL!r}\n"
        "settings |= {'timesteps': 10**6, 'eval_workers': 2, 'env_kwargs': {'seconds': 0.01}}\n"
        "unidle.train(Errands, **settings)\n"
    )
    source, tests = SOURCE, TESTS
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{tests}"}
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 0)):
        folder = tmp_path / str(int(number))
        folder.mkdir()
        trainer = subprocess.Popen([sys.executable, str(script)], cwd=folder, env=environment, stderr=subprocess.PIPE)
        try:
            until = time.monotonic() + 60
            while len(processes_of(trainer.pid)) < 2 and time.monotonic() < until:
                time.sleep(0.05)
            pids = processes_of(trainer.pid)
            assert len(pids) == 2
            time.sleep(0.5)
            trainer.send_signal(number)
            assert trainer.wait(timeout=30) == code
        finally:
            trainer.kill()
            trainer.wait()
        until = time.monotonic() + 20
        while any(map(is_running, pids)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(is_running, pids))


# -- what is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "chosen"), [(1, 1), (2, 1), (16, 8), (64, 20)])
def test_half_of_the_cores_evaluate_several_tasks(cores: int, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.engine.evaluate.evaluations.available_cores", lambda: cores)
    _, maker, env_spec = walker()
    assert choose_processes(config_of(eval_episodes=200), maker, env_spec, 2, must_wait=False) == chosen


@pytest.mark.parametrize(("asked", "workers", "chosen"), [(8, 0, 4), (3, 0, 3), (0, 2, 0), (None, 0, 0), (None, 2, 4)])
def test_there_are_no_more_processes_than_environments(
    asked: int | None, workers: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidle.engine.evaluate.evaluations.available_cores", lambda: 64)
    _, maker, env_spec = walker()
    config = config_of(eval_workers=asked, eval_episodes=4)
    assert choose_processes(config, maker, env_spec, workers, must_wait=False) == chosen


@pytest.mark.parametrize(("processes", "words"), [(1, "4 episodes, asynchronous (1 process)"), (2, "(2 processes)")])
def test_a_run_says_how_many_evaluate(processes: int, words: str) -> None:
    policy, _, env_spec = walker()
    parts: Any = SimpleNamespace(
        env_spec=env_spec, workers=processes, algo=SimpleNamespace(policy=policy), precision="float32"
    )
    facts = run_facts(config_of(eval_episodes=4), parts, Path("run"), processes, 0)
    assert facts["evaluation"].endswith(words)
    assert f"{processes} worker process{'es' * (processes > 1)} (" in facts["environment"]


def test_environments_that_step_together_are_refused_for_asynchronous_evaluation(tmp_path: Path) -> None:
    settings = {"preset": "classic", "timesteps": 4096, "eval_workers": 1, "runs_dir": str(tmp_path), "quiet": True}
    with pytest.raises(UsageError, match="steps many environments together"):
        unidle.train("unidle/CartPole-v1", **settings)
    with pytest.raises(UsageError, match="must not be negative"):
        unidle.train("CartPole-v1", **{**settings, "eval_workers": -1})
