"""The changes that a tuner tries, one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unidle.config import Config, Engine
from unidle.config.fields import section_of
from unidle.tuning.job import MOST_WORKERS_PER_CORE, is_valid
from unidle.tuning.search.trial import JobSetup

# Engine settings that affect speed; the others are about faults and evaluation.
TUNED = ("device", "subproc", "workers", "slices", "pin_cores", "compile", "graphs", "threads")
_DOUBLED = ("n_envs", "n_steps", "batch_size", "n_epochs")


@dataclass(frozen=True)
class Change:
    """New values of settings, with a short description."""

    values: tuple[tuple[str, Any], ...]
    text: str

    def applied(self, config: Config) -> Config:
        """Return `config` with the change applied."""
        return config.with_values(dict(self.values), "tune")

    def restored(self, config: Config) -> tuple[tuple[str, Any], ...]:
        """Return the values of these settings in `config`."""
        now = config.flat()
        return tuple((name, now[name]) for name, _ in self.values)

    @property
    def starts_slowly(self) -> bool:
        """Whether it may start much more slowly because kernels are loaded, compiled or captured first."""
        return any(name in ("device", "compile", "graphs") for name, _ in self.values)

    @property
    def is_default(self) -> bool:
        """Whether it restores the engine's defaults."""
        defaults = vars(Engine())
        return all(name in defaults and defaults[name] == value for name, value in self.values)

    @property
    def is_recipe(self) -> bool:
        """Whether it changes what is learned."""
        return any(section_of(name) == "recipe" for name, _ in self.values)


def engine_changes(config: Config, setup: JobSetup) -> list[Change]:
    """Return the engine changes that may be faster than `config` in that situation."""
    engine = config.engine
    found: list[Change] = []
    if setup.on_gpu and not engine.graphs:
        found += _each(engine, "graphs", [True])
    if setup.on_device:
        found += _each(engine, "compile", [not engine.compile])
    elif setup.vectorised:
        found += _each(engine, "slices", [1, 2]) if engine.workers is None else []  # else the number of workers counts
        found += [] if setup.workers else _each(engine, "subproc", [True])
    else:
        found += _stepping(config, setup)
    if setup.gpu:
        found += _each(engine, "device", ["cpu" if setup.on_gpu else "cuda"])
    if not setup.on_gpu:
        found += _each(engine, "threads", [count for count in (1, 2, setup.cores) if count <= setup.cores])
    return [change for change in found if is_valid(change.applied(config))]


def _stepping(config: Config, setup: JobSetup) -> list[Change]:
    """Return changes of how host environments are stepped: workers, slices, pinning or the trainer's process."""
    engine, n_envs = config.engine, config.recipe.n_envs
    if not setup.workers:
        return [Change((("subproc", True),), f"subproc {_word(engine.subproc)} → on")]
    here = Change((("subproc", False), ("workers", None)), f"{_now(engine, setup)} → in the trainer's process")
    most = min(n_envs, MOST_WORKERS_PER_CORE * setup.cores)
    wanted = [None, setup.cores, setup.cores - 1, 2 * setup.workers, setup.workers // 2]
    counts = [count for count in wanted if count is None or 0 < count <= most]
    return [
        *_each(engine, "workers", [count for count in counts if count != setup.workers]),
        *_each(
            engine,
            "slices",
            [count for count in (1, 2, 4) if count != setup.slices and count * setup.workers <= n_envs],
        ),
        *_each(engine, "pin_cores", [not _is_pinned(engine, setup)]),
        here,
    ]


def _is_pinned(engine: Engine, setup: JobSetup) -> bool:
    """As `make_envs` decides."""
    return setup.workers >= setup.cores - 1 if engine.pin_cores is None else engine.pin_cores


def _now(engine: Engine, setup: JobSetup) -> str:
    return f"workers {engine.workers or f'auto ({setup.workers})'}"


def _each(engine: Engine, name: str, values: list[Any]) -> list[Change]:
    """Return one change for each distinct value other than the current one."""
    now = getattr(engine, name)
    return [
        Change(((name, value),), f"{name} {_word(now)} → {_word(value)}")
        for value in dict.fromkeys(values)
        if value != now
    ]


def recipe_changes(config: Config, setup: JobSetup) -> list[Change]:
    """Return recipe changes: overlap and larger sizes; each of them changes learning."""
    recipe = config.recipe
    found = []
    if recipe.overlap == "off" and not setup.on_device:
        found.append(Change((("overlap", "strict"),), "overlap off → strict"))
    for name in _DOUBLED:
        value = vars(recipe).get(name)
        if value is not None:  # off-policy algorithms have no n_epochs
            found.append(Change(((name, 2 * value),), f"{name} {value} → {2 * value}"))
    return [change for change in found if is_valid(change.applied(config))]


def halved(change: Change, config: Config, setup: JobSetup) -> Change | None:
    """Return the change with half the value, after it ran out of memory; None if that is no increase."""
    for name, value in change.values:
        now = setup.workers if name == "workers" else getattr(config.engine, name, None) or 1
        much = setup.cores if name == "workers" and value is None else value
        if name in ("workers", "slices", "threads") and much // 2 > now:
            return _each(config.engine, name, [much // 2])[0]
    return None


def _word(value: Any) -> str:
    words = {None: "auto", True: "on", False: "off"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
