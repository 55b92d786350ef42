"""The environment that the shim's tests run in: a virtual environment with torch's CUDA build and no library of CUDA.

``python -m tests.gpu_shim.shim`` makes it (``make shim``). It takes 1.9 GB of disk, of which 0.7 GB are downloaded, and
needs a C compiler and binutils. Everything else is taken from the environment that makes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("GPU_SHIM_VENV", ROOT / ".venv-shim"))
PYTHON = VENV / "bin" / "python"
TORCH = "torch===2.13.0"
"""From PyPI, where it is built for CUDA; ``===`` leaves out ``2.13.0+cpu``."""
TRITON = "triton==3.7.1"
"""What that torch asks for: it compiles kernels for a GPU that is not there."""
ENOUGH_BYTES = 4 << 30


def lacking() -> str:
    """Return why the tests cannot run here; empty if they can."""
    tools = [name for name in ("gcc", "readelf", "nm") if shutil.which(name) is None]
    if tools:
        return f"{', '.join(tools)} not found"
    return "" if PYTHON.exists() else f"no environment in {VENV}: make shim"


def make() -> str:
    """Make the environment where it is not there; return why it cannot be had, or an empty string."""
    if PYTHON.exists():
        return ""
    free = shutil.disk_usage(VENV.parent).free
    if free < ENOUGH_BYTES:
        return f"{free >> 20} MiB of disk are free, and {ENOUGH_BYTES >> 20} are needed"
    print(f"installing torch's CUDA build into {VENV}: 0.7 GB to download, 1.9 GB on disk", flush=True)
    partial = VENV.with_name(VENV.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(partial)], check=True)
    python = str(partial / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", TORCH, TRITON], check=False)
    if done.returncode:
        shutil.rmtree(partial)
        return f"pip could not install {TORCH} and {TRITON}"
    packages = Path(_said(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "zz_all_others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    partial.rename(VENV)
    return ""


def _said(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def libraries() -> Path:
    """Return the folder of the shim's libraries, which are built unless those of the same sources are there."""
    sources = [*sorted(Path(__file__).parent.glob("*.[ch]")), Path(__file__).with_name("build.py")]
    folder = VENV / f"shim-{hashlib.sha256(b''.join(source.read_bytes() for source in sources)).hexdigest()[:12]}"
    if not folder.exists():
        partial = folder.with_suffix(f".{os.getpid()}")  # others may use an older one, or be building this one
        subprocess.run([str(PYTHON), str(Path(__file__).with_name("build.py")), str(partial)], check=True)
        with contextlib.suppress(OSError):
            partial.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def environment(meeting: str, **settings: object) -> dict[str, str]:
    """Return the environment of a process over the shim, whose processes meet in a folder."""
    shim = {f"GPU_SHIM_{key.upper()}": str(value) for key, value in settings.items()}
    return {
        "LD_LIBRARY_PATH": str(libraries()), "GPU_SHIM_DIR": meeting, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    } | shim  # fmt: skip


def run_module(name: str, *words: str, **settings: object) -> int:
    """Run a module over the shim with this process's output, and return its exit status."""
    with tempfile.TemporaryDirectory(prefix="raypipe-gpu-shim-") as meeting:
        command = [str(PYTHON), "-m", name, *words]
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | environment(meeting, **settings), check=False
        ).returncode


def run_case(name: str, **settings: object) -> list[dict[str, Any]]:
    """Run a case of ``cases.py`` over the shim, and return what its processes said; none of them is left."""
    return said_by("tests.gpu_shim.cases", name, **settings)


def said_by(module: str, *words: str, limit_s: float = 150.0, **settings: object) -> list[dict[str, Any]]:
    """Run a module over the shim, and return what it and its processes printed as JSON; none of them is left."""
    with (
        tempfile.TemporaryDirectory(prefix="raypipe-gpu-shim-") as meeting,
        subprocess.Popen(
            [str(PYTHON), "-m", module, *words], cwd=ROOT, text=True, start_new_session=True,
            env=os.environ | environment(meeting, **settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process,
    ):  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise AssertionError(f"{module} {' '.join(words)} ended with {process.returncode}:\n{err[-3000:]}")
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    if why := make() or lacking():
        print(f"the tests over the GPU shim are skipped: {why}")
        sys.exit(0)
    libraries()
    sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-v", "tests/gpu_shim"], cwd=ROOT, check=False).returncode)
