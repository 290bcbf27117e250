"""The HTML document of a report page: a single file without scripts or external resources."""

from __future__ import annotations

from html import escape

from unidle.report.page.style import CSS, HATCHES


def document(title: str, body: str, source: str) -> str:
    """Return the page with `body`, which is HTML; `source` says what it was generated from."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<svg width="0" height="0" style="position: absolute" aria-hidden="true">{HATCHES}</svg>
<main>
{body}
<footer>{escape(source)}</footer>
</main>
</body>
</html>
"""
