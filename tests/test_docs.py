"""What the documentation points to exists: links and headings, modules after `python -m`, paths of the repository.

Also the documentation that the code points to, in its errors and docstrings.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    *(ROOT / "raypipe").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "jobs").iterdir(),
    *(ROOT / "cluster").rglob("*.*"), *(ROOT / "dashboards").rglob("*.*"), ROOT / "Makefile",
]  # fmt: skip
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
MODULE = re.compile(r"(?:python -m\s+|`)((?:raypipe|tests)(?:\.\w+)*)(?=[`\s])")
PATH = re.compile(r"(?<![\w/.~*-])((?:raypipe|tests|jobs|cluster|dashboards|docs)/[\w./*-]*)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    result = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        there = page.parent / target if target else page
        if not there.exists():
            result.append(f"link to {target}, which does not exist")
        elif anchor and anchor[1:] not in anchors(there):
            result.append(f"link to {target}{anchor}: that page has no such heading")
    return result


def defines(module: Path, name: str) -> bool:
    """Whether a module has a class, function or constant of that name, or imports one: `raypipe.PipelineTrainer`."""
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return file.is_file() and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) is not None


def missing_modules(page: Path) -> list[str]:
    result = []
    for name in sorted(set(MODULE.findall(page.read_text(encoding="utf-8")))):
        file = ROOT.joinpath(*name.split("."))
        if not (file.is_dir() or file.with_suffix(".py").is_file() or defines(file.parent, file.name)):
            result.append(f"module {name}, which does not exist")
    return result


def missing_paths(text: str, only: str = "") -> list[str]:
    result = []
    for name in sorted({path.rstrip(".") for path in PATH.findall(text) if path.startswith(only)}):
        here = any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists() or (ROOT / f"{name}.py").exists()
        if not here:
            result.append(f"path {name}, which does not exist")
    return result


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_points_to_exists(page: Path) -> None:
    wrong = broken_links(page) + missing_modules(page) + missing_paths(page.read_text(encoding="utf-8"))
    assert not wrong, "\n  ".join([f"{page.relative_to(ROOT)} mentions", *wrong])


def test_the_documentation_that_the_code_points_to_exists() -> None:
    wrong = [
        f"{source.relative_to(ROOT)} mentions {each}"
        for source in SOURCES
        if source.is_file() and source != Path(__file__)
        for each in missing_paths(source.read_text(encoding="utf-8"), only="docs/")
    ]
    assert not wrong, "\n  ".join(["", *wrong])


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        todo += [page.parent / target for target, _ in LINK.findall(page.read_text(encoding="utf-8")) if target]
    assert not {page.resolve() for page in PAGES} - seen


def test_the_readme_takes_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_checks_find_what_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, here\n[a](page.md#a-heading-here) [b](#none) [c](gone.md)\n"
        "`python -m tests.bench.gone` `tests.bench.gone_too` `raypipe.PipelineTrainer` "
        "`tests/gone/test_*.py` jobs/gone.yaml."
    )
    assert broken_links(page) == [
        "link to #none: that page has no such heading",
        "link to gone.md, which does not exist",
    ]
    assert [each.split(",")[0] for each in missing_modules(page)] == [
        "module tests.bench.gone", "module tests.bench.gone_too",
    ]  # fmt: skip
    assert [each.split(",")[0] for each in missing_paths(page.read_text())] == [
        "path jobs/gone.yaml", "path tests/gone/test_*.py",
    ]  # fmt: skip


def test_the_map_of_the_code_names_files_that_are_there() -> None:
    """CONTRIBUTING.md writes paths below raypipe/ without it, of packages and of files in one that the row names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_/]*(?:\w+\.py)?)`", text))
    below = {name for name in named if (ROOT / "raypipe" / name.split("/")[0]).is_dir()}
    assert len(below) > 20
    assert not [name for name in sorted(below) if not any((ROOT / "raypipe").glob(f"**/{name}"))]


def test_the_walk_from_the_command_to_a_forward_is_that_of_the_code() -> None:
    """Each file of the list has the name that the list gives it, and one before it uses that name."""
    page = (ROOT / "docs" / "reference" / "how-it-works.md").read_text(encoding="utf-8")
    walk = re.findall(r"^\d+\. `([\w/.]+)`: `(\w+)`", page, re.MULTILINE)
    assert len(walk) == 9
    before = ""
    for path, name in walk:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), f"{path} defines no {name}"
        assert not before or re.search(rf"\b{name}\b", before), f"{path}: {name} is not used by a file before it"
        before += text
