"""Asynchronous evaluation: same results as in the trainer, no waiting, nothing lost or repeated after a crash."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
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
from task_envs import MultiTaskWalk

import unidle
from unidle.algos.dormancy import DORMANT, dormancy_warning
from unidle.algos.run_to_end import run_to_end
from unidle.config import Config, SACRecipe
from unidle.engine.build import make_envs
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint, save_checkpoint
from unidle.engine.evaluate.async_evaluator import AsyncEvaluator
from unidle.engine.evaluate.best_policy import BestPolicyTracker
from unidle.engine.evaluate.evaluations import Evaluations, FinishedEvaluation
from unidle.engine.evaluate.play import FIRST_EVALUATION_ENV, Evaluation, n_evaluation_envs, play
from unidle.engine.evaluate.schedule import choose_processes
from unidle.engine.evaluate.worker import EvaluationJob, Evaluator, Snapshots, shapes_of, shares
from unidle.engine.progress import Progress
from unidle.engine.run_facts import run_facts
from unidle.envs.make import env_maker
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.slot import episode_seed
from unidle.envs.probe import probe
from unidle.envs.protocol import HostEnvs
from unidle.envs.shared_block import shared_memory
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


def evaluation_records(run: unidle.TrainedRun) -> list[dict[str, Any]]:
    """Evaluation records of a run, without timings."""
    records = [record for record in run.records if record["kind"] == "evaluation"]
    return [
        {k: v for k, v in record.items() if "time/" not in k and "second" not in k and k != "wall"}
        for record in records
    ]


def play_by_hand(policy: SACPolicy, n_envs: int, env: int, episode: int) -> tuple[float, bool, int]:
    """Return, success and task of one episode with deterministic actions."""
    task_env, obs_layout = MultiTaskWalk(n_envs), policy.obs_layout
    env_id = FIRST_EVALUATION_ENV + env
    observation, _ = task_env.reset(seed=episode_seed(0, env_id, episode), options={"env": env_id, "episode": episode})
    total, succeeded, done = 0.0, False, False
    while not done:
        with torch.no_grad():
            params, _ = policy.act(torch.from_numpy(obs_layout.pack(observation)).unsqueeze(0))
            action = policy.distribution.to_env(policy.distribution.mode(params))
        observation, reward, _, done, info = task_env.step(action[0].numpy())
        total, succeeded = total + reward, succeeded or info["success"] > 0
    return total, succeeded, task_env.task


def policy_and_envs(**kwargs: Any) -> tuple[SACPolicy, Any, Any]:
    """A policy that solves some of the tasks, the maker of its environments and their spec."""
    maker = env_maker(MultiTaskWalk, kwargs)
    env_spec = probe(maker)
    torch.manual_seed(1)
    recipe = SACRecipe(n_tasks=3, net_arch=(16,))
    policy = SACPolicy(env_spec.obs_layout, env_spec.action_layout, recipe)
    torch.nn.init.normal_(policy.actor_head.weight)
    return policy, maker, env_spec


def make_config(**run: Any) -> Config:
    return Config(recipe=SACRecipe(n_tasks=3, net_arch=(16,))).with_values(run, "test")


# -- success -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_envs", [1, 4, 10])
def test_tasks_share_episodes_and_success_counts_at_any_step(n_envs: int) -> None:
    policy, maker, env_spec = policy_and_envs()
    envs = SerialEnvs(maker.for_n_envs(n_envs), env_spec, n_envs, 0, FIRST_EVALUATION_ENV)
    result = play(policy, envs, 20)
    quotas = [20 // n_envs + (env < 20 % n_envs) for env in range(n_envs)]
    expected = [
        play_by_hand(policy, n_envs, env, episode) for env, quota in enumerate(quotas) for episode in range(quota)
    ]
    assert result.returns == pytest.approx([total for total, _, _ in expected], rel=1e-4)
    assert result.successes == [succeeded for _, succeeded, _ in expected]
    assert result.tasks == [task for _, _, task in expected]
    assert sorted(Counter(result.tasks).values()) == [6, 7, 7]
    assert 0 < sum(result.successes) < 20


def test_success_is_read_from_success_or_is_success() -> None:
    results = []
    for info_key in ("success", "is_success", "luck"):
        policy, maker, env_spec = policy_and_envs(success_key=info_key)
        results.append(play(policy, SerialEnvs(maker, env_spec, 2, 0), 6))
    assert results[0].successes
    assert results[1] == results[0]
    assert results[2].successes == []
    assert results[2].success is None
    assert not any("success" in name for name in results[2].metrics())


def test_metrics_are_means_per_task_and_overall() -> None:
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
def test_number_of_envs_depends_only_on_number_of_episodes(episodes: int, n_envs: int) -> None:
    assert n_evaluation_envs(episodes) == n_envs


# -- asynchronous -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_envs", "processes"), [(10, 4), (50, 6), (3, 3), (7, 1)])
def test_shares_cover_all_envs_and_are_nearly_equal(n_envs: int, processes: int) -> None:
    parts = list(shares(n_envs, processes))
    assert [env for part in parts for env in part] == list(range(n_envs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_async_evaluation_matches_trainer_and_leaves_training_unchanged(tmp_path: Path) -> None:
    runs = {
        workers: unidle.train(
            MultiTaskWalk, run_name=str(workers), runs_dir=str(tmp_path), eval_workers=workers, **SMALL
        )
        for workers in (0, 2)
    }
    synchronous, asynchronous = evaluation_records(runs[0]), evaluation_records(runs[2])
    assert [record["step"] for record in synchronous] == [120, 240, 360, 480]
    assert any(0 < record.get("rollout/success", 0) < 1 for record in runs[0].records)  # from training episodes
    assert asynchronous == synchronous
    assert all(record["eval/seconds_behind"] > 0 for record in runs[2].records if record["kind"] == "evaluation")
    assert read_history(runs[2].path).wall > max(record.get("wall", 0) for record in runs[2].records)
    expected_metrics = {"eval/success", "eval/success/left", "eval/return/right", "plasticity/critic/dormant"}
    assert expected_metrics <= synchronous[0].keys()
    assert_same(final_state(runs[2].path), final_state(runs[0].path))
    best = [load_checkpoint(run.folder.best) for run in runs.values()]
    assert_same(best[1], best[0])
    assert best[0]["step"] == max(synchronous, key=lambda record: record["eval/return_mean"])["step"]
    unevaluated = unidle.train(
        MultiTaskWalk, run_name="unevaluated", runs_dir=str(tmp_path), **{**SMALL, "eval_every": 0}
    )
    assert_same(final_state(unevaluated.path)["algo"], final_state(runs[2].path)["algo"])


def test_async_results_use_weights_at_time_of_request(tmp_path: Path) -> None:
    """Steps are so slow that every evaluation is requested before the first one finishes."""
    policy, maker, env_spec = policy_and_envs(step_seconds=0.02)
    config = make_config(eval_episodes=4, seed=0)
    messages: list[str] = []
    evaluator = AsyncEvaluator(config, maker, env_spec, None, policy.state_dict(), 2, messages.append)
    try:
        expected = []
        for step in range(3):
            expected.append(play(policy, SerialEnvs(maker.for_n_envs(4), env_spec, 4, 0, FIRST_EVALUATION_ENV), 4))
            began = time.monotonic()
            evaluator.request(step, 0, {"at": float(step)}, policy.state_dict())
            assert time.monotonic() - began < 0.5
            torch.nn.init.normal_(policy.actor_head.weight)  # after the request
        results = []
        while evaluator.requests:
            finished = evaluator.take(30.0)
            assert finished is not None
            results.append((finished[0].step, finished[0].extra, finished[1]))
            evaluator.release()
        evaluators = [
            child for child in psutil.Process().children() if "evaluate.worker_main" in " ".join(child.cmdline())
        ]
        low_priority = min(19, psutil.Process().nice() + 10)
        assert [child.nice() for child in evaluators] == [low_priority, low_priority]
        assert results == [(step, {"at": float(step)}, result) for step, result in enumerate(expected)]
        assert len({tuple(result.returns) for result in expected}) == 3
    finally:
        evaluator.close()
    assert not messages


def test_dead_evaluator_repeats_its_share_until_restarts_are_exhausted(tmp_path: Path) -> None:
    kill_file = tmp_path / "kill"
    policy, maker, env_spec = policy_and_envs(kill_file=str(kill_file))
    expected = play(policy, SerialEnvs(maker.for_n_envs(4), env_spec, 4, 0, FIRST_EVALUATION_ENV), 4)
    messages: list[str] = []
    config = make_config(eval_episodes=4, seed=0, max_env_restarts=1)
    evaluator = AsyncEvaluator(config, maker, env_spec, None, policy.state_dict(), 2, messages.append)
    try:
        kill_file.touch()
        for step in range(2):
            evaluator.request(step, 0, {}, policy.state_dict())
        for _ in range(2):
            finished = evaluator.take(60.0)
            assert finished is not None
            assert finished[1] == expected
            evaluator.release()
        assert len(messages) == 1
        assert "exit status 9" in messages[0]
        kill_file.touch()
        evaluator.request(2, 0, {}, policy.state_dict())
        with pytest.raises(TrainingError, match="An evaluation failed"):
            evaluator.take(60.0)
    finally:
        evaluator.close()


class DiesAtStart(MultiTaskWalk):
    """Kills its process when it is created, as often as there are files in `folder`."""

    def __init__(self, n_envs: int = 1, folder: str = "") -> None:
        super().__init__(n_envs)
        for file in Path(folder).iterdir():
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def test_evaluator_killed_while_it_starts_is_restarted(tmp_path: Path) -> None:
    policy, maker, env_spec = policy_and_envs()
    expected = play(policy, SerialEnvs(maker.for_n_envs(4), env_spec, 4, 0, FIRST_EVALUATION_ENV), 4)
    for number in range(2):
        (tmp_path / str(number)).touch()
    messages: list[str] = []
    maker = env_maker(DiesAtStart, {"folder": str(tmp_path)})
    config = make_config(eval_episodes=4, seed=0, max_env_restarts=2)
    evaluator = AsyncEvaluator(config, maker, env_spec, None, policy.state_dict(), 1, messages.append)
    try:
        evaluator._processes[0]._process.wait(30)  # type: ignore[union-attr]
        evaluator.request(0, 0, {}, policy.state_dict())
        finished = evaluator.take(60.0)
        assert finished is not None
        assert finished[1] == expected
        assert len(messages) == 2
    finally:
        evaluator.close()


class Closing(MultiTaskWalk):
    """Creates `close_file` when closed; with `only_pid`, it can be created in that process only."""

    def __init__(self, n_envs: int = 1, close_file: str = "", only_pid: int = 0) -> None:
        super().__init__(n_envs)
        self._close_file = close_file
        if only_pid not in (0, os.getpid()):
            raise UsageError("The simulator's licence is for one process.")

    def close(self) -> None:
        if self._close_file:
            Path(self._close_file).touch()


def policy_and_closing_envs(**kwargs: Any) -> tuple[SACPolicy, Any, Any]:
    policy, _, env_spec = policy_and_envs()
    return policy, env_maker(Closing, kwargs), env_spec


def make_evaluations(
    policy: SACPolicy, maker: Any, env_spec: Any, processes: int, in_workers: bool = False, **run: Any
) -> Evaluations:
    return Evaluations(
        make_config(seed=0, **run),
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
def test_synchronous_evaluation_sizes_its_own_worker_pool(
    in_workers: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidle.engine.placement.available_cores", lambda: 16)  # one per evaluation env, and spare
    worker_counts: list[int] = []

    def make(maker: Any, env_spec: Any, n_envs: int, seed: int, workers: int, *rest: Any) -> HostEnvs:
        worker_counts.append(workers)
        return make_envs(maker, env_spec, n_envs, seed, 0, *rest)

    monkeypatch.setattr("unidle.engine.evaluate.evaluations.make_envs", make)
    policy, maker, env_spec = policy_and_envs()
    env_spec = replace(env_spec, step_seconds=1e-3)
    with contextlib.closing(make_evaluations(policy, maker, env_spec, 0, in_workers, eval_episodes=10)) as evaluations:
        evaluations.request(10, 0, {})
        assert [finished.step for finished in evaluations.done(0)] == [10]
    assert worker_counts == [workers]


def test_queued_evaluations_run_in_order_and_close_their_envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.engine.evaluate.async_evaluator._QUEUE_LENGTH", 2)
    close_file = tmp_path / "closed"
    policy, maker, env_spec = policy_and_closing_envs(close_file=str(close_file))
    evaluations = make_evaluations(policy, maker, env_spec, 1, eval_episodes=2, eval_workers=1)
    with contextlib.closing(evaluations):
        close_file.unlink(missing_ok=True)  # from the environment that was created to read the task names
        evaluations.load_pending({"step": step, "about": {}, "weights": policy.state_dict()} for step in (10, 20, 30))
        evaluations.run_pending()
        evaluations.request(40, 0, {})
        assert evaluations.is_full
        assert evaluations.n_open == 4
        assert [pending["step"] for pending in evaluations.state()] == [10, 20, 30, 40]
        steps: list[int] = []
        deadline = time.monotonic() + 60
        while evaluations.n_open and time.monotonic() < deadline:
            steps += [evaluated.step for evaluated in evaluations.done(0, 1.0)]
        assert steps == [10, 20, 30, 40]
        assert not evaluations.is_full
        assert not close_file.exists()
    assert close_file.exists()


def test_user_error_in_evaluator_becomes_training_error() -> None:
    """The trainer writes a checkpoint only for a TrainingError."""
    policy, maker, env_spec = policy_and_closing_envs(only_pid=os.getpid())
    evaluator = AsyncEvaluator(
        make_config(eval_episodes=1, seed=0), maker, env_spec, None, policy.state_dict(), 1, print
    )
    with contextlib.closing(evaluator):
        evaluator.request(0, 0, {}, policy.state_dict())
        with pytest.raises(TrainingError, match=r"An evaluation failed\. .*licence is for one process"):
            evaluator.take(60.0)


def test_evaluator_uses_configured_number_of_threads() -> None:
    policy, maker, env_spec = policy_and_envs()
    config, shapes, before = make_config(threads=2), shapes_of(policy.state_dict()), torch.get_num_threads()
    memory = shared_memory(Snapshots.nbytes(shapes, 1, 1))
    payload = cloudpickle.dumps((maker, env_spec, config, None))
    job = EvaluationJob(os.getpid(), sys.path, payload, memory, shapes, 1, 0, 1, n_envs=2, env_ids=range(2), episodes=2)
    try:
        torch.set_num_threads(1)
        with contextlib.closing(Evaluator(job)):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        os.close(memory)


class SlowEvaluations:
    """Three open evaluations; each wait finishes one. Records the timeline phase of every call."""

    task_names = ()
    is_async = False

    def __init__(self, timeline: Timeline, policy: SACPolicy) -> None:
        self.n_open, self.phases = 3, list[int]()
        self._timeline, self._policy = timeline, policy

    @property
    def is_full(self) -> bool:
        return self.n_open > 0

    def is_overdue(self, iteration: int) -> bool:
        return False

    def done(self, iteration: float, seconds: float = 0.0) -> Iterator[FinishedEvaluation]:
        if seconds:
            self.phases.append(self._timeline._phase)
            self.n_open -= 1
            result = Evaluation([-float(self.n_open)], [1])  # better than the last, so it is saved
            yield FinishedEvaluation(self.n_open, 0, {}, result, {}, self._policy)

    def request(self, step: int, iteration: int, extra: dict[str, Any]) -> None:
        self.phases.append(self._timeline._phase)


@pytest.mark.parametrize("at_end", [True, False])
def test_waiting_for_evaluations_counts_as_evaluation_time(at_end: bool) -> None:
    timeline, (policy, _, _) = Timeline(), policy_and_envs()
    slow, ignore = SlowEvaluations(timeline, policy), lambda *_: None
    components: Any = {
        "evaluations": slow,
        "saver": SimpleNamespace(save_best=ignore),
        "folder": None,
        "log": SimpleNamespace(write=ignore),
        "display": SimpleNamespace(on_evaluation=ignore, on_message=ignore),
        "runner": SimpleNamespace(call=ignore),
    }
    hooks: Any = {"report_fault": ignore, "save": ignore, "stop": ignore, "is_interrupted": lambda: False}
    algo: Any = SimpleNamespace(plasticity=lambda *_: {})
    tracker = BestPolicyTracker(
        make_config(), algo, progress=Progress(), timeline=timeline, callbacks=(), **components, **hooks
    )
    if at_end:
        run_to_end(tracker.finish())
    else:
        run_to_end(tracker.evaluate())
    assert slow.phases == [EVALUATE] * (3 if at_end else 4)
    assert timeline._phase == OTHER


def test_dormant_neurons_are_reported_after_enough_updates_and_two_evaluations() -> None:
    messages: list[str] = []
    recipe = SACRecipe(learning_starts=1000, utd_ratio=0.5)
    tracker: Any = SimpleNamespace(
        config=Config(recipe=recipe), n_dormant=0, display=SimpleNamespace(on_message=messages.append)
    )
    #            too few updates              in a row  still     recovered, and again
    shares = {1000: 0.9, 20_999: 0.9, 21_000: 0.4, 22_000: 0.5, 23_000: 0.6, 24_000: 0.3, 25_000: 0.4, 26_000: 0.7}
    reported = {}
    for step, share in shares.items():
        BestPolicyTracker._warn_if_dormant(tracker, {"step": step, DORMANT: share})
        if messages:
            reported[step] = messages.pop()
    assert reported == {22_000: dormancy_warning(0.5), 26_000: dormancy_warning(0.7)}


def add_pending_evaluation(run: unidle.TrainedRun, step: int, weights: dict[str, Any], **changes: Any) -> None:
    """Edit a run's last checkpoint as if the evaluation at `step` was still pending when it was written."""
    path = run.folder.latest()
    assert path is not None
    state = {name: value for name, value in load_checkpoint(path).items() if name != "format"}
    pending = {"step": step, "about": {"wall": 1.0}, "weights": weights}
    save_checkpoint(path, {**state, "evaluations": [pending], **changes})


