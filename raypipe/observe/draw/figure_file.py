"""Write Matplotlib figures to files that are byte-identical every time."""

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
    """Write ``figure`` as SVG, PNG (200 dpi) or PDF, depending on the file's suffix.

    Raises:
        RequestError: the suffix is another one, or the file cannot be written.
    """
    check_format(path)
    # Text stays text (small, searchable files). No dates or random ids, so that equal pictures are equal files.
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
    """Shrink an SVG to about a third: no indentation, numbers to a hundredth of a point, shared styles as classes."""
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
    """Check the file's suffix before any work is done.

    Raises:
        RequestError: the suffix is not that of a supported picture format.
    """
    if path.suffix.lower() not in FORMATS:
        why = f'"{path.name}" has no suffix of a picture format'
        raise RequestError(str(path), why, f"end the name in {', '.join(FORMATS)}")
