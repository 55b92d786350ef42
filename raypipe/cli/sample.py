"""``raypipe sample``: generate text with a trained language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LONGEST = 100_000
"""Largest number of tokens, which takes minutes on a CPU."""
HOTTEST, COLDEST = 100.0, 1e-4


def sample(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run of `raypipe train`, or of `raypipe export`.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    ids: Annotated[
        str | None, typer.Option(help="Token ids to continue, such as 1,2,3; token ids are printed.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, if the model's tokens are not bytes.")
    ] = None,
    length: Annotated[int, typer.Option(help="Number of bytes or tokens to generate; at most 100000.")] = 400,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature, at most 100; 0 always takes the likeliest token.")
    ] = 0.6,
    step: Annotated[int | None, typer.Option(help="Use the checkpoint of this step, not the newest.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
) -> None:
    """Generate text with a trained language model: the newest checkpoint of a run, or an exported model."""
    from raypipe.errors import SpecError
    from raypipe.sample import Writer

    bounds = (
        ("--length", length, 1, LONGEST, "the text is printed when it is complete"),
        ("--temperature", temperature, 0, HOTTEST, "above, all tokens are about equally likely"),
        ("--seed", seed, 0, 2**63 - 1, "torch's generators accept no other seed"),
    )
    for option, value, least, most, why in bounds:
        if not least <= value <= most:
            near = least if value < least else most
            raise SpecError(option, f"{value} is not from {least} to {most}: {why}", f"use {near}")
    if 0 < temperature < COLDEST:
        raise SpecError(
            "--temperature", f"{temperature} is too close to 0 to divide by", f"use 0, or {COLDEST} or more"
        )
    writer = Writer(run_dir, tokenizer, step)
    if ids is None:
        print(writer.text(prompt, length, temperature, seed))
        return
    try:
        given = [int(part) for part in ids.split(",")]
    except ValueError:
        raise SpecError("--ids", f'"{ids}" is not a list of whole numbers', "write 1,2,3") from None
    print(",".join(map(str, writer.ids(given, length, temperature, seed))))
