"""A film of one episode."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np

from unidle.engine.agent import Agent
from unidle.envs.contract import mask_from
from unidle.envs.make import EnvMaker
from unidle.errors import UsageError

_MOST_FRAMES = 5000


def film_episode(agent: Agent, maker: EnvMaker, path: Path, seed: int) -> Path:
    """Play one episode with the mode action and write it as an MP4."""
    try:
        import imageio.v3 as iio
        import imageio_ffmpeg  # noqa: F401
    except ImportError:
        raise UsageError("--video needs two packages; run: pip install 'unidle[video]'.") from None
    env = _with_pictures(maker)
    frames: list[np.ndarray] = []
    try:
        observation, info = env.reset(seed=seed)
        agent.reset()
        ended = False
        while not ended and len(frames) < _MOST_FRAMES:
            frames.append(_picture(env, maker.name))
            mask = mask_from(observation, info, agent.rows.space) if agent.rows.mask_width else None
            observation, _, terminated, truncated, info = env.step(agent.predict(observation, action_mask=mask))
            ended = bool(terminated or truncated)
        frames.append(_picture(env, maker.name))
        rate = env.metadata.get("render_fps", 30)
    finally:
        env.close()
    iio.imwrite(path, np.stack([_even(frame) for frame in frames]), fps=rate, codec="libx264", macro_block_size=2)
    return path


def _with_pictures(maker: EnvMaker) -> gymnasium.Env:
    try:
        return maker(render_mode="rgb_array")
    except (TypeError, UsageError):
        return maker()  # a factory of the user's own may have chosen its render mode itself


def _picture(env: gymnasium.Env, name: str) -> np.ndarray:
    try:
        frame = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise UsageError(f"{name} cannot be rendered: {' '.join(str(error).split())}") from None
    except NotImplementedError:
        frame = None  # Gymnasium's own `render`
    if not isinstance(frame, np.ndarray):
        raise UsageError(f"{name} renders no pictures; let its factory make it with render_mode='rgb_array'.")
    return frame


def _even(frame: np.ndarray) -> np.ndarray:
    """Video codecs want even sides."""
    return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
