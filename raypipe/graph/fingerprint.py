"""One number for everything that what is captured follows from: model code, configuration, versions, options.

Code is taken by content, so that an edited model is captured again. Nothing is imported to find it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ROOMS = Path(__file__).parent.parent
OWN_CODE = (ROOMS / "graph", ROOMS / "capture")
"""What captures: a change in these folders may change what comes out."""
TENSOR_CODE = ROOMS / "tensor"
"""What divides layers, before a divided model is captured."""
MODEL_CODE = ROOMS / "models"
"""What builds the modules that are captured."""
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, wherever they are: this environment's are not the only ones on ``sys.path``."""


def fingerprint(asked: Mapping[str, Any], code: Iterable[Path], packages: Iterable[str] = ("torch",)) -> str:
    """SHA-256 of what is asked for (plain data), of the content of these files, and of the versions of packages.

    This package's own code and Python's version are always included.
    """
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode())
    digest.update(f"python {sys.version_info[:2]}".encode())
    for package in sorted(packages):
        digest.update(f"{package} {_version(package)}".encode())
    own = [path for folder in OWN_CODE for path in sorted(folder.glob("*.py"))]
    for path in [*own, *sorted(set(code))]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}".encode())
        digest.update(content)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def transformers_code(model_type: str) -> list[Path]:
    """The files of the transformers library that a model type's forward runs through; [] without the library."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return []
    root = Path(found.origin).parent
    folders = [root, root / "integrations", root / "models" / model_type.replace("-", "_")]
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def module_code(name: str) -> list[Path]:
    """The file of a module and of every module it imports, however far away, that belongs to no installed package.

    Installed ones are known by their versions. [] if there is no such module.
    """
    seen: dict[Path, None] = {}
    todo = [name]
    tried: set[str] = set()
    while todo:
        module = todo.pop()
        if module in tried:
            continue
        tried.add(module)
        path = _own_file(module)
        if path is None or path in seen:
            continue
        seen[path] = None
        todo.extend(_imports(path, module))
    return list(seen)


def structure(module: nn.Module) -> list[Any]:
    """What a constructed module says of itself, as plain data: classes, plain attributes, parameters' shapes, buffers.

    Two modules of the same code and structure have the same forward, whatever files or variables their constructors
    read. Values of parameters do not count, those of buffers do.
    """
    found: list[Any] = []
    for path, part in module.named_modules():
        plain = {key: said for key, value in vars(part).items() if (said := _plain(value)) is not None}
        found.append([path, f"{type(part).__module__}.{type(part).__qualname__}", plain])
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.append([name, list(parameter.shape), str(parameter.dtype), parameter.requires_grad])
    for name, buffer in module.named_buffers():
        value = "" if buffer.is_meta else hashlib.sha256(repr(buffer.tolist()).encode()).hexdigest()
        found.append([name, list(buffer.shape), str(buffer.dtype), value])
    return found


def _plain(value: object) -> Any:
    """Numbers, text and containers of these as JSON has them; None for anything else."""
    if isinstance(value, bool | int | float | str):
        return value if not isinstance(value, float) else repr(value)
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in value]
        return items if None not in items else None
    if isinstance(value, Mapping):
        entries = {str(key): _plain(item) for key, item in value.items()}
        return entries if entries and None not in entries.values() else None
    return repr(value) if is_dataclass(value) and not isinstance(value, type) else None


def _own_file(module: str) -> Path | None:
    try:
        found = find_spec(module)
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    path = Path(found.origin).resolve()
    if INSTALLED & set(path.parts):  # also the user's own, a parent environment's, or one that a .pth file names
        return None
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    return None if any(folder in path.parents for folder in installed) else path


def _imports(path: Path, module: str) -> list[str]:
    """Modules that a file may import: every dotted prefix, and each imported name, which may be a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.extend([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return [name for name in found if name]
