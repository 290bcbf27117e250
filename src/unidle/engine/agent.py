"""A trained policy, for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unidle.config import Config
from unidle.config.files import display_path
from unidle.config.resolve import edited_settings
from unidle.engine.build import policy_from
from unidle.engine.checkpoint.checkpoint_file import (
    explain_weight_mismatch,
    first_intact,
    load_checkpoint,
    refuse_non_finite,
)
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.placement import choose_device
from unidle.engine.predict import initial_state, pack_observations, unpack_actions, write_masks
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import PREDICTION, keyed_generator
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout


class Agent:
    """A frozen policy with its normalisers. A recurrent policy keeps its state between calls until `reset`."""

    def __init__(
        self, state: dict[str, Any], config: Config, network: NetworkFactory | None, device: str = "cpu"
    ) -> None:
        """`state` is the content of a checkpoint; its weights are copied."""
        self.policy, self.obs_layout, self.action_layout = policy_from(state["spaces"], config, network)
        with explain_weight_mismatch():
            self.policy.load_state_dict(state["algo"]["policy"])
        self.actor_layout = self.policy.encoder.layout  # the part of the observation that the actor gets
        self.device = choose_device(device)
        self.policy.to(self.device).eval()
        self.step: int = state["step"]
        self.env_statistics: dict[str, Any] = state.get("env_statistics", {})  # of wrappers around vector environments
        self._state: np.ndarray | None = None
        self._generator = keyed_generator(self.device, config.run.seed, PREDICTION)

    obs_layout: ObservationLayout
    action_layout: ActionLayout

    def reset(self) -> None:
        """Clear the recurrent state; call it at the start of each episode if the policy is recurrent."""
        self._state = None

    def predict(self, observation: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
        """The action alone; a recurrent policy continues from the previous call."""
        action, self._state = self.predict_from(
            observation, self._state, deterministic=deterministic, action_mask=action_mask
        )
        return action

    @torch.inference_mode()
    def predict_from(
        self,
        observation: Any,
        state: np.ndarray | None = None,
        episode_start: Sequence[bool] | np.ndarray | None = None,
        *,
        deterministic: bool = True,
        action_mask: Any = None,
    ) -> tuple[Any, np.ndarray | None]:
        """Actions for an observation or a batch, and the next recurrent state; see `TrainedRun.predict`."""
        policy = self.policy
        packed, size = pack_observations(self.actor_layout, observation)
        if policy.masked:
            write_masks(self.obs_layout, self.action_layout, packed, size, observation, action_mask)
        before = None
        if policy.state_size:
            before = torch.from_numpy(initial_state(state, episode_start, size, policy.state_size)).to(self.device)
        params, after = policy.act(torch.from_numpy(packed).to(self.device), before)
        distribution = policy.distribution
        if deterministic:
            actions = distribution.mode(params)
        else:
            actions = distribution.sample(params, distribution.all_noise((len(packed),), self._generator))
        taken = unpack_actions(self.action_layout, distribution.to_env(actions).cpu().numpy(), size)
        if after is None:
            return taken, None
        states: np.ndarray = after.cpu().numpy()
        return taken, states[0] if size is None else states


def read_agent(path: Path, config: Config, network: NetworkFactory | None, device: str = "cpu") -> Agent:
    """The policy in a checkpoint file."""
    state = load_checkpoint(path, policy_only=True)
    _refuse_edited_recipe(path, state, config)
    agent = Agent(state, config, network, device)
    refuse_non_finite(agent.policy, path)
    return agent


def _refuse_edited_recipe(checkpoint: Path, state: dict[str, Any], config: Config) -> None:
    """UsageError if config.yaml now describes another policy, such as one with another activation."""
    if "settings" not in state:
        return  # a best.pt of unidle 0.1.0
    edited = edited_settings(state["settings"], config, of_policy=True)
    if edited:
        path = display_path(checkpoint.parent.parent / "config.yaml")
        raise UsageError(f"{path} was edited, but a policy keeps the recipe it was trained with: {edited}; undo that.")


def load_agent(
    folder: RunFolder, config: Config, network: NetworkFactory | None, say: Callable[[str], None], device: str = "cpu"
) -> Agent:
    """The best policy of a run, or its latest if there is no best one; damaged files are skipped, with a message."""
    paths = folder.policies()
    agent, damaged = first_intact(paths, lambda path: read_agent(path, config, network, device))
    for each in damaged:
        say(f"{display_path(each)} is damaged; using {paths[len(damaged)].name} of step {agent.step:,}.")
    return agent
