"""A trained policy, for inference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unidle.config import Config
from unidle.config.files import display_path
from unidle.engine.build import policy_from
from unidle.engine.checkpoint.checkpoint_file import (
    DamagedCheckpointError,
    explain_weight_mismatch,
    load_checkpoint,
    refuse_non_finite,
)
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.placement import choose_device
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import PREDICTION, keyed_generator
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import MASK, ObservationLayout


class Agent:
    """A frozen policy with its normalisers. A recurrent policy keeps its state between calls until `reset`."""

    def __init__(self, checkpoint: Path, config: Config, network: NetworkFactory | None, device: str = "cpu") -> None:
        state = load_checkpoint(checkpoint, policy_only=True)
        self.policy, self.obs_layout, self.action_layout = policy_from(state["spaces"], config, network)
        with explain_weight_mismatch():
            self.policy.load_state_dict(state["algo"]["policy"])
        refuse_non_finite(self.policy, checkpoint)
        self.actor_layout = self.policy.encoder.layout  # the part of the observation that the actor gets
        self.device = choose_device(device)
        self.policy.to(self.device).eval()
        self.step: int = state["step"]
        self.env_statistics: dict[str, Any] = state.get("env_statistics", {})  # of wrappers around vector environments
        self._state: torch.Tensor | None = None
        self._generator = keyed_generator(self.device, config.run.seed, PREDICTION)

    obs_layout: ObservationLayout
    action_layout: ActionLayout

    def reset(self) -> None:
        """Clear the recurrent state; call it at the start of each episode if the policy is recurrent."""
        self._state = None

    @torch.inference_mode()
    def predict(self, observation: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
        """The action for one observation of the space (not a batch)."""
        packed = self._pack(observation, action_mask)
        if self._state is None:
            self._state = torch.zeros(1, self.policy.state_size, device=self.device)
        params, after = self.policy.act(torch.from_numpy(packed).to(self.device), self._state)
        self._state = after if after is not None else self._state
        distribution = self.policy.distribution
        if deterministic:
            action = distribution.mode(params)
        else:
            action = distribution.sample(params, distribution.noise((1,), self._generator))
        return self.action_layout.decode(distribution.to_env(action)[0].cpu().numpy())

    def _pack(self, observation: Any, action_mask: Any) -> np.ndarray:
        try:
            self._check_shapes(observation)
            packed = self.actor_layout.pack(observation)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise UsageError(f"The observation does not fit the space {self.actor_layout.space} ({error}).") from None
        if self.obs_layout.mask_width:
            if self.obs_layout.mask_key is not None:
                action_mask = observation[MASK]
            if action_mask is None:
                raise UsageError("This policy was trained with action masks; pass action_mask=info['action_mask'].")
            self.obs_layout.mask_view(packed[None])[0] = self.action_layout.flatten_mask(action_mask)
        return packed[None]

    def _check_shapes(self, observation: Any) -> None:
        """ValueError for wrong shapes: NumPy would silently broadcast a number, or a batch of one, over the field."""
        for leaf in self.actor_layout.leaves:
            part = observation
            for key in leaf.path:
                part = part[key]
            if np.shape(part) != leaf.shape:
                raise ValueError(f"its shape is {np.shape(part)}, not {leaf.shape}")


def load_agent(
    folder: RunFolder, config: Config, network: NetworkFactory | None, say: Callable[[str], None], device: str = "cpu"
) -> Agent:
    """The best policy of a run, or its latest if there is no best one; damaged files are skipped, with a message."""
    damaged: list[Path] = []
    for path in folder.policies():
        try:
            agent = Agent(path, config, network, device)
        except DamagedCheckpointError as error:
            damaged.append(path)
            reason = error
            continue
        for each in damaged:
            say(f"{display_path(each)} is damaged; using {path.name} of step {agent.step:,}.")
        return agent
    raise reason
