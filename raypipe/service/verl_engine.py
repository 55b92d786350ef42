"""A training engine for verl (0.9) whose model is that of a session: verl's workers, batches and losses, our pipeline.

verl finds an engine by its name in ``EngineRegistry`` and makes one in each process of a worker group. This one is in a
group of one process and calls a ``RemoteSession``, whose workers have the devices::

    actor_rollout_ref.model.external_lib: raypipe.service.verl_engine
    actor_rollout_ref.actor:
      _target_: verl.workers.config.ActorConfig
      strategy: raypipe
      engine: {_target_: raypipe.service.verl_engine.SessionEngineConfig, session: trainer}
    trainer: {nnodes: 1, n_gpus_per_node: 1}

A loss of verl is a function of the log-probability of every token, and of the entropy at every position. The engine has
the session compute these, differentiates the loss by them here, and sends minus the gradients as the weights of the
session's ``cross_entropy`` or ``entropy``: by the chain rule the same gradients, whatever the loss is.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.py_functional import append_to_dict
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from raypipe.errors import RunError, SpecError
from raypipe.files import write_whole
from raypipe.runtime.session.call_data import Datum
from raypipe.runtime.session.session_worker import AdamW
from raypipe.runtime.session.slots import DOWN, WEIGHTS
from raypipe.runtime.session.token_losses import LOSSES, TARGETS
from raypipe.service.actor import RemoteSession

BACKEND: Final = "raypipe"
PARTS: Final = {"log_probs": ("cross_entropy", "weights"), "entropy": ("entropy", "entropy_weights")}
"""Of a model's output, by name: the session's loss that returns it, and its weights there."""
STATE: Final = "verl.json"
"""Beside a checkpoint's weights: where the learning rate's schedule is."""
NO_WEIGHTS: Final[Mapping[str, Sequence[NDArray[Any]]]] = {}
REFUSED: Final = ("distillation_use_topk", "calculate_sum_pi_squared", "enable_routing_replay")
"""Of a batch, what needs more of the model than log-probabilities and entropies."""


@dataclass
class SessionEngineConfig(EngineConfig):  # type: ignore[misc]
    """Which session an engine calls; of verl's own keys, those about micro-batches and memory count for nothing."""

    strategy: str = BACKEND
    session: str = ""
    """Name of the actor that ``RemoteSession.start`` made."""
    namespace: str | None = None
    slot: int = 0
    """Of the session: another one for a reference model, which keeps the start values."""


