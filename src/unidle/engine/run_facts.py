"""The summary that a run shows when it starts, and warnings about its settings."""

from __future__ import annotations

from pathlib import Path

import torch

from unidle.config import Config
from unidle.config.files import display_path
from unidle.config.settings import round_up_timesteps
from unidle.engine.build import RunParts
from unidle.engine.placement import too_many_workers
from unidle.envs.spec import EnvSpec
from unidle.formatting import short_time
from unidle.nn.actor_critic import n_parameters

_FEW_ITERATIONS = 10


def run_facts(config: Config, parts: RunParts, folder: Path | None, eval_workers: int, step: int) -> dict[str, str]:
    """Name and text of each line of the summary. The run starts, or resumes, at `step`.

    `folder` is None if it keeps no files.
    """
    recipe, run, env_spec, workers = config.recipe, config.run, parts.env_spec, parts.workers
    duration = f"{short_time(env_spec.step_seconds)} per step"
    backend = (
        f"{_counted(workers, 'worker process', 'worker processes')} ({duration})"
        if workers
        else f"in this process ({duration})"
    )
    if env_spec.on_device:
        backend = "on the device"
    layers = _layers(recipe.net_arch)
    critic: tuple[int, ...] | None = vars(recipe).get("critic_arch")
    if critic not in (None, recipe.net_arch):
        layers += f" (critic: {_layers(critic)})"
    core = f"{recipe.recurrent} {vars(recipe)['recurrent_size']} → " if recipe.recurrent != "none" else ""
    if recipe.network is None and any(leaf.is_image for leaf in env_spec.obs_layout.leaves):
        core = f"{recipe.encoder} CNN → {core}"
    policy = parts.algo.policy
    device = next(policy.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    facts = {
        **({} if folder is None else {"run": display_path(folder)}),
        "environment": f"{run.env}, {backend}",
        "preset": run.preset or "none",
        "total batch": f"n_envs {recipe.n_envs} × n_steps {recipe.n_steps} = {recipe.total_batch:,}",
        "batch size": f"{recipe.batch_size:,}, {recipe.update_schedule}",
        "overlap": recipe.overlap,
        "network": f"{core}{layers} {recipe.activation}, {n_parameters(policy):,} parameters",
        "device": f"{name}, {parts.precision}",
    }
    if parts.ranks is not None:
        facts["ranks"] = f"{parts.ranks.size}, gradients averaged by {parts.ranks.backend}"
    total = round_up_timesteps(run.timesteps, recipe.total_batch)
    if step < run.timesteps < total:
        facts["steps"] = f"{run.timesteps:,}, rounded up to whole iterations: {total:,}"
    if eval_workers:
        episodes = _counted(run.eval_episodes, "episode", "episodes")
        facts["evaluation"] = f"{episodes}, asynchronous ({_counted(eval_workers, 'process', 'processes')})"
    return facts


def start_notes(config: Config, env_spec: EnvSpec) -> list[str]:
    """Warnings about settings that are rarely what the user wants."""
    run, batch, notes = config.run, config.recipe.total_batch, []
    for name, flag in (("NormalizeObservation", "--normalize-obs"), ("NormalizeReward", "--normalize-reward")):
        if name in env_spec.stateful_wrappers:
            notes.append(
                f"{name} keeps separate statistics in each environment, and others in evaluation; use {flag} "
                "instead, whose statistics they share."
            )
    warning = too_many_workers(config.engine)
    if warning:
        notes.append(warning)
    few = round_up_timesteps(run.timesteps, batch) // batch
    if env_spec.on_device and few < _FEW_ITERATIONS:
        notes.append(
            f"{run.timesteps:,} steps are only {few} iteration{'s' * (few > 1)} of {batch:,}; "
            "to learn more, raise --timesteps or lower --n-envs."
        )
    return notes


def _layers(widths: tuple[int, ...]) -> str:
    return ",".join(map(str, widths)) or "linear"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
