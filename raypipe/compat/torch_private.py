"""Every private name of torch that raypipe uses: its use, and what does not work where the installed torch lacks it.

Import it from here. It is looked up when it is first asked for, since some of the modules bring torch's compiler, which
workers do without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
    from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm
    from torch.utils import _pytree as _pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as _disable_current_modes

CHECKED = "2.13"
"""The newest version of torch whose private names were checked."""


class PrivateName(NamedTuple):
    """A name that torch does not promise to keep."""

    module: str
    use: str
    without: str


_CAPTURE = "no model can be captured; jobs with ``model: {type: gpt}`` run"
_BUILD = "no model but ``type: gpt`` can be constructed"
_COMPILE = "no stage can be compiled; ``train.compile: none`` runs"
_GRAPHS = "no CUDA graphs; ``train.cuda_graphs: none`` runs"
NAMES: dict[str, PrivateName] = {
    "DisableTorchFunction": PrivateName("torch._C", "trial runs of opaque modules beside an export", _CAPTURE),
    "FakeTensor": PrivateName("torch._subclasses.fake_tensor", "finds buffers without a value", _CAPTURE),
    "FakeTensorMode": PrivateName("torch._subclasses.fake_tensor", "an export without memory for parameters", _CAPTURE),
    "GuardOnDataDependentSymNode": PrivateName(
        "torch.fx.experimental.symbolic_shapes",
        "what a branch on values raises, said in plain words",
        _CAPTURE,
    ),
    "HigherOrderOperator": PrivateName("torch._ops", "regions of an exported graph, such as no_grad", _CAPTURE),
    "OpOverload": PrivateName("torch._ops", "tells operators from Python functions in an exported graph", _CAPTURE),
    "PyCodeCache": PrivateName("torch._inductor.codecache", "loads a stored program", _COMPILE),
    "ShapeEnv": PrivateName(
        "torch.fx.experimental.symbolic_shapes",
        "stops an export that fixes the number of samples (``_set_replacement``)",
        _CAPTURE,
    ),
    "TorchDispatchMode": PrivateName(
        "torch.utils._python_dispatch", "parameters on the meta device, start values and draws by key", _BUILD
    ),
    "TracingContext": PrivateName("torch._guards", "compiles a piece under its stage's fake mode", _COMPILE),
    "_BatchNorm": PrivateName("torch.nn.modules.batchnorm", "every kind of batch norm, user-defined ones too", _BUILD),
    "_detect_is_causal_mask": PrivateName(
        "torch.nn.modules.transformer", "nn.TransformerEncoder is captured without looking at its mask", _CAPTURE
    ),
    "_disable_current_modes": PrivateName(
        "torch.utils._python_dispatch", "trial runs of opaque modules beside an export", _CAPTURE
    ),
    "_foreach_add_": PrivateName("torch", "adds a compiled stage's weight gradients in one call", _COMPILE),
    "_foreach_copy_": PrivateName("torch", "copies the inputs of a CUDA graph in one call", _GRAPHS),
    "_foreach_zero_": PrivateName("torch", "clears the gradients that CUDA graphs add to in one call", _GRAPHS),
    "_functorch": PrivateName("torch", "the share of the activations to keep, of the partitioner", _COMPILE),
    "_inductor": PrivateName(
        "torch", "settings: programs without checks, vector instructions that are known to work", _COMPILE
    ),
    "_no_grad_trunc_normal_": PrivateName(
        "torch.nn.init", "start values that do not depend on the cut into stages", _BUILD
    ),
    "_parse_to": PrivateName("torch._C._nn", "modules that are cast in a forward (Switch Transformers)", _CAPTURE),
    "_pytree": PrivateName("torch.utils", "takes apart what models are given and return", _BUILD),
    "compile_fx_inner": PrivateName("torch._inductor.compile_fx", "compiles a graph of ATen operations", _COMPILE),
    "constrain_to_fx_strides": PrivateName(
        "torch._inductor.lowering", "operations that round as in eager mode", _COMPILE
    ),
    "lowerings": PrivateName(
        "torch._inductor.lowering", "the same; decompositions take the module to be imported", _COMPILE
    ),
    "make_fallback": PrivateName("torch._inductor.lowering", "operations that round as in eager mode", _COMPILE),
    "make_fx": PrivateName("torch.fx.experimental.proxy_tensor", "traces a stage's forward and backward", _COMPILE),
    "min_cut_rematerialization_partition": PrivateName(
        "torch._functorch.partitioners", "chooses what a forward keeps", _COMPILE
    ),
    "select_decomp_table": PrivateName("torch._inductor.decomposition", "the operations that Inductor knows", _COMPILE),
    "tracing": PrivateName("torch._guards", "compiles a piece under its stage's fake mode", _COMPILE),
}
"""Per name, the module that has it."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"{__name__} has no {name}")
    module, use, without = NAMES[name]
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        import torch

        raise ImportError(
            f"torch {torch.__version__} has no {module}.{name} ({use}): {without}; raypipe was checked with {CHECKED}"
        ) from None
    globals()[name] = found
    return found
