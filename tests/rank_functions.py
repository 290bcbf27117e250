"""Functions that tests run on every rank of a real job: `python rank_functions.py NAME FOLDER ARGUMENTS`.

What a function returns is saved to FOLDER, in a file per rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

import unidle
from unidle.algos.ppo import PPO, Batch
from unidle.algos.ppo_ops import new_ppo
from unidle.config import recipe_for
from unidle.distributed.place import current_place
from unidle.distributed.ranks import Ranks
from unidle.engine.checkpoint.rank_folder import RankFolder, weights_digest
from unidle.engine.cuda_graphs import Capture
from unidle.engine.learn import learner
from unidle.engine.learn.finite import all_finite
from unidle.engine.together import Together
from unidle.errors import UsageError, WriteError
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.normalise import RunningNorm
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout


def this_rank(seconds: float = 60.0) -> Ranks:
    place = current_place()
    assert place is not None
    return Ranks(place, seconds)


def reductions() -> dict[str, Any]:
    ranks = this_rank()
    mean = torch.tensor([float(ranks.rank), 1.0])
    ranks.mean_(mean)
    copied = torch.full((2,), float(ranks.rank))
    ranks.broadcast_([copied])
    return {
        "mean": mean,
        "gathered": ranks.gather({"rank": ranks.rank}),
        "all": [ranks.all(True), ranks.all(ranks.rank == 0)],
        "first": ranks.from_first(lambda: f"from {ranks.rank}"),
        "broadcast": copied,
    }


def statistics() -> dict[str, Tensor]:
    """Running statistics of this rank's share of two batches, which are the same on all ranks."""
    ranks, norm = this_rank(), RunningNorm(3)
    for scale in (1.0, 5.0):
        batch = scale * torch.randn(12, 3, generator=torch.Generator().manual_seed(1)) + 3
        norm.update(batch.chunk(ranks.size)[ranks.rank], ranks)
    return dict(norm.state_dict())


def agreed_error(*, rank: int) -> str:
    """What ends each rank if this one has a usage error."""
    ranks = this_rank()
    try:
        with ranks.stage():
            if ranks.rank == rank:
                raise UsageError("This setting is wrong; use another one.")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def lost(*, rank: int) -> str:
    """What ends the other ranks if this one dies."""
    ranks = this_rank()
    ranks.all(True)
    if ranks.rank == rank:
        os._exit(3)
    try:
        ranks.all(True)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def silent(*, rank: int) -> tuple[str, float]:
    """What ends the other ranks, and after how long, if this one does not answer."""
    ranks = this_rank(seconds=2.0)
    ranks.all(True)
    began = time.monotonic()
    try:
        if ranks.rank != rank:
            ranks.all(True)
    except Exception as error:
        return type(error).__name__, time.monotonic() - began
    time.sleep(4.0)
    return "nothing", 0.0


# -- PPO ---------------------------------------------------------------------------------------------------------------

N_SEQUENCES = 24  # in the whole job


def _batch(generator: torch.Generator, obs_bytes: int) -> Batch:
    def draw(*shape: int) -> Tensor:
        return torch.randn(N_SEQUENCES, *shape, generator=generator)

    obs = torch.zeros(N_SEQUENCES, 1, obs_bytes, dtype=torch.uint8)
    obs[..., :12] = draw(1, 3).view(torch.uint8)
    fields = [draw(1, 2), draw(1) - 2, draw(1), 3 + 10 * draw(1), draw(1)]
    return Batch(obs, *fields, None, None, draw(1).exp().clamp(max=2.0))


def _order(order: Tensor, n: int, generator: torch.Generator) -> Tensor:
    return order.flatten()


