"""Plays whole episodes with a fixed policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from unidle.algos.registry import AnyPolicy
from unidle.config import Run
from unidle.envs.protocol import EpisodeRecorder, Fault, HostEnvs, StatisticsHolder
from unidle.envs.shared_block import SUCCEEDED
from unidle.envs.spec import EnvSpec
from unidle.nn.sac_policy import task_of
from unidle.rng import EVALUATION, keyed_generator

_MAX_STEPS = 100_000  # per evaluation episode, so that one that never ends does not hang the evaluation
_MIN_STEPS = 1000  # that an evaluation episode may always take
FIRST_EVALUATION_ENV = 1 << 20  # env indices of evaluations start here, so that training never uses their seeds
_FEW_ENVS, _MANY_ENVS = 10, 50


def use_statistics(envs: HostEnvs, statistics: dict[str, Any]) -> None:
    """Let wrappers of `envs` normalise as those of the training environments, whose running means are given."""
    if statistics and isinstance(envs, StatisticsHolder):
        envs.load_statistics(statistics, freeze=True)


def n_evaluation_envs(episodes: int) -> int:
    """Number of environments of an evaluation. It decides which seeds are played, so it depends on `episodes` only."""
    return min(episodes, max(_FEW_ENVS, min(_MANY_ENVS, episodes // 10)))


def longest_episode(run: Run, env_spec: EnvSpec) -> int:
    """Steps after which an evaluation episode is cut off.

    Where no time limit is known, all episodes together take at most as many steps as training does between two
    evaluations: the episodes of a policy that never gets anywhere may not end, and would take most of the run's time.
    """
    if run.eval_max_steps is not None:
        return run.eval_max_steps
    if env_spec.has_time_limit:
        return _MAX_STEPS
    between = run.eval_every or max(1, run.timesteps // 10)
    return min(_MAX_STEPS, max(_MIN_STEPS, between // run.eval_episodes))


@dataclass(frozen=True)
class Evaluation:
    """The results of some episodes."""

    returns: list[float]
    lengths: list[int]
    successes: list[bool] = field(default_factory=list)  # of each episode, where the environment reports it
    tasks: list[int] = field(default_factory=list)  # of each episode, where there are several tasks
    trace: dict[str, Any] | None = None  # of the first environment's first episode, where it reports one
    cut_off: int = 0  # episodes that reached the limit on their length

    @staticmethod
    def merge(parts: Iterable[Evaluation]) -> Evaluation:
        """One evaluation of all episodes of several; without successes unless every part has them."""
        parts = list(parts)

        def all_of(name: str) -> list[Any]:
            return [value for part in parts for value in getattr(part, name)]

        cut_off = sum(part.cut_off for part in parts)
        whole = Evaluation(all_of("returns"), all_of("lengths"), all_of("successes"), all_of("tasks"), cut_off=cut_off)
        return whole if len(whole.successes) == whole.episodes else replace(whole, successes=[])

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return len(self.returns)

    @property
    def mean_return(self) -> float:
        """Mean of the returns."""
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    @property
    def mean_length(self) -> float:
        """Mean number of steps."""
        return float(np.mean(self.lengths))

    @property
    def success(self) -> float | None:
        """Share of episodes that succeeded at any step; None where the environment does not report it."""
        return float(np.mean(self.successes)) if self.successes else None

    def metrics(self, names: Sequence[str] = ()) -> dict[str, float]:
        """The `eval/…` metrics; `names` are those of the tasks."""
        record: dict[str, float] = {
            "eval/return_mean": self.mean_return,
            "eval/return_std": self.std_return,
            "eval/length_mean": self.mean_length,
            "eval/episodes": self.episodes,
        }
        if self.cut_off:
            record["eval/cut_off"] = self.cut_off
        if self.successes:
            record["eval/success"] = float(np.mean(self.successes))
        tasks = np.array(self.tasks)
        for task in np.unique(tasks):
            name = names[task] if task < len(names) else str(task)
            record[f"eval/return/{name}"] = float(np.mean(np.array(self.returns)[tasks == task]))
            if self.successes:
                record[f"eval/success/{name}"] = float(np.mean(np.array(self.successes)[tasks == task]))
        return record


class Stopped(Exception):  # noqa: N818  # not an error, but requested by the user
    """An evaluation or a rollout was cancelled."""


@dataclass(frozen=True)
class Share:
    """The environments of an evaluation that this process plays: those from `first` on, of `n_envs` in total.

    Inference always has the full batch shape, so that actions are the same bit for bit in every process.
    """

    first: int
    n_envs: int


class _Episode(NamedTuple):
    total: float
    length: int
    success: int  # as in the block
    task: int
    is_cut_off: bool


@torch.inference_mode()
def play(
    policy: AnyPolicy,
    envs: HostEnvs,
    episodes: int,
    *,
    deterministic: bool = True,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    on_fault: Callable[[Fault], None] = lambda fault: None,
    share: Share | None = None,
    max_steps: int = _MAX_STEPS,
) -> Evaluation:
    """Play `episodes` episodes, divided among `envs`: environment i plays its episodes 0, 1, … from their seeds.

    Every environment plays a fixed number of episodes: taking the first that end would favour short ones. If
    environments cycle through tasks, every task also gets the same number of episodes, or one less. With a `share`,
    only the episodes of its environments are played. An episode is cut off after `max_steps` steps, and counts. Raises
    Stopped if `stop` returns True before the end.
    """
    was_training = policy.training
    _take_trace(envs)  # discard the previous one, so that the next is recorded
    policy.eval()
    try:
        chosen = share or Share(0, envs.n_envs)
        results = _play(policy, envs, episodes, deterministic, seed, stop, on_fault, chosen, max_steps)
    finally:
        policy.train(was_training)
    return Evaluation(
        [episode.total for episode in results],
        [episode.length for episode in results],
        [episode.success == SUCCEEDED for episode in results] if all(episode.success for episode in results) else [],
        [episode.task for episode in results] if policy.n_tasks > 1 else [],
        _take_trace(envs),
        sum(episode.is_cut_off for episode in results),
    )


def _take_trace(envs: HostEnvs) -> dict[str, Any] | None:
    return envs.take_episode_record() if isinstance(envs, EpisodeRecorder) else None


def _play(
    policy: AnyPolicy,
    envs: HostEnvs,
    episodes: int,
    deterministic: bool,
    seed: int,
    stop: Callable[[], bool],
    on_fault: Callable[[Fault], None],
    share: Share,
    max_steps: int,
) -> list[_Episode]:
    block, device, n_envs = envs.block, next(policy.parameters()).device, share.n_envs
    slices, mine = range(len(envs.bounds)), slice(share.first, share.first + envs.n_envs)
    quota = np.full(n_envs, episodes // n_envs)
    quota[: episodes % n_envs] += 1
    quota = quota[mine]
    results: list[list[_Episode]] = [[] for _ in range(envs.n_envs)]
    block.oldest_episode[:] = np.iinfo(np.int64).max  # no episode is ever resumed
    envs.start(np.zeros(envs.n_envs, np.int64))
    obs = torch.zeros(n_envs, block.obs.shape[1], dtype=torch.uint8, device=device)
    state = torch.zeros(n_envs, policy.state_size, device=device)
    continues = torch.zeros(n_envs, 1, dtype=torch.bool, device=device)
    generator = keyed_generator(device, seed, EVALUATION)
    distribution = policy.distribution
    returns, lengths = np.zeros(envs.n_envs), np.zeros(envs.n_envs, np.int64)  # of the open episodes
    tasks = np.zeros(envs.n_envs, np.int64)
    to_restart = np.zeros(envs.n_envs, np.bool_)  # after an episode that was cut off
    while any(len(done) < n for done, n in zip(results, quota)):
        if stop():
            raise Stopped
        obs[mine].copy_(torch.from_numpy(block.obs))
        if policy.n_tasks > 1 and not lengths.all():  # some episodes begin now
            tasks = task_of(policy.encoder(obs[mine]), policy.n_tasks).cpu().numpy()
        params, after = policy.act(obs, state)
        if deterministic:
            action = distribution.mode(params)
        else:
            action = distribution.sample(params, distribution.all_noise((n_envs,), generator))
        torch.from_numpy(block.actions).copy_(distribution.to_env(action)[mine])
        envs.send(slices)
        envs.recv(len(slices))
        # These start a new episode, because the step failed or the worker died after it; the old one does not count.
        failed = block.retry | (block.truncated & (block.episode_length < 0))
        for fault in envs.faults:
            on_fault(fault)
        envs.faults.clear()
        ended = (block.terminated | block.truncated) & ~failed
        returns += block.reward
        lengths += 1
        returns[failed], lengths[failed] = 0.0, 0
        for env in np.flatnonzero(ended | (lengths >= max_steps)):
            if len(results[env]) < quota[env] and not to_restart[env]:
                # The environment's own sum, if there is one, is in double precision.
                total = block.episode_return[env] if ended[env] else returns[env]
                success = int(block.episode_success[env]) if ended[env] else 0
                is_cut_off = not ended[env]
                results[env].append(_Episode(float(total), int(lengths[env]), success, int(tasks[env]), is_cut_off))
                to_restart[env] = is_cut_off
            returns[env], lengths[env] = 0.0, 0
        if after is not None:
            continues[mine] = torch.from_numpy(~(ended | failed)).to(device).unsqueeze(-1)
            state = after * continues
        played = np.array([len(done) for done in results])
        if to_restart.any() and (to_restart | (played >= quota)).all() and (played < quota).any():
            # Environments start together, so those whose episode was cut off waited for the others.
            envs.start(played)
            returns[:], lengths[:], to_restart[:] = 0.0, 0, False
            state = torch.zeros_like(state)
    return [episode for done in results for episode in done]
