"""Models of the transformers library: their configuration, their class and task, and their start values."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from raypipe.capture.meta import build_without_memory
from raypipe.compat.transformers_private import construct
from raypipe.errors import SpecError, install, nearest
from raypipe.files import short
from raypipe.graph.fingerprint import Identity, transformers_code
from raypipe.job import HfSpec
from raypipe.job.model_spec import TaskName
from raypipe.models.losses import LossFunction, contrastive
from raypipe.models.sources.adapters import AdapterValues, SavedAdapters, with_adapters, without_adapters
from raypipe.models.sources.saved_values import Saved, Unsaved
from raypipe.models.start_values import Constructed, StartValues
from raypipe.models.task import (
    BYTES,
    Field,
    Labels,
    MaskedToken,
    NextToken,
    Pixels,
    Sequences,
    SeveralLabels,
    Task,
    Transcript,
    Values,
)

CLASSES: dict[TaskName, tuple[str, ...]] = {
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "masked-lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    "classification": (
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ),
    "regression": (
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "segmentation": ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",),
    "ctc": ("MODEL_FOR_CTC_MAPPING_NAMES",),
    "contrastive": ("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",),
}
"""transformers' tables of classes by model type. A model is trained for the first task whose tables contain it."""

NEEDED: dict[str, tuple[str, str, str]] = {
    "switch_transformers": (
        "attention_mask",
        "transformers' own forward of it fails without one",
        "add an array attention_mask of ones, [rows, tokens]",
    ),
    "paligemma": (
        "token_type_ids",
        "without them transformers' masks differ between a traced model and an eager one",
        "add token_type_ids: 0 for the image and the prompt, 1 for the answer",
    ),
}
"""Per model type, an array that it cannot do without although its forward does not require it; why, what to do."""


