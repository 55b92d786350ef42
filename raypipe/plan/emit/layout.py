"""A layout: what a trainer's file says of how a model is trained."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

from raypipe.errors import SpecError, nearest
from raypipe.files import read_json
from raypipe.job.model_spec import GptSpec, HfSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import base_schedule
from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.plan.predict.prediction import Cut
from raypipe.schedule.ir import Schedule


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """A plan less its program: ``plan`` makes that of it."""

    parallel: ParallelSpec
    cut: Cut
    """The layers of each stage: the embedding, the blocks, and the head with the norm before it."""
    batch: int
    """``train.batch``: samples of a step."""
    per_block: int = 1
    """Layers that a block of the model is planned in."""
    order: Schedule | None = None
    """The order of one data-parallel copy, where ``parallel.schedule`` does not generate it."""

    @property
    def layers(self) -> int:
        """Layers of the model, the embedding and the head among them."""
        return self.cut[-1].stop

    @property
    def units(self) -> int:
        """The embedding, the blocks and the head."""
        return 2 + (self.layers - 2) // self.per_block

    @property
    def microbatches(self) -> int:
        """Micro-batches of a copy."""
        return self.batch // (self.parallel.sample_copies * self.parallel.microbatch)

    @property
    def block_cut(self) -> Cut:
        """The same, where the embedding, each block and the head count as one."""
        ends = [0, *(1 + (own.stop - 1) // self.per_block for own in self.cut[:-1])]
        ends += [self.units]
        return tuple(range(a, b) for a, b in pairwise(ends))

    @property
    def aligned(self) -> bool:
        """Return whether no stage ends inside a block."""
        return self.cut == of_blocks(self.block_cut, self.per_block)

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each stage, from 0."""
        last = self.block_cut[-1].stop - 1
        return [[i - 1 for i in own if 0 < i < last] for own in self.block_cut]

    @property
    def deepest(self) -> int:
        """Blocks of the stage that has most."""
        return max(map(len, self.blocks))

    def layers_of(self, block: int) -> range:
        """The layers that a block is planned in."""
        return range(1 + block * self.per_block, 1 + (block + 1) * self.per_block)

    @property
    def pipelined(self) -> bool:
        """Return whether the model is cut over devices."""
        return self.parallel.stages > 1

    @property
    def own_order(self) -> Schedule:
        """Compute tasks of one data-parallel copy, without recomputation that the keys ask for."""
        return base_schedule(self.parallel, self.batch) if self.order is None else self.order

    def with_keys(self, **keys: Any) -> TrainerLayout:
        """The layout with other ``parallel`` keys."""
        return replace(self, parallel=self.parallel.model_copy(update=keys))

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            ScheduleError: no schedule of that name has the shape.
        """
        return Plan.of(self.parallel, self.cut, self.batch, self.order)


def even_cut(blocks: int, stages: int) -> Cut:
    """Deal blocks out evenly, as all four trainers do where nothing else is said: embedding and head go with the first
    and the last, and left-over blocks to the first stages.

    >>> even_cut(5, 2)
    (range(0, 4), range(4, 7))
    """
    few, more = divmod(blocks, stages)
    return cut_of([few + (s < more) for s in range(stages)])


def cut_of(blocks: Sequence[int]) -> Cut:
    """Return the cut with so many blocks in each stage, the embedding in the first and the head in the last.

    >>> cut_of([1, 2])
    (range(0, 2), range(2, 5))
    """
    ends = list(accumulate(blocks, initial=1))
    ends[0], ends[-1] = 0, ends[-1] + 1
    return tuple(range(a, b) for a, b in pairwise(ends))


def of_blocks(cut: Cut, per_block: int) -> Cut:
    """Return a cut in layers, of one in which each block counts as one.

    >>> of_blocks((range(0, 2), range(2, 4)), 2)
    (range(0, 3), range(3, 6))
    """
    last = cut[-1].stop - 1
    ends = [1 + (end - 1) * per_block if 0 < end <= last else end for end in (0, *(own.stop for own in cut[:-1]))]
    ends += [2 + (last - 1) * per_block]
    return tuple(range(a, b) for a, b in pairwise(ends))


def layer_by_layer(layout: TrainerLayout) -> TrainerLayout:
    """The layout; where copies of the whole model divide gradients too, with a stage for each layer, as FSDP wraps
    them and DeepSpeed's buckets reduce them."""
    keys: dict[str, Any] = {"gather": "microbatch"} if layout.parallel.shard == "zero3" else {}
    if layout.pipelined:
        return layout.with_keys(**keys)
    if layout.parallel.shard not in ("zero2", "zero3"):
        return replace(layout.with_keys(schedule="1f1b", chunks=1), cut=(range(layout.layers),), order=None)
    cut = of_blocks(tuple(range(i, i + 1) for i in range(layout.units)), layout.per_block)
    keys |= {"schedule": "interleaved-1f1b", "chunks": len(cut)}
    return replace(layout.with_keys(**keys), cut=cut, order=None)


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """A decoder's shape, as far as trainers' files say it."""

    blocks: int
    hidden: int
    heads: int
    sequence: int
    positions: int
    intermediate: int | None = None
    """Width of the MLP; None: four times ``hidden``."""
    groups: int | None = None
    """Heads of keys and values; None: as many as heads."""
    experts: int | None = None
    """Experts of a layer that a router chooses from."""
    per_token: int | None = None
    """How many of them a token goes to."""
    expert_width: int | None = None
    """Width of an expert's MLP; None: ``intermediate``."""
    shared_width: int | None = None
    """Width of the experts that all tokens go to, together."""
    dense_first: int | None = None
    """Blocks at the beginning that have no experts."""
    head: int | None = None
    """Width of a head; None: ``hidden`` by ``heads``."""
    norms_heads: bool = False
    """Queries and keys are normalised."""
    llama: bool = False
    """Rotary positions, RMS norms and gated MLPs."""
    tied: bool = True
    """Embedding and head share their matrix."""
    dropout: float = 0.0
    """Share of the values that blocks add which dropout takes."""
    attention_dropout: float = 0.0
    """Share of attention's probabilities which it takes."""
    kind: str = "gpt"
    """The model's type at Hugging Face; ``gpt``: the built-in one."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the job or the model's directory says of its configuration."""

    @classmethod
    def of(cls, job: JobSpec) -> DecoderShape:
        """The shape of a job's model.

        Raises:
            SpecError: the job does not say it.
        """
        model = job.model
        if isinstance(model, GptSpec):
            positions = model.positions or model.sequence
            return cls(
                blocks=model.layers,
                hidden=model.hidden,
                heads=model.heads,
                sequence=model.sequence,
                positions=positions,
                tied=model.tie_embeddings,
                dropout=model.dropout,
            )
        if not isinstance(model, HfSpec):
            raise SpecError("model", "is no decoder of Hugging Face", "leave out --emit and --from")
        config = {**_saved(model.hf), **model.config}
        result = {name: _first(config, *keys) for name, keys in KEYS.items()}
        for name in ("blocks", "hidden", "heads"):
            if not isinstance(result[name], int):
                raise SpecError(f"model.config.{KEYS[name][0]}", "is not given", "give it: the trainer needs it")
        if result["experts"] is not None and result["per_token"] is None:
            raise SpecError(f"model.config.{KEYS['per_token'][0]}", "is not given", "give it: the trainer needs it")
        if config.get("n_shared_experts") and result["expert_width"]:
            result["shared_width"] = config["n_shared_experts"] * result["expert_width"]
        sequence = model.sequence or result["positions"]
        if not isinstance(sequence, int):
            raise SpecError("model.sequence", "is not given", "give it: the trainer needs it")
        kind = str(config.get("model_type", model.hf))
        llama = "rms_norm_eps" in config or "rope_parameters" in config or kind.startswith(LLAMAS)
        values = {key: value for key, value in result.items() if isinstance(value, int)}
        values |= {"sequence": sequence, "positions": max(sequence, values.get("positions", 0))}
        tied = bool(config.get("tie_word_embeddings", not llama))
        common = 0.1 if kind == "gpt2" else 0.0
        return cls(
            **values,
            llama=llama,
            tied=tied,
            norms_heads=kind.startswith(("qwen3", "deepseek")),
            dropout=_first(config, "resid_pdrop", default=common),
            attention_dropout=_first(config, "attn_pdrop", "attention_dropout", default=common),
            kind=kind,
            config=config,
        )


