"""Generate text or token ids with a trained language model in one process.

The model is a run's newest or best checkpoint, or a directory that transformers can load, such as one that
``raypipe export`` wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.data import known_fields, reads_bytes
from raypipe.errors import SpecError, install
from raypipe.files import expanded
from raypipe.job import GivenSpec, GptSpec, HfSpec, JobSpec
from raypipe.launch.run_directory import saved_job
from raypipe.models import random_keys
from raypipe.models.sources.hugging_face import HuggingFace, configuration
from raypipe.models.sources.imported import Imported
from raypipe.models.task import BYTES, NextToken
from raypipe.observe.run_dir import RECORD
from raypipe.trained import TOKENS, load_body, load_hugging_face

CONFIG = "config.json"
LONGEST = 1024
"""Context length of models that do not state theirs."""
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Names of the files that a tokenizer is loaded from."""
Logits = Callable[[list[int]], Tensor]
"""Maps the tokens so far to the logits of the next token, of shape ``[vocabulary]``."""


class Writer:
    """Generates text with the model of a run or of a directory that transformers can load.

    Args:
        directory: the directory of a run or of a model.
        tokenizer: a directory from which transformers loads a tokenizer.
        step: of the run's checkpoint; None for the newest or best.

    Raises:
        CheckpointError: the checkpoint of ``step``, or the best one, is damaged.
        SpecError: the directory holds neither a run with a checkpoint nor a model, the model is not a causal language
            model, or ``tokenizer`` holds no tokenizer.
    """

    def __init__(self, directory: Path, tokenizer: Path | None = None, step: int | None = None) -> None:
        self.directory, self._step = directory, step
        self.end: int | None = None
        """End-of-text token, if the model has one."""
        if not (directory / RECORD).exists() and (directory / CONFIG).is_file():
            if step is not None:
                raise SpecError("--step", f"{directory} is a model, which has no checkpoints", "name a run, or omit it")
            module = _exported(directory)
            self.tokenizer = _tokenizer(tokenizer or _with_tokenizer(directory))
            self.bytes = self.tokenizer is None and getattr(module.config, TOKENS, None) == "bytes"
            self._logits, self.window, self.vocabulary = self._of_transformers(module, None)
            return
        job = saved_job(directory)
        self.tokenizer = _tokenizer(tokenizer or _of_run(job))
        self.bytes = self.tokenizer is None and reads_bytes(job, directory / "data")
        """Whether tokens are bytes."""
        self._logits, self.window, self.vocabulary = self._load(job)

    def _load(self, job: JobSpec) -> tuple[Logits, int, int]:
        """Load the model of a run; return its logits function, context length and vocabulary size."""
        model = job.model
        fields = known_fields(self.directory / "data")
        if isinstance(model, GptSpec):
            return _of_layers(self.directory, self._step, "input_ids"), model.sequence, model.vocabulary
        tokens = (fields or {}).get("input_ids")
        sequence = model.sequence or (tokens.shape[0] if tokens is not None and tokens.shape else 1)
        if isinstance(model, GivenSpec):
            why = "is the run of a model instance, which only its script can construct"
            raise SpecError(str(self.directory), why, "generate in the script: the instance has the trained values")
        if not isinstance(model, HfSpec):
            kind = Imported(model)
            own = [name for name in fields or ("input_ids",) if "labels" not in name]
            _check_writes(self.directory, kind.spec.function, kind.task(fields, job.data.mask), own)
            return _of_layers(self.directory, self._step, own[0]), sequence, BYTES if fields is None else 1 << 62
        source = HuggingFace(model)
        task = None if source.task_name == "seq2seq" else source.task(fields, job.data.mask)
        _check_writes(self.directory, f"{source.config.model_type}, trained for {source.task_name},", task)
        _, module = load_hugging_face(self.directory, job, model, self._step)
        return self._of_transformers(module, sequence)

    def _of_transformers(self, module: Any, sequence: int | None) -> tuple[Logits, int, int]:
        """Return the same for a transformers module; ``sequence`` is the training length in tokens, if known."""
        text = module.config.get_text_config(decoder=True)
        if not self.bytes:
            self.end = text.eos_token_id if isinstance(text.eos_token_id, int) else None
        longest = getattr(text, "max_position_embeddings", None) or sequence or LONGEST
        return _of_module(module.eval()), min(sequence or longest, longest), int(text.vocab_size)

    def text(self, prompt: str, length: int, temperature: float, seed: int) -> str:
        """Return ``prompt`` and ``length`` more tokens as text; characters that cannot be printed become U+FFFD.

        Raises:
            SpecError: the prompt is empty, or the model has no tokenizer.
        """
        if self.bytes:
            made = self.ids(list(prompt.encode()) or [0], length, temperature, seed, "--prompt")
            text = bytes(t for t in made if 0 < t < BYTES).decode(errors="replace")
        elif self.tokenizer is not None:
            given = self.tokenizer.encode(prompt, add_special_tokens=False)
            if not given:
                raise SpecError("--prompt", "contains no token", "give some text to continue")
            made = self.ids(given, length, temperature, seed, "--tokenizer")
            text = self.tokenizer.decode(made, skip_special_tokens=True)
        else:
            why = f"{self.directory} has no tokenizer, so text cannot be converted to tokens"
            raise SpecError("--prompt", why, "give --tokenizer DIR, or token ids: --ids 1,2,3")
        # An untrained model also generates control characters, which must not reach the terminal.
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)

    def ids(self, given: Sequence[int], length: int, temperature: float, seed: int, option: str = "--ids") -> list[int]:
        """Return the ``given`` tokens and up to ``length`` more; with temperature 0, always the likeliest token.

        ``option`` is what gave them, which an error names.

        Raises:
            SpecError: a given token is not in the vocabulary.
        """
        wrong = next((t for t in given if not 0 <= t < self.vocabulary), None)
        if wrong is not None:
            raise SpecError(option, f"token {wrong} is beyond the vocabulary of {self.vocabulary}", "use others")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the work per token is too small to be divided over threads
        generator, tokens = torch.Generator().manual_seed(seed), list(given)
        try:
            with torch.no_grad():
                while len(tokens) < len(given) + length:
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
    """Generate text as ``Writer.text`` does, with the tokenizer of the run."""
    return Writer(directory).text(prompt, length, temperature, seed)


