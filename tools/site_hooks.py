"""What MkDocs calls while it builds the site: adds what is not in docs/, and makes links to it work.

README.md is the landing page. CHANGELOG.md, CONTRIBUTING.md and benchmarks/README.md are pages too. Scripts and results
of benchmarks that a page links to are copied, so that the site needs no server and no repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmark-scripts.md",
}
_SOURCES = {uri: path for path, uri in PAGES.items()}
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
    """The page with links as they are in the site."""
    uri = page.file.src_uri

    def in_site(link: re.Match[str]) -> str:
        target = _target(uri, link[0])
        if target is None:
            return link[0]
        place = PAGES.get(target, target.removeprefix("docs/"))
        return os.path.relpath(place, PurePosixPath(uri).parent)

    return _LINK.sub(in_site, markdown)


def _target(uri: str, link: str) -> str | None:
    """The path in the repository that a page's link points to; None for a link to elsewhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    source = PurePosixPath(_SOURCES.get(uri, f"docs/{uri}"))
    return os.path.normpath(source.parent / link)
