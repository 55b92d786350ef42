"""Everything that needs a GPU, section by section into a folder: ``python -m tests.bench.gpu --report FOLDER``.

``make gpu`` runs it. Each section is a process of its own that has eight minutes, and its file is written when it ends:
one that fails, hangs or breaks its GPU's context is reported with its error, and the next one begins. ``report.json``
has all of them. Without a GPU the command says so and exits with 2. ``--device cpu`` rehearses the sections that have a
CPU path, to show that they run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.bench.command import options
from tests.bench.gpu.sections import SECTIONS, SkippedError

SECTION_S = 480.0
"""Seconds that a section has."""
LEAVE_S = 20.0
"""Seconds that it then has to end what it has started."""


def main() -> int:
    args = options(__doc__, report=Path("gpu-report"), device="cuda", only=SECTIONS, here=False, limit_s=SECTION_S)
    if args.here:
        (title,) = args.only
        device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
        _write(args.report / f"{title}.json", run_here(title, device))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device. On a machine with one, use a torch built for "
            "CUDA (see the Makefile); --device cpu rehearses what can run here",
            file=sys.stderr,
        )
        return 2
    args.report.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    report: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": name}
    for title in args.only:
        report[title] = result = run_apart(title, args.device, args.report, args.limit_s)
        print(title, json.dumps({k: v for k, v in result.items() if k != "traceback"}), flush=True)
        _write(args.report / "report.json", report)
    failed = sum(report[title]["ok"] is False for title in args.only)
    print(f"{failed} of {len(args.only)} sections failed; the report is {args.report / 'report.json'}")
    return 1 if failed else 0


def run_here(title: str, device: torch.device) -> dict[str, Any]:
    """Run a section in this process."""
    if device.type == "cpu":
        torch.set_num_threads(1)  # on a busy machine more threads mostly wait for each other
    begin = time.monotonic()
    try:
        result: dict[str, Any] = {"ok": True, **SECTIONS[title](device)}
    except SkippedError as why:
        result = {"ok": None, "skipped": str(why)}
    except Exception as error:
        result = {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {**result, "seconds": round(time.monotonic() - begin, 1)}


def run_apart(title: str, device: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a section in a process of its own; one that ends without a result, or does not end, has failed."""
    file, log = folder / f"{title}.json", folder / f"{title}.log"
    file.unlink(missing_ok=True)
    words = ["-m", "tests.bench.gpu", "--here", "--report", str(folder), "--device", device, "--only", title]
    begin, how = time.monotonic(), ""
    with log.open("w") as said:
        process = subprocess.Popen([sys.executable, *words], stdout=said, stderr=said, start_new_session=True)
        try:
            how = f"ended with {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            how = f"took more than {limit_s:g} s"
            os.killpg(process.pid, signal.SIGINT)  # runs then stop what they have started
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            file.unlink(missing_ok=True)  # of what the signal broke: an import may have swallowed it
    if file.is_file():
        result: dict[str, Any] = json.loads(file.read_text())
        return result
    tail = log.read_text(errors="replace")[-2000:]
    result = {"ok": False, "error": how, "traceback": tail, "seconds": round(time.monotonic() - begin, 1)}
    _write(file, result)
    return result


def _write(file: Path, found: dict[str, Any]) -> None:
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