def test_resume_does_not_repeat_evaluation_recorded_after_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a queue of one, training has to wait for evaluations.
    monkeypatch.setattr("unidle.engine.evaluate.async_evaluator._QUEUE_LENGTH", 1)
    settings = {**SMALL, "runs_dir": str(tmp_path), "eval_workers": 1}
    uninterrupted = unidle.train(MultiTaskWalk, run_name="uninterrupted", **settings)
    interrupted = unidle.train(
        MultiTaskWalk, run_name="interrupted", after_iteration=[StopAfter(6)], **{**settings, "eval_workers": 0}
    )
    nan_weights = {
        name: torch.full_like(value, torch.nan)
        for name, value in final_state(interrupted.path)["algo"]["policy"].items()
    }
    add_pending_evaluation(
        interrupted, 120, nan_weights, best_success=-np.inf, best_return=-np.inf, best_step=-1, highest_return=-np.inf
    )
    resumed = unidle.resume(interrupted.path, env=MultiTaskWalk, quiet=True)
    assert evaluation_records(resumed) == evaluation_records(uninterrupted)
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))


def test_resume_runs_unrecorded_evaluation_with_its_own_weights(tmp_path: Path) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), "timesteps": 240}
    run = unidle.train(MultiTaskWalk, run_name="r", eval_workers=0, **settings)
    early = unidle.train(MultiTaskWalk, run_name="early", eval_workers=0, **{**settings, "timesteps": 120})
    weights = final_state(early.path)["algo"]["policy"]
    first, second = evaluation_records(run)
    metrics = run.path / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if '"evaluation", "step": 120' not in line]
    excluded = [name for name in first if name.startswith("plasticity/") or name == "eval/best"]
    for workers in (0, 1):
        metrics.write_text("".join(lines))
        add_pending_evaluation(run, 120, weights)
        callback_weights: list[Any] = []
        callbacks: Any = [lambda context, seen=callback_weights: seen.append(context.policy.state_dict())]
        resumed = unidle.resume(
            run.path, env=MultiTaskWalk, quiet=True, eval_workers=workers, after_evaluation=callbacks
        )
        assert_same(callback_weights, [weights])
        after, redone = evaluation_records(resumed)
        assert after == second
        assert {k: v for k, v in redone.items() if k not in excluded} == {
            k: v for k, v in first.items() if k not in excluded
        }
        assert final_state(run.path)["evaluations"] == []


