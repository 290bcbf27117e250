"""The dashboard's pages; the page of a run gets its data from the server or contains it."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from pathlib import Path

from unidle.errors import UsageError
from unidle.report.dashboard.runs import as_json, whole_view
from unidle.report.page.phase_colours import PHASE_STYLES, UNKNOWN_STYLE
from unidle.report.page.style import PAGE_CSS, PALETTE
from unidle.writing import write_atomically

NEEDED = "needs the packages starlette, uvicorn and plotly; run: pip install 'unidle[dashboard]'."
_PARTS = {"run": ("shared.js", "styles", "charts.js", "time.js", "run.js"), "index": ("shared.js", "index.js")}


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
    """Return the dashboard's script for `page`: run or index."""
    return "".join(_styles() if part == "styles" else _static(part) for part in _PARTS[page])


def run_page(name: str, version: str) -> str:
    """Return the page of a run, which loads its data and static files of `version` from the server."""
    return _document(f"{name} · unidle", _static("run.html"), _served(("plotly.js", "run.js"), version))


def index_page(version: str) -> str:
    """Return the page of all runs."""
    return _document("runs · unidle", _static("index.html"), _served(("index.js",), version))


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


def _served(names: tuple[str, ...], version: str) -> tuple[str, str]:
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
