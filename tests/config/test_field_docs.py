"""Docstrings of settings, as read from the source."""

from __future__ import annotations

from dataclasses import fields

import pytest

from unidle.config import Engine, Run
from unidle.config.field_docs import field_docs
from unidle.config.settings import RECIPES, SACRecipe, TD3Recipe


@pytest.mark.parametrize("part", [Engine, Run, *RECIPES.values()])
def test_every_setting_has_a_docstring(part: type) -> None:
    docs = field_docs(part)
    assert [f.name for f in fields(part) if not docs.get(f.name, "").endswith(".")] == []


def test_docstring_of_overridden_field_is_the_last_one() -> None:
    assert field_docs(SACRecipe)["batch_size"] == "Transitions sampled per gradient update."
    assert field_docs(TD3Recipe)["gamma"] == "Discount factor."