class HuggingFace:
    """A model given as ``model: {hf: TYPE_OR_DIRECTORY, config: {...}}``.

    Raises:
        SpecError: transformers is not installed; the type, directory or a configuration key does not exist; or there
            is no class for the task.
    """

    outputs: Sequence[str] | None = ("logits",)

    def __init__(self, spec: HfSpec) -> None:
        try:
            self.config = configuration(spec.hf, spec.config)
        except ImportError:
            raise SpecError("model.hf", "needs transformers, which is not installed", install("hf")) from None
        self.spec = spec
        self.kind, self.task_name = _class_and_task(self.config, spec)
        two = self.task_name == "contrastive"
        # Its own code takes the number of samples as fixed: arange(len(logits)).
        self.loss: LossFunction | None = (
            contrastive if two and hasattr(sys.modules[self.kind.__module__], "contrastive_loss") else None
        )
        self.own_loss = two and (self.loss is None or spec.loss == "model")
        self.constants: Mapping[str, object] = {"return_loss": True} if self.own_loss else {}

    def build(self) -> nn.Module:
        """Construct the model with random weights.

        Raises:
            SpecError: transformers cannot construct it with this configuration.
        """
        module = self._construct(self.kind)
        return module if self.spec.lora is None else with_adapters(module, self.spec.lora)

    def _construct(self, kind: Any) -> nn.Module:
        try:
            # In float32 whatever precision the directory has, because the job chooses the precision.
            module: nn.Module = construct(kind, self.config)
        except Exception as error:  # the library's models raise many classes
            said = short(" ".join(str(error).split()) or type(error).__name__, 300)
            why = f"{kind.__name__} cannot be constructed with this configuration: {said}"
            raise SpecError("model.config", why, "correct its keys; each model type has its own") from error
        return module

    def identity(self, build: Callable[[], nn.Module]) -> Identity:
        """Return the model's class, its configuration but for where it was read, and the library's code."""
        says = [self.kind.__name__, self.config.to_dict() | {"_name_or_path": ""}]
        packages = ("torch", "transformers", *(() if self.spec.lora is None else ("peft",)))
        return Identity(says, transformers_code(self.config.model_type), packages)

    def task(self, arrays: Mapping[str, Field] | None, mask: float) -> Task:
        """Return the task of the model's class."""
        task = self._task(arrays, mask)
        text = self.config.get_text_config()
        padding = getattr(text, "pad_token_id", None)
        if isinstance(padding, int) and 0 <= padding < getattr(text, "vocab_size", 0):
            task.padding = padding
        return task

    def _task(self, arrays: Mapping[str, Field] | None, mask: float) -> Task:
        config = self.config
        if config.model_type in NEEDED:
            name, why, fix = NEEDED[config.model_type]
            if name not in (arrays or {}):
                raise SpecError("data", f"a {config.model_type} model needs {name}: {why}", fix)
        if arrays is None:
            self._check_bytes()
        else:
            for name, field in arrays.items():
                if name.endswith("input_ids") and "decoder" not in name and field.shape:
                    longest = field.shape[0]
                    fix = "shorten it, or raise model.config.max_position_embeddings"
                    self._check_positions("data", f"the longest row has {longest} {name}", longest, fix)
        if self.task_name == "causal-lm":
            return NextToken(arrays if arrays is not None else ("shift_labels",))
        if self.task_name == "masked-lm":
            return MaskedToken(BYTES, mask)
        if self.task_name == "seq2seq":
            return Sequences(config.decoder_start_token_id, config.pad_token_id)
        if self.task_name == "ctc":
            layers = zip(getattr(config, "conv_kernel", ()), getattr(config, "conv_stride", ()), strict=False)
            return Transcript(config.pad_token_id, bool(config.ctc_zero_infinity), tuple(layers), arrays or ())
        if self.task_name == "segmentation":
            return Pixels(int(getattr(config, "semantic_loss_ignore_index", 255)))
        labels = (arrays or {}).get("labels") if self.spec.loss == "task" else None
        return task_of_labels(self.kind.__name__, config, self.spec.task, labels)

    def _check_bytes(self) -> None:
        text = self.config.get_text_config()
        needed = BYTES + (self.task_name == "masked-lm")
        known = getattr(text, "vocab_size", needed)
        if known < needed:
            more = ", and one more for the mask" if needed > BYTES else ""
            why = f"{known}, but text is read as bytes, which take {BYTES} values{more}"
            raise SpecError("model.config.vocab_size", why, f"use {needed} or more")
        if (given := self.spec.sequence) is not None:
            fix = "shorten it, or raise model.config.max_position_embeddings"
            self._check_positions("model.sequence", str(given), given, fix)

    def _check_positions(self, where: str, what: str, tokens: int, fix: str) -> None:
        text = self.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        if positions is None or positions < 0:  # XLNet's are relative, which it says with -1
            return
        if "roberta" in text.model_type:  # its positions begin after the padding token's index
            positions -= text.pad_token_id + 1
        if tokens > positions:
            raise SpecError(where, f"{what}, but the model has positions for {positions}", fix)

    def values(self, build: Callable[[], nn.Module]) -> StartValues:
        """Return random start values for a model type, and for ``init: random``; else those that a directory holds.

        Raises:
            SpecError: the directory's files do not hold the model's values.
        """
        directory, adapters = Path(self.spec.hf), self.spec.adapters
        values: StartValues = Constructed(build) if self.spec.lora is None else AdapterValues(Constructed(build))
        if not directory.is_dir() or self.spec.init == "random":
            return values
        if not any(directory.glob("*.safetensors*")):
            return Unsaved(directory)
        skeleton = whole = build_without_memory(build)
        if self.spec.lora is not None:
            dtype = next(value.dtype for value in whole.parameters() if value.is_floating_point())
            skeleton = build_without_memory(lambda: self._construct(self.kind)).to(dtype)
        values = Saved(directory, skeleton, values, self._names_before, without_adapters)
        return values if adapters is None else SavedAdapters(Path(adapters), whole, values)

    def _names_before(self) -> Collection[str] | None:
        """Return what the saved model has, where the directory names another class than the job takes."""
        import transformers

        saved = (saved_config(Path(self.spec.hf)).get("architectures") or [None])[0]
        if saved is None or saved == self.kind.__name__ or not hasattr(transformers, saved):
            return None
        return build_without_memory(lambda: self._construct(getattr(transformers, saved))).state_dict()


