"""Capture and shard GPT-3 175B (as a GPT2Config), without its memory: ``python -m tests.bench.runtime.capture_175b``.

Each figure is that of a process of its own on one core, from its start to its end: seconds and peak resident memory.
Merak's paper (Table II) has 48.57 minutes without its cache and 0.48 with it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GPT3 = {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}
SEQUENCE = 2048


def work() -> None:
    """What the measured process does: capture, unless it is kept, and shard."""
    from raypipe.capture.captured import load_kept
    from raypipe.graph.fingerprint import fingerprint, transformers_code
    from raypipe.graph.subgraphs import shard

    began = time.perf_counter()
    packages = ("torch", "transformers")
    key = fingerprint({"hf": "gpt2", "config": GPT3, "sequence": SEQUENCE}, transformers_code("gpt2"), packages)
    kept = load_kept(key)
    if kept is not None:
        graph = kept.graph
    else:
        from raypipe.capture.capture import capture
        from raypipe.capture.captured import captured_once
        from raypipe.capture.meta import build_without_memory
        from raypipe.models.sources.hugging_face import configuration
        from tests.capture.transformers_builder import builder, example_inputs

        config = configuration("gpt2", GPT3)
        inputs = example_inputs(config, sequence=SEQUENCE)
        module = build_without_memory(builder(config))
        graph = captured_once(key, lambda: capture(module, inputs, outputs=["logits"])).graph
    loaded = time.perf_counter()
    cut = shard(graph)
    print(json.dumps({
        "kept": kept is not None, "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 3),
        "load_or_capture_s": loaded - began, "cpu_s": time.process_time(), "shard_s": time.perf_counter() - loaded,
        "parameters": sum(graph.parameters.values()), "operations": len(graph.operations), "subgraphs": cut.count,
        "labels": {label: cut.labels.count(label) for label in dict.fromkeys(cut.labels)},
        "tensors_across": max(map(len, cut.cuts)),
    }))  # fmt: skip


def measured(cache: Path) -> dict[str, object]:
    """Run ``work`` in a process of its own, on one core."""
    began = time.perf_counter()
    core = {min(os.sched_getaffinity(0))}
    child = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--work"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "RAYPIPE_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    )  # fmt: skip
    out, _ = child.communicate()
    seconds = time.perf_counter() - began
    if child.returncode:
        raise SystemExit(child.returncode)
    return {"process_s": seconds, **json.loads(out.splitlines()[-1])}


def main() -> None:
    """Cold, then from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("captured", "from the cache"):
            print(json.dumps({"run": name, **measured(Path(folder))}))
        print(f"kept: {sum(f.stat().st_size for f in Path(folder).rglob('*') if f.is_file()) / 1e6:.1f} MB")


if __name__ == "__main__":
    work() if "--work" in sys.argv else main()
