"""Start values from a local directory in Hugging Face's format; each stage reads only its own tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.files import short
from raypipe.models.sources.conversion import Conversion, tied
from raypipe.models.sources.tensor_files import TensorFiles
from raypipe.models.start_values import StartValues

ONE = "model.safetensors"


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
        self, directory: Path, skeleton: nn.Module, others: StartValues,
        before: Callable[[], Collection[str] | None] = lambda: None, renamed: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        self.directory, self.others, self.before, self.renamed = directory, others, before, renamed
        self.files = TensorFiles(directory, ONE)
        self.conversion = Conversion(skeleton, self.files.without_memory())
        self.names = {name: tuple(group) for group in tied(skeleton) for name in group}
        self._check()

    @cached_property
    def new(self) -> tuple[str, ...]:
        """Parameters of a new head, which the files lack."""
        return tuple(sorted(self.conversion.report.missing_keys))

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know: names that are new, and saved tensors that the model does not have."""
        found = []
        if self.new:
            names = ", ".join(self.new)
            found.append(f"model.hf: {self.directory} lacks these parameters of a head, which start new: {names}")
        if unexpected := sorted(self.conversion.report.unexpected_keys):
            names = ", ".join(unexpected)
            found.append(f"model.hf: {self.directory} holds tensors that the model does not have, left out: {names}")
        return tuple(found)

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return values in the model's dtype; those that are not in the files, in the constructor's.

        Raises:
            SpecError: a file cannot be read, or holds different values of one tied parameter.
        """
        wanted = {name: key for name in (*parameters, *buffers) if (key := self._saved_name(name)) is not None}
        missing = [name for name in parameters if name not in wanted]
        found = self._load(wanted)
        return {**found, **self.others.read(missing, (), seed)} if missing else found

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
        """Whether the files fill nothing outside the model's base."""
        start = f"{self.conversion.model.base_model_prefix}."
        parts = {name for name, _ in self.conversion.model.named_parameters(remove_duplicate=False)}
        own = any(name.startswith(start) for name in parts)
        return own and not any(name in parts and not name.startswith(start) for name in self.conversion.sources)

    @cached_property
    def _before(self) -> Collection[str] | None:
        return self.before()

    def _of_new_head(self, name: str) -> bool:
        """Whether the saved model cannot have had this parameter, so that no value of it was lost."""
        start = f"{self.conversion.model.base_model_prefix}."
        if self._headless and not name.startswith(start):
            return True
        if self._before is None:
            return False
        return not {name, name.removeprefix(start), start + name} & set(self._before)
