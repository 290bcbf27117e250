"""Loaded by Python itself as it starts: begins the samples, then hands over to the `sitecustomize` that it hides."""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys


def _begin() -> None:
    folder = os.environ.get("UNIDLE_WATCH")
    if folder and os.path.isdir(folder):
        import unidle_sampler  # type: ignore[import-not-found]  # it lies beside this file, whatever Python this is

        unidle_sampler.begin(folder)


def _hand_over() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or os.getcwd()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        hidden = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


if __name__ == "sitecustomize":
    with contextlib.suppress(Exception):  # whatever fails here, the command must run as if nobody watched
        _begin()
    _hand_over()
