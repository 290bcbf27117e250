"""unidle: train RL policies faster on the hardware you have, and see what your GPU waits for."""

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unidle.version import __version__ as __version__

if TYPE_CHECKING:
    from unidle.api import TrainedGroup as TrainedGroup
    from unidle.api import TrainedRun as TrainedRun
    from unidle.api import load as load
    from unidle.api import resume as resume
    from unidle.api import resume_group as resume_group
    from unidle.api import train as train
    from unidle.engine.callbacks import CallbackContext as CallbackContext
    from unidle.engine.evaluate.play import Evaluation as Evaluation
    from unidle.envs.make import register_backend as register_backend
    from unidle.envs.vector.process_vector_env import ProcessVectorEnv as ProcessVectorEnv
    from unidle.errors import TrainingError as TrainingError
    from unidle.errors import UsageError as UsageError
    from unidle.meter.attribution.phases import PhaseMeter as PhaseMeter
    from unidle.meter.attribution.phases import phase as phase
    from unidle.metrics.writer import MetricWriter as MetricWriter
    from unidle.sweeps.pbt import resume_population as resume_population
    from unidle.sweeps.pbt import train_population as train_population
    from unidle.sweeps.sweep import Sweep as Sweep
    from unidle.sweeps.sweep import resume_sweep as resume_sweep
    from unidle.sweeps.sweep import sweep as sweep

# Imported on first use: `import unidle`, the command line's help and worker processes do not need torch.
_MODULES = {
    "train": "unidle.api",
    "resume": "unidle.api",
    "resume_group": "unidle.api",
    "load": "unidle.api",
    "TrainedRun": "unidle.api",
    "TrainedGroup": "unidle.api",
    "sweep": "unidle.sweeps.sweep",
    "resume_sweep": "unidle.sweeps.sweep",
    "Sweep": "unidle.sweeps.sweep",
    "train_population": "unidle.sweeps.pbt",
    "resume_population": "unidle.sweeps.pbt",
    "Evaluation": "unidle.engine.evaluate.play",
    "CallbackContext": "unidle.engine.callbacks",
    "MetricWriter": "unidle.metrics.writer",
    "ProcessVectorEnv": "unidle.envs.vector.process_vector_env",
    "register_backend": "unidle.envs.make",
    "PhaseMeter": "unidle.meter.attribution.phases",
    "phase": "unidle.meter.attribution.phases",
    "UsageError": "unidle.errors",
    "TrainingError": "unidle.errors",
}
_RENAMED = {"Moment": "CallbackContext"}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"unidle.{name} is now unidle.{new}; use the new name.", DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MODULES[new]), new)
    if name in _MODULES:
        found = globals()[name] = getattr(import_module(_MODULES[name]), name)  # cached for the next access
        return found
    raise AttributeError(f"module 'unidle' has no attribute {name!r}")


# Registers `unidle/Mission-v0` and the others, if Gymnasium is imported: importing it takes a hundred times as long as
# importing unidle. Otherwise the first use of `unidle.envs` registers them.
if "gymnasium" in sys.modules:
    import_module("unidle.envs")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
