"""Runs Gymnasium's own tests of AsyncVectorEnv on `unidle.ProcessVectorEnv`.

    python benchmarks/gymnasium_vector_suite.py [--checkout FOLDER] [TEST_FILE …]

Gymnasium's source distribution has no tests of vector environments, so its repository is cloned, at the installed
version, into a temporary folder; `--checkout` uses a copy that is there already. Nothing else is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import provenance, save

REPOSITORY = "https://github.com/Farama-Foundation/Gymnasium"
FILES = ("test_async_vector_env.py", "test_observation_mode.py", "test_autoreset_mode.py", "test_vector_env.py")
# A part of a test's name → why ProcessVectorEnv differs on purpose.
BY_DESIGN = {
    "custom_space_async_vector_env": "spaces without a fixed size are refused",
    "max_concurrency": "`workers` limits how many environments step at once",
    "custom_worker": "there is no `worker` argument",
    "subenv_error": "an exception is a TrainingError with the traceback, without warnings",
    "test_vector_obs_action_spaces": "spaces without a fixed size are refused",
}
PLUGIN = """
import gymnasium.vector
import gymnasium.vector.async_vector_env as module
import unidle


class Substitute(unidle.ProcessVectorEnv):
    def __init__(self, env_fns, shared_memory=True, context=None, daemon=True, **given):
        super().__init__(env_fns, 2, **given)  # refuses `worker` and `max_concurrency`, which it does not have


gymnasium.vector.AsyncVectorEnv = module.AsyncVectorEnv = Substitute
"""


def clone(folder: Path) -> Path:
    """Gymnasium's repository at the installed version."""
    tag = f"v{version('gymnasium')}"
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, REPOSITORY, str(folder / "gymnasium")]
    subprocess.run(command, check=True)
    return folder / "gymnasium"


def run(checkout: Path, files: list[str], folder: Path) -> list[dict[str, str]]:
    """The outcome of each test, except for those of SyncVectorEnv."""
    (folder / "substitute.py").write_text(PLUGIN)
    tests = [f"tests/vector/{name}" for name in files if (checkout / "tests" / "vector" / name).exists()]
    report = folder / "report.xml"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The tests' own configuration treats warnings as errors in some versions.
    arguments = [
        "-q",
        "--tb=line",
        "-p",
        "substitute",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(checkout),
    ]
    command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}", *tests]
    subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, check=False)
    outcomes = [outcome(case) for case in ET.parse(report).iter("testcase")]
    return [each for each in outcomes if not re.search(r"\bSync", each["test"])]  # Gymnasium's own class


def outcome(case: ET.Element) -> dict[str, str]:
    """The name of a test, how it ended, and the message if it failed."""
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    for part in case:
        if part.tag in ("failure", "error", "skipped"):
            ended = "skipped" if part.tag == "skipped" else "failed"
            return {"test": name, "ended": ended, "message": (part.get("message") or "").partition("\n")[0][:200]}
    return {"test": name, "ended": "passed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES, help="names of test files; default: all that have its tests")
    parser.add_argument("--checkout", type=Path, help="a checkout of Gymnasium's repository")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        results = run(flags.checkout or clone(folder), list(flags.files), folder)
    failed = [result for result in results if result["ended"] == "failed"]
    for result in failed:
        result["by_design"] = next((why for part, why in BY_DESIGN.items() if part in result["test"]), "")
        print(f"{result['test']}: {result['by_design'] or 'UNEXPLAINED: ' + result['message']}")
    counts: dict[str, Any] = dict(Counter(result["ended"] for result in results))
    counts["unexplained"] = sum(not result["by_design"] for result in failed)
    print(counts)
    save(
        "gymnasium_vector_suite",
        {
            "machine": provenance(),
            "counts": counts,
            "tests": "a given checkout" if flags.checkout else f"v{version('gymnasium')}",
            "files": list(flags.files),
            "not_passed": [r for r in results if r["ended"] != "passed"],
        },
    )
    return 1 if counts["unexplained"] else 0


if __name__ == "__main__":
    sys.exit(main())
