"""What has to be known of the cluster before a job can ask for CUDA graphs."""

from __future__ import annotations

from raypipe.errors import SpecError


def check_graphs(wanted: str, gpus: bool) -> None:
    """Check that the devices can capture graphs, where ``train.cuda_graphs`` insists on it.

    Raises:
        SpecError: they are CPUs.
    """
    if wanted in ("tasks", "step") and not gpus:
        raise SpecError(
            "train.cuda_graphs", f"{wanted} needs GPU devices, and this cluster's are CPUs",
            "use none, or auto, which captures where there are GPUs",
        )  # fmt: skip
