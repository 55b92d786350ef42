"""Start values from a local directory in Hugging Face's format; each stage reads only its own tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raypipe.capture.meta import needs_values, same_randomness, tied_names
from raypipe.errors import SpecError
from raypipe.files import read_json, short
from raypipe.models.start_values import StartValues

ONE = "model.safetensors"


class Unsaved:
    """The start values of a directory that holds no weights: enough to plan, and refused before a run begins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def notices(self) -> tuple[str, ...]:
        """Raise: a run asks for them before it starts.

        Raises:
            SpecError: the directory holds no weights.
        """
        fix = "use model.init: random to train from new weights, or save the model with transformers' save_pretrained"
        raise SpecError("model.hf", f"{self.directory} holds no {ONE}", fix)

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Raise, as ``notices``."""
        assert not self.notices
        return {}


class Saved:
    """Start values saved in ``model.safetensors``, or in several files with an index.

    They are what ``from_pretrained`` reads in the model's dtype. Parameters of a head that the files lack start with
    the values of ``others``.

    Args:
        directory: where the files are.
        skeleton: the model without memory and without adapters.
        others: start values of new parameters.
        before: names that the model which was saved has, of another class than ``skeleton``; None: of this class.
        renamed: maps a name to that of the model without adapters.

    Raises:
        SpecError: there are no such files; or a tensor is missing that is not of a new head, has another shape, or
            cannot be converted.
    """

    def __init__(
        self,
        directory: Path,
        skeleton: nn.Module,
        others: StartValues,
        before: Callable[[], Collection[str] | None] = lambda: None,
        renamed: Callable[[str], str] = str,
    ) -> None:
        self.directory, self.others, self.before, self.renamed = directory, others, before, renamed
        self.files = TensorFiles(directory, ONE)
        self.conversion = Conversion(skeleton, self.files.without_memory())
        self.names = {name: group for group in tied_names(skeleton, True) for name in group}
        self._check()

    @cached_property
    def new(self) -> tuple[str, ...]:
        """Parameters of a new head, which the files lack."""
        return tuple(sorted(self.conversion.report.missing_keys))

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what the user should know: names that are new, and saved tensors that the model does not have."""
        result = []
        if self.new:
            names = ", ".join(self.new)
            result.append(f"model.hf: {self.directory} lacks these parameters of a head, which start new: {names}")
        if unexpected := sorted(self.conversion.report.unexpected_keys):
            names = ", ".join(unexpected)
            result.append(f"model.hf: {self.directory} holds tensors that the model does not have, left out: {names}")
        return tuple(result)

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return values in the model's dtype; those that are not in the files, in the constructor's.

        Raises:
            SpecError: a file cannot be read, or holds different values of one tied parameter.
        """
        wanted = {name: key for name in (*parameters, *buffers) if (key := self._saved_name(name)) is not None}
        missing = [name for name in parameters if name not in wanted]
        result = self._load(wanted)
        return {**result, **self.others.read(missing, (), seed)} if missing else result

    def _saved_name(self, name: str) -> str | None:
        """Return the name, of those that are tied to this one, which the files fill."""
        base = self.renamed(name)
        return next((one for one in self.names.get(base, (base,)) if one in self.conversion.sources), None)

    def _load(self, wanted: Mapping[str, str]) -> dict[str, Tensor]:
        """Return values by their own names, given the names that the files fill."""
        made: dict[str, Tensor] = {}
        needed = {one for name in wanted.values() for one in self.names.get(name, (name,))}
        with self.files.reader() as read:
            for source in {self.conversion.sources[name] for name in needed if name in self.conversion.sources}:
                values = self.conversion.convert(source, read)
                made |= {name: value for name, value in values.items() if name in needed}
        self._check_conversion()
        for name in set(wanted.values()):
            for other in self.names.get(name, (name,)):
                if other in made and not torch.equal(made[other], made[name]):
                    why = f"{self.directory} holds different values for {name} and {other}, which the model ties"
                    raise SpecError("model.hf", why, "set model.config.tie_word_embeddings to false")
        settled = self.conversion.settled({key: made[key] for key in set(wanted.values())})
        return {name: settled[key] for name, key in wanted.items()}

    def _check(self) -> None:
        self._check_conversion()
        report = self.conversion.report
        if report.mismatched_keys:
            listed = "; ".join(
                f"{name} is {list(saved)} in the file and {list(own)} in the model"
                for name, saved, own in sorted(report.mismatched_keys)
            )
            fix = "correct model.config, so that the model is the one that was saved"
            raise SpecError("model.hf", f"{self.directory}: {listed}", fix)
        if not self.conversion.sources:
            raise SpecError("model.hf", f"{self.directory} holds none of the model's tensors", "check its config.json")
        if lost := [name for name in self.new if not self._of_new_head(name)]:
            why = f"{self.directory} holds no values of {', '.join(lost)}"
            raise SpecError("model.hf", why, "save the model again with transformers' save_pretrained")

    def _check_conversion(self) -> None:
        for name, why in self.conversion.report.conversion_errors.items():
            said = short(" ".join(str(why).split()), 300)
            raise SpecError("model.hf", f"{self.directory}: {name} cannot be converted: {said}", "save it again")

    @cached_property
    def _headless(self) -> bool:
        """Return whether the files fill nothing outside the model's base."""
        start = f"{self.conversion.model.base_model_prefix}."
        parts = {name for name, _ in self.conversion.model.named_parameters(remove_duplicate=False)}
        own = any(name.startswith(start) for name in parts)
        return own and not any(name in parts and not name.startswith(start) for name in self.conversion.sources)

    @cached_property
    def _before(self) -> Collection[str] | None:
        return self.before()

    def _of_new_head(self, name: str) -> bool:
        """Return whether the saved model cannot have had this parameter, so that no value of it was lost."""
        start = f"{self.conversion.model.base_model_prefix}."
        if self._headless and not name.startswith(start):
            return True
        if self._before is None:
            return False
        return not {name, name.removeprefix(start), start + name} & set(self._before)


