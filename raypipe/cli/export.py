"""``raypipe export``: write a trained Hugging Face model to a directory that transformers can load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import output as named


def export(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run of `raypipe train` with model: {hf: ...}.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", parser=named("--output"), help="Directory to write; it must be new or empty."),
    ],
) -> None:
    """Write the model of the newest checkpoint (with train.load_best_at_end: the best) for from_pretrained."""
    from raypipe.export import export as write

    print(write(run_dir, output))
