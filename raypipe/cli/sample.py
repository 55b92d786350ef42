"""``raypipe sample``: let a trained model write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run of `raypipe train`.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "def ",
    length: Annotated[int, typer.Option(min=1, help="Bytes to write.")] = 400,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest byte every time.")] = 0.6,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
) -> None:
    """Write text with the newest (with train.load_best_at_end: the best) checkpoint of a run."""
    from raypipe.sample import sample_text

    print(sample_text(run_dir, prompt, length, temperature, seed))
