"""The settings of a run in one tree, addressed by flat names: `n_envs`, `device`, `seed`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from unidle.config.convert import yaml_text
from unidle.config.fields import SECTIONS, coerce, section_of, unknown_key
from unidle.config.settings import RECIPES, Engine, PPORecipe, Recipe, Run
from unidle.errors import UsageError


@dataclass(frozen=True)
class Config:
    """All settings of a run, stored in `config.yaml` of the run folder, from which the run can be reproduced."""

    recipe: Recipe = field(default_factory=PPORecipe)
    engine: Engine = field(default_factory=Engine)
    run: Run = field(default_factory=Run)

    def with_values(self, values: dict[str, Any], source: str) -> Config:
        """A copy with flat `values` (n_envs, device, …) changed; errors name `source`.

        When `algo` changes, settings that differ from their default are carried over.
        """
        recipe = _with_algo(self.recipe, values.get("algo", self.recipe.algo), source)
        parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for key, value in values.items():
            section = section_of(key)
            if section is None:
                raise UsageError(unknown_key(key, source))
            if key != "algo":
                parts[section][key] = coerce(key, value, source, recipe.algo)
        return Config(
            recipe=dataclasses.replace(recipe, **parts["recipe"]),
            engine=dataclasses.replace(self.engine, **parts["engine"]),
            run=dataclasses.replace(self.run, **parts["run"]),
        )

    def with_run(self, **values: Any) -> Config:
        """A copy with these settings of the section `run` changed."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, **values))

    def flat(self) -> dict[str, Any]:
        """All settings by their flat names."""
        return {f.name: getattr(part, f.name) for part in self._parts() for f in dataclasses.fields(part)}

    def to_yaml(self) -> str:
        """The text of a config file; `load_yaml` restores the same settings."""
        tree = {
            name: {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(part).items()}
            for name, part in zip(SECTIONS, self._parts())
        }
        return yaml_text(tree)

    def _parts(self) -> tuple[Recipe | Engine | Run, ...]:
        return self.recipe, self.engine, self.run


def recipe_for(algo: str = "ppo", **values: Any) -> Recipe:
    """The recipe of algorithm `algo`: its defaults, overridden by `values`."""
    return recipe_type(algo, "algo")(**values)


def recipe_type(algo: Any, source: str) -> type[Recipe]:
    """The settings class of algorithm `algo`."""
    return RECIPES[coerce("algo", algo, source)]


def _with_algo(recipe: Recipe, algo: str, source: str) -> Recipe:
    if algo == recipe.algo:
        return recipe
    default = type(recipe)()
    changed = {name: value for name, value in vars(recipe).items() if value != getattr(default, name)}
    kind = recipe_type(algo, source)
    return kind(**{name: coerce(name, value, source, algo) for name, value in changed.items()})
