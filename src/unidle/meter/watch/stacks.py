"""Classifies a program's activity by its Python stack.

A run of unidle reports its phase itself. For other programs there are only a few unambiguous rules: a method of a class
with `step` and `reset` steps an environment, `backward` and `torch.optim` learn, a line with `.item()` waits for the
GPU. Everything else is user code, shown by function name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from unidle.meter.watch.samples import Frame, Stack
from unidle.meter.watch.source import package_of

ENVIRONMENT = "environment"
WORKERS = "waiting for workers"
INFERENCE = "inference"
LEARNING = "learning"
NETWORK = "forward pass"
ROLLOUT = "rollout (other)"
STORAGE = "storage"
COPIES = "copies and syncs"
DATA = "data loading"
EVALUATION = "evaluation"
CHECKPOINTS = "checkpoints"
LOGGING = "logging and checkpoints"
METRICS = "logging"
WAITING = "waiting"
OWN = "user code"
OTHER = "other"
START = "start-up and exit"
# In display order.
ACTIVITIES = (
    ENVIRONMENT,
    WORKERS,
    INFERENCE,
    ROLLOUT,
    STORAGE,
    LEARNING,
    NETWORK,
    COPIES,
    DATA,
    EVALUATION,
    CHECKPOINTS,
    LOGGING,
    METRICS,
    WAITING,
    OWN,
    OTHER,
    START,
)

# A run of unidle reports its phase itself. A phase that is not listed goes by its own name.
_OF_PHASE = {
    "learn": LEARNING,
    "sync": COPIES,
    "evaluate": EVALUATION,
    "checkpoint": CHECKPOINTS,
    "logging": METRICS,
}
_OF_CALLBACKS = {METRICS, OTHER}  # activities in which a run calls the user's functions
_POOL = "/unidle/envs/pool/process_pool.py"
_WORKER_WAITS = "/unidle/envs/pool/signals.py"
_PREPARATION = ("/unidle/api.py", "/unidle/cli/", "/unidle/engine/")  # before and after training

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
_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3|/bin/[^/]+$")
# Not the user's own code either if they are used from a clone.
_LIBRARIES = {*_LEARNING, "gymnasium", "gym", "torch", "tensordict", "pettingzoo", "isaaclab", "mjlab", "brax"}
_SYNC = re.compile(r"\.(item|cpu|numpy|tolist|cuda)\(|\.to\(|synchronize\(")


def activity(stack: Stack, uses_cuda: bool, *, trains: bool = False) -> str:
    """Return the thread's activity, one of ACTIVITIES or a phase of unidle; `trains`: unidle trains in the process."""
    frames = stack.frames
    if stack.phase is not None:
        return _activity_in_run(stack.phase, frames)
    if trains and any(mark in f.file for f in frames for mark in _PREPARATION) and not any(_acts(f) for f in frames):
        return START
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
        return OWN if is_own(_innermost_user_or_collector(frames)) else ROLLOUT
    if is_forward:
        return NETWORK
    if frames and any(mark in frames[0].file for mark in (*_WAITING_FILES, *_NETWORK_FILES)):
        return WAITING
    return OWN


def _activity_in_run(phase: str, frames: Sequence[Frame]) -> str:
    """Return the activity in a phase of unidle's trainer."""
    found = _OF_PHASE.get(phase, phase)
    if found == ENVIRONMENT and any(_POOL in f.file for f in frames):
        return WORKERS
    return OWN if found in _OF_CALLBACKS and _called_by_library(frames) else found


def is_network(frames: Sequence[Frame]) -> bool:
    """Whether the stack is inside network I/O."""
    return any(mark in f.file for f in frames[:12] for mark in _NETWORK_FILES)


def waits_for_message(stack: Stack) -> bool:
    """Whether a worker was idle, waiting for a message on its pipe or queue."""
    if not stack.frames:
        return False
    frame = stack.frames[0]
    return _WORKER_WAITS in frame.file or ("/multiprocessing/" in frame.file and "recv" in frame.name)


def named_frames(stack: Stack, name: str) -> list[Frame]:
    """Return the frames of a stack that may be named for activity `name`, innermost first.

    They are functions of the user, or else the function of a library that does what the activity says. The phases of
    unidle say more than its own functions, so these are not named.
    """
    frames = stack.frames
    if name in (ENVIRONMENT, WORKERS, EVALUATION):
        outermost = max((i for i, f in enumerate(frames) if f.steps_env), default=-1)
        inside = frames[: outermost + 1]
        return [f for f in inside if is_own(f)] or [f for f in inside if f.steps_env and not _is_engine(f)][:1]
    if stack.phase is not None:
        return _called_by_library(frames)
    logger = next((f for f in reversed(frames) if _logs(f)), None)
    if logger is not None:
        return [logger]
    return [f for f in frames if _is_learner(f) or _acts(f) or is_own(f)] or list(frames[:1])


def innermost_user_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame outside the standard library and installed packages, if any."""
    return next((f for f in stack.frames if is_own(f)), None)


def _called_by_library(frames: Sequence[Frame]) -> list[Frame]:
    """Return the user's frames inside those of unidle."""
    outermost = max((i for i, f in enumerate(frames) if _is_engine(f)), default=-1)
    return [f for f in frames[: outermost + 1] if is_own(f)]


def display_name(frame: Frame) -> str:
    """Return the display name of a function; module-level code goes by its file name."""
    return os.path.basename(frame.file) if frame.name == "<module>" else frame.name


def _innermost_user_or_collector(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame that is user code or a collector."""
    return next(f for f in frames if is_own(f) or last_name(f) in _COLLECTING)


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


def is_own(frame: Frame) -> bool:
    """Whether a function is the user's own: not of the standard library, an installed package or a known library."""
    file = frame.file
    is_generated = file == "<string>" and frame.name.startswith("__")  # by a dataclass
    if not file or is_generated or file.startswith("<frozen") or _INSTALLED.search(file):
        return False
    return package_of(file) not in _LIBRARIES


def _is_engine(frame: Frame) -> bool:
    return package_of(frame.file) == "unidle" and "/unidle/tasks/" not in frame.file