# Which saved tensors make which of a model's parameters and buffers, by transformers' own rules.
#
# Names in files differ from a model's: layers were renamed, experts are saved one by one and held as one tensor, base
# models are saved without the prefix that models with heads give them. transformers has tables of these conversions,
# and the code that applies them loads a whole model. Here the same functions run twice: once on tensors without memory,
# to learn what makes what, and once per stage, on what makes its own parameters.
#
# Source: ``convert_and_load_state_dict_in_model`` in ``transformers.core_model_loading``, whose loop this follows.
Load = Callable[[str], Tensor]


class ConversionSource(NamedTuple):
    """Saved tensors that are converted together."""

    first: str
    """The first parameter or buffer that they make."""
    keys: tuple[str, ...]
    """Their names in the files, in the order in which transformers converts them."""
    patterns: tuple[str, ...]
    """Per name, the pattern of the converter that takes it; empty where the tensor is taken as it is."""


class Conversion:
    """The saved tensors that a model's parameters and buffers are made of.

    Args:
        model: a model of transformers without memory, in the dtype to read values in.
        saved: all saved tensors by their names in the files, without memory.
    """

    def __init__(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
        from transformers.utils.loading_report import LoadStateDictInfo

        whole: Any = model
        self.model = whole
        self.state: dict[str, Tensor] = model.state_dict()
        """Parameters and saved buffers by name; a tied parameter has several."""
        table = get_model_conversion_mapping(self.model)
        self._renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        self._converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        self.report: Any = LoadStateDictInfo(
            missing_keys=set(self.state),
            unexpected_keys=set(),
            mismatched_keys=set(),
            conversion_errors={},
            error_msgs=[],
            skipped_pp_keys=set(),
        )
        """transformers' own account: names that are missing, unexpected, of another shape, or failed."""
        self.sources: dict[str, ConversionSource] = {}
        """What makes each parameter or buffer."""
        for source in self._grouped(saved, converters):
            for name, value in self.convert(source, saved.__getitem__).items():
                if name not in self.state:
                    self.report.unexpected_keys.add(name)
                    continue
                self.sources[name] = source
                self.report.missing_keys.discard(name)
                if value.shape != self.state[name].shape:
                    self.report.mismatched_keys.add((name, value.shape, self.state[name].shape))
        for names in tied_names(self.model, True):
            if any(name in self.sources for name in names):
                self.report.missing_keys.difference_update(names)
            else:
                self.report.missing_keys.difference_update(names[1:])
        whole._adjust_missing_and_unexpected_keys(self.report)

    def _grouped(self, saved: Collection[str], converters: list[Any]) -> Iterable[ConversionSource]:
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        prefix = self.model.base_model_prefix
        groups: dict[str, list[tuple[str, str]]] = {}
        for key in sorted(saved, key=dot_natural_key):
            name, pattern = rename_source_key(key, self._renamings, converters, prefix, self.state)
            if name not in self.state and key in self.state:  # it should not have been renamed
                name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=self.state)
            if name in self.state:
                groups.setdefault(name, []).append((key, pattern or ""))
            elif pattern is None:
                self.report.unexpected_keys.add(name)
            else:
                targets = self._converter_of[pattern].target_patterns
                self.report.unexpected_keys.update(name.replace(targets[0], target) for target in targets)
        for name, members in groups.items():
            if not members[0][1]:
                members = members[:1]  # of several tensors of one name, the first is taken
            yield ConversionSource(name, tuple(key for key, _ in members), tuple(pattern for _, pattern in members))

    def convert(self, source: ConversionSource, load: Load) -> dict[str, Tensor]:
        """Return what is made of these tensors, by name; nothing if the conversion fails, which the report then says.

        ``load`` returns a saved tensor.
        """
        from transformers.core_model_loading import SkipParameters

        dtype = self.state[source.first].dtype
        if not source.patterns[0]:
            return {source.first: load(source.keys[0]).to(dtype)}
        converter = deepcopy(self._converter_of[source.patterns[0]])
        for key, pattern in zip(source.keys, source.patterns, strict=True):
            converter.add_tensor(source.first, key, pattern or key, load(key).to(dtype))
        try:
            made = converter.convert(source.first, model=self.model, config=self.model.config, loading_info=self.report)
        except SkipParameters:
            return {}
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def settled(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values that were read as they are once transformers has initialised what the files lack.

        It runs the model's own initialisation then, which leaves values alone that are marked as read. But some models
        set a part of one regardless, such as the row of a padding token.
        """
        model: Any = deepcopy(self.model)
        for part in model.modules():
            part._is_hf_initialized = False
        for name in self.state:
            model.get_parameter_or_buffer(name)._is_hf_initialized = True
        for name, value in values.items():
            parent, _, leaf = name.rpartition(".")
            part = model.get_submodule(parent)
            known = leaf in part._parameters
            held: Any = nn.Parameter(value, value.is_floating_point()) if known else value
            held._is_hf_initialized = True
            (part._parameters if known else part._buffers)[leaf] = held
        try:
            with same_randomness(0):
                model.initialize_weights()
        except Exception as error:  # whatever reads values that this stage lacks changes none that it read
            if not needs_values(error):
                raise
        return {name: model.get_parameter_or_buffer(name).detach() for name in values}


# The safetensors files of a directory: their tensors' shapes, and single tensors.
DTYPES = (
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
    | {"BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16}
    | {"I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64}
)
"""Dtypes as safetensors writes them; those that quantised models alone use are not read."""


class TensorFiles:
    """The tensors of one file, or of several with an index.

    Args:
        directory: where the files are.
        one: name of a single file; ``one`` with ``.index.json`` is that of an index.
        where: the job's key that gives the directory.

    Raises:
        SpecError: there are no such files, or they cannot be read.
    """

    def __init__(self, directory: Path, one: str, where: str = "model.hf") -> None:
        self.directory, self.where = directory, where
        self.index = f"{one}.index.json"
        self.files = self._listed(one)
        """The file that holds each tensor."""

    def _listed(self, one: str) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        try:
            if (self.directory / self.index).is_file():
                listed = dict(read_json(self.directory / self.index)["weight_map"])
                if not all(isinstance(file, str) and Path(file).name == file for file in listed.values()):
                    raise ValueError(f"{self.index} names a file outside the folder")
                return listed
            with safe_open(self.directory / one, framework="pt") as content:
                return dict.fromkeys(content.keys(), one)
        except FileNotFoundError:
            fix = "save the model with transformers' save_pretrained"
            raise SpecError(self.where, f"{self.directory} holds no {one}", fix) from None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            why = f"{self.directory}'s weights can't be read: {error}"
            raise SpecError(self.where, why, "save the model again") from None

    def without_memory(self) -> dict[str, Tensor]:
        """Return all tensors on the meta device.

        Raises:
            SpecError: a file cannot be read, or lacks a tensor that the index lists.
        """
        from safetensors import SafetensorError, safe_open

        result: dict[str, Tensor] = {}
        for file in dict.fromkeys(self.files.values()):
            try:
                with safe_open(self.directory / file, framework="pt") as content:
                    for key in set(content.keys()):
                        if self.files.get(key) == file:
                            part = content.get_slice(key)
                            result[key] = torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")
            except KeyError as error:
                why = f"{self.directory / file} holds values of type {error.args[0]}, as quantised models do"
                raise SpecError(self.where, why, "save the model in floating-point numbers") from None
            except (OSError, SafetensorError) as error:
                raise self._unreadable(file, error) from None
        if lost := [key for key in self.files if key not in result]:
            why = f"{self.directory / self.files[lost[0]]} lacks {', '.join(lost)}, which {self.index} lists"
            raise SpecError(self.where, why, "save the model again")
        return result

    @contextmanager
    def reader(self) -> Iterator[Callable[[str], Tensor]]:
        """Give a function that reads a tensor by name; each file is opened once, and closed at the end.

        Raises:
            SpecError: a file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        opened: dict[str, Any] = {}

        def read(key: str) -> Tensor:
            file = self.files[key]
            try:
                if file not in opened:
                    opened[file] = safe_open(self.directory / file, framework="pt")
                value: Tensor = opened[file].get_tensor(key)
            except (OSError, SafetensorError) as error:
                raise self._unreadable(file, error) from None
            return value

        try:
            yield read
        finally:
            opened.clear()

    def _unreadable(self, file: str, error: Exception) -> SpecError:
        return SpecError(self.where, f"{self.directory / file} can't be read: {error}", "save it again")
