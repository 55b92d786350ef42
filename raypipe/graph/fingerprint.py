"""A fingerprint of everything that a captured model depends on: model code, configuration, versions, options.

Code is hashed by content, so that an edited model is captured again. Nothing is imported to find the code.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

ROOMS = Path(__file__).parent.parent
OWN_CODE = (ROOMS / "graph", ROOMS / "capture")
"""Folders of the code that captures; a change there may change the result."""
TENSOR_CODE = ROOMS / "tensor"
"""Folder of the code that divides layers before a divided model is captured."""
MODEL_CODE = ROOMS / "models"
"""Folder of the code that builds the modules that are captured."""
INSTALLED = {"site-packages", "dist-packages"}
"""Names of folders of installed packages, in any environment, since ``sys.path`` may contain several."""


class Identity(NamedTuple):
    """Everything a model's forward depends on; a cached capture is valid only while all of it is unchanged."""

    says: Any
    """The model's configuration or structure, as plain data."""
    code: Sequence[Path]
    """Source files, which are identified by their content."""
    packages: Sequence[str]
    """Installed packages, which are identified by their versions."""


def fingerprint(asked: Mapping[str, Any], code: Iterable[Path], packages: Iterable[str] = ("torch",)) -> str:
    """Hash the request, the content of code files and the versions of packages, with SHA-256.

    The code that captures and Python's version are always included.

    Args:
        asked: the request, as plain data.
        code: source files.
        packages: names of installed packages.
    """
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode())
    digest.update(f"python {sys.version_info[:2]}".encode())
    for package in sorted(packages):
        digest.update(f"{package} {_version(package)}".encode())
    own = [path for folder in OWN_CODE for path in sorted(folder.rglob("*.py"))]
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
    """Return the files of the transformers library that a model type's forward may use; [] without the library."""
    result = find_spec("transformers")
    if result is None or result.origin is None:
        return []
    root = Path(result.origin).parent
    folders = [root, root / "integrations", root / "models" / model_type.replace("-", "_")]
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def module_code(name: str) -> list[Path]:
    """Return the file of a module and of all modules that it imports, directly or indirectly.

    Installed packages are left out, because their versions identify them. [] if there is no such module.
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
    """Describe a constructed module as plain data: classes, plain attributes, parameters' shapes, buffers' values.

    Two modules with the same code and structure have the same forward, whatever files or variables their constructors
    read. Values of parameters are left out.
    """
    result: list[Any] = []
    for path, part in module.named_modules():
        plain = {key: data for key, value in vars(part).items() if (data := _plain(value)) is not None}
        result.append([path, f"{type(part).__module__}.{type(part).__qualname__}", plain])
    for name, parameter in module.named_parameters(remove_duplicate=False):
        result.append([name, list(parameter.shape), str(parameter.dtype), parameter.requires_grad])
    for name, buffer in module.named_buffers():
        value = "" if buffer.is_meta else hashlib.sha256(repr(buffer.tolist()).encode()).hexdigest()
        result.append([name, list(buffer.shape), str(buffer.dtype), value])
    return result


def _plain(value: object) -> Any:
    """Convert numbers, text and containers of these to JSON data; return None for anything else."""
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
        result = find_spec(module)
    except (ImportError, ValueError):
        return None
    if result is None or result.origin is None or not result.origin.endswith(".py"):
        return None
    path = Path(result.origin).resolve()
    if INSTALLED & set(path.parts):  # in any environment: the user's, a parent's, or one that a .pth file adds
        return None
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    return None if any(folder in path.parents for folder in installed) else path


def _imports(path: Path, module: str) -> list[str]:
    """Return the modules that a file may import, including imported names, which may be modules."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    result: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            result.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            result.extend([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return [name for name in result if name]
