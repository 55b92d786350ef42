import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from docs.gallery import draw, entries, section, write
from raypipe.schedule import SCHEDULES

DRAWN = {drawn.title: drawn for drawn in map(draw, entries())}


@pytest.mark.parametrize("title", DRAWN)
def test_formulas_are_what_the_simulator_finds(title):
    drawn = DRAWN[title]
    per_device = drawn.costs.stages // drawn.shape.devices
    known = {kind: per_device * drawn.costs.by_kind(kind)[-1] for kind in ("F", "B", "W", "BW", "R")}
    known |= {"D": drawn.shape.devices, "N": drawn.shape.microbatches, "V": per_device, "U": drawn.shape.unit}
    for figure, formula in drawn.entry.formulas.items():
        assert drawn.measured(figure) == pytest.approx(eval(formula, {"min": min}, known)), figure


def test_every_schedule_is_shown_once():
    shown = {drawn.entry.schedule for drawn in DRAWN.values()}
    makers = {SCHEDULES[name].make for name in shown}
    assert all(family.make in makers for name, family in SCHEDULES.items() if name != "auto")
    assert len(DRAWN) == len(entries())


@pytest.mark.parametrize("title", DRAWN)
def test_the_command_under_a_picture_makes_it(title, monkeypatch, capsys):
    """The gallery may not import the command line, so this is where the two are held together."""
    from raypipe.cli import run
    from raypipe.observe.terminal import draw as draw_lines

    command = re.search(r"`raypipe (schedule .*?)`", section(DRAWN[title])).group(1)
    monkeypatch.setattr(sys, "argv", ["raypipe"])
    monkeypatch.setenv("COLUMNS", "500")
    assert run(shlex.split(command)) == 0
    lines = draw_lines(DRAWN[title].timeline, width=500)
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines


@pytest.mark.slow
def test_writes_a_page_whose_pictures_exist(tmp_path):
    written = write(tmp_path)
    page = (tmp_path / "schedules.md").read_text()
    named = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert sorted(tmp_path / name for name in named) == sorted(path for path in written if path.suffix == ".svg")
    for name in named:
        ElementTree.parse(tmp_path / name)
        assert (tmp_path / name).stat().st_size < 120_000
