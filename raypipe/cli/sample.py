"""``raypipe sample``: let a trained model write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run of `raypipe train`.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "def ",
    ids: Annotated[str | None, typer.Option(help="Token ids to go on from, 1,2,3; ids are printed.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, where the run's tokens are no bytes.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Bytes, or tokens, to write.")] = 400,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest every time.")] = 0.6,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same.")] = 0,
) -> None:
    """Write text with a trained language model: the newest checkpoint of a run."""
    from raypipe.errors import SpecError
    from raypipe.sample import Writer

    writer = Writer(run_dir, tokenizer)
    if ids is None:
        print(writer.text(prompt, length, temperature, seed))
        return
    try:
        begun = [int(part) for part in ids.split(",")]
    except ValueError:
        raise SpecError("--ids", f'"{ids}" is no list of whole numbers', "write 1,2,3") from None
    print(",".join(map(str, writer.ids(begun, length, temperature, seed))))
