"""EnvPool: `--env envpool:CartPole-v1`."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from unidle.envs.make import EnvMaker
from unidle.envs.vector.adapters import EnvPoolVector
from unidle.errors import UsageError

# Set by unidle, not in env_kwargs.
_SETTINGS = {
    "num_envs": "n_envs",
    "seed": "seed",
    "env_seed": "seed",
    "batch_size": "slices",
}


def backend(name: str, kwargs: dict[str, Any]) -> EnvMaker:
    """The backend of `envpool:` names; UsageError if EnvPool has no such environment."""
    task = name.partition(":")[2]
    try:
        envpool = importlib.import_module("envpool")
    except ImportError:
        raise UsageError(f"`envpool:{task}` needs the package envpool; run: pip install envpool.") from None
    if task not in envpool.list_all_envs():
        near = difflib.get_close_matches(task, envpool.list_all_envs(), n=1)
        hint = f"did you mean `{near[0]}`?" if near else "envpool.list_all_envs() lists them all."
        raise UsageError(f"EnvPool has no environment `{task}`; {hint}")
    for argument in kwargs.keys() & _SETTINGS.keys():
        raise UsageError(f"EnvPool's `{argument}` is set by {_SETTINGS[argument]}; leave it out of env_kwargs.")

    def make(**given: Any) -> Any:
        return envpool.make(task, env_type="gymnasium", **given)

    return EnvMaker(name, make, kwargs, kind="native", native=EnvPoolVector)
