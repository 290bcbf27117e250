"""The state of an untrained model, for what a script does with it before `learn`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from unidle.algos.capturing import no_capture
from unidle.algos.registry import new_algorithm, new_policy
from unidle.config import Config
from unidle.config.settings import OffPolicyRecipe
from unidle.engine.build import spaces_to_plain
from unidle.engine.checkpoint.run_folder import without_replay_buffer
from unidle.engine.progress import Progress
from unidle.envs.make import EnvMaker
from unidle.envs.probe import probe
from unidle.kernels.dispatch import no_report
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import DrawingFrom


def untrained_state(config: Config, maker: EnvMaker, network: NetworkFactory | None) -> dict[str, Any]:
    """What a run with this validated config starts from: the same weights, drawn from the same seed."""
    recipe = config.recipe
    if isinstance(recipe, OffPolicyRecipe):  # no replay buffer is needed
        size = max(2 * recipe.total_batch, (recipe.n_step + 2) * recipe.n_envs)
        recipe = dataclasses.replace(recipe, buffer_size=size)
    env_spec = probe(maker, recipe.discretize, config.run.seed)
    with DrawingFrom(torch.Generator().manual_seed(config.run.seed)):
        policy = new_policy(env_spec.obs_layout, env_spec.action_layout, recipe, network)
        algo = new_algorithm(policy, recipe, no_capture, no_report)
    state = {"algo": algo.state_dict(), "spaces": spaces_to_plain(env_spec), **dataclasses.asdict(Progress())}
    return without_replay_buffer(state)
