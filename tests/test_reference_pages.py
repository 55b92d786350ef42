"""The pages about verbs, keys and the Trainer's names say what the code takes."""

from pathlib import Path

from docs.reference_pages import (
    COMMAND,
    JOB_SECTIONS,
    JOBS,
    commands_page,
    field_docstrings,
    keys_page,
    write,
)
from raypipe.cli import VERBS
from raypipe.job.model_spec import HfSpec

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


def test_the_pages_are_up_to_date(tmp_path):
    for made in write(tmp_path):
        assert (FOLDER / made.name).read_text(encoding="utf-8") == made.read_text(encoding="utf-8"), f"run {COMMAND}"


def test_every_verb_has_a_section_with_its_options():
    sections = dict(part.split("\n", 1) for part in commands_page().split("\n## ")[1:])
    assert sorted(sections) == sorted(VERBS)
    assert "`raypipe train JOB [OPTIONS]`" in sections["train"]
    assert "| `--top K` | Number of plans to list [10]. |" in sections["autoconfigure"]
    assert "| `--steps STEPS` | Steps to run [5]. |" in sections["emulate"]
    assert "| `--resume` |" in sections["train"]


def test_every_section_of_a_file_has_a_table():
    text = keys_page(JOBS, JOB_SECTIONS)
    for spec in JOB_SECTIONS.values():
        for name, field in spec.model_fields.items():
            assert f"| `{field.alias or name}` |" in text
    assert "any value" not in text  # a section that a key refers to and that has no table


def test_a_field_has_the_docstring_below_it_and_that_of_its_base_class():
    result = field_docstrings(HfSpec)
    assert result["config"].startswith("Changes to the configuration")
    assert result["sequence"].startswith("Tokens per text sample")
    assert "model_config" not in result


def test_values_and_defaults_are_those_that_are_checked():
    text = keys_page(JOBS, JOB_SECTIONS)
    assert "| `dropout` | number >= 0, < 1 | `0.0` |" in text
    assert "| `concat` | `direct`, `doubling`, `halving` | `direct` |" in text
    assert "| `early_stop` | [train.early_stop](#trainearly_stop) or `null` | `null` |" in text
    assert "| `layers` | whole number >= 1 | required |" in text