def ppo_step(*, kernels: bool, target_kl: float | None) -> dict[str, Tensor]:
    """A step on all ranks from two minibatches, and the same steps on the whole minibatches by this rank alone."""
    ranks = this_rank()
    obs = ObservationLayout.of(gymnasium.spaces.Box(-1, 1, (3,), np.float32))
    actions = ActionLayout.of(gymnasium.spaces.Box(-1, 1, (2,)))
    settings: dict[str, Any] = {"n_steps": 1, "n_epochs": 1, "net_arch": (8,), "max_grad_norm": 0.1, "adam_eps": 0.1}
    settings |= {"learning_rate": 0.05, "target_kl": target_kl, "ent_coef": 0.01}

    def new(size: int, with_ranks: Ranks | None) -> PPO:
        recipe = recipe_for("ppo", n_envs=N_SEQUENCES // size, batch_size=N_SEQUENCES // 2 // size, **settings)
        torch.manual_seed(4)
        after_gradient = None if with_ranks is None else with_ranks.mean_
        return new_ppo(ActorCritic(obs, actions, recipe), recipe, after_gradient=after_gradient, ranks=with_ranks)

    whole = _batch(torch.Generator().manual_seed(5), obs.obs_bytes)
    own = torch.arange(N_SEQUENCES).view(ranks.size, -1)[ranks.rank]
    share = whole.at(own)
    job, alone = new(ranks.size, ranks), new(1, None)
    for ppo, batch in ((job, share), (alone, whole)):
        ops: Any = ppo.ops
        if not kernels:
            ops.numpy_unsupported = "disabled by the test"
        ops._choose_numpy(batch)
        assert ops.in_numpy == kernels
        ops._static_batches[0] = batch, ops._captured(batch)
        ops._learn_on[id(batch)] = ops._static_batches[0][1]
        ops._advantages = batch.advantages.clone()
    # The first half of each rank's sequences is the first minibatch.
    halves = torch.arange(N_SEQUENCES).view(ranks.size, 2, -1)
    orders = {
        id(job): torch.arange(len(own)).view(2, -1),
        id(alone): torch.stack([half.flatten() for half in halves.unbind(1)]),
    }
    for ppo, batch in ((job, share), (alone, whole)):
        ppo.ops.shuffle = partial(_order, orders[id(ppo)])
        for minibatch in ppo.ops.minibatches(batch, torch.Generator()):
            ppo.ops.step(batch, minibatch)
    metrics = torch.stack(
        [job._metrics(share)[name].detach().float().view(()) for name in ("policy_loss", "explained_variance")]
    )
    ranks.mean_(metrics)
    expected = torch.stack(
        [alone._metrics(whole)[name].detach().float().view(()) for name in ("policy_loss", "explained_variance")]
    )
    return {
        "weights": job.parameters.flat.detach().clone(),
        "expected": alone.parameters.flat.detach().clone(),
        "start": new(1, None).parameters.flat.detach().clone(),
        "metrics": metrics,
        "expected_metrics": expected,
        "stopped": job.counters.stopped.clone(),
        "expected_stopped": alone.counters.stopped.clone(),
    }


# -- runs --------------------------------------------------------------------------------------------------------------


def digests(*, settings: dict[str, Any]) -> list[str]:
    """The hash of this rank's weights after every iteration of a run."""
    found: list[str] = []
    decide = Together.decide

    def recording(self: Together, algo: Any, *arguments: Any, **others: Any) -> bool:
        found.append(weights_digest(algo))
        return decide(self, algo, *arguments, **others)

    Together.decide = recording  # type: ignore[method-assign]
    unidle.train(**settings)
    return found


def digests_and_backend(*, settings: dict[str, Any]) -> dict[str, Any]:
    """`digests`, and how the ranks have reduced gradients."""
    backends: list[str] = []
    choose = Ranks.choose_device

    def recording(self: Ranks, name: str) -> torch.device:
        device = choose(self, name)
        backends.append(self.backend)
        return device

    Ranks.choose_device = recording  # type: ignore[method-assign]
    return {"digests": digests(settings=settings), "backend": backends[0]}


def stop_by_callback(*, settings: dict[str, Any], iterations: int) -> int:
    """How many iterations this rank has trained when a callback of rank 0 has stopped the run."""
    found: list[int] = []
    decide = Together.decide

    def recording(self: Together, *arguments: Any, **others: Any) -> bool:
        found.append(self._progress.iteration)
        return decide(self, *arguments, **others)

    def stop(context: unidle.CallbackContext) -> None:
        if context.record["iteration"] == iterations:
            context.stop()

    Together.decide = recording  # type: ignore[method-assign]
    unidle.train(**settings, after_iteration=[stop])
    return found[-1]


def guarded(*, settings: dict[str, Any]) -> dict[str, Any]:
    """The weights' hashes of a run on a GPU whose iterations 4 to 8 must not sync, and what was not captured."""
    found: list[str] = []
    fallbacks: list[str] = []
    decide, fall_back = Together.decide, Capture.fall_back

    def guarding(self: Together, algo: Any, *arguments: Any, **others: Any) -> bool:
        torch.cuda.set_sync_debug_mode("default")
        found.append(weights_digest(algo))
        saves = decide(self, algo, *arguments, **others)
        torch.cuda.set_sync_debug_mode("error" if 3 <= self._progress.iteration < 8 else "default")
        return saves

    def recording(self: Capture, name: str, error: Exception, to: str) -> None:
        fallbacks.append(f"{name} {to}")
        fall_back(self, name, error, to)

    Together.decide, Capture.fall_back = guarding, recording  # type: ignore[method-assign]
    try:
        unidle.train(**settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"digests": found, "fallbacks": fallbacks}


def ended_by(settings: dict[str, Any]) -> str:
    """The error that ends a run on this rank."""
    try:
        unidle.train(**settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def non_finite(*, settings: dict[str, Any], rank: int) -> str:
    """What ends a run on this rank if the second rollout of `rank` has a NaN."""
    place = current_place()
    calls = 0

    def finding(encoder: Any, rollout: Any) -> Tensor:
        nonlocal calls
        calls += 1
        finite = all_finite(encoder, rollout)
        if calls == 2 and place is not None and place.rank == rank:
            finite[3, 1] = False
        return finite

    learner.all_finite = finding  # type: ignore[attr-defined]
    return ended_by(settings)


def full_disk(*, settings: dict[str, Any]) -> str:
    """What ends a run on this rank if rank 1 cannot write checkpoints."""

    def save(*_: Any) -> Path:
        raise WriteError("The disk is full", "free some space")

    RankFolder.save = save  # type: ignore[method-assign]
    return ended_by(settings)


class FailsOnce(gymnasium.Env):
    """Raises in the 41st step of its episode on rank 1, until a file exists."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fixed: str = "") -> None:
        self._fixed, self._steps = Path(fixed), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self._steps += 1
        place = current_place()
        if place is not None and place.rank == 1 and self._steps > 40 and not self._fixed.exists():
            raise ValueError("This environment is broken.")
        obs = np.array([self._steps / 100, action], np.float32)
        return obs, float(action), self._steps >= 100, False, {}


def main(name: str, folder: str, arguments: str) -> None:
    function: Callable[..., Any] = globals()[name]
    result = function(**json.loads(arguments))
    place = current_place()
    torch.save(result, Path(folder) / f"{name}-{place.rank if place else 0}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