def _of_layers(directory: Path, step: int | None, field: str) -> Logits:
    _, body = load_body(directory, step)

    def logits(tokens: list[int]) -> Tensor:
        with random_keys(0, 0, [], training=False):
            outputs: tuple[Tensor, ...] = body((), {field: torch.tensor([tokens])})
        return outputs[0][0, -1]

    return logits


def _of_module(module: nn.Module) -> Logits:
    def logits(tokens: list[int]) -> Tensor:
        result: Tensor = module(input_ids=torch.tensor([tokens])).logits[0, -1]
        return result

    return logits


def _check_writes(directory: Path, what: str, task: object, inputs: Sequence[str] = ("input_ids",)) -> None:
    """Refuse a model that does not predict the next token, or that needs other inputs than the tokens."""
    fix = "sample a run of a causal language model, or `raypipe export` this one"
    if not isinstance(task, NextToken):
        raise SpecError(str(directory), f"{what} is not a causal language model", fix)
    if len(inputs) != 1:
        raise SpecError(str(directory), f"{what} needs {', '.join(inputs)}, but sampling provides only tokens", fix)


def _exported(directory: Path) -> Any:
    """Load the causal language model from a directory that ``raypipe export`` or transformers wrote."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        raise SpecError(str(directory), "needs transformers, which is not installed", install("hf")) from None
    config = configuration(str(directory), {})
    named = (config.architectures or [None])[0]
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if causal is None or named not in (None, causal):
        why = f"holds a {named or config.model_type}, which is not a causal language model"
        raise SpecError(str(directory), why, "sample a causal language model")
    try:
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise SpecError(str(directory), f"holds a model that cannot be loaded: {first}", "export it again") from None


def _of_run(job: JobSpec) -> Path | None:
    """The directory of the tokenizer that made the run's tokens, if it is known; None where they are bytes."""
    if job.data.tokenizer is not None:
        place = expanded(Path(job.data.tokenizer))
        return place if place.is_dir() else place.parent
    tokens = job.data.type == "arrays" or (job.data.type == "documents" and job.data.column != "text")
    return _with_tokenizer(Path(job.model.hf)) if isinstance(job.model, HfSpec) and tokens else None


def _with_tokenizer(directory: Path) -> Path | None:
    return directory if (directory / "tokenizer_config.json").is_file() else None


def _tokenizer(directory: Path | None) -> Any:
    """Load the tokenizer from a directory; None if no directory is given."""
    if directory is None:
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise SpecError("--tokenizer", "needs transformers, which is not installed", install("hf")) from None
    # Of a configuration alone, transformers makes a tokenizer without tokens.
    if directory.is_dir() and not any(fnmatch(file.name, one) for file in directory.iterdir() for one in TOKENIZERS):
        raise SpecError("--tokenizer", f"{directory} holds no tokenizer", "give its directory")
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise SpecError("--tokenizer", f"{directory} holds no tokenizer: {first}", "give its directory") from None
