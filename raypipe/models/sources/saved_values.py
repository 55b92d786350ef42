"""Start values from a local directory in Hugging Face's format; each stage reads only its own tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from raypipe.capture.meta import build_without_memory, tied_names
from raypipe.errors import SpecError
from raypipe.files import read_json
from raypipe.models.start_values import StartValues

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Saved:
    """Start values saved in ``model.safetensors``, or in several files with an index.

    Names in the files are the module's own, with or without ``prefix`` (that of the base model: ``transformer``).
    ``renamed`` maps a name to one that the files may have. Parameters that are not in the files, such as those of a new
    head, start with the values of ``others``.

    Raises:
        SpecError: there are no such files, or they hold none of the model's tensors.
    """

    def __init__(
        self, directory: Path, prefix: str, build: Callable[[], nn.Module], others: StartValues,
        renamed: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        self.directory, self.prefix, self.build, self.others = directory, prefix, build, others
        self.renamed = renamed
        self.files = _files(directory)
        self._aliases: dict[str, tuple[str, ...]] | None = None

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return values in the files' dtype; those that are not in the files, in the constructor's."""
        keys = {name: self.key(name) for name in (*parameters, *buffers)}
        found = self._load({name: key for name, key in keys.items() if key is not None})
        missing = [name for name in parameters if name not in found]
        if missing and not any(name in found for name in parameters) and not any(map(self.key, self._names())):
            raise SpecError("model.hf", f"{self.directory} holds none of the model's tensors", "check its config.json")
        return {**found, **self.others.read(missing, (), seed)} if missing else found

    def key(self, name: str) -> str | None:
        """Return the name of a parameter or buffer in the files; None if they do not hold it."""
        start = f"{self.prefix}."
        for alias in map(self.renamed, self._names().get(name, (name,))):
            for key in (alias, alias.removeprefix(start), start + alias):
                if key in self.files:
                    return key
        return None

    def _names(self) -> dict[str, tuple[str, ...]]:
        """Return all names of each parameter, by its first name."""
        if self._aliases is None:
            self._aliases = {group[0]: group for group in tied_names(build_without_memory(self.build))}
        return self._aliases

    def _load(self, keys: Mapping[str, str]) -> dict[str, Tensor]:
        from safetensors import SafetensorError, safe_open

        found: dict[str, Tensor] = {}
        for file in {self.files[key] for key in keys.values()}:
            try:
                with safe_open(self.directory / file, framework="pt") as content:
                    found |= {n: content.get_tensor(k) for n, k in keys.items() if self.files[k] == file}
            except (OSError, SafetensorError) as error:
                raise SpecError(
                    "model.hf", f"{self.directory / file} can't be read: {error}", "save it again"
                ) from None
        return found


def _files(directory: Path) -> dict[str, str]:
    """Return the file that holds each tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        if (directory / INDEX).is_file():
            listed = dict(read_json(directory / INDEX)["weight_map"])
            if not all(isinstance(file, str) and Path(file).name == file for file in listed.values()):
                raise ValueError(f"{INDEX} names a file outside the folder")
            return listed
        with safe_open(directory / ONE, framework="pt") as content:
            return dict.fromkeys(content.keys(), ONE)
    except FileNotFoundError:
        why = f"{directory} holds no {ONE}"
        raise SpecError("model.hf", why, "save the model with transformers' save_pretrained") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SpecError("model.hf", f"{directory}'s weights can't be read: {error}", "save the model again") from None
