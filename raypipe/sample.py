"""Text, or token ids, from a trained language model: a run's newest checkpoint, or its best one, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.data import known_fields
from raypipe.errors import SpecError
from raypipe.job import GptSpec, HfSpec, JobSpec
from raypipe.models import random_keys
from raypipe.models.hugging_face import HuggingFace
from raypipe.models.imported import Imported
from raypipe.models.task import BYTES, NextToken
from raypipe.train import saved_job
from raypipe.trained import load_body, load_hugging_face

Logits = Callable[[list[int]], Tensor]
"""What a model makes of the tokens so far: ``[vocabulary]``, of the one that follows."""


class Writer:
    """A trained model that writes; ``tokenizer`` is a directory that transformers reads one from.

    Raises:
        SpecError: no run, no checkpoint, a model that does not write, or no tokenizer there.
    """

    def __init__(self, directory: Path, tokenizer: Path | None = None) -> None:
        self.directory, self.job = directory, saved_job(directory)
        self.tokenizer = _tokenizer(self.job, tokenizer)
        self.bytes = self.tokenizer is None and self.job.data.type != "arrays"
        """Tokens are bytes."""
        self.end: int | None = None
        """Token after which nothing follows."""
        self._logits, self.window, self.vocabulary = self._load()

    def _load(self) -> tuple[Logits, int, int]:
        """The model, most tokens it looks back on, and how many it knows."""
        job, model = self.job, self.job.model
        fields = known_fields(self.directory / "data")
        if isinstance(model, GptSpec):
            return _of_layers(self.directory, "input_ids"), model.sequence, model.vocabulary
        tokens = (fields or {}).get("input_ids")
        sequence = model.sequence or (tokens.shape[0] if tokens is not None and tokens.shape else 1)
        if not isinstance(model, HfSpec):
            kind = Imported(model)
            own = [name for name in fields or ("input_ids",) if "labels" not in name]
            _check_writes(self.directory, kind.spec.function, kind.task(fields, job.data.mask), own)
            return _of_layers(self.directory, own[0]), sequence, BYTES if fields is None else 1 << 62
        source = HuggingFace(model)
        task = None if source.task_name == "seq2seq" else source.task(fields, job.data.mask)
        _check_writes(self.directory, f"{source.config.model_type}, trained for {source.task_name},", task)
        source, module = load_hugging_face(self.directory, job, model)
        text = source.config.get_text_config(decoder=True)
        if not self.bytes:
            self.end = text.eos_token_id if isinstance(text.eos_token_id, int) else None
        longest = getattr(text, "max_position_embeddings", None) or sequence
        return _of_module(module.eval()), min(sequence, longest), int(text.vocab_size)

    def text(self, prompt: str, length: int, temperature: float, seed: int) -> str:
        """``prompt`` and ``length`` more tokens as text; what cannot be shown is U+FFFD."""
        if self.bytes:
            made = self.ids(list(prompt.encode()) or [0], length, temperature, seed)
            text = bytes(t for t in made if 0 < t < BYTES).decode(errors="replace")
        elif self.tokenizer is not None:
            begun = self.tokenizer.encode(prompt, add_special_tokens=False)
            if not begun:
                raise SpecError("--prompt", "holds no token", "give some text to go on from")
            text = self.tokenizer.decode(self.ids(begun, length, temperature, seed), skip_special_tokens=True)
        else:
            why = "the run read arrays, and what its tokens mean is not known"
            raise SpecError("--prompt", why, "give --tokenizer DIR, or token ids: --ids 1,2,3")
        # An untrained model writes control characters too; a terminal must not obey them.
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)

    def ids(self, begun: Sequence[int], length: int, temperature: float, seed: int) -> list[int]:
        """``begun`` and up to ``length`` more tokens; with a temperature of 0 the likeliest each time.

        Raises:
            SpecError: a token that the model does not know.
        """
        wrong = next((t for t in begun if not 0 <= t < self.vocabulary), None)
        if wrong is not None:
            raise SpecError("--prompt", f"token {wrong} is beyond the vocabulary of {self.vocabulary}", "use others")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # one short window at a time: more threads only wait for each other
        generator, tokens = torch.Generator().manual_seed(seed), list(begun)
        try:
            with torch.no_grad():
                while len(tokens) < len(begun) + length:
                    logits = self._logits(tokens[-self.window :]).float()
                    if temperature == 0:
                        tokens.append(int(logits.argmax()))
                    else:
                        odds = torch.softmax(logits / temperature, dim=0)
                        tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
                    if tokens[-1] == self.end:
                        break
        finally:
            torch.set_num_threads(threads)
        return tokens


def sample_text(directory: Path, prompt: str, length: int, temperature: float, seed: int) -> str:
    """As ``Writer.text``, with what the run itself says of its tokens."""
    return Writer(directory).text(prompt, length, temperature, seed)


def _of_layers(directory: Path, field: str) -> Logits:
    _, body = load_body(directory)

    def logits(tokens: list[int]) -> Tensor:
        with random_keys(0, 0, [], training=False):
            outputs: tuple[Tensor, ...] = body((), {field: torch.tensor([tokens])})
        return outputs[0][0, -1]

    return logits


def _of_module(module: nn.Module) -> Logits:
    def logits(tokens: list[int]) -> Tensor:
        found: Tensor = module(input_ids=torch.tensor([tokens])).logits[0, -1]
        return found

    return logits


def _check_writes(directory: Path, what: str, task: object, inputs: Sequence[str] = ("input_ids",)) -> None:
    """Refuse what does not say which token comes next, or needs more than the tokens for it."""
    fix = "sample a run of a causal language model, or `raypipe export` this one"
    if not isinstance(task, NextToken):
        raise SpecError(str(directory), f"{what} does not write text token by token", fix)
    if len(inputs) != 1:
        raise SpecError(str(directory), f"{what} needs {', '.join(inputs)}, and only tokens are here", fix)


def _tokenizer(job: JobSpec, directory: Path | None) -> Any:
    """The tokenizer in a directory, or in the model's own where the run read arrays; None if there is none."""
    if directory is None:
        own = Path(job.model.hf) if isinstance(job.model, HfSpec) and job.data.type == "arrays" else None
        if own is None or not (own / "tokenizer_config.json").is_file():
            return None
        directory = own
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise SpecError("--tokenizer", f"{directory} holds no tokenizer: {first}", "give its directory") from None
