"""Loaded by Python at start-up: starts the sampler, then runs the `sitecustomize` that this one shadows."""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys


def _begin() -> None:
    folder = os.environ.get("UNIDLE_WATCH")
    if folder and os.path.isdir(folder):
        import unidle_sampler  # type: ignore[import-not-found]  # found next to this file in any Python

        unidle_sampler.begin(folder)


def _run_shadowed() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or os.getcwd()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        hidden = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


if __name__ == "sitecustomize":
    with contextlib.suppress(Exception):  # a failure here must not affect the command
        _begin()
    _run_shadowed()
