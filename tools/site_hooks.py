"""What MkDocs calls while it builds the site: adds what is not in docs/, and makes links to it work.

README.md is the landing page. CHANGELOG.md, CONTRIBUTING.md and the README.md of benchmarks/ and examples/ are pages
too. Scripts and results that a page links to are copied, so that the site needs no server and no repository. Reference
pages come from the code (site_reference.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from jinja2 import Environment
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import write_file
from site_reference import REFERENCES

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmark-scripts.md",
    "examples/README.md": "examples.md",
}
_SOURCES = {uri: path for path, uri in PAGES.items()}
_REFERENCE = re.compile(r"<!-- reference: ([\w-]+) -->\n.*?<!-- /reference -->", re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the files of the repository that pages link to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    linked = {
        target
        for file in files.documentation_pages()
        for link in _LINK.findall(file.content_string)
        if (target := _target(file.src_uri, link)) and target not in PAGES and not target.startswith("docs/")
    }
    for target in sorted(linked):
        if not (ROOT / target).is_file():
            raise PluginError(f"{target} is linked in the docs, but is no file.")
        files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its reference, and with links as they are in the site."""
    uri = page.file.src_uri
    markdown = _REFERENCE.sub(lambda found: REFERENCES[found[1]](), markdown)

    def in_site(link: re.Match[str]) -> str:
        target = _target(uri, link[0])
        if target is None:
            return link[0]
        place = PAGES.get(target, target.removeprefix("docs/"))
        return os.path.relpath(place, PurePosixPath(uri).parent)

    return _LINK.sub(in_site, markdown)


def on_env(env: Environment, *, config: MkDocsConfig, files: Files) -> Environment:
    """Write llms.txt: every page by its place in the navigation, with the sentence that it starts with."""
    lines = [f"# {config.site_name}", f"> {config.site_description}"]
    for entry in config.nav or ():
        ((section, pages),) = entry.items()
        if isinstance(pages, list):
            links = [next(iter(page.items())) for page in pages]
            lines.append("\n".join([f"## {section}\n", *(_llms_line(title, uri, files) for title, uri in links)]))
    write_file("\n\n".join(lines).encode() + b"\n", os.path.join(config.site_dir, "llms.txt"))
    return env


def _llms_line(title: str, uri: str, files: Files) -> str:
    file = files.get_file_from_path(uri)
    text = file.page.markdown if file and file.page else None
    found = re.search(r"^# [^\n]+\n\n([\w`*\[].*?)(?:\n\n|\Z)", text or "", re.MULTILINE | re.DOTALL)
    if file is None or found is None:
        raise PluginError(f"{uri} needs a sentence below its title; llms.txt shows it.")
    first = found[1]
    sentence = re.split(r"(?<=[.:?])\s+(?=[A-Z`*\[])", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first))[0]
    return f"- [{title}]({file.url}): {' '.join(sentence.split())}"


def _target(uri: str, link: str) -> str | None:
    """The path in the repository that a page's link points to; None for a link to elsewhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    source = PurePosixPath(_SOURCES.get(uri, f"docs/{uri}"))
    return os.path.normpath(source.parent / link)
