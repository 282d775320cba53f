"""A page of ours: one self-contained file that opens from disk and asks no network for anything.

Light and dark, on a phone and in print. Its script only helps: hiding series, showing a point's values.
"""

from __future__ import annotations

import html
from pathlib import Path

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, body: str, *, data: str | None = None) -> str:
    """Return a whole page. `data` is JSON that is kept within it, for those who want the numbers."""
    kept = ""
    if data is not None:  # no text in it can end the element
        kept = f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>'
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">
<title>{html.escape(title)}</title><style>{style}</style></head>
<body>
<main>
{body}
</main>
{kept}
<script>{script}</script>
</body></html>
"""
