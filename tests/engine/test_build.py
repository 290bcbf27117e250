"""Networks by name."""

from __future__ import annotations

import pytest
import torch

from unidle.engine.build import resolve_network
from unidle.errors import UsageError


def test_a_network_is_found_by_its_name_and_keeps_it() -> None:
    factory, name = resolve_network("torch.nn:Linear")
    assert factory is torch.nn.Linear
    assert name == "torch.nn:Linear"
    for wrong in ("torch.nn", "torch.nn:NoSuchThing", "<lambda>"):
        with pytest.raises(UsageError):
            resolve_network(wrong)