def _class_and_task(config: Any, spec: HfSpec) -> tuple[Any, TaskName]:
    import transformers
    from transformers.models.auto import modeling_auto

    tables = {task: [getattr(modeling_auto, name, {}) for name in names] for task, names in CLASSES.items()}
    own = (config.architectures or [None])[0] if Path(spec.hf).is_dir() else None
    for task, options in tables.items():
        if spec.task not in (None, task):
            continue
        for table in options:
            name = table.get(config.model_type)
            names = name if isinstance(name, tuple | list) else [name]
            if own is not None and own not in names and own not in table.values():
                continue
            result = own if own is not None else names[0]
            if result is not None and hasattr(transformers, result):
                return getattr(transformers, result), task
    what = f"a {config.model_type} model" if own is None else own
    if spec.task is not None:
        fix = "leave model.task out, or use another model"
        raise SpecError("model.task", f"{what} can't be trained for {spec.task}", fix)
    tasks = ", ".join(CLASSES)
    raise SpecError(
        "model.hf",
        f"{what} has no class for any of {tasks}",
        "use a language or image model, or give it with model.import and a function in model.loss",
    )


# What a model of transformers with a classification head learns: classes, several labels, or values.
#
# The library decides it at the first mini-batch, by ``problem_type`` of the configuration, or else by the number of
# labels and their dtype. Here it is decided by the data's fields, before anything starts.
REGRESSION, ONE_CLASS, SEVERAL = "regression", "single_label_classification", "multi_label_classification"
TASKS: dict[str, Callable[[], Task]] = {REGRESSION: Values, ONE_CLASS: Labels, SEVERAL: SeveralLabels}


def task_of_labels(kind: str, config: Any, asked: TaskName | None, labels: Field | None) -> Task:
    """Return the task of a head, as transformers' ``ForSequenceClassificationLoss`` chooses it.

    Args:
        kind: name of the model's class.
        config: its configuration.
        asked: ``model.task``.
        labels: the data's labels; None if it has none, which another check names.

    Raises:
        SpecError: labels have a shape or a dtype that the head's loss does not take, or the job contradicts itself.
    """
    if "TokenClassification" in kind:
        return Labels()
    said = config.problem_type
    if asked == "regression":
        if said not in (None, REGRESSION):
            why = f"regression, but the model's problem_type is {said}"
            raise SpecError("model.task", why, "leave model.task out, or change model.config.problem_type")
        said = REGRESSION
    if said is None and config.num_labels == 1:
        said = REGRESSION
    if said is None:
        said = ONE_CLASS if labels is None or not labels.dtype.is_floating_point else SEVERAL
    if labels is not None:
        _check(said, int(config.num_labels), labels)
    return TASKS[said]()


def _check(problem: str, count: int, labels: Field) -> None:
    """Raise an error if labels do not fit the problem type; ``count`` is ``num_labels``."""
    dtype = str(labels.dtype).removeprefix("torch.")
    shape, floating, one = labels.shape, labels.dtype.is_floating_point, labels.shape in ((), (1,))
    has = f"labels hold {dtype} of shape {['rows', *shape]}".replace("'", "")
    if problem == REGRESSION:
        fits, takes = one if count == 1 else shape == (count,), "one number" if count == 1 else f"{count} numbers"
        if not fits:
            fix = f"give labels of shape [rows{'' if count == 1 else f', {count}'}], or set num_labels"
            raise SpecError("data", f"{has}, and the model's head learns {takes} a row (regression)", fix)
        return
    if problem == SEVERAL:
        if floating and shape == (count,):
            return
        fix = f"give floats, 0 or 1, of shape [rows, {count}]"
        if one:
            fix += ", or whole numbers of shape [rows] for one of several classes"
        raise SpecError("data", f"{has}, and the model's head learns {count} labels a row ({SEVERAL})", fix)
    if floating or not one:
        fix = f"give whole numbers of shape [rows]; for several labels a row, floats of shape [rows, {count}]"
        raise SpecError("data", f"{has}, and the model's head learns one of {count} classes a row ({ONE_CLASS})", fix)


# Configurations: a model is named by its type (``gpt2``), which gets the library's default configuration with the given
# changes, or by a local directory with a ``config.json``. Nothing is downloaded.
_TAKEN = re.compile(r"""kwargs\.(?:pop|get)\(\s*["'](\w+)""")
_READ = re.compile(r"""\bconfig\.(\w+)(?!\w|\s*=[^=])|attr\(\s*(?:self\.)?config,\s*["'](\w+)""")