@EngineRegistry.register(model_type="language_model", backend=BACKEND, device=["cuda", "npu", "cpu"])
class SessionEngine(BaseEngine):  # type: ignore[misc]
    """See the module; methods are those of verl's ``BaseEngine``.

    Raises:
        SpecError: the configuration asks for what sessions do not have.
    """

    def __init__(
        self, model_config: Any, engine_config: SessionEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        super().__init__()
        self.model_config, self.engine_config, self.checkpoint_config = model_config, engine_config, checkpoint_config
        self.mode: str | None = None
        self._slot = engine_config.slot
        self._saved: list[Path] = []
        self._gradients = False
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            why = f"there are {torch.distributed.get_world_size()} processes, and the session has its own devices"
            _refuse("trainer.n_gpus_per_node", why, "use one process: nnodes 1, n_gpus_per_node 1")
        if getattr(model_config, "lora_rank", 0):
            _refuse("model.lora_rank", "adapters are the session's", "set model.lora in its job")
        self._plan_updates(optimizer_config)

    def _plan_updates(self, config: Any) -> None:
        """Take the numbers of the updates, and how the learning rate goes."""
        self.optimizer: torch.optim.Optimizer | None = None
        if config is None or self.engine_config.forward_only:
            return
        name, given = getattr(config, "optimizer", "AdamW"), getattr(config, "override_optimizer_config", None) or {}
        if name.lower() != "adamw" or set(given) - {"eps"}:
            _refuse("optim", f"asks for {name} with {sorted(given)}", "use AdamW, and of its options eps")
        self._clip = config.clip_grad
        nothing = [torch.zeros(1, requires_grad=True)]  # it has the numbers alone
        self.optimizer = torch.optim.AdamW(
            nothing, config.lr, tuple(config.betas), given.get("eps", 1e-8), config.weight_decay
        )
        warm = config.lr_warmup_steps
        if warm is None or warm <= 0:
            warm = int(config.lr_warmup_steps_ratio * config.total_training_steps)
        kind = getattr(config, "lr_scheduler_type", "constant")
        if kind == "constant":
            self._schedule = get_constant_schedule_with_warmup(self.optimizer, num_warmup_steps=warm)
        elif kind == "cosine":
            self._schedule = get_cosine_schedule_with_warmup(
                self.optimizer,
                num_warmup_steps=warm,
                num_training_steps=config.total_training_steps,
                min_lr_ratio=config.min_lr_ratio,
                num_cycles=config.num_cycles,
                zero_indexed_step=config.zero_indexed_step,
            )
        else:
            _refuse("optim.lr_scheduler_type", f"is {kind}", "use constant or cosine")

    def initialize(self) -> None:
        """Begin with the start values of the session's job."""
        config = self.engine_config
        self.session = RemoteSession.find(config.session, config.namespace)
        self._run = self.session.directory()
        start = self._run / "start"
        if not start.exists():
            ray.get(self.session.save(start))
        ray.get(self.session.load(start, False, self._slot, lasting=True))
        self._gradients = False

    # Calls.

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Compute what the loss is a function of, the loss, and with it, unless ``forward_only``, gradients."""
        _check(data)
        tu.assign_non_tensor(data, sp_size=1, dp_size=1, batch_num_tokens=int(data["loss_mask"].sum()))
        tokens, offsets = [one.cpu().numpy() for one in data["input_ids"].unbind()], data["input_ids"].offsets().cpu()
        names = ["log_probs", *["entropy"] * bool(tu.get_non_tensor_data(data, "calculate_entropy", False))]
        calls = [self.session.forward(_data(tokens, PARTS[name][0]), PARTS[name][0], slot=self._slot) for name in names]
        leaves = [torch.from_numpy(np.concatenate(found.logprobs)) for found in ray.get(calls)]
        for leaf in leaves:
            leaf.requires_grad_(not forward_only)
        with torch.set_grad_enabled(not forward_only):
            output = {
                name: torch.nested.nested_tensor_from_jagged(leaf, offsets)
                for name, leaf in zip(names, leaves, strict=True)
            }
            loss, metrics = torch.ones(()), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=output, data=data, dp_group=None)
        if not forward_only:
            self._send(loss, dict(zip(names, leaves, strict=True)), tokens)
        found = {name: values.detach() for name, values in output.items()}
        collected: dict[str, Any] = {}
        append_to_dict(collected, metrics)
        gathered = {name: [values] for name, values in collected.items()}  # as of a group of one process
        return {"model_output": found, "loss": [loss.detach().item()], "metrics": gathered}

    def _send(self, loss: Tensor, leaves: Mapping[str, Tensor], tokens: Sequence[NDArray[Any]]) -> None:
        """Add the gradients of a loss to those of the session."""
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients = {name: one for name, one in zip(leaves, found, strict=True) if one is not None}
        if not all(one.isfinite().all() for one in gradients.values()):
            raise RunError("update", "the loss's gradients are not finite", "look at its batch")
        ends = list(itertools.accumulate(map(len, tokens)))[:-1]
        weights = {PARTS[name][1]: np.split(-one.numpy(), ends) for name, one in gradients.items()}
        call = PARTS["entropy" if "entropy" in gradients else "log_probs"][0]
        ray.get(self.session.forward_backward(_data(tokens, call, weights), call, slot=self._slot))
        self._gradients = True

    def optimizer_zero_grad(self) -> None:
        """Check that there are no gradients, as after every update."""
        if self._gradients:
            _refuse("optimizer_zero_grad", "gradients wait for an update, and a session keeps them", "update first")

    def optimizer_step(self) -> float:
        """Update, and return the norm of the gradients before clipping."""
        assert self.optimizer is not None, "the engine's configuration says forward_only"
        (group,) = self.optimizer.param_groups
        adam = AdamW(group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"], self._clip)
        self.optimizer.step()  # of nothing; the schedule counts on it
        updated = ray.get(self.session.optim_step(adam, self._slot))
        self._gradients = False
        return float(updated.grad_norm)

    def lr_scheduler_step(self) -> float:
        """Go on to the next learning rate, and return it."""
        self._schedule.step()
        return float(self._schedule.get_last_lr()[0])

    # Weights.

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return all weights by the model's own names, for a sampler; they pass through the run's directory."""
        folder = ray.get(self.session.save(self._run / "for-sampler", self._slot))
        return _read(folder), None

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Write weights, optimizer and schedule into ``local_path``; of those written here, keep the newest ones."""
        if hdfs_path is not None:
            _refuse("default_hdfs_dir", "checkpoints are files", "leave it out")
        folder = Path(local_path).resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        ray.get(self.session.save(folder, self._slot))
        steps = self._schedule.last_epoch if self.optimizer is not None else 0
        write_whole(folder / STATE, json.dumps({"schedule": steps}))
        self._saved = [*[one for one in self._saved if one != folder], folder]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            shutil.rmtree(self._saved.pop(0), ignore_errors=True)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False, **_: Any
    ) -> None:
        """Read what ``save_checkpoint`` wrote; without a path do nothing."""
        if local_path is None:
            return
        folder = Path(local_path).resolve()
        ray.get(self.session.load(folder, True, self._slot))
        self._gradients = False
        if self.optimizer is not None:
            self._schedule.last_epoch = json.loads((folder / STATE).read_text())["schedule"] - 1
            self._schedule.step()
        if del_local_after_load:
            shutil.rmtree(folder, ignore_errors=True)

    # What there is one of, or none.

    @property
    def is_param_offload_enabled(self) -> bool:
        """Return False: the session has its devices to itself."""
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Return False: the session has its devices to itself."""
        return False

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """Return the context of training."""
        return BaseEngineCtx(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """Return the context of inference."""
        return BaseEngineCtx(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Leave everything on the session's devices."""

    def get_data_parallel_size(self) -> int:
        """Return 1, whatever copies the session's plan has."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """Return 0."""
        return 0

    def get_data_parallel_group(self) -> None:
        """Return None."""

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return True."""
        return True

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Refuse: a reference model has a slot of its own."""
        _refuse("no_lora_adapter", "adapters are the session's", "give the reference model a slot of its own")


def _refuse(where: str, why: str, fix: str) -> NoReturn:
    raise SpecError(where, why, fix)


def _check(data: Any) -> None:
    """Raise SpecError where a batch asks for more than sessions have."""
    if tu.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING:
        _refuse("data.pad_mode", "is not no_padding", "use no_padding")
    for name in REFUSED:
        if tu.get_non_tensor_data(data, name, False):
            _refuse(name, "needs more of the model than log-probabilities and entropies", "leave it out")
    has = set(data.keys())
    if "multi_modal_inputs" in has and any(data["multi_modal_inputs"]):
        _refuse("multi_modal_inputs", "sessions have text alone", "leave them out")
    temperature = data["temperature"] if "temperature" in has else 1.0
    if not bool((torch.as_tensor(temperature) == 1).all()):
        _refuse("rollout.temperature", f"is {temperature}; log-probabilities are those of temperature 1", "use 1")
    tokens = data["input_ids"]
    if not tokens.is_nested:
        _refuse("input_ids", "are padded", "use verl's left_right_2_no_padding")
    if "position_ids" in has:
        places = [torch.arange(len(one)) for one in tokens.unbind()]
        if not torch.equal(data["position_ids"].values().cpu(), torch.cat(places)):
            _refuse("position_ids", "do not count from 0 in each sequence", "leave them out")


def _data(
    tokens: Sequence[NDArray[Any]], loss: str, weights: Mapping[str, Sequence[NDArray[Any]]] = NO_WEIGHTS
) -> list[Datum]:
    """Return sequences whose targets are each position's next token; the last one's is any, as no loss reads it."""
    result = []
    for number, own in enumerate(tokens):
        inputs = {name: weights[name][number] if name in weights else np.zeros(len(own)) for name in LOSSES[loss].needs}
        result.append(Datum(np.asarray(own, np.int64), {TARGETS: np.roll(own, -1).astype(np.int64), **inputs}))
    return result


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob(f"{WEIGHTS}-*.safetensors")):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  # it is no mapping
                if DOWN in name:
                    _refuse("update_weights", "the job trains adapters", "sample through the session's checkpoints")
                yield name, content.get_tensor(name)
