"""Small replay buffers, and transitions with recognisable observations."""

import numpy as np
import torch
from torch import Tensor

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay, Transitions

CPU = torch.device("cpu")


GAMMA = 0.5


CONTINUES, TERMINATED, TRUNCATED, BOTH = range(4)


OBS_BYTES, ACTION_WIDTH = 16, 2


ReplayBuffer = Replay | TaskReplay | Prioritised


def seeded(seed: int = 0, device: torch.device = CPU) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def observations_of(ids: list[int]) -> Tensor:
    """[n, 16] packed observations that each hold an id."""
    return torch.tensor([[obs_id, ~obs_id] for obs_id in ids]).view(torch.uint8)


def ids_of(obs: Tensor) -> list[int]:
    numbers = obs.view(torch.int64)
    assert (numbers[:, 1] == ~numbers[:, 0]).all()  # no observation is mixed from two
    return numbers[:, 0].tolist()


def actions_of(ids: list[int]) -> Tensor:
    """[n, 2] the action that belongs to each observation."""
    return torch.tensor([[obs_id, -obs_id] for obs_id in ids], dtype=torch.float32)


def reward_of(obs_id: int) -> int:
    return obs_id * 37 % 64 - 31


# Expected transitions: observation → (return, discount, next observation).
Expected = dict[int, tuple[float, float, int]]


def read_batch(batch: Transitions) -> Expected:
    """A sampled batch in the form of `Expected`."""
    ids = ids_of(batch.obs)
    assert batch.actions.tolist() == actions_of(ids).tolist()
    outcomes = zip(batch.returns.tolist(), batch.discounts.tolist(), ids_of(batch.next_obs))
    return dict(zip(ids, outcomes))


def make_replay(device: torch.device = CPU) -> Replay:
    return Replay(30, 3, OBS_BYTES, ACTION_WIDTH, device, GAMMA, n_steps=2)


def make_task_replay(device: torch.device = CPU) -> TaskReplay:
    return TaskReplay(40, 4, 3, OBS_BYTES, ACTION_WIDTH, device, GAMMA)


def make_prioritised(device: torch.device = CPU) -> Prioritised:
    return Prioritised(make_replay(device), alpha=0.6, beta=0.4)


def random_step(replay: ReplayBuffer, rng: np.random.Generator, device: torch.device = CPU) -> dict[str, Tensor]:
    """The arguments of `add` for 3 environments."""
    end = torch.from_numpy(rng.choice(4, 3, p=[0.7, 0.1, 0.1, 0.1]))
    step = {
        "actions": torch.from_numpy(rng.standard_normal((3, ACTION_WIDTH), np.float32)),
        "rewards": torch.from_numpy(rng.standard_normal(3, np.float32)),
        "terminated": (end == TERMINATED) | (end == BOTH),
        "truncated": (end == TRUNCATED) | (end == BOTH),
        "next_obs": torch.from_numpy(rng.integers(0, 256, (3, OBS_BYTES), np.uint8)),
        "final_obs": torch.from_numpy(rng.integers(0, 256, (3, OBS_BYTES), np.uint8)),
    }
    tasks = torch.from_numpy(rng.integers(0, 4, 3))
    if isinstance(replay, TaskReplay):
        step["tasks"] = tasks
    return {name: value.to(device) for name, value in step.items()}


def add_steps(replay: ReplayBuffer, rng: np.random.Generator, n_steps: int) -> None:
    """Add random steps and update priorities."""
    for _ in range(n_steps):
        replay.add(**random_step(replay, rng))
        if isinstance(replay, Prioritised):
            replay.update(replay.sample(4, seeded()).index, torch.from_numpy(rng.standard_normal(4)))


def equal_transitions(one: Transitions, other: Transitions) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors()))
