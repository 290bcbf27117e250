"""The dashboard's pages; they get their data from the server, or the page of a run contains it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from unidle.errors import UsageError
from unidle.report.dashboard.runs import as_json, whole_view
from unidle.report.page.phase_colours import PHASE_STYLES, UNKNOWN_STYLE
from unidle.report.page.style import PAGE_CSS, PALETTE
from unidle.writing import write_atomically

NEEDED = "needs the packages starlette, uvicorn and plotly; run: pip install 'unidle[dashboard]'."
_CHARTS = ("shared.js", "styles", "charts.js")
_PARTS = {
    "run": (*_CHARTS, "time.js", "run.js"),
    "index": ("shared.js", "table.js", "index.js"),
    "several": (*_CHARTS, "table.js", "several.js"),
    "sweep": (*_CHARTS, "table.js", "sweep.js"),
    "pack": ("shared.js", "table.js", "pack.js"),
}
SCRIPTS = tuple(_PARTS)  # one per page


def style_sheet() -> str:
    """Return the report's style sheet plus the dashboard's."""
    return PALETTE + PAGE_CSS + _static("dashboard.css")


def plotly_script() -> str:
    """Return Plotly's script from its package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError(f"The dashboard {NEEDED}") from None
    return str(get_plotlyjs())


def script(page: str) -> str:
    """Return the dashboard's script for `page`, one of `SCRIPTS`."""
    return "".join(_styles() if part == "styles" else _static(part) for part in _PARTS[page])


def served_page(name: str, title: str, version: str) -> str:
    """Return a page, one of `SCRIPTS`, which loads its data and static files of `version` from the server."""
    has_charts = "charts.js" in _PARTS[name]
    scripts = [*(["plotly.js"] if has_charts else []), f"{name}.js"]
    return _document(f"{title} · unidle", _static(f"{name}.html"), _served(scripts, version))


def error_page(sentence: str, version: str) -> str:
    """Return a page that says what is wrong and links to the first page."""
    body = _static("error.html").replace("SENTENCE", escape(sentence))
    return _document("unidle", body, _served([], version))


def write_page(folder: Path, path: Path) -> Path:
    """Write the page of a run as a single file that needs no server."""
    view, spans = whole_view(folder)
    own = [plotly_script(), script("run")]
    policy = (
        f"default-src 'none'; script-src {' '.join(_hash(text) for text in own)}; "
        "style-src 'unsafe-inline'; img-src data: blob:"
    )
    # A script element ends at the first `</script`, so every `<` in the data is escaped.
    data = as_json({"view": view, "spans": spans}).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style_sheet()}</style>'
    tail = f'<script id="data" type="application/json">{data}</script>\n'
    tail += "\n".join(f"<script>{text}</script>" for text in own)
    page = _document(f"{view['name']} · unidle", _static("run.html"), (head, tail))
    return write_atomically(path, page)


def _static(name: str) -> str:
    return (files("unidle.report.dashboard") / "static" / name).read_text(encoding="utf-8")


def _styles() -> str:
    """Return the table of colours for charts.js."""
    return f"const PHASE_STYLES = {json.dumps(PHASE_STYLES)}, UNKNOWN_STYLE = {json.dumps(UNKNOWN_STYLE)};\n"


def _served(names: Sequence[str], version: str) -> tuple[str, str]:
    """Return head and tail of a served page."""
    tail = "\n".join(f'<script src="/static/{name}?v={version}"></script>' for name in names)
    return f'<link rel="stylesheet" href="/static/dashboard.css?v={version}">', tail


def _document(title: str, body: str, ends: tuple[str, str]) -> str:
    head, tail = ends
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
{head}
</head>
<body>
{body}
{tail}
</body>
</html>
"""


def _hash(text: str) -> str:
    """Return the hash of a script for a Content-Security-Policy."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
