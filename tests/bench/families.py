"""Every model family of the installed transformers: start values against ``from_pretrained``, and what is exported.

    python -m tests.bench.families [TYPE ...]

Of each family that can be built small from its configuration, a model is saved; the values that stages would start with
and the exported directory are compared with it bit for bit. Prints a row per family; those left out with the reason.
The exit status is 1 if a value differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from raypipe.models.sources.hugging_face import CLASSES
from tests.models.sources.saved_families import LeftOutError, compare, small_model


def types() -> list[str]:
    """Return the model types that raypipe has a task for."""
    tables = {name for names in CLASSES.values() for name in names}
    return sorted({kind for name in tables for kind in getattr(modeling_auto, name, {})})


def outcome(kind: str) -> str:
    """Return ``equal``, ``left out: REASON`` or what differs, of one family."""
    with tempfile.TemporaryDirectory(prefix="raypipe-family-") as folder:
        try:
            wrong = compare(small_model(kind), Path(folder))
        except LeftOutError as why:
            return f"left out: {why}"
        except Exception as error:  # a crash is what this command looks for
            wrong = [f"{type(error).__name__}: {error}"]
    return f"differs ({len(wrong)}): {'; '.join(wrong)[:400]}" if wrong else "equal"


def main() -> int:
    """Compare, and print a row per family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    asked = parser.parse_args().types or types()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts = {"equal": 0, "left": 0, "differs": 0}
    for kind in asked:
        said = outcome(kind)
        counts[said.split()[0]] += 1
        print(f"{kind:28} {said}", flush=True)
    print(f"{counts['equal']} of {len(asked)} families equal, {counts['differs']} not, {counts['left']} left out")
    return bool(counts["differs"])


if __name__ == "__main__":
    sys.exit(main())
