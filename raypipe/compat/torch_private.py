"""Every private name of torch that raypipe uses: its use, and what does not work where the installed torch lacks it.

Import it from here. It is looked up when it is first asked for, since some of the modules bring torch's compiler, which
workers do without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raypipe.compat import PrivateName

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
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

_CAPTURE = "no model can be captured; jobs with ``model: {type: gpt}`` run"
_BUILD = "no model but ``type: gpt`` can be constructed"
_COMPILE = "no stage can be compiled; ``train.compile: none`` runs"
_GRAPHS = "no CUDA graphs; ``train.cuda_graphs: none`` runs"
NAMES = (
    PrivateName("torch._C", "DispatchKey", "tells operators that may return their argument", _CAPTURE),
    PrivateName("torch._C", "DisableTorchFunction", "trial runs of opaque modules beside an export", _CAPTURE),
    PrivateName("torch._subclasses.fake_tensor", "FakeTensor", "finds buffers without a value", _CAPTURE),
    PrivateName("torch._subclasses.fake_tensor", "FakeTensorMode", "an export without memory for parameters", _CAPTURE),
    PrivateName(
        "torch.fx.experimental.symbolic_shapes",
        "GuardOnDataDependentSymNode",
        "what a branch on values raises, said in plain words",
        _CAPTURE,
    ),
    PrivateName("torch._ops", "HigherOrderOperator", "regions of an exported graph, such as no_grad", _CAPTURE),
    PrivateName("torch._ops", "OpOverload", "tells operators from Python functions in an exported graph", _CAPTURE),
    PrivateName(
        "torch.fx.experimental.symbolic_shapes",
        "ShapeEnv",
        "stops an export that fixes the number of samples (``_set_replacement``)",
        _CAPTURE,
    ),
    PrivateName(
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "parameters on the meta device, start values and draws by key",
        _BUILD,
    ),
    PrivateName("torch.nn.modules.batchnorm", "_BatchNorm", "every kind of batch norm, user-defined ones too", _BUILD),
    PrivateName(
        "torch.nn.modules.transformer",
        "_detect_is_causal_mask",
        "nn.TransformerEncoder is captured without looking at its mask",
        _CAPTURE,
    ),
    PrivateName(
        "torch.utils._python_dispatch",
        "_disable_current_modes",
        "trial runs of opaque modules beside an export",
        _CAPTURE,
    ),
    PrivateName(
        "torch.nn.init", "_no_grad_trunc_normal_", "start values that do not depend on the cut into stages", _BUILD
    ),
    PrivateName("torch._C._nn", "_parse_to", "modules that are cast in a forward (Switch Transformers)", _CAPTURE),
    PrivateName("torch.utils", "_pytree", "takes apart what models are given and return", _BUILD),
    PrivateName("torch._inductor.codecache", "PyCodeCache", "loads a stored program", _COMPILE),
    PrivateName("torch._guards", "TracingContext", "compiles a piece under its stage's fake mode", _COMPILE),
    PrivateName("torch", "_foreach_add_", "adds a compiled stage's weight gradients in one call", _COMPILE),
    PrivateName("torch", "_foreach_copy_", "copies the inputs of a CUDA graph in one call", _GRAPHS),
    PrivateName("torch", "_foreach_zero_", "clears the gradients that CUDA graphs add to in one call", _GRAPHS),
    PrivateName("torch", "_functorch", "the share of the activations to keep, of the partitioner", _COMPILE),
    PrivateName(
        "torch", "_inductor", "settings: programs without checks, vector instructions that are known to work", _COMPILE
    ),
    PrivateName(
        "torch._inductor.async_compile", "shutdown_compile_workers", "ends processes that compile kernels", _COMPILE
    ),
    PrivateName("torch._inductor.compile_fx", "compile_fx_inner", "compiles a graph of ATen operations", _COMPILE),
    PrivateName(
        "torch._inductor.lowering", "constrain_to_fx_strides", "operations that round as in eager mode", _COMPILE
    ),
    PrivateName(
        "torch._inductor.lowering",
        "lowerings",
        "the same; decompositions take the module to be imported",
        _COMPILE,
    ),
    PrivateName("torch._inductor.lowering", "make_fallback", "operations that round as in eager mode", _COMPILE),
    PrivateName("torch.fx.experimental.proxy_tensor", "make_fx", "traces a stage's forward and backward", _COMPILE),
    PrivateName(
        "torch._functorch.partitioners",
        "min_cut_rematerialization_partition",
        "chooses what a forward keeps",
        _COMPILE,
    ),
    PrivateName("torch._inductor.decomposition", "select_decomp_table", "the operations that Inductor knows", _COMPILE),
    PrivateName("torch._C", "_AutoDispatchBelowAutograd", "divided experts as operators of a graph", _COMPILE),
    PrivateName("torch._guards", "tracing", "compiles a piece under its stage's fake mode", _COMPILE),
)
_BY_NAME = {one.name: one for one in NAMES}


def __getattr__(name: str) -> Any:
    if name not in _BY_NAME:
        raise AttributeError(f"{__name__} has no {name}")
    module, _, use, without = _BY_NAME[name]
    try:
        result = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        import torch

        why = f"torch {torch.__version__} has no {module}.{name} ({use}): {without}"
        raise ImportError(f"{why}; raypipe was checked with {CHECKED}") from None
    globals()[name] = result
    return result
