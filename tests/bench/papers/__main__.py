"""What the papers measured beside what their configurations cost here: one machine description each for all rows.

Run: ``python -m tests.bench.papers`` (``--write`` puts the tables into docs/evidence/papers.md). One core, seconds.
"""

from __future__ import annotations

from pathlib import Path

from tests.bench.command import options
from tests.bench.papers import chimera, merak, out_of_order, zeropp

PAGE = Path(__file__).parents[3] / "docs" / "evidence" / "papers.md"
BEGIN, END = "<!-- tests.bench.papers: begin -->", "<!-- tests.bench.papers: end -->"

SOURCES = {
    "Chimera on Piz Daint (`cluster/devices/piz-daint.yaml`)": (chimera,),
    "ZeroPP on A800 (`cluster/devices/a800.yaml`)": (zeropp,),
    "Merak on RTX 3090 (`cluster/devices/rtx3090.yaml`)": (merak,),
    "Out-of-order backprop on V100 (`cluster/devices/v100.yaml`)": (out_of_order,),
}


def report() -> str:
    """All tables as Markdown."""
    parts = []
    for heading, modules in SOURCES.items():
        parts.append(f"### {heading}")
        for title, body in (section for module in modules for section in module.sections()):
            parts += [f"**{title}.**", body]
    return "\n\n".join(parts)


def main() -> None:
    """Print the report, and write it where asked."""
    asked = options(__doc__, write=False)
    text = report()
    print(text)
    if asked.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
