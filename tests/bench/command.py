"""The command line of a bench: its options from their defaults, its docstring for help."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def options(doc: str | None, names: Collection[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """Read the options of the module that runs, one for each keyword.

    A number, text or path is a default of that type, ``False`` a flag, and a type an option without a default; a tuple
    is some texts, and a mapping offers its keys, of which all are the default. ``names``: positional, and may be empty.
    """
    spec = sys.modules["__main__"].__spec__
    prog = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
    parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names is not None:
        parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME")
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(option, type=default)
        elif isinstance(default, Mapping):
            parser.add_argument(option, nargs="+", choices=list(default), default=list(default))
        elif isinstance(default, tuple):
            parser.add_argument(option, nargs="+", default=list(default))
        else:
            parser.add_argument(option, type=type(default), default=default)
    return parser.parse_args()


def write_rows(file: Path | None, rows: object) -> None:
    """Write figures as JSON, where a file was asked for."""
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
