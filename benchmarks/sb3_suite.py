"""Runs Stable-Baselines3's own tests on `unidle.sb3`.

    python benchmarks/sb3_suite.py [--source FOLDER] [TEST_FILE …]

The source distribution, which has the tests, is downloaded into a temporary folder; `--source` uses one that is
unpacked already. In copies of the test files, each import of a name that `unidle.sb3` has is replaced. A test is not
applicable if it tests a class that unidle does not have (A2C, DDPG, HER), or nothing of unidle's. Why the others fail
is in `sb3_suite_differences.py`. Results are kept per file, so that the files may be run in pieces.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import RESULTS, provenance, save
from sb3_suite_differences import DIFFERENCES

import unidle

FILES = (
    *("identity", "predict", "save_load", "callbacks", "vec_envs", "vec_normalize", "train_eval_mode", "run"),
    *("deterministic", "dict_env", "cnn", "spaces"),
)
THEIRS, OURS = "stable_baselines3", "unidle.sb3"
TEST_SECONDS, NICENESS = 120, 10

# Beside the tests: those that are not applicable are skipped, with the reason.
CONFTEST = '''
import types

import pytest

MISSING = ("A2C", "DDPG", "HerReplayBuffer")


def reaches_unidle(value, seen):
    """Whether a test, or a function or class of its module that it uses, uses something of unidle's."""
    if getattr(value, "__module__", "").startswith("unidle."):
        return True
    functions = vars(value).values() if isinstance(value, type) else [value]
    codes = [each.__code__ for each in functions if isinstance(each, types.FunctionType)]
    names = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names, code.co_freevars)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    module = globals_of(value)
    found = [module[name] for name in names - seen if name in module]
    seen |= names
    return any(reaches_unidle(each, seen) for each in found)


def globals_of(value):
    import sys

    module = sys.modules.get(getattr(value, "__module__", None) or "")
    is_test = module is not None and module.__name__.startswith("test_")
    return vars(module) if is_test else {}


def why_not(item):
    values = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
    kinds = [value for value in values if isinstance(value, type)]
    for kind in kinds:
        if kind.__name__ in MISSING:
            return f"{kind.__name__} is not offered"
    if not kinds:
        for name in MISSING:
            if name in item.function.__code__.co_names:
                return f"{name} is not offered"
    if not any(reaches_unidle(each, set()) for each in (item.function, *kinds, *values)):
        return "tests nothing of unidle's"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        reason = why_not(item)
        if item.get_closest_marker("expensive"):
            item.add_marker(pytest.mark.skip(reason="marked expensive: a model of several GB"))
        elif reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {reason}"))
'''


def download(folder: Path) -> Path:
    """The unpacked source distribution of the installed version."""
    wanted = f"stable-baselines3=={version('stable-baselines3')}"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def rewritten(text: str) -> str:
    """A module's text, which imports from unidle.sb3 what that has."""
    lines = text.splitlines()
    for node in ast.parse(text).body[::-1]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == THEIRS:
            assert node.module is not None
            ours = node.module.replace(THEIRS, OURS, 1)
            names = [(ours if has(ours, alias.name) else node.module, ast.unparse(alias)) for alias in node.names]
            lines[node.lineno - 1 : node.end_lineno] = [f"from {module} import {name}" for module, name in names]
    return "\n".join(lines) + "\n"


def has(module: str, name: str) -> bool:
    """Whether unidle itself has a name; one that it only passes on from Stable-Baselines3 does not count."""
    from unidle.errors import UsageError

    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, UsageError):
        return False
    return str(getattr(value, "__module__", "")).startswith("unidle.")


def run(source: Path, name: str, folder: Path) -> list[dict[str, str]]:
    """The outcome of each test of a file."""
    (folder / "conftest.py").write_text(CONFTEST)
    copy, report = folder / f"test_{name}.py", folder / f"{name}.xml"
    copy.write_text(rewritten((source / "tests" / copy.name).read_text()))
    options = [
        "-q",
        "--tb=line",
        "--no-header",
        "--disable-warnings",
        *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)),
        f"--timeout={TEST_SECONDS}",
        f"--junitxml={report}",
    ]
    command = [sys.executable, "-m", "pytest", *options, str(copy)]
    path = os.pathsep.join(filter(None, [str(Path(unidle.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run(command, cwd=folder, env=environment, check=False, preexec_fn=lambda: os.nice(NICENESS))
    return [outcome(case) for case in ET.parse(report).iter("testcase")]


def outcome(case: ET.Element) -> dict[str, str]:
    """The name of a test, how it ended, and the message if it did not pass."""
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    for part in case:
        if part.tag not in ("failure", "error", "skipped"):
            continue
        message = (part.get("message") or "").partition("\n")[0]
        if part.tag != "skipped":
            ended = "failed"
        else:
            ended = "not applicable" if message.startswith("not applicable") else "skipped"
        return {"test": name, "ended": ended, "message": message.removeprefix("not applicable: ")[:250]}
    return {"test": name, "ended": "passed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES, help="names of test files, without test_ and .py")
    parser.add_argument("--source", type=Path, help="the unpacked source distribution")
    flags = parser.parse_args()
    earlier = RESULTS / "sb3_suite.json"
    files: dict[str, Any] = json.loads(earlier.read_text())["files"] if earlier.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "source").mkdir()
        source = flags.source or download(folder / "source")
        for name in flags.files:
            outcomes = run(source, name, folder)
            counts = dict(Counter(each["ended"] for each in outcomes))
            not_passed = [explained(each) for each in outcomes if each["ended"] != "passed"]
            files[name] = {"counts": counts, "not_passed": not_passed, "machine": provenance("stable-baselines3")}
            save("sb3_suite", summary(files))
    result = summary(files)
    for name in flags.files:
        for each in files[name]["not_passed"]:
            if each["ended"] == "failed":
                print(f"{each['test']}: {each['why'] or 'UNEXPLAINED: ' + each['message']}")
        print(f"{name}: {files[name]['counts']}")
    print(f"all: {result['total']}, of the failures {result['unexplained']} unexplained")
    return 1 if result["unexplained"] else 0


def explained(outcome: dict[str, str]) -> dict[str, str]:
    """The outcome with the reason why a test fails by design; empty if that is not known."""
    if outcome["ended"] != "failed":
        return outcome
    return {**outcome, "why": next((why for part, why in DIFFERENCES.items() if part in outcome["test"]), "")}


def summary(files: dict[str, Any]) -> dict[str, Any]:
    """The results of all files that have been run, in order."""
    total: Counter[str] = Counter()
    for found in files.values():
        total.update(found["counts"])
    failed = [each for found in files.values() for each in found["not_passed"] if each["ended"] == "failed"]
    return {
        "total": dict(total),
        "unexplained": sum(not each["why"] for each in failed),
        "files": {name: files[name] for name in FILES if name in files},
    }


if __name__ == "__main__":
    sys.exit(main())