def is_running(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"


def evaluators_of(trainer: int) -> list[int]:
    children = psutil.Process(trainer).children()  # for a moment others too, such as git
    return [child.pid for child in children if "worker_main" in " ".join(command_line(child))]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has exited
        return []


def test_evaluators_exit_when_trainer_is_killed_or_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import unidle\nfrom task_envs import MultiTaskWalk\nsettings = {SMALL!r}\n"
        "settings |= {'timesteps': 10**6, 'eval_workers': 2, 'env_kwargs': {'step_seconds': 0.01}}\n"
        "unidle.train(MultiTaskWalk, **settings)\n"
    )
    source, tests = SOURCE, TESTS
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{tests}"}
    for sig, exit_code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 0)):
        folder = tmp_path / str(int(sig))
        folder.mkdir()
        trainer = subprocess.Popen([sys.executable, str(script)], cwd=folder, env=environment, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 60
            while len(evaluators_of(trainer.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            pids = evaluators_of(trainer.pid)
            assert len(pids) == 2
            time.sleep(0.5)
            trainer.send_signal(sig)
            assert trainer.wait(timeout=30) == exit_code
        finally:
            trainer.kill()
            trainer.wait()
        deadline = time.monotonic() + 20
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, pids))


# -- number of evaluators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "n_tasks", "workers", "step_seconds", "chosen"),
    [
        (1, 1, 0, 1e-5, 0),  # no core to spare: training waits
        (1, 3, 2, 1e-5, 0),
        (2, 1, 0, 1e-5, 1),
        (2, 1, 2, 1e-5, 1),  # at low priority, beside the workers
        (16, 1, 8, 1e-5, 1),
        (16, 1, 8, 1e-3, 8),  # 200 seconds of stepping
        (64, 1, 8, 1e-3, 20),
        (2, 3, 2, 1e-5, 1),
        (16, 3, 2, 1e-5, 8),  # many tasks take long
        (64, 3, 2, 1e-5, 20),
    ],
)
def test_number_of_processes_follows_from_spare_cores_and_length_of_evaluation(
    cores: int, n_tasks: int, workers: int, step_seconds: float, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidle.engine.evaluate.schedule.available_cores", lambda: cores)
    _, maker, env_spec = policy_and_envs()
    config, env_spec = make_config(eval_episodes=200, n_tasks=n_tasks), replace(env_spec, step_seconds=step_seconds)
    assert choose_processes(config, maker, env_spec, workers) == chosen
    monkeypatch.setattr("unidle.engine.evaluate.schedule.available_cores", lambda: 64)
    assert choose_processes(config, maker, env_spec, workers, cores) == chosen  # beside other trainers
    assert choose_processes(config, replace(maker, kind="async"), env_spec, workers) == 0
    assert choose_processes(config, replace(maker, kwargs={"lock": threading.Lock()}), env_spec, workers) == 0


@pytest.mark.parametrize(("requested", "chosen"), [(8, 4), (3, 3), (0, 0), (None, 4)])
def test_evaluators_do_not_exceed_number_of_envs(
    requested: int | None, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidle.engine.evaluate.schedule.available_cores", lambda: 64)
    _, maker, env_spec = policy_and_envs()
    config = make_config(eval_workers=requested, eval_episodes=4)
    assert choose_processes(config, maker, env_spec, 2) == chosen


@pytest.mark.parametrize(("processes", "suffix"), [(1, "4 episodes, asynchronous (1 process)"), (2, "(2 processes)")])
def test_run_facts_state_number_of_evaluators(processes: int, suffix: str) -> None:
    policy, _, env_spec = policy_and_envs()
    components: Any = SimpleNamespace(
        env_spec=env_spec, workers=processes, algo=SimpleNamespace(policy=policy), precision="float32", ranks=None
    )
    facts = run_facts(make_config(eval_episodes=4), components, Path("run"), processes, 0)
    assert facts["evaluation"].endswith(suffix)
    assert f"{processes} worker process{'es' * (processes > 1)} (" in facts["environment"]


def test_device_envs_are_rejected_for_async_evaluation(tmp_path: Path) -> None:
    settings = {"preset": "classic", "timesteps": 4096, "eval_workers": 1, "runs_dir": str(tmp_path), "quiet": True}
    with pytest.raises(UsageError, match="steps many environments together"):
        unidle.train("unidle/CartPole-v1", **settings)
    with pytest.raises(UsageError, match="must not be negative"):
        unidle.train("CartPole-v1", **{**settings, "eval_workers": -1})
