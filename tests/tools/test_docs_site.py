"""The documentation as a site: it builds strictly, its links hold, and it loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
import yaml
from paths import ROOT

import unidle
from unidle.cli.main import COMMANDS
from unidle.config import Engine, Run
from unidle.config.field_docs import field_docs
from unidle.config.settings import RECIPES

PARTS = {**{recipe().algo.upper(): recipe for recipe in RECIPES.values()}, "Engine": Engine, "Run": Run}
SETTINGS = {name.replace("_", "-") for part in PARTS.values() for name in asdict(part())}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTION = re.compile(r"--[a-z-]*[a-z](?![a-z…-])")
BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict"]


class Reader(HTMLParser):
    """What a page links to and loads, its anchors, its texts, and the rows of its tables by section."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.texts: list[str] = []  # of paragraphs, list items and cells
        self.rows: list[tuple[str, list[str]]] = []
        self.section = ""
        self.in_text = self.in_cell = False
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found["id"]} if "id" in found else set()
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif "src" in found or (tag == "link" and "href" in found):
            self.loads.append(found.get("src") or found["href"])
        elif tag == "h2":
            self.section = found.get("id", "")
        elif tag == "tr":
            self.rows.append((self.section, []))
        elif tag == "td":
            self.rows[-1][1].append("")
        if tag in ("p", "li", "td", "pre"):
            self.texts.append("")
            self.in_text, self.in_cell = tag != "pre", self.in_cell or tag == "td"

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.in_text:
            self.texts[-1] += data
        if self.in_cell:
            self.rows[-1][1][-1] += data


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BUILD, "--config-file", str(config), "--site-dir", str(site)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Reader]:
    """Every page of the site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    pages = [page for page in folder.rglob("*.html") if page.name != "404.html"]
    return {page: Reader(page) for page in pages}


def page(site: dict[Path, Reader], name: str) -> Reader:
    return next(reader for path, reader in site.items() if path.name == name)


def test_every_page_of_the_docs_is_in_the_site(site: dict[Path, Reader]) -> None:
    pages = {path.stem for path in site}
    assert {path.stem for path in (ROOT / "docs").rglob("*.md")} | {"index", "changelog"} <= pages


def test_links_and_anchors_have_targets(site: dict[Path, Reader]) -> None:
    broken = []
    for path, reader in site.items():
        for link in [*reader.links, *reader.loads]:
            name, _, anchor = unquote(link).partition("#")
            if re.match(r"\w+:", name):
                continue
            target = (path.parent / name).resolve() if name else path
            lacks_anchor = anchor and anchor not in site[target].anchors if target in site else False
            if not target.exists() or lacks_anchor:
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_pages_load_nothing_from_elsewhere(site: dict[Path, Reader]) -> None:
    loaded = [link for reader in site.values() for link in reader.loads]
    assert loaded
    assert [link for link in loaded if re.match(r"(\w+:)?//", link)] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.stem)
def test_picture_is_well_formed(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_lists_and_tables_are_rendered(site: dict[Path, Reader]) -> None:
    raw = re.compile(r"(?:^|\n)(?:[-*] |\d+\. \w|\| |#+ |```)")
    assert [text for reader in site.values() for text in reader.texts if raw.search(text)] == []


def test_llms_txt_lists_every_page_with_its_first_sentence(site: dict[Path, Reader]) -> None:
    index = next(path for path in site if path.name == "index.html")
    lines = (index.parent / "llms.txt").read_text().splitlines()
    listed = dict(re.findall(r"^- \[.+\]\((.+?)\): (.+)$", "\n".join(lines), re.MULTILINE))
    assert listed.keys() == {path.name for path in site} - {"index.html"}
    assert listed["faults.html"] == "A simulator that crashes once a night should not end the run."


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_search_works_in_a_page_opened_from_its_file(site: dict[Path, Reader]) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    index = next(path for path in site if path.name == "index.html")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    problems: list[str] = []
    with playwright.sync_playwright() as driver, driver.chromium.launch(executable_path=CHROMIUM, args=sandbox) as one:
        page = one.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith("file:") else problems.append(asked.url))
        page.goto(index.as_uri())
        page.get_by_placeholder("Search").first.click()
        page.keyboard.type("micro-batches")
        page.locator(".md-search-result a", has_text="gradient accumulation").first.click()
        page.wait_for_url(re.compile(r"/tune\.html"))
    assert problems == []


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "[x](nowhere.md), [x](tune.md#nowhere)",
            ["link 'nowhere.md', but the target is not found", "does not contain an anchor '#nowhere'"],
        ),
        ("[x](../benchmarks/nowhere.py)", ["benchmarks/nowhere.py is linked in the docs, but is no file"]),
    ],
)
def test_broken_link_fails_the_build(text: str, messages: list[str], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "seeds.md").open("a") as page:
        page.write(f"\n{text}\n")
    config = {"INHERIT": str(ROOT / "mkdocs.yml"), "hooks": [str(ROOT / "tools" / "site_hooks.py")], "plugins": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    for message in messages:
        assert message in done.stderr


# -- the reference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_reference_has_every_option_of_every_command(site: dict[Path, Reader], command: str) -> None:
    rows = [cells[0] for section, cells in page(site, "commands.html").rows if section == command and cells]
    listed = set(OPTION.findall(" ".join(rows)))
    options = set(OPTION.findall(" ".join(re.findall("^│ (-.+?)  ", help_of(command), re.MULTILINE))))
    if command in ("train", "sweep", "diagnose", "tune"):
        options -= {f"--{no}{name}" for name in SETTINGS for no in ("", "no-")}
    assert listed == options - {"--help"}


def help_of(command: str) -> str:
    environment = {**os.environ, "COLUMNS": "100", "PYTHONUTF8": "1"}
    run = [sys.executable, "-m", "unidle", command, "--help-all"]
    return subprocess.run(run, env=environment, capture_output=True, text=True, timeout=100, check=True).stdout


@pytest.mark.parametrize("title", PARTS)
def test_reference_has_every_setting_with_its_meaning(site: dict[Path, Reader], title: str) -> None:
    rows = [cells for section, cells in page(site, "settings.html").rows if section == title.lower() and cells]
    names, texts = list(asdict(PARTS[title]())), field_docs(PARTS[title])
    assert texts.keys() == set(names)
    meanings = [re.sub(r"`|docs/|\.md", "", texts[name]) for name in names]  # pages are links
    assert [(name, meaning) for name, _, meaning in rows] == list(zip(names, meanings))


@pytest.mark.parametrize(
    ("title", "name", "default"),
    [
        ("PPO", "n_steps", "2048"),
        ("PPO", "net_arch", "64,64"),
        ("PPO", "target_kl", "none"),
        ("PPO", "weight_decay", "auto"),
        ("SAC", "per", "false"),
        ("Run", "env", ""),
    ],
)
def test_reference_writes_defaults_as_in_a_command(
    site: dict[Path, Reader], title: str, name: str, default: str
) -> None:
    rows = page(site, "settings.html").rows
    assert [cells[1] for section, cells in rows if section == title.lower() and cells[:1] == [name]] == [default]


def test_reference_has_every_public_name(site: dict[Path, Reader]) -> None:
    reader = page(site, "python-api.html")
    assert {f"unidle.{name}" for name in unidle.__all__} <= reader.anchors
    assert any(text.startswith("Train a policy and return the run") for text in reader.texts)
