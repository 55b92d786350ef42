"""Write a Matplotlib figure to a file, the same bytes every time."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from raypipe.atomic_write import write_whole
from raypipe.errors import RequestError

FORMATS = (".svg", ".png", ".pdf")


def save(figure: Figure, path: Path) -> None:
    """Write ``figure``; the name's ending chooses SVG, PNG (200 dpi) or PDF.

    Raises:
        RequestError: another ending, or a place that cannot be written.
    """
    check_format(path)
    # Text stays text (small files, searchable); no dates or random ids, so that pictures under git stay still.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "raypipe", "font.family": "sans-serif"}
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    with matplotlib.rc_context(settings):
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:].lower(), dpi=200, metadata=metadata)
    data = content.getvalue()
    if path.suffix.lower() == ".svg":
        data = slim(data.decode()).encode()
    try:
        write_whole(path, data)
    except OSError as error:
        raise RequestError(str(path), error.strerror or str(error), "choose a place that can be written") from error


def slim(svg: str) -> str:
    """The same picture in about a third of the bytes: no indentation, numbers to a hundredth of a point."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' clip-path="[^"]*"(?= style="fill)', "", svg)  # boxes never leave the axes
    svg = re.sub(r"font-family: [^;]*;", "font-family: 'DejaVu Sans', Arial, sans-serif;", svg)
    svg = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", svg)
    svg = re.sub(r"(?<![\w#])(-?\d+\.\d{2})\d+", r"\1", svg)
    svg = re.sub(r'<g id="text_\d+">\s*(<text.*?</text>)\s*</g>', r"\1", svg, flags=re.DOTALL)
    often = Counter(re.findall(r' style="[^"]*"', svg)).most_common(40)
    rules = ""
    for n, (style, times) in enumerate(often):
        if times > 3:
            rules += f".s{n}{{{style[8:-1]}}}"
            svg = svg.replace(style, f' class="s{n}"')
    svg = svg.replace("</style>", f"{rules}</style>", 1)
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", svg)) + "\n"


def check_format(path: Path) -> None:
    """Refuse an ending that no picture format has, before any work is done.

    Raises:
        RequestError: naming the endings that work.
    """
    if path.suffix.lower() not in FORMATS:
        why = f'cannot tell the picture format from "{path.name}"'
        raise RequestError(str(path), why, f"end the name in {', '.join(FORMATS)}")
