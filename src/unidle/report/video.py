"""Records one episode as a video."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from unidle.engine.agent import Agent
from unidle.envs.make import EnvMaker
from unidle.envs.spec import mask_from
from unidle.errors import UsageError

_MAX_FRAMES = 5000


def record_video(agent: Agent, maker: EnvMaker, path: Path, seed: int) -> Path:
    """Play one episode with the mode action and write it as an MP4."""
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401
    except ImportError:
        raise UsageError("--video needs imageio and imageio-ffmpeg; run: pip install 'unidle[video]'.") from None
    env = _make_env(maker)
    with contextlib.closing(env):
        observation, info = env.reset(seed=seed)
        agent.reset()
        first = _render(env, maker.name)  # before the file is created, in case rendering fails
        rate = env.metadata.get("render_fps", 30)
        writer: Any
        with imageio.get_writer(path, fps=rate, codec="libx264", macro_block_size=2) as writer:
            writer.append_data(_even(first))
            for _ in range(_MAX_FRAMES):
                mask = mask_from(observation, info, agent.obs_layout.space) if agent.obs_layout.mask_width else None
                observation, _, terminated, truncated, info = env.step(agent.predict(observation, action_mask=mask))
                writer.append_data(_even(_render(env, maker.name)))
                if terminated or truncated:
                    break
    return path


def _make_env(maker: EnvMaker) -> gymnasium.Env:
    try:
        return maker(render_mode="rgb_array")
    except (TypeError, UsageError):
        return maker()  # a user's factory may set the render mode itself


def _render(env: gymnasium.Env, name: str) -> np.ndarray:
    try:
        frame = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise UsageError(f"{name} cannot be rendered: {' '.join(str(error).split())}") from None
    except NotImplementedError:
        frame = None  # Gymnasium's own `render`
    if not isinstance(frame, np.ndarray):
        raise UsageError(f"{name} does not render images; create it with render_mode='rgb_array' in its factory.")
    return frame


def _even(frame: np.ndarray) -> np.ndarray:
    """Crop to even sides, which video codecs require."""
    return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
