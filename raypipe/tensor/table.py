"""Feature tables say which layers of a family of models tensor parallelism divides, and along which dimension.

A table is a YAML file. The folder ``tables`` has those of the families that raypipe knows; ``parallel.tensor_table``
names another one.

Source: Merak section 4.1 (a dictionary of features per projection); transformers' ``base_model_tp_plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from raypipe.errors import SpecError
from raypipe.files import read_regular
from raypipe.job.reading import MOST_BYTES, parse_yaml

Kind = Literal["column", "row", "vocabulary", "head", "shared"]
FOLDER = Path(__file__).parent / "tables"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Feature(_Strict):
    """How one layer is divided."""

    kind: Kind
    """``column``: outputs; ``row``: inputs, followed by an all-reduce; ``vocabulary``: an embedding's rows; ``head``:
    outputs, followed by an all-gather; ``shared``: not divided, but used between column and row, so its gradients are
    summed."""
    units: tuple[str, ...] = ()
    """For a column: keys of the model's configuration that count its indivisible units (heads). A fused layer has one
    key per part, such as query, key and value."""


def _feature(value: object) -> object:
    """Expand the short forms ``row`` and ``{column: [num_attention_heads]}``."""
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, units),) = value.items()
        return {"kind": kind, "units": [units] if isinstance(units, str) else units}
    return value


def _names(value: object) -> object:
    return [value] if isinstance(value, str) else value


class FeatureTable(_Strict):
    """The divided layers of one family of models."""

    family: Annotated[str, Field(min_length=1)]
    model_types: Annotated[tuple[str, ...], BeforeValidator(_names)]
    """Values of ``model_type`` in the configurations that the table is for."""
    modules: dict[str, Annotated[Feature, BeforeValidator(_feature)]]
    """Divided layers by the end of a module's path; ``*`` matches within one component of the path."""
    attributes: dict[str, Annotated[tuple[str, ...], BeforeValidator(_names)]] = {}
    """Attributes of modules that are divided by T: numbers of heads, lengths of parts. Paths as in ``modules``."""


def matches(pattern: str, path: str) -> bool:
    """Return whether the end of a path matches a pattern.

    >>> matches("h.*.attn.c_attn", "transformer.h.11.attn.c_attn"), matches("fc1", "layers.0.not_fc1")
    (True, False)
    """
    wanted, parts = pattern.split("."), path.split(".")
    if len(wanted) > len(parts):
        return False
    return all(fnmatchcase(part, want) for part, want in zip(parts[-len(wanted) :], wanted, strict=True))


def load_table(path: Path) -> FeatureTable:
    """Read a feature table.

    Raises:
        SpecError: the file is missing or is not a feature table.
    """
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"is not text: {error}", "give a feature table; docs/guides/tensor.md") from None
    except OSError as error:
        raise SpecError(
            str(path), f"cannot be read: {error.strerror}", "give a feature table; docs/guides/tensor.md"
        ) from None
    try:
        return FeatureTable.model_validate(parse_yaml(text, str(path)))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        kinds = ", ".join(get_args(Kind))
        raise SpecError(
            f"{path}: {key}" if key else str(path),
            first["msg"],
            f"kinds are {kinds}; docs/guides/tensor.md shows a table",
        ) from None


@lru_cache(maxsize=1)
def known_tables() -> dict[str, FeatureTable]:
    """Return the tables that come with raypipe, by model type."""
    tables = [load_table(path) for path in sorted(FOLDER.glob("*.yaml"))]
    return {kind: table for table in tables for kind in table.model_types}


def table_for(model_type: str, own: Path | None = None) -> FeatureTable:
    """Return the table of a model type, or the one at ``own``.

    Raises:
        SpecError: raypipe has no table for the model type, or ``own`` cannot be read.
    """
    if own is not None:
        return load_table(own)
    tables = known_tables()
    if model_type not in tables:
        why = f"there is no feature table for {model_type}; known: {', '.join(sorted(tables))}"
        fix = "write one (docs/guides/tensor.md) and give it as parallel.tensor_table, or use tensor: 1"
        raise SpecError("parallel.tensor", why, fix)
    return tables[model_type]


def number(config: Any, key: str, path: str) -> int:
    """Read a count from a model's configuration; ``path`` is the layer's, for errors.

    Raises:
        SpecError: the configuration has no such number.
    """
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise SpecError(path, f"the model's configuration has no number {key}", "correct the table's units")
    return value
