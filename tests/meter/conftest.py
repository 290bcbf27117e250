"""A make-believe NVIDIA driver, compiled here, so that the real binding is tested without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """What makes the environment in which a new process finds that driver, whole and sound or otherwise."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")

    def environment(mode: str = "", *, old: bool = False) -> dict[str, str]:
        place = folder / ("old" if old else "new")
        if not place.exists():
            place.mkdir()
            library = place / "libnvidia-ml.so.1"
            flags = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *(["-DOLD"] if old else [])]
            subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
        return {**os.environ, "LD_LIBRARY_PATH": str(place), "FAKE_NVML": mode}

    return environment
