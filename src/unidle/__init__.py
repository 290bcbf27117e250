"""unidle: reinforcement learning that never lets the GPU wait."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidle.api import TrainedRun as TrainedRun
    from unidle.api import load as load
    from unidle.api import resume as resume
    from unidle.api import train as train
    from unidle.engine.callbacks import Moment as Moment
    from unidle.engine.evaluate.play import Evaluation as Evaluation
    from unidle.envs.make import register_backend as register_backend
    from unidle.envs.vector.process_vector_env import ProcessVectorEnv as ProcessVectorEnv
    from unidle.errors import TrainingError as TrainingError
    from unidle.errors import UsageError as UsageError
    from unidle.meter.attribution.phases import PhaseMeter as PhaseMeter
    from unidle.meter.attribution.phases import phase as phase

__version__ = "0.1.0"

# Loaded on first use: `import unidle`, the command line's help and the worker processes do without torch.
_WHERE = {
    "train": "unidle.api",
    "resume": "unidle.api",
    "load": "unidle.api",
    "TrainedRun": "unidle.api",
    "Evaluation": "unidle.engine.evaluate.play",
    "Moment": "unidle.engine.callbacks",
    "ProcessVectorEnv": "unidle.envs.vector.process_vector_env",
    "register_backend": "unidle.envs.make",
    "PhaseMeter": "unidle.meter.attribution.phases",
    "phase": "unidle.meter.attribution.phases",
    "UsageError": "unidle.errors",
    "TrainingError": "unidle.errors",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        found = globals()[name] = getattr(import_module(_WHERE[name]), name)  # so that it is not asked for twice
        return found
    raise AttributeError(f"module 'unidle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
