"""What a program was doing, by its Python stack.

The rules are few and look at what cannot be mistaken: a method of something that has both `step` and `reset` steps an
environment, `backward` and `torch.optim` learn, a line with `.item()` waits for the GPU. What no rule knows is the
program's own code, and is shown by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from unidle.meter.watch.samples import Frame, Stack

ENVIRONMENT = "environment"
INFERENCE = "inference"
LEARNING = "learning"
NETWORK = "network, forward"
ROLLOUT = "rollout, other"
COPIES = "copies and syncs"
DATA = "data loading"
LOGGING = "logging and checkpoints"
WAITING = "waiting for others"
OWN = "own code"
START = "start and end"
# In the order to show them.
ACTIVITIES = (ENVIRONMENT, INFERENCE, ROLLOUT, LEARNING, NETWORK, COPIES, DATA, LOGGING, WAITING, OWN, START)

# Functions that learn, or that act, by the library they belong to.
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
    """What the thread was doing; one of ACTIVITIES."""
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
        return OWN if _is_own(_inside(frames)) else ROLLOUT
    if is_forward:
        return NETWORK
    if frames and any(mark in frames[0].file for mark in (*_WAITING_FILES, *_NETWORK_FILES)):
        return WAITING
    return OWN


def is_network(frames: Sequence[Frame]) -> bool:
    """Whether the stack is in the middle of talking to another machine."""
    return any(mark in f.file for f in frames[:12] for mark in _NETWORK_FILES)


def waits_for_message(stack: Stack) -> bool:
    """Whether a worker stood at the end of its pipe or queue, with nothing to do."""
    return bool(stack.frames) and "/multiprocessing/" in stack.frames[0].file and "recv" in stack.frames[0].name


def place(stack: Stack) -> str:
    """The function to name to a reader: the environment's innermost, the learner's, or the program's own."""
    frames = stack.frames
    logger = next((f for f in reversed(frames) if _logs(f)), None)
    if logger is not None:
        return called(logger)
    found = next((f for f in frames if f.steps_env), None)
    if found is None:
        found = next((f for f in frames if _is_learner(f) or _acts(f) or _is_own(f)), frames[0])
    return called(found)


def deepest_own(stack: Stack) -> str | None:
    """The innermost function that is neither Python's nor a package's, if there is one."""
    found = next((f for f in stack.frames if _is_own(f)), None)
    return called(found) if found is not None else None


def called(frame: Frame) -> str:
    """The function as a reader knows it; code outside of functions by its file."""
    return os.path.basename(frame.file) if frame.name == "<module>" else frame.name


def _inside(frames: Sequence[Frame]) -> Frame:
    """The innermost function of the program's own, or of the collector, whichever is further in."""
    return next(f for f in frames if _is_own(f) or last_name(f) in _COLLECTING)


def last_name(frame: Frame) -> str:
    """The function without its class."""
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
