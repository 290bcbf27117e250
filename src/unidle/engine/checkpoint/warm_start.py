"""A new run that starts from the networks of another (`--init-from`); its optimiser and replay buffer are new.

The other run's settings are compared, never used: no code that they name is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unidle.algos.registry import Algorithm
from unidle.config import Config
from unidle.config.convert import in_brief
from unidle.config.files import display_path, load_yaml
from unidle.config.resolve import learned_with
from unidle.engine.build import spaces_to_plain
from unidle.engine.checkpoint.checkpoint_file import first_intact, load_checkpoint, refuse_non_finite
from unidle.engine.checkpoint.run_folder import RunFolder
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import HostCollector
from unidle.envs.spec import EnvSpec
from unidle.errors import UsageError

# Settings that determine what the weights mean; those that an algorithm does not have are skipped.
_NETWORK = (
    *(
        "algo",
        "net_arch",
        "critic_arch",
        "activation",
        "network",
        "encoder",
        "share_trunk",
        "recurrent",
        "recurrent_size",
    ),
    *("actor_obs", "critic_obs", "normalize_obs", "discretize", "action_distribution", "dueling", "n_critics"),
    *("n_tasks", "action_limit", "use_sde", "use_expln"),
)
_SHOWN = {"critics": "critics", "reward_norm": "reward normalisation"}


def warm_start(
    config: Config,
    algo: Algorithm,
    collector: HostCollector | DeviceCollector,
    env_spec: EnvSpec,
    say: Callable[[str], None],
) -> None:
    """Load the networks that `config.run.init_from` names; UsageError if they do not fit."""
    assert config.run.init_from is not None
    path, state = _load(Path(config.run.init_from), complete=bool(algo.start_parts))
    shown, other = display_path(path), state["algo"]
    _refuse_other_recipe(config, path, state)
    if state["spaces"] != spaces_to_plain(env_spec):
        raise UsageError(
            f"{config.run.env} does not have the spaces that {shown} was trained on; start from a run with the same "
            "observation and action spaces."
        )
    try:
        algo.start_from(other)
    except ValueError as error:
        raise UsageError(
            f"The networks in {shown} have other layers ({error}); use the same network settings."
        ) from None
    refuse_non_finite(algo.policy, path)
    statistics = state.get("env_statistics", {})
    if statistics and statistics.keys() == collector.env_statistics().keys():
        collector.load_env_statistics(statistics)
    missing = [_SHOWN[name] for name in algo.start_parts if not other.get(name)]
    new = f"; {' and '.join(missing)} are new, because that file has none" if missing else ""
    what = "policy and critics" if "critics" in algo.start_parts and "critics" in other else "policy"
    say(f"Starting from the {what} in {shown}, of step {state['step']:,}{new}.")


def _load(path: Path, *, complete: bool) -> tuple[Path, dict[str, Any]]:
    """A checkpoint file; of a run folder the best policy, or the latest intact checkpoint if it must be `complete`."""
    if path.is_file() or path.suffix == ".pt":
        return path, load_checkpoint(path, policy_only=True)
    folder = RunFolder.open(path)
    paths = folder.policies()
    if complete:  # the best one has only the policy
        paths = [*reversed(folder.saved()), *(best for best in paths if best == folder.best)]
    state, damaged = first_intact(paths, lambda each: load_checkpoint(each, policy_only=True))
    return paths[len(damaged)], state


def _refuse_other_recipe(config: Config, path: Path, state: dict[str, Any]) -> None:
    """UsageError if the settings in the checkpoint, or in its run folder, describe other networks."""
    folder = path.absolute().parent
    config_file = folder.parent / "config.yaml"
    if "settings" in state:
        other = learned_with(state["settings"])
    elif folder.name == "checkpoints" and config_file.is_file():
        other = load_yaml(config_file).flat()
    else:
        return  # a policy without its run folder: only shapes can be compared
    own = config.flat()
    for name in _NETWORK:
        if name in own and name in other and own[name] != other[name]:
            raise UsageError(
                f"{display_path(path)} was trained with `{name}` {in_brief(other[name])}, not {in_brief(own[name])}; "
                "use the same, or start from another run."
            )
