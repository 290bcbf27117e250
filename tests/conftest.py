"""Makes the helpers of this folder and the benchmarks importable, and keeps pytest workers from sharing cores."""

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import settings

os.environ["XDG_STATE_HOME"] = f"{tempfile.gettempdir()}/unidle-tests-{os.getuid()}"  # not the user's own key
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="unidle-tests-")  # runs of other tests are not found there
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported anywhere

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels run step by step on the CPU

atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

FAKE_DRIVER = Path(__file__).with_name("fake_nvml.c")

# The same examples every time, so that only a code change can break a test; HYPOTHESIS_PROFILE=explore tries more.
settings.register_profile("repeatable", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("explore", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and collected tests stay until the end: garbage collections need not visit them


@pytest.fixture(scope="module", autouse=True)
def _pickled_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sends environments of a test module to workers by value: importing that module there imports torch and pytest."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """A function that returns environment variables with which a new process loads the fake NVML driver."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")

    def environment(mode: str = "", *, old: bool = False) -> dict[str, str]:
        directory = folder / ("old" if old else "new")
        if not directory.exists():
            directory.mkdir()
            library = directory / "libnvidia-ml.so.1"
            flags = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *(["-DOLD"] if old else [])]
            subprocess.run([compiler, *flags, "-o", str(library), str(FAKE_DRIVER)], check=True)
        return {**os.environ, "LD_LIBRARY_PATH": str(directory), "FAKE_NVML": mode}

    return environment
