"""Build the libraries that stand in for CUDA's and NCCL's, for torch's CUDA build to find in one folder.

``python -m tests.gpu_shim.build FOLDER``, run by an interpreter whose own torch is the CUDA build; or ``build``.

What torch links to and the shim has no code for is a function that returns 0. The names come from torch's libraries.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
OURS = {"libcudart.so.13": "cuda.c", "libnccl.so.2": "nccl.c"}
UNVERSIONED = {
    "nccl": "libnccl.so.2",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "cu": "libcuda.so.1",
}
"""By how a name begins, where torch's libraries ask for it without naming the library."""
SPECIAL = {
    # torch takes no product from a library that finds no way to compute it.
    "cublasLtMatmulAlgoGetHeuristic": "int {name}(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n,"
    " void *r, int *found) {{ *found = 1; return 0; }}",
    "nvmlDeviceGetCount_v2": 'int {name}(unsigned *n) {{ char *s = getenv("GPU_SHIM_DEVICES"); *n = s ? atoi(s) : 2;'
    " return 0; }}",
    "nvmlDeviceGetName": 'int {name}(void *d, char *to, unsigned n) {{ snprintf(to, n, "GPU shim"); return 0; }}',
}
NVML = (
    "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetGpuFabricInfoV",
    "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlInitWithFlags", "nvmlShutdown", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName",
)  # fmt: skip
"""What torch looks up by name when its allocator has segments that grow, and Ray where it counts GPUs (last line)."""


def torch_libraries() -> Path:
    """Return the folder of the libraries of the torch that this interpreter would import."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def build(folder: Path, libraries: Path) -> None:
    """Build every library that those in ``libraries`` link to and the machine lacks, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, set[str]] = defaultdict(set)
    for library in libraries.glob("lib*.so"):
        headers = _said("readelf", "-d", str(library))
        for name in re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nvrtc|nvshmem)[^\]]*)\]", headers):
            wanted[name]
        for symbol in re.findall(r" U (\S+)", _said("nm", "-D", "--undefined-only", str(library))):
            name, _, version = symbol.partition("@")
            if version.startswith(("libcu", "libnvrtc")):
                wanted[version].add(name)
            elif version == "NVSHMEM" or name.startswith("nvshmem"):
                wanted["libnvshmem_host.so.3"].add(name)
            elif not version and (prefix := re.match(r"(nccl|cuFile|cusparseLt|cu)(?=[A-Z])", name)):
                wanted[UNVERSIONED[prefix[0]]].add(name)
    wanted["libnvidia-ml.so.1"] = set(NVML)
    for library, names in sorted(wanted.items(), key=lambda one: one[0] not in OURS):
        _compile(folder, library, names)


def _compile(folder: Path, library: str, names: set[str]) -> None:
    own = HERE / OURS[library] if library in OURS else None
    code = own.read_text() if own else ""
    have = set(re.findall(r"^EXPORT .*?(\w+)\(", code, re.MULTILINE))
    if library == "libcuda.so.1":
        names = names - set(re.findall(r"^EXPORT .*?(cu[A-Z]\w+)\(", (HERE / "cuda.c").read_text(), re.MULTILINE))
    plain = '__attribute__((visibility("default"))) int {name}() {{ return 0; }}'
    stubs = [SPECIAL.get(name, plain).format(name=name) for name in sorted(names - have)]
    source, versions = folder / f"{library}.c", folder / f"{library}.map"
    source.write_text("\n".join(["#include <stdio.h>", "#include <stdlib.h>", *stubs, ""]))
    tag = "NVSHMEM" if "nvshmem" in library else library
    versions.write_text(f"{tag} {{ global: *; }};\n")
    versioned = (
        [] if library in ("libnccl.so.2", "libcuda.so.1", "libnvidia-ml.so.1") else [f"-Wl,--version-script={versions}"]
    )
    others = [] if library in ("libcudart.so.13",) else [f"-L{folder}", "-Wl,--no-as-needed", "-l:libcudart.so.13"]
    _said(
        "gcc", "-shared", "-fPIC", "-O1", "-g", "-w", f"-I{HERE}", "-pthread", f"-Wl,-soname,{library}", *versioned,
        "-o", str(folder / library), str(source), *([str(own)] if own else []), *others, "-Wl,-rpath,$ORIGIN", "-ldl",
    )  # fmt: skip


def _said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:3])} ...: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    build(Path(sys.argv[1]), torch_libraries())
