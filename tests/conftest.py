"""Lets every test import what stands beside this file, and keeps two workers off each other's cores."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported anywhere
sys.path.insert(0, str(Path(__file__).parent))

# The same examples every time, so that a red test is the code's doing; HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile("repeatable", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("explore", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
