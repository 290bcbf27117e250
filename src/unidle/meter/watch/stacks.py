"""Classifies a program's activity by its Python stack.

There are only a few unambiguous rules: a method of a class with `step` and `reset` steps an environment, `backward` and
`torch.optim` learn, a line with `.item()` waits for the GPU. Everything else is user code, shown by function name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from unidle.meter.watch.samples import Frame, Stack

ENVIRONMENT = "environment"
INFERENCE = "inference"
LEARNING = "learning"
NETWORK = "forward pass"
ROLLOUT = "rollout (other)"
COPIES = "copies and syncs"
DATA = "data loading"
LOGGING = "logging and checkpoints"
WAITING = "waiting"
OWN = "user code"
START = "start-up and exit"
# In display order.
ACTIVITIES = (ENVIRONMENT, INFERENCE, ROLLOUT, LEARNING, NETWORK, COPIES, DATA, LOGGING, WAITING, OWN, START)

# Functions that learn, by library.
_LEARNING = {
    "stable_baselines3": {"train"},
    "sb3_contrib": {"train"},
    "skrl": {"update", "_update"},
    "rsl_rl": {"update"},
    "rl_games": {"train_epoch", "train_actor_critic", "calc_gradients"},
    "tianshou": {"update", "learn"},
    "torchrl": {"update"},
    "unidle": {"learn", "update"},
}
_COLLECTING = {"collect_rollouts"}
_ACTING = {"predict", "act", "select_action", "get_action", "get_actions", "sample_action"}
_BACKWARD = {"backward", "_engine_run_backward"}
_LOGGERS = ("/tensorboard", "/wandb/", "/mlflow/", "/stable_baselines3/common/logger", "/torch/serialization")
_NETWORK_FILES = ("/socket.py", "/ssl.py", "/http/", "/urllib", "/requests/", "/aiohttp/", "/httpx/", "/httpcore/")
_WAITING_FILES = ("/threading.py", "/queue.py", "/selectors.py", "/subprocess.py", "/asyncio/", "/multiprocessing/")
_STARTING = {"SubprocVecEnv.__init__", "AsyncVectorEnv.__init__"}
_SYNC = re.compile(r"\.(item|cpu|numpy|tolist|cuda)\(|\.to\(|synchronize\(")


def activity(stack: Stack, uses_cuda: bool) -> str:
    """Return the thread's activity, one of ACTIVITIES."""
    frames = stack.frames
    if any(f.file.startswith("<frozen importlib") or f.name in _STARTING for f in frames):
        return START
    if any(f.steps_env for f in frames):
        return ENVIRONMENT
    if any(_logs(f) for f in frames):
        return LOGGING
    if any("/torch/utils/data/" in f.file for f in frames):
        return DATA
    if uses_cuda and _SYNC.search(stack.text):
        return COPIES
    if any(_learns(f) for f in frames):
        return LEARNING
    is_forward = any("/torch/nn/" in f.file for f in frames)
    is_collecting = any(last_name(f) in _COLLECTING for f in frames)
    if any(last_name(f) in _ACTING for f in frames) or (is_collecting and is_forward):
        return INFERENCE
    if is_collecting:
        return OWN if _is_own(_innermost_user_or_collector(frames)) else ROLLOUT
    if is_forward:
        return NETWORK
    if frames and any(mark in frames[0].file for mark in (*_WAITING_FILES, *_NETWORK_FILES)):
        return WAITING
    return OWN


def is_network(frames: Sequence[Frame]) -> bool:
    """Whether the stack is inside network I/O."""
    return any(mark in f.file for f in frames[:12] for mark in _NETWORK_FILES)


def waits_for_message(stack: Stack) -> bool:
    """Whether a worker was idle, waiting for a message on its pipe or queue."""
    return bool(stack.frames) and "/multiprocessing/" in stack.frames[0].file and "recv" in stack.frames[0].name


def display_function(stack: Stack) -> str:
    """Return the function to display: the environment's innermost, the learner's, or the user's."""
    frames = stack.frames
    logger = next((f for f in reversed(frames) if _logs(f)), None)
    if logger is not None:
        return display_name(logger)
    found = next((f for f in frames if f.steps_env), None)
    if found is None:
        found = next((f for f in frames if _is_learner(f) or _acts(f) or _is_own(f)), frames[0])
    return display_name(found)


def innermost_user_function(stack: Stack) -> str | None:
    """Return the innermost function outside the standard library and installed packages, if any."""
    found = next((f for f in stack.frames if _is_own(f)), None)
    return display_name(found) if found is not None else None


def display_name(frame: Frame) -> str:
    """Return the display name of a function; module-level code goes by its file name."""
    return os.path.basename(frame.file) if frame.name == "<module>" else frame.name


def _innermost_user_or_collector(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame that is user code or a collector."""
    return next(f for f in frames if _is_own(f) or last_name(f) in _COLLECTING)


def last_name(frame: Frame) -> str:
    """Return the function name without its class."""
    return frame.name.rpartition(".")[2]


def _learns(frame: Frame) -> bool:
    if "/torch/" in frame.file:
        return "/torch/optim/" in frame.file or last_name(frame) in _BACKWARD
    return _is_learner(frame)


def _logs(frame: Frame) -> bool:
    return any(mark in frame.file for mark in _LOGGERS)


def _acts(frame: Frame) -> bool:
    return last_name(frame) in _ACTING | _COLLECTING


def _is_learner(frame: Frame) -> bool:
    return any(f"/{library}/" in frame.file and last_name(frame) in names for library, names in _LEARNING.items())


def _is_own(frame: Frame) -> bool:
    return not frame.file.startswith("<frozen") and not re.search(r"/(site|dist)-packages/|/lib/python3", frame.file)
