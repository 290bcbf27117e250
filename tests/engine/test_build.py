"""Networks given by import path."""

from __future__ import annotations

import pytest
import torch

from unidle.engine.build import resolve_network
from unidle.errors import UsageError


def test_network_is_resolved_from_its_import_path() -> None:
    factory, name = resolve_network("torch.nn:Linear")
    assert factory is torch.nn.Linear
    assert name == "torch.nn:Linear"
    for invalid in ("torch.nn", "torch.nn:NoSuchThing", "<lambda>"):
        with pytest.raises(UsageError):
            resolve_network(invalid)
