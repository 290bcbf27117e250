"""Small replay buffers, and transitions that can be told apart."""

import numpy as np
import torch
from torch import Tensor

from unidle.buffers.multitask import TaskReplay
from unidle.buffers.prioritised import Prioritised
from unidle.buffers.replay import Replay, Transitions

CPU = torch.device("cpu")


GAMMA = 0.5


GOES_ON, TERMINATED, TRUNCATED, BOTH = range(4)


ROW_BYTES, WIDTH = 16, 2


Memory = Replay | TaskReplay | Prioritised


def seeded(seed: int = 0, device: torch.device = CPU) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def rows_of(names: list[int]) -> Tensor:
    """[n, 16] rows that carry a number each, so that an observation is known again."""
    return torch.tensor([[name, ~name] for name in names]).view(torch.uint8)


def names_of(obs: Tensor) -> list[int]:
    numbers = obs.view(torch.int64)
    assert (numbers[:, 1] == ~numbers[:, 0]).all()  # no row is made of two
    return numbers[:, 0].tolist()


def actions_of(names: list[int]) -> Tensor:
    """[n, 2] the action that the model takes in an observation."""
    return torch.tensor([[name, -name] for name in names], dtype=torch.float32)


def reward_of(name: int) -> int:
    return name * 37 % 64 - 31


# What a transition must read: its observation → (return, discount, next observation).
Expected = dict[int, tuple[float, float, int]]


def read(batch: Transitions) -> Expected:
    """A batch in the model's words."""
    names = names_of(batch.obs)
    assert batch.actions.tolist() == actions_of(names).tolist()
    outcomes = zip(batch.returns.tolist(), batch.discounts.tolist(), names_of(batch.next_obs))
    return dict(zip(names, outcomes))


def make_replay(device: torch.device = CPU) -> Replay:
    return Replay(30, 3, ROW_BYTES, WIDTH, device, GAMMA, n_steps=2)


def make_task_replay(device: torch.device = CPU) -> TaskReplay:
    return TaskReplay(40, 4, 3, ROW_BYTES, WIDTH, device, GAMMA)


def make_prioritised(device: torch.device = CPU) -> Prioritised:
    return Prioritised(make_replay(device), alpha=0.6, beta=0.4)


def random_step(memory: Memory, rng: np.random.Generator, device: torch.device = CPU) -> dict[str, Tensor]:
    """The arguments of `add` for 3 environments."""
    end = torch.from_numpy(rng.choice(4, 3, p=[0.7, 0.1, 0.1, 0.1]))
    step = {
        "actions": torch.from_numpy(rng.standard_normal((3, WIDTH), np.float32)),
        "rewards": torch.from_numpy(rng.standard_normal(3, np.float32)),
        "terminated": (end == TERMINATED) | (end == BOTH),
        "truncated": (end == TRUNCATED) | (end == BOTH),
        "next_obs": torch.from_numpy(rng.integers(0, 256, (3, ROW_BYTES), np.uint8)),
        "final_obs": torch.from_numpy(rng.integers(0, 256, (3, ROW_BYTES), np.uint8)),
    }
    tasks = torch.from_numpy(rng.integers(0, 4, 3))
    if isinstance(memory, TaskReplay):
        step["tasks"] = tasks
    return {name: value.to(device) for name, value in step.items()}


def live(memory: Memory, rng: np.random.Generator, n_steps: int) -> None:
    """Add, and learn something of what was added."""
    for _ in range(n_steps):
        memory.add(**random_step(memory, rng))
        if isinstance(memory, Prioritised):
            memory.update(memory.sample(4, seeded()).index, torch.from_numpy(rng.standard_normal(4)))


def same(one: Transitions, other: Transitions) -> bool:
    return all(torch.equal(mine, others) for mine, others in zip(one.tensors(), other.tensors()))
