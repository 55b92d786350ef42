"""Everything that needs a GPU, in one report: ``python -m tests.bench.gpu --report FILE`` (``make gpu``).

Each section stands alone: one that fails is reported with its error, and the others still run. Without a GPU the
command says so and exits with 2. ``--device cpu`` rehearses the sections that have a CPU path, to show that they run.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.bench.command import options
from tests.bench.gpu.sections import SECTIONS, SkippedError


def main() -> int:
    args = options(__doc__, report=Path("gpu-report.json"), device="cuda", only=SECTIONS)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device. On a machine with one, use a torch built for "
            "CUDA (see the Makefile); --device cpu rehearses what can run here",
            file=sys.stderr,
        )
        return 2
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # on a busy machine more threads mostly wait for each other
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report: dict[str, object] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": name}
    failed = 0
    for title in args.only:
        begin = time.monotonic()
        try:
            found: dict[str, object] = {"ok": True, **SECTIONS[title](device)}
        except SkippedError as why:
            found = {"ok": None, "skipped": str(why)}
        except Exception as error:
            failed += 1
            found = {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        found["seconds"] = round(time.monotonic() - begin, 1)
        report[title] = found
        print(title, json.dumps({k: v for k, v in found.items() if k != "traceback"}), flush=True)
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{failed} of {len(args.only)} sections failed; the report is {args.report}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
