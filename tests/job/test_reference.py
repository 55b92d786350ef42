"""The pages about job and cluster files say what the specs say."""

from pathlib import Path

from raypipe.job import reference
from raypipe.job.model_spec import HfSpec
from raypipe.job.reference import COMMAND, field_docstrings, page

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def test_the_pages_are_up_to_date(tmp_path):
    for made in reference.write(tmp_path):
        assert (FOLDER / made.name).read_text(encoding="utf-8") == made.read_text(encoding="utf-8"), f"run {COMMAND}"


def test_every_section_of_a_file_has_a_table():
    text = page(reference.JOBS, reference.JOB_SECTIONS)
    for spec in reference.JOB_SECTIONS.values():
        for name, field in spec.model_fields.items():
            assert f"| `{field.alias or name}` |" in text
    assert "any value" not in text  # a section that a key refers to and that has no table


def test_a_field_has_the_docstring_below_it_and_that_of_its_base_class():
    found = field_docstrings(HfSpec)
    assert found["config"].startswith("Changes to the configuration")
    assert found["sequence"].startswith("Tokens per text sample")
    assert "model_config" not in found


def test_values_and_defaults_are_those_that_are_checked():
    text = page(reference.JOBS, reference.JOB_SECTIONS)
    assert "| `dropout` | number >= 0, < 1 | `0.0` |" in text
    assert "| `concat` | `direct`, `doubling`, `halving` | `direct` |" in text
    assert "| `early_stop` | [train.early_stop](#trainearly_stop) or `null` | `null` |" in text
    assert "| `layers` | whole number >= 1 | required |" in text
