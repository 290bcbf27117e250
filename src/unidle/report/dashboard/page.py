"""The pages: the same one for a run, whether its data comes from a server or lies in the file itself."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from pathlib import Path

from unidle.errors import UsageError
from unidle.report.dashboard.runs import as_json, whole_view
from unidle.report.page.atomic_write import write_atomically
from unidle.report.page.phase_colours import PHASE_LOOKS, UNKNOWN_LOOK
from unidle.report.page.style import PAGE_LOOK, PALETTE

NEEDED = "needs the packages starlette, uvicorn and plotly; run: pip install 'unidle[dashboard]'."
_PARTS = {"run": ("shared.js", "looks", "charts.js", "time.js", "run.js"), "index": ("shared.js", "index.js")}


def style_sheet() -> str:
    """The report's look, and what the dashboard adds."""
    return PALETTE + PAGE_LOOK + _static("dashboard.css")


def plotly_script() -> str:
    """Plotly's own script, as its package brings it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError(f"The dashboard {NEEDED}") from None
    return str(get_plotlyjs())


def script(page: str) -> str:
    """The dashboard's own script for `page`: run or index."""
    return "".join(_looks() if part == "looks" else _static(part) for part in _PARTS[page])


def run_page(name: str, version: str) -> str:
    """The page of a run, which asks the server for its data and for the files of that `version`."""
    return _document(f"{name} · unidle", _static("run.html"), _served(("plotly.js", "run.js"), version))


def index_page(version: str) -> str:
    """The page of all runs."""
    return _document("runs · unidle", _static("index.html"), _served(("index.js",), version))


def write_page(folder: Path, path: Path) -> Path:
    """The page of a run as one file, which needs no server and loads nothing."""
    view, spans = whole_view(folder)
    own = [plotly_script(), script("run")]
    policy = (
        f"default-src 'none'; script-src {' '.join(_hash(text) for text in own)}; "
        "style-src 'unsafe-inline'; img-src data: blob:"
    )
    # Text in a script element ends at the first `</script`, so no `<` of the data may stand there as it is.
    data = as_json({"view": view, "spans": spans}).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style_sheet()}</style>'
    tail = f'<script id="data" type="application/json">{data}</script>\n'
    tail += "\n".join(f"<script>{text}</script>" for text in own)
    page = _document(f"{view['name']} · unidle", _static("run.html"), (head, tail))
    return write_atomically(path, page)


def _static(name: str) -> str:
    return (files("unidle.report.dashboard") / "static" / name).read_text(encoding="utf-8")


def _looks() -> str:
    """The table of colours, as charts.js reads it."""
    return f"const PHASE_LOOKS = {json.dumps(PHASE_LOOKS)}, UNKNOWN_LOOK = {json.dumps(UNKNOWN_LOOK)};\n"


def _served(names: tuple[str, ...], version: str) -> tuple[str, str]:
    """Head and tail of a page from the server."""
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
    """What a Content-Security-Policy calls a script by."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
