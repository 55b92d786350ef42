"""``raypipe sample``: let a trained model write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LONGEST = 100_000
"""Tokens: minutes on a CPU."""
HOTTEST, COLDEST = 100.0, 1e-4


def sample(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run of `raypipe train`, or of `raypipe export`.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "def ",
    ids: Annotated[str | None, typer.Option(help="Token ids to go on from, 1,2,3; ids are printed.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, where the model's tokens are no bytes.")
    ] = None,
    length: Annotated[int, typer.Option(help="Bytes, or tokens, to write; at most 100000.")] = 400,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest every time; at most 100.")] = 0.6,
    seed: Annotated[int, typer.Option(help="The same seed writes the same.")] = 0,
) -> None:
    """Write text with a trained language model: the newest checkpoint of a run, or an exported model."""
    from raypipe.errors import SpecError
    from raypipe.sample import Writer

    bounds = (
        ("--length", length, 1, LONGEST, "the text is printed when it is whole"),
        ("--temperature", temperature, 0, HOTTEST, "above, all tokens are as likely"),
        ("--seed", seed, 0, 2**63 - 1, "torch's generators take no other"),
    )
    for option, value, least, most, why in bounds:
        if not least <= value <= most:
            near = least if value < least else most
            raise SpecError(option, f"{value} is not from {least} to {most}: {why}", f"use {near}")
    if 0 < temperature < COLDEST:
        raise SpecError(
            "--temperature", f"{temperature} is too close to 0 to divide by", f"use 0, or {COLDEST} or more"
        )
    writer = Writer(run_dir, tokenizer)
    if ids is None:
        print(writer.text(prompt, length, temperature, seed))
        return
    try:
        begun = [int(part) for part in ids.split(",")]
    except ValueError:
        raise SpecError("--ids", f'"{ids}" is no list of whole numbers', "write 1,2,3") from None
    print(",".join(map(str, writer.ids(begun, length, temperature, seed))))
