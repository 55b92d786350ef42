"""The exact judge and the random cases of ``tests/auto``, for benchmarks.

``tests/auto`` isn't a package (pytest imports its files by path), so they are found by path here too.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "auto"))
judge = importlib.import_module("judge").judge
random_case = importlib.import_module("conftest").random_case
