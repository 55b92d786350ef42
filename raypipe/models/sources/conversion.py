"""Which saved tensors make which of a model's parameters and buffers, by transformers' own rules.

Names in files differ from a model's: layers were renamed, experts are saved one by one and held as one tensor, base
models are saved without the prefix that models with heads give them. transformers has tables of these conversions, and
the code that applies them loads a whole model. Here the same functions run twice: once on tensors without memory, to
learn what makes what, and once per stage, on what makes its own parameters.

Source: ``convert_and_load_state_dict_in_model`` in ``transformers.core_model_loading``, whose loop this follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from torch import Tensor, nn

from raypipe.capture.meta import needs_values, same_randomness

Load = Callable[[str], Tensor]


class Source(NamedTuple):
    """Saved tensors that are converted together."""

    first: str
    """The first parameter or buffer that they make."""
    keys: tuple[str, ...]
    """Their names in the files, in the order in which transformers converts them."""
    patterns: tuple[str, ...]
    """Per name, the pattern of the converter that takes it; empty where the tensor is taken as it is."""


class Conversion:
    """What a model's parameters and buffers are made of.

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
            missing_keys=set(self.state), unexpected_keys=set(), mismatched_keys=set(), conversion_errors={},
            error_msgs=[], skipped_pp_keys=set(),
        )  # fmt: skip
        """transformers' own account: names that are missing, unexpected, of another shape, or failed."""
        self.sources: dict[str, Source] = {}
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
        for names in tied(self.model):
            if any(name in self.sources for name in names):
                self.report.missing_keys.difference_update(names)
            else:
                self.report.missing_keys.difference_update(names[1:])
        whole._adjust_missing_and_unexpected_keys(self.report)

    def _grouped(self, saved: Collection[str], converters: list[Any]) -> Iterable[Source]:
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
            yield Source(name, tuple(key for key, _ in members), tuple(pattern for _, pattern in members))

    def convert(self, source: Source, load: Load) -> dict[str, Tensor]:
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


def tied(model: nn.Module) -> list[list[str]]:
    """Return all names of each parameter and buffer; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(value), []).append(name)
    return list(names.values())
