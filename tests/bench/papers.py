"""What the papers measured beside what their configurations cost here: one machine description each for all rows.

Run: ``python -m tests.bench.papers`` (``--write`` puts the tables into docs/planner.md). One core, seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.bench import papers_chimera, papers_speedups, papers_zeropp

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
BEGIN, END = "<!-- tests.bench.papers: begin -->", "<!-- tests.bench.papers: end -->"


def report() -> str:
    """All tables as Markdown."""
    parts = ["### Chimera on Piz Daint (`cluster/piz-daint.yaml`)"]
    for title, body in (*papers_chimera.sections(), *papers_speedups.sections()):
        parts += [f"**{title}.**", body]
    parts.append("### ZeroPP on A800 (`cluster/a800.yaml`)")
    for title, body in papers_zeropp.sections():
        parts += [f"**{title}.**", body]
    return "\n\n".join(parts)


def main() -> None:
    """Print the report, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/planner.md")
    text = report()
    print(text)
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
