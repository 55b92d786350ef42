"""The page about the verbs says what the command line takes."""

from pathlib import Path

from raypipe.cli import verbs
from raypipe.cli._shared.reference import COMMAND, page, write

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"


def test_the_page_is_up_to_date(tmp_path):
    made = write(tmp_path)
    assert made.name == PAGE.name
    assert PAGE.read_text(encoding="utf-8") == made.read_text(encoding="utf-8"), f"run {COMMAND}"


def test_every_verb_has_a_section_with_its_options():
    sections = dict(part.split("\n", 1) for part in page().split("\n## ")[1:])
    assert sorted(sections) == verbs()
    assert "`raypipe train JOB [OPTIONS]`" in sections["train"]
    assert "| `--top K` | Number of plans to list [10]. |" in sections["autoconfigure"]
    assert "| `--steps STEPS` | Steps to run [5]. |" in sections["emulate"]
    assert "| `--resume` |" in sections["train"]