def configuration(model: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Make the configuration of a model type or of a local directory, with changes, and with the KV cache off.

    Raises:
        SpecError: the library does not know the type, or a key of its configuration.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    make: Callable[..., Any]
    if Path(model).is_dir():
        make = partial(AutoConfig.from_pretrained, model, local_files_only=True)
    elif model in CONFIG_MAPPING_NAMES:
        make = partial(AutoConfig.for_model, model)
    else:
        why = f'"{model}" is neither a model type nor a local directory'
        raise SpecError("model.hf", why, nearest(model, CONFIG_MAPPING_NAMES))
    config = _made(make, model)
    known = _known(config, Path(model))
    for key in changes or {}:
        if key not in known:
            raise SpecError(f"model.config.{key}", f"{model} has no such key", nearest(key, known))
    if changes:
        config = _made(partial(make, **changes), model, "model.config")
    for part in (config, config.get_text_config()):  # a language model inside another has a switch of its own
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(
            config, "pad_token_id", None
        )  # as in the published checkpoints of these types
    return config


def _known(config: Any, directory: Path) -> set[str]:
    """Return the keys that a configuration may have.

    These are the declared ones, older names that the constructor converts into these (``rope_theta``), those of the
    directory's own file, and those that the type's code reads though no class declares them, such as ``head_dim``. A
    configuration made of several is read in its parts, whose keys are not its own.
    """
    kind = type(config)
    known = {*config.to_dict(), *config.attribute_map, *inspect.signature(kind).parameters}
    known |= {"num_labels"} if hasattr(config, "id2label") else set()  # kept as a table of names
    if (directory / "config.json").is_file():
        known |= set(saved_config(directory))
    named = [vars(owner).get(name) for owner in kind.__mro__ for name in ("__init__", "__post_init__")]
    taken = {key for function in named for key in _keys_taken(function)}
    rope = _keys_taken(getattr(kind, "convert_rope_params_to_dict", None))
    known |= taken | rope if hasattr(config, "rope_parameters") else taken - rope
    if not config.sub_configs:
        known |= _read_in(Path(inspect.getfile(kind)).parent)
    other = kind.model_type, "self", "args", "kwargs"
    return {key for key in known if key[0] != "_" and key not in other and not callable(getattr(kind, key, None))}


@cache
def _read_in(directory: Path) -> frozenset[str]:
    """Return the keys of a configuration that the models of a directory of transformers read."""
    files = (file.read_text(encoding="utf-8") for file in directory.glob("model*.py"))
    return frozenset(key for text in files for pair in _READ.findall(text) for key in pair if key)


def _keys_taken(function: Any) -> set[str]:
    """Return the names that a function of transformers takes out of its ``kwargs``."""
    if not inspect.isfunction(function) or not function.__module__.startswith("transformers."):
        return set()
    try:
        return set(_TAKEN.findall(inspect.getsource(function)))
    except OSError:  # made by a decorator
        return set()


def saved_config(directory: Path) -> dict[str, Any]:
    """Return the content of a directory's ``config.json`` as transformers reads it: numbers may be infinite."""
    from transformers import PreTrainedConfig

    result: dict[str, Any] = PreTrainedConfig.get_config_dict(str(directory), local_files_only=True)[0]
    return result


def _made(make: Callable[[], Any], model: str, where: str = "model.hf") -> Any:
    try:
        return make()
    except Exception as error:  # the library and its dependencies raise many classes
        if not (Path(model) / "config.json").is_file() and Path(model).is_dir():
            run = (Path(model) / "checkpoints").is_dir()
            fix = f"export it: raypipe export {model} -o DIR, and give DIR" if run else "give a directory that has one"
            what = "is a run of raypipe and not a model" if run else "holds no model"
            raise SpecError(where, f"{model} {what} that transformers reads: it has no config.json", fix) from None
        first = " ".join(str(error).split()) or type(error).__name__
        raise SpecError(where, f"{model}: {short(first, 300)}", "correct the configuration") from None
