"""Names of Stable-Baselines3 that unidle does not replace, under unidle's: `from unidle.sb3.common.utils import …`.

They are Stable-Baselines3's own, which must be installed. Its algorithms are never passed on: where unidle has one of
the same name, that is imported, and an algorithm that unidle does not have is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from unidle.errors import UsageError

_OURS, _THEIRS = "unidle.sb3", "stable_baselines3"
_REFUSED = {
    "A2C": "use PPO, or import A2C from stable_baselines3",
    "DDPG": "use TD3, or import DDPG from stable_baselines3",
    "HER": "import SAC and HerReplayBuffer from stable_baselines3",
    "HerReplayBuffer": "import it and SAC from stable_baselines3",
}
# What scripts import from the modules that unidle replaces, and unidle does not have.
_NAMES = {
    *("VecNormalize", "VecMonitor", "VecFrameStack", "VecTransposeImage", "VecCheckNan", "VecExtractDictObs"),
    *("VecVideoRecorder", "VecEnvWrapper", "sync_envs_normalization", "unwrap_vec_normalize", "is_vecenv_wrapped"),
    *("make_atari_env", "is_wrapped", "unwrap_wrapper", "ResultsWriter", "load_results", "get_monitor_files"),
    *("ActionNoise", "OrnsteinUhlenbeckActionNoise", "VectorizedActionNoise", "get_system_info"),
}
_MODULES = {"a2c": "A2C", "ddpg": "DDPG", "her": "HER"}


class MissingNameError(UsageError, ImportError):
    """A name that cannot be imported from unidle.sb3."""


def name_of_theirs(module: str, name: str) -> Any:
    """What `name` is in the module of Stable-Baselines3 that corresponds to unidle's `module`."""
    if name.startswith("__"):
        raise AttributeError(name)
    _refuse(name)
    ours = vars(import_module(_OURS))["_MODULES"]
    if name in ours and ours[name] != module:
        return getattr(import_module(ours[name]), name)
    try:
        theirs = import_module(_counterpart(module))
    except ImportError:
        if name in _NAMES:
            raise MissingNameError(f"{name} is Stable-Baselines3's own; run: pip install stable-baselines3") from None
        theirs = None
    found = getattr(theirs, name, None)
    if found is not None and not isinstance(found, ModuleType):  # modules are imported by the finder
        return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _refuse(name: str) -> None:
    if name in _REFUSED:
        raise MissingNameError(f"unidle has no {name}; {_REFUSED[name]}.")


def _counterpart(module: str) -> str:
    return module.replace(_OURS, _THEIRS, 1)


class _Finder(MetaPathFinder):
    """Finds modules of Stable-Baselines3 under `unidle.sb3`; asked last, so that unidle's own come first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_OURS}."):
            return None
        _refuse(_MODULES.get(fullname.removeprefix(f"{_OURS}.").partition(".")[0], ""))
        try:
            found = find_spec(_counterpart(fullname))
        except ImportError:
            raise MissingNameError(
                f"unidle has no module {fullname}; if it is one of Stable-Baselines3's, run: pip install "
                "stable-baselines3"
            ) from None
        return None if found is None else ModuleSpec(fullname, _Loader(), is_package=True)


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = partial(name_of_theirs, module.__name__)


def install_finder() -> None:
    """Let `unidle.sb3` have the modules of Stable-Baselines3 that unidle does not replace."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
