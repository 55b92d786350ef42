"""``raypipe export``: write a trained Hugging Face model for transformers to load, or its adapters for peft."""

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
    step: Annotated[int | None, typer.Option(help="Write the checkpoint of this step, not the newest.")] = None,
) -> None:
    """Write the model of the newest checkpoint (with train.load_best_at_end: the best) for from_pretrained.

    Of a run with model.lora, write the adapters, for peft.PeftModel.from_pretrained.
    """
    from raypipe.export import export as write

    print(write(run_dir, output, step))
