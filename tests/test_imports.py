"""Imports point one way, and the planning half needs neither torch nor Ray (read from the source, nothing imported)."""

import ast
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "raypipe"
LAYERS = [
    "errors", "signals", "files", "machine_code", "schedule", "simulate", "search", "job", "cost",
    "graph", "plan", "explain", "compat", "checkpoint", "tensor", "capture", "models", "data", "partition", "observe",
    "runtime", "profiling", "launch", "new_job", "train", "trained", "sample", "trainer", "service", "cli",
    "__main__",
]  # fmt: skip
"""The rooms, in the order that data flows through them."""
RUNTIME = [
    "transport", "process", "backward", "stage", "update", "setup", "hosts", "executor", "compiled", "graphs",
    "state", "recovery", "worker", "saving", "driver", "cluster", "emulation", "session",
]  # fmt: skip
"""The rooms of ``runtime``, in their order; the files beside them are the driver's."""
PLANNING = {
    "errors", "signals", "files", "machine_code", "schedule", "simulate", "search", "cost", "graph",
    "plan",
    "explain", "job", "observe",
}  # fmt: skip
HEAVY = {"torch", "ray"}
MOST = 16
"""Files side by side in one folder, ``__init__.py`` not counted."""
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imports(path: Path, type_checking: bool = False) -> set[str]:
    """Absolute names of what the file imports: modules, and names in them; with ``type_checking``, such blocks too."""
    result: set[str] = set()
    package = ["raypipe", *path.relative_to(ROOT).parts[:-1]]
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if not type_checking and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            result.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        todo.extend(ast.iter_child_nodes(node))
    return result


def raypipe_layers(path: Path) -> set[str]:
    names = [name.split(".") for name in imports(path)]
    return {parts[1] for parts in names if parts[0] == "raypipe" and len(parts) > 1 and parts[1] in LAYERS}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_point_up_the_list(path: Path) -> None:
    here = layer_of(path)
    assert here in LAYERS, f"{here} has no place in the order of layers"
    for used in raypipe_layers(path):
        assert LAYERS.index(used) <= LAYERS.index(here), f"{path} reaches down into {used}"


def runtime_room(parts: Sequence[str]) -> str:
    """Return the room of a module below ``runtime``, given by the names on the way to it."""
    return parts[0] if (ROOT / "runtime" / parts[0]).is_dir() else "driver"


@pytest.mark.parametrize("path", [p for p in FILES if layer_of(p) == "runtime"], ids=lambda p: str(p.relative_to(ROOT)))
def test_runtime_has_rooms_in_an_order_too(path: Path) -> None:
    """Type-checking imports count: whoever needs to know a room stands on top of it."""
    here = runtime_room(path.relative_to(ROOT / "runtime").parts)
    assert here in RUNTIME, f"{here} has no place in the order of runtime's rooms"
    for name in imports(path, type_checking=True):
        if name.startswith("raypipe.runtime."):
            used = runtime_room(name.split(".")[2:])
            assert RUNTIME.index(used) <= RUNTIME.index(here), f"{path} reaches down into {used}"


@pytest.mark.parametrize("folder", sorted({p.parent for p in FILES}), ids=lambda p: str(p.relative_to(ROOT)))
def test_folders_stay_small(folder: Path) -> None:
    files = [p for p in folder.glob("*.py") if p.name != "__init__.py"]
    assert len(files) <= MOST, f"{folder} holds {len(files)} files: what in it belongs together?"


@pytest.mark.parametrize("path", [p for p in FILES if layer_of(p) in PLANNING], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_planning_half_reaches_neither_torch_nor_ray(path: Path) -> None:
    """Directly, or through a module of raypipe that it imports, however far away."""
    seen: set[Path] = set()
    todo: list[tuple[Path, str]] = [(path, path.name)]
    while todo:
        file, chain = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imports(file):
            top, *rest = name.split(".")
            assert top not in HEAVY, f"{chain} imports {name}"
            if top != "raypipe":
                continue
            for depth in range(len(rest) + 1):  # importing a.b.c runs a and a.b first
                module = ROOT.joinpath(*rest[:depth])
                for target in (module / "__init__.py", module.with_suffix(".py")):
                    if target.is_file():
                        todo.append((target, f"{chain} -> {target.relative_to(ROOT)}"))


def imported_files(path: Path) -> set[Path]:
    """Files of raypipe that the file imports at its top, in a function or for type checking.

    The ``__init__.py`` of the rooms on the way does not count, as in Python: it may be half imported by then.
    """
    names = imports(path, type_checking=True)
    result: set[Path] = set()
    for name in names:
        top, *rest = name.split(".")
        module = ROOT.joinpath(*rest)
        for file in (module / "__init__.py", module.with_suffix(".py")):
            # `from a import b` is of the module b where there is one, and of a otherwise.
            if top == "raypipe" and file.is_file() and not (file.name == "__init__.py" and only_passed(name, names)):
                result.add(file)
    return result - {path}


def only_passed(package: str, names: set[str]) -> bool:
    """Whether all that is imported of a package are modules in it."""
    inside = [name for name in names if name.rpartition(".")[0] == package]
    return bool(inside) and all(
        (ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")).is_file()
        or ROOT.joinpath(*name.split(".")[1:], "__init__.py").is_file()
        for name in inside
    )


def circles(files: Iterable[Path]) -> list[list[str]]:
    """The groups of files that import each other, however far around."""
    uses = {file: imported_files(file) for file in files}

    def reached(start: Path) -> set[Path]:
        seen: set[Path] = set()
        todo = list(uses[start])
        while todo:
            if (file := todo.pop()) not in seen:
                seen.add(file)
                todo.extend(uses.get(file, ()))
        return seen

    reach = {file: reached(file) for file in uses}
    groups = {frozenset(o for o in reach[f] if o in reach and f in reach[o]) for f in uses if f in reach[f]}
    return sorted(sorted(str(file.relative_to(ROOT)) for file in group) for group in groups)


@pytest.mark.slow
def test_no_files_import_each_other() -> None:
    """Type-checking imports count: two files that need each other's types are one idea, or three."""
    result = circles([ROOT / "__init__.py", *FILES])
    assert not result, f"circles of imports: {result}"


def test_the_check_of_circles_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "raypipe"
    (root / "job").mkdir(parents=True)
    for name, text in {
        "__init__": "from raypipe.job.a import A", "a": "if TYPE_CHECKING:\n    from raypipe.job.b import B",
        "b": "def f():\n    from raypipe.job import c", "c": "import raypipe.job.a", "d": "from raypipe.job.a import A",
    }.items():  # fmt: skip
        (root / "job" / f"{name}.py").write_text(text)
    monkeypatch.setattr(f"{__name__}.ROOT", root)
    assert circles(sorted(root.rglob("*.py"))) == [["job/a.py", "job/b.py", "job/c.py"]]


def test_the_check_itself_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "raypipe"
    (root / "schedule").mkdir(parents=True)
    file = root / "schedule" / "x.py"
    file.write_text("import ray.train\nfrom raypipe import cli\ndef f():\n    from ..runtime import y\n")
    monkeypatch.setattr(f"{__name__}.ROOT", root)
    assert {"ray.train", "raypipe.cli", "raypipe.runtime.y"} <= imports(file)