LLAMAS = ("deepseek", "llama", "mistral", "mixtral", "qwen")
"""How types of Hugging Face begin that are ``DecoderShape.llama``, whatever their configuration spells out."""
KEYS = {
    "blocks": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "positions": ("max_position_embeddings", "n_positions"),
    "intermediate": ("intermediate_size", "n_inner"),
    "groups": ("num_key_value_heads",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "per_token": ("num_experts_per_tok", "moe_k"),
    "expert_width": ("moe_intermediate_size",),
    "shared_width": ("shared_expert_intermediate_size",),
    "head": ("head_dim",),
    "dense_first": ("first_k_dense_replace", "moe_layer_start_index"),
}
"""Keys of Hugging Face configurations for each of a model's figures."""


def _first(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """Return the first of some keys of a configuration that is given."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _saved(hf: str) -> dict[str, Any]:
    """The configuration in a model's directory; empty for a model type."""
    file = Path(hf) / "config.json"
    return dict(read_json(file)) if file.is_file() else {}


def layers_per_block(job: JobSpec, layers: int) -> int:
    """Return the number of layers that a block of the job's model is planned in, beside an embedding and a head.

    Raises:
        SpecError: it is no such model.
    """
    blocks = DecoderShape.of(job).blocks
    if (layers - 2) % blocks:
        why = f"is planned in {layers} layers, not as an embedding, {blocks} blocks and a head"
        raise SpecError("model", why, "other trainers' layouts are of decoders alone: leave out --emit and --from")
    return (layers - 2) // blocks


# Settings of a trainer's file, by name: command-line arguments, or nested keys with dots between them.


T = TypeVar("T")


class Settings:
    """The settings of a file.

    Args:
        source: the file's name, for messages.
        values: a value, or several, by name; a flag has none.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source, self.values = source, dict(values)

    @classmethod
    def of_arguments(cls, text: str, source: str) -> Settings:
        """Read command-line arguments; a word without dashes before it, such as torchtitan's ``none``, is a flag.

        Raises:
            SpecError: a quotation has no end.
        """
        result: dict[str, Any] = {}
        key = None
        try:
            words = shlex.split(text, comments=True)
        except ValueError as error:
            raise SpecError(source, f"is no list of arguments: {error}", "give a file that --emit wrote") from None
        for word in words:
            if word.startswith("--"):
                key, _, value = word.removeprefix("--").partition("=")
                result[key] = [value] if value else []
            elif key is None or (":" in word and "," not in word):
                result[word] = []
            else:
                result[key].append(word)
        return cls(source, {key: values[0] if len(values) == 1 else values for key, values in result.items()})

    @classmethod
    def of_keys(cls, nested: Mapping[str, Any], source: str) -> Settings:
        """Read nested keys."""
        return cls(source, dict(_flat(nested, "")))

    def fail(self, key: str, why: str, fix: str) -> SpecError:
        """Return the error of a setting."""
        return SpecError(f"{self.source}: {key}", why, fix)

    def whole(self, key: str, default: int | None = 1) -> int:
        """Return a whole number from 1.

        Raises:
            SpecError: the setting is another value, or is missing and has no default.
        """
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing", "give it")
            return default
        try:
            result = int(str(value))
        except ValueError:
            result = 0
        if result < 1:
            raise self.fail(key, f"is {value!r}, no number from 1", "give a whole number from 1")
        return result

    def flag(self, key: str) -> bool:
        """Return whether a flag is set."""
        value = self.values.get(key, False)
        return value == [] or value is True or str(value).lower() == "true"

    def choice(self, key: str, words: Mapping[str, T], default: T) -> T:
        """Return what a word means.

        Raises:
            SpecError: the word is unknown.
        """
        value = self.values.get(key)
        if value is None:
            return default
        known = {word.lower(): meant for word, meant in words.items()}
        if str(value).lower() not in known:
            raise self.fail(key, f'"{value}" is not expressible here', nearest(str(value), words))
        return known[str(value).lower()]

    def refuse(self, *keys: str) -> None:
        """Check that settings that raypipe has nothing like are 1 or missing.

        Raises:
            SpecError: one is not.
        """
        for key in keys:
            if self.whole(key) > 1:
                raise self.fail(key, f"is {self.values[key]}, and no plan divides that", "set it to 1")

    def experts(self, key: str, copies: int, tensor: int) -> int:
        """Return over how many of these copies experts are divided.

        Raises:
            SpecError: it does not divide them, or tensor-parallel ranks share layers too.
        """
        result = self.whole(key)
        if copies % result:
            good = min((n for n in range(1, copies + 1) if copies % n == 0), key=lambda n: (abs(n - result), n))
            raise self.fail(key, f"{copies} copies are no multiple of {result}", f"use {good}")
        if result > 1 and tensor > 1:
            raise self.fail(key, f"is {result} beside {tensor} tensor ranks, and no plan has both", "set one to 1")
        return result

    def divided(self, key: str, devices: int, by: int) -> int:
        """Return the data-parallel copies of ``devices``, groups of ``by`` devices.

        Raises:
            SpecError: they do not divide.
        """
        if devices % by:
            raise self.fail(key, f"{devices} devices are no multiple of {by}", "give other --devices")
        return devices // by


def _flat(nested: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        yield before + str(key), value
