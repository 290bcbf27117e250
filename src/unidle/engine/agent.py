"""A trained policy for inference: observations in, actions out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from unidle.config import Config
from unidle.engine.build import policy_from
from unidle.engine.checkpoint.run_folder import load_checkpoint, weights_that_fit
from unidle.engine.placement import choose_device
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import PREDICTION, keyed_generator
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import MASK, ObservationLayout


class Agent:
    """A frozen policy with its normalisers. A recurrent one keeps its state between calls until `reset`."""

    def __init__(self, checkpoint: Path, config: Config, network: NetworkFactory | None, device: str = "cpu") -> None:
        state = load_checkpoint(checkpoint, policy_only=True)
        self.policy, self.obs_layout, self.action_layout = policy_from(state["spaces"], config, network)
        with weights_that_fit():
            self.policy.load_state_dict(state["algo"]["policy"])
        self.seen = self.policy.encoder.layout  # the part of the observation that the actor sees
        self.device = choose_device(device)
        self.policy.to(self.device).eval()
        self.step: int = state["step"]
        self._state: torch.Tensor | None = None
        self._generator = keyed_generator(self.device, config.run.seed, PREDICTION)

    obs_layout: ObservationLayout
    actions: ActionLayout

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
            packed = self.seen.pack(observation)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise UsageError(f"The observation does not fit the space {self.seen.space} ({error}).") from None
        if self.obs_layout.mask_width:
            if self.obs_layout.mask_key is not None:
                action_mask = observation[MASK]
            if action_mask is None:
                raise UsageError("This policy was trained with action masks; pass action_mask=info['action_mask'].")
            self.obs_layout.mask_view(packed[None])[0] = self.action_layout.flatten_mask(action_mask)
        return packed[None]

    def _check_shapes(self, observation: Any) -> None:
        """Check shapes: NumPy would silently broadcast a number, or a batch of one, over the whole field."""
        for leaf in self.seen.leaves:
            part = observation
            for key in leaf.path:
                part = part[key]
            if np.shape(part) != leaf.shape:
                raise ValueError(f"its shape is {np.shape(part)}, not {leaf.shape}")
