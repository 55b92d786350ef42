"""Sampling from checkpoints of a session, by transformers' ``generate`` in the server's process: for small models.

It is no inference engine: one request at a time, on CPU, in float32. What trains a large model samples elsewhere, from
the safetensors that ``save_weights_for_sampler`` writes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from raypipe.errors import SpecError
from raypipe.job.model_spec import HfSpec
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.runtime.session.slots import WEIGHTS

MOST_SAMPLES = 256
"""Continuations of one request."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for continuations of a prompt."""

    prompt: Sequence[int]
    count: int = 1
    tokens: int | None = None
    """Largest number of tokens of each; None for as many as the model's sequence has room for."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[int] | None = None
    """Tokens that end a continuation; None for the model's own end of a text."""
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation."""

    tokens: NDArray[np.int32]
    """With the token that ended it."""
    logprobs: NDArray[np.float32]
    """Of each token by the model as it is trained: at temperature 1, among all tokens."""
    stopped: bool
    """Whether a token ended it, and not its length."""


class Sampler:
    """The model of a job in this process, with the weights of the checkpoint that was sampled from last.

    Args:
        job: the job; its model is one of transformers.
        longest: most tokens of a prompt and its continuation.
        vocabulary: number of tokens that the model knows.
    """

    def __init__(self, job: JobSpec, longest: int, vocabulary: int) -> None:
        self._job, self._longest, self._vocabulary = job, longest, vocabulary
        self._model: Any = None
        self._loaded: Path | None = None
        self._lock = threading.Lock()

    def check(self, asked: SampleRequest) -> None:
        """Refuse a request that cannot be met.

        Raises:
            SpecError: a token or a number is out of range.
        """
        prompt = asked.prompt
        if not 1 <= len(prompt) < self._longest:
            why = f"has {len(prompt)} tokens; the model has room for {self._longest} with the continuation"
            raise SpecError("prompt", why, "shorten it, or serve a job with a larger model.sequence")
        for name, tokens in (("prompt", prompt), ("sampling_params.stop", asked.stop or ())):
            if wrong := [token for token in tokens if not 0 <= token < self._vocabulary]:
                raise SpecError(name, f"holds token {wrong[0]}; there are {self._vocabulary}", "use the model's tokens")
        for name, value, least, most in (
            ("num_samples", asked.count, 1, MOST_SAMPLES),
            ("sampling_params.max_tokens", 1 if asked.tokens is None else asked.tokens, 1, 1 << 30),
            ("sampling_params.temperature", asked.temperature, 0.0, 100.0),
            ("sampling_params.top_p", asked.top_p, 1e-6, 1.0),
            ("sampling_params.top_k", asked.top_k, -1, 1 << 30),
            ("sampling_params.seed", asked.seed or 0, 0, (1 << 63) - 1),
        ):
            if not least <= value <= most:
                raise SpecError(name, f"is {value}", f"use {least:g} to {most:g}")

    @torch.no_grad()
    def sample(self, folder: Path, asked: SampleRequest) -> tuple[list[Continuation], NDArray[np.float32] | None]:
        """Return continuations by the weights in a folder, and the prompt's log-probabilities where they are asked for.

        The first token of a prompt has none: not a number.
        """
        with self._lock, torch.random.fork_rng(devices=[]):
            model = self._with_weights(folder)
            prompt = torch.tensor([list(asked.prompt)])
            known = None
            if asked.prompt_logprobs:
                each = model(input_ids=prompt).logits[0, :-1].float().log_softmax(-1)
                own = each.gather(-1, prompt[0, 1:, None])[:, 0].numpy()
                known = np.concatenate([np.full(1, np.nan, np.float32), own])
            if asked.seed is not None:
                torch.manual_seed(asked.seed)
            else:
                torch.seed()  # the generator is put back after every request, so that all would draw the same
            room = self._longest - len(asked.prompt)
            ends = model.generation_config.eos_token_id if asked.stop is None else list(asked.stop)
            ends = [ends] if isinstance(ends, int) else ends
            made = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=asked.temperature > 0,
                **({"temperature": asked.temperature, "top_p": asked.top_p} if asked.temperature > 0 else {}),
                top_k=max(0, asked.top_k),
                max_new_tokens=min(room, asked.tokens or room),
                num_return_sequences=asked.count,
                eos_token_id=ends or None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            each = torch.stack(made.logits, 1).float().log_softmax(-1)  # [count, tokens, vocabulary]
            rows = made.sequences[:, len(asked.prompt) :]
            logprobs = each.gather(-1, rows[..., None])[..., 0]
            return [_ended(*one, ends or ()) for one in zip(rows, logprobs, strict=True)], known

    def _with_weights(self, folder: Path) -> Any:
        if self._model is None:
            spec, train = self._job.model, self._job.train
            assert isinstance(spec, HfSpec)
            self._model = HuggingFace(spec).build().float().eval()
            layers = build_model(self._job, None, 0)
            start = layers.build_stage(range(layers.count), train.seed).named()
            self._model.load_state_dict(start, strict=False)  # what is trained, and what adapters leave frozen
        if folder != self._loaded:
            for file in sorted(folder.glob(f"{WEIGHTS}-*.safetensors")):
                self._model.load_state_dict(load_file(file), strict=False)
            self._loaded = folder
        return self._model


def _ended(row: torch.Tensor, logprobs: torch.Tensor, ends: Sequence[int]) -> Continuation:
    tokens = row.tolist()
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    stopped = bool(length) and tokens[length - 1] in ends
    return Continuation(np.array(tokens[:length], np.int32), logprobs[:length].numpy().astype(np.float32), stopped)
