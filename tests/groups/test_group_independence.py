"""What a run of a group learns depends on its seed and settings alone: random groups, neighbours and disturbances.

`HYPOTHESIS_PROFILE=explore` tries many more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from resumed_runs import assert_same, final_state

import unidle
from unidle.envs.pool.slot import episode_seed
from unidle.groups.folder import GroupFolder
from unidle.metrics.jsonl import read_records

# Without shrinking: an example takes seconds.
few = settings(max_examples=max(2, settings.default.max_examples // 25), phases=[Phase.explicit, Phase.generate])
Fault = Literal["none", "killed", "diverges"]

ON_POLICY = {"preset": "classic", "n_envs": 4, "n_steps": 16, "batch_size": 32, "n_epochs": 2}
OFF_POLICY = {"n_envs": 2, "learning_starts": 32, "batch_size": 16, "buffer_size": 500}
RECIPES: dict[str, dict[str, Any]] = {
    "ppo": ON_POLICY,
    "ppo with overlap": {**ON_POLICY, "overlap": "strict"},
    "sac": {"algo": "sac", **OFF_POLICY},
    "td3": {"algo": "td3", **OFF_POLICY},
    "dqn": {"algo": "dqn", **OFF_POLICY},
}
COMMON: dict[str, Any] = {
    "net_arch": (8,),
    "eval_every": 0,
    "checkpoint_every": 10**9,  # only at the end
    "device": "cpu",
    "tensorboard": False,
    "quiet": True,
}


class Disturbed:
    """Mixed into an environment: the run with the seed `bad` has a fault after some steps."""

    def __init__(self, bad: int = 0, fault: Fault = "none", after: int = 0) -> None:
        super().__init__()
        self._bad, self._fault, self._left, self._is_bad = bad, fault, after, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        # The first environment of that run, in its first episode: one that replaces it begins with a later one.
        self._is_bad |= self._fault != "none" and seed == episode_seed(self._bad, 0, 0)
        return super().reset(seed=seed, options=options)  # type: ignore[misc]

    def step(self, action: Any) -> Any:
        observation, reward, *others = super().step(action)  # type: ignore[misc]
        self._left -= self._is_bad
        if self._left < 0 and self._fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left < 0 and self._fault == "diverges":
            reward = 3e38  # finite, but its square is not
        return observation, reward, *others


class DisturbedCartPole(Disturbed, CartPoleEnv):
    pass


class DisturbedPendulum(Disturbed, PendulumEnv):
    pass


@dataclass
class Stop:
    """A callback that stops the run `name` after some of its iterations."""

    name: str
    left: int

    def __call__(self, context: unidle.CallbackContext) -> None:
        if context.folder.name == self.name:
            self.left -= 1
            if self.left == 0:
                context.stop()


class Trainer:
    """Trains with one recipe, in one folder."""

    def __init__(self, recipe: str, timesteps: int, folder: str) -> None:
        self._env = DisturbedPendulum if recipe in ("sac", "td3") else DisturbedCartPole
        self._settings = {**COMMON, **RECIPES[recipe], "timesteps": timesteps, "runs_dir": folder}
        self._folder = Path(folder)

    def alone(self, seed: int) -> dict[str, Any]:
        """What one run has learned in the end."""
        return learned(unidle.train(self._env, seed=seed, run_name="alone", **self._settings).path)

    def group(self, name: str, seeds: list[int], **changes: Any) -> GroupFolder:
        """Train several, some of which may fail."""
        with contextlib.suppress(unidle.TrainingError):  # the folder says which one has failed, and why
            unidle.train(self._env, seeds=seeds, run_name=name, **{**self._settings, **changes})
        return GroupFolder.open(self._folder / name)


def learned(run: Path) -> dict[str, Any]:
    """The last checkpoint of a run: what it has learned, its environments, its generators."""
    state = final_state(run)
    del state["random"]  # Python's, NumPy's and torch's own generators belong to the process
    return state


def seeds(at_least: int, at_most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2**31), min_size=at_least, max_size=at_most, unique=True)


@pytest.mark.parametrize("recipe", RECIPES)
@few
@given(members=seeds(2, 5), others=seeds(1, 3), data=st.data(), steps=st.integers(1, 6))
def test_member_equals_its_solo_run_and_the_same_member_of_any_other_group(
    recipe: str, members: list[int], others: list[int], data: st.DataObject, steps: int
) -> None:
    member = data.draw(st.sampled_from(members), label="member")
    others = [seed for seed in others if seed != member]
    place = data.draw(st.integers(0, len(others)), label="place in the other group")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(recipe, 64 * steps, folder)
        alone = trainer.alone(member)
        for name, chosen in {"group": members, "other": [*others[:place], member, *others[place:]]}.items():
            assert_same(learned(trainer.group(name, chosen).path / f"seed-{member}"), alone)


@pytest.mark.parametrize("fault", ["killed", "diverges", "stopped"])
@few
@given(recipe=st.sampled_from([*RECIPES]), members=seeds(2, 4), data=st.data(), after=st.integers(0, 100))
def test_member_with_a_fault_leaves_the_others_as_they_would_be_without_it(
    fault: Literal["killed", "diverges", "stopped"], recipe: str, members: list[int], data: st.DataObject, after: int
) -> None:
    bad = data.draw(st.sampled_from(members), label="bad")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(recipe, 512, folder)
        if fault == "stopped":
            changes: dict[str, Any] = {"after_iteration": [Stop(f"seed-{bad}", 1 + after // 50)]}
        else:
            changes = {"env_kwargs": {"bad": bad, "fault": fault, "after": after}}
        if fault == "killed":
            changes["workers"] = 1
        disturbed, whole = trainer.group("disturbed", members, **changes), trainer.group("whole", members)
        end = learned(disturbed.path / f"seed-{bad}")["step"]
        match fault:
            case "killed":
                records = read_records(disturbed.path / f"seed-{bad}" / "metrics.jsonl")
                assert max(record.get("faults/killed", 0) for record in records) == 1
                assert not disturbed.failures
            case "diverges":
                (failed,) = disturbed.failures.items()
                assert failed[0] == f"seed-{bad}"
                assert "Learning diverged" in failed[1]
                assert end < 512
            case "stopped":
                assert not disturbed.failures
                assert end < 512
        for seed in members:
            if seed != bad:
                ours, theirs = (learned(group.path / f"seed-{seed}") for group in (disturbed, whole))
                assert_same(ours["algo"], theirs["algo"])
                assert ours["step"] == theirs["step"] == 512
