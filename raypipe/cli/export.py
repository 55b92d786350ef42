"""``raypipe export``: a trained Hugging Face model as a directory that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import output as named


def export(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run of `raypipe train` with model: {hf: ...}.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", parser=named("--output"), help="Directory to write; must not be there yet."),
    ],
) -> None:
    """Write the newest (with train.load_best_at_end: the best) checkpoint's model for from_pretrained."""
    from raypipe.export import export as write

    print(write(run_dir, output))
