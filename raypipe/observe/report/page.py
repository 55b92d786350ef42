"""The report of a run as one HTML page that needs nothing else: no network, no script, no font, no picture file."""

from __future__ import annotations

from raypipe import __version__
from raypipe.observe.report import sections
from raypipe.observe.report.explanation import explanation
from raypipe.observe.report.markup import Markup, joined, tag
from raypipe.observe.report.style import STYLE
from raypipe.observe.run_view.run_record import RunRecord

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Browsers then refuse every request and every script, whatever a run's texts contain."""


def report_page(run: RunRecord) -> str:
    """Return the page.

    Everything on it is from the run directory: metrics.jsonl, events.jsonl, plan.json, job.json and timeline.json.
    """
    summary = run.summary()
    parts: list[tuple[str, Markup]] = [
        ("Predicted and measured step", sections.schedule(run)),
        ("Where the time goes", explanation(run)),
        ("Training", sections.curves(run)),
        ("Plans compared", sections.plans(run)),
        ("Memory per device", sections.memory(run)),
        ("Events", sections.events(run)),
        ("Environment", sections.environment(run)),
    ]
    broken = [tag("p", f"damaged: {text}", class_="bad") for text in run.damaged]
    links = [tag("a", title, href=f"#part{n}") for n, (title, _) in enumerate(parts)]
    body = tag(
        "body",
        tag("header", tag("h1", run.name, " ", tag("small", run.state())), tag("nav", *links)),
        *broken,
        sections.figures(run, summary),
        *(tag("section", tag("h2", title), part, id=f"part{n}") for n, (title, part) in enumerate(parts)),
        tag("footer", f"raypipe {__version__} report"),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{run.name}: raypipe report"),
        tag("style", Markup(STYLE)),
    )
    return "<!DOCTYPE html>\n" + tag("html", joined(head, "\n", body), lang="en") + "\n"
