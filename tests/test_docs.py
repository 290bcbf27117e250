"""The docs: code blocks run, links and flags exist, and tables match the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import unidle
from unidle.cli import main as command_line
from unidle.config import Config
from unidle.config.files import load_yaml
from unidle.config.presets import load_preset, preset_names
from unidle.config.settings import RECIPES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w<!-])--[a-z][a-z-]*")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return FENCE.findall(page.read_text())


def pages(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("page", paths, ids=lambda path: path.name)


# -- code blocks ----------------------------------------------------------------------------------------------------

# A page is one session: its ```bash and ```python blocks run in order, in one folder, the Python blocks in one
# interpreter. Each line of an ```output block must appear in what they print, where … matches anything.
# ```sh blocks are not run: `make demo` and `make test` would run this test again, and `pip install` changes the
# machine.
SESSION = """
import gc, subprocess, sys
for index, (language, text) in enumerate({blocks!r}):
    print(f"--- block {{index}}", flush=True)
    if language == "bash":
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
    else:
        exec(compile(text, f"block {{index}}", "exec"), globals())
gc.freeze()  # else garbage collection at exit traverses all of torch
"""


def shortened(text: str) -> str:
    """Divides timesteps above 10,000 by 100, so that the pages can show realistic numbers."""

    def shorter(found: re.Match[str]) -> str:
        steps = int(found[2].replace("_", ""))
        return found[1] + str(steps // 100 if steps > 10_000 else steps)

    return re.sub(r"(timesteps[ =])([\d_]+)", shorter, text)


RUN = [page for page in PAGES if {"bash", "python"} & {language for language, _ in blocks(page)}]


@pytest.fixture(scope="module")
def sessions(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Path, Future[subprocess.CompletedProcess[str]]]]:
    """Runs all pages, two at a time, because most of their time is spent on starting processes."""
    with ThreadPoolExecutor(2) as pool:
        yield {page: pool.submit(run_blocks, page, tmp_path_factory.mktemp(page.stem)) for page in RUN}


def run_blocks(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    runnable = [(language, shortened(text)) for language, text in blocks(page) if language in ("bash", "python")]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return subprocess.run(
        [sys.executable, "-c", SESSION.format(blocks=runnable)],
        cwd=folder,
        env={**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(folder)},  # runs of other pages are not found there
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )


@pages(RUN)
def test_code_blocks_run_and_print_documented_output(
    page: Path, sessions: dict[Path, Future[subprocess.CompletedProcess[str]]]
) -> None:
    done = sessions[page].result()
    shown = "".join(text for language, text in blocks(page) if language == "output")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Traceback" not in done.stdout or "Traceback" in shown, done.stdout[-4000:]
    assert "Warning" not in done.stdout, done.stdout[-4000:]
    for line in shown.splitlines():
        printed = re.escape(line).replace("…", ".*")
        assert re.search(f"^{printed}$", done.stdout, re.MULTILINE), f"{line!r} is not in:\n{done.stdout[-4000:]}"


@pages(LINKED)
def test_only_install_and_make_blocks_are_not_run(page: Path) -> None:
    for language, text in blocks(page):
        assert language in ("bash", "python", "output", "sh", "text", "yaml"), (
            f"a block of language {language!r} is not checked"
        )
        if language == "sh":
            words = {line.split()[0] for line in text.splitlines() if line and not line.startswith("#")}
            assert words <= {"make", "pip", "pre-commit"}


def test_yaml_blocks_load_as_config_files(tmp_path: Path) -> None:
    found = [text for page in PAGES for language, text in blocks(page) if language == "yaml"]
    assert found
    for text in found:
        (tmp_path / "config.yaml").write_text(text)
        load_yaml(tmp_path / "config.yaml")


# -- links, flags and names --------------------------------------------------------------------------------------------


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_benchmark_is_in_benchmarks_readme() -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text()
    assert [path.name for path in folder.glob("*.py") if f"`{path.name}`" not in page] == []


@pages(LINKED)
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{target} does not exist"
        assert not anchor or anchor in slugs(linked), f"{target}: no such heading"


def test_readme_links_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text] == []


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        command_line([*command, "--help-all" if command else "--help"])
    return capsys.readouterr().out


def test_every_flag_in_the_docs_exists(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^  ([a-z-]+)  ", help_of(capsys), re.MULTILINE)
    assert "check-env" in commands
    known = {flag for command in commands for flag in FLAG.findall(help_of(capsys, command))}
    known |= {flag for algo in RECIPES for flag in FLAG.findall(help_of(capsys, "train", "--algo", algo))}
    known |= {
        "--no-subproc",
        "--no-pin-cores",
        "--num-envs",
        "--n-parallel-envs",
        "--total-timesteps",
        "--wrapper",
        "--help-all",
        "--onnx",
        *("--job-name", "--nodes", "--ntasks", "--open-mode", "--output", "--requeue"),  # of sbatch
        "--start",  # of squeue
        "--nv",  # of apptainer
        "--nproc-per-node",  # of torchrun
    }  # accepted, but not listed in the help
    for page in LINKED:
        text = re.sub(r"^```sh\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert set(FLAG.findall(text)) - known == set(), page.name


def test_every_public_name_is_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in unidle.__all__ if f"unidle.{name}" not in text] == []


# -- tables ------------------------------------------------------------------------------------------------------------


def test_presets_table_matches_presets() -> None:
    table_rows = []
    for name in preset_names():
        preset = load_preset(name)
        recipe = preset.apply(Config()).recipe
        epochs = vars(recipe).get("n_epochs", "–")
        network = ",".join(map(str, recipe.net_arch))
        cells = [f"`{name}`", f"{recipe.n_envs} × {recipe.n_steps}", recipe.batch_size, epochs, network, preset.cores]
        table_rows.append(f"| {' | '.join(map(str, cells))} |")
    lines = (ROOT / "docs" / "training.md").read_text().splitlines()
    missing = [row for row in table_rows if row not in lines]
    assert not missing, "put these rows in docs/training.md:\n" + "\n".join(missing)
