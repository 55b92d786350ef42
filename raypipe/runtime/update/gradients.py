"""Sums gradients over the devices that hold or divide a stage, and over tied parameters; their share of the norm.

Sums, never means: every micro-batch's loss is already divided by the tokens of the whole mini-batch, so the sum
over replicas is the mini-batch gradient whatever the plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.plan.online.tune_first_k import FirstKTuner
from raypipe.runtime.backward.waiting import WaitingOperands
from raypipe.runtime.process.clock import Clock, Mark
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.buckets import BucketedAllReduce, PrioritisedAllReduce, buckets_of
from raypipe.runtime.update.collectives import Pending, Push, start_sum, wait_for
from raypipe.runtime.update.shards import ShardedStage
from raypipe.schedule.ir import Sharding
from raypipe.schedule.sharding import StageKey, expert_sum_group, stage_group

SCATTERS = 1
"""Reduce-scatters of a device that may be under way when gradients get another buffer (``schedule.deps``)."""


@dataclass(frozen=True, slots=True)
class TiedHolders:
    """One parameter that several stages hold copies of."""

    name: str
    """The group's first member, ``<layer index>.<path>``: its name in checkpoints."""
    parameters: tuple[str, ...]
    """All names the parameter goes by."""
    ranks: tuple[int, ...]
    """Every device that holds a copy, in any replica."""
    layer: int
    """The layer of the first member: the stage that holds it saves the parameter."""
    stage: int | None = None
    """The stage that all its layers are in, if there is one: then it is one parameter there, like any other."""


def tied_over_devices(tied: Iterable[TiedHolders]) -> set[str]:
    """Return the names of the parameters that several devices hold, and sum by themselves."""
    return {name for tie in tied for name in tie.parameters if len(tie.ranks) > 1}


def groups_of_ties(tied: Iterable[TiedHolders], sharding: Sharding | None) -> dict[str, tuple[int, ...]]:
    """Return who sums tied parameters by themselves, by name: those of several stages, and of a stage that is divided,
    as these stay whole."""
    levels = sharding.levels if sharding is not None else ()
    apart = (tie for tie in tied if tie.stage is None or (levels and levels[tie.stage]))
    return {_tie_group(tie): tie.ranks for tie in apart if len(tie.ranks) > 1}


def _tie_group(tie: TiedHolders) -> str:
    return f"tied {tie.name}"


@dataclass(slots=True)
class TieSum:
    """The sum of one parameter's gradients over all its copies, which may be under way."""

    name: str
    copies: Sequence[nn.Parameter]
    """This device's."""
    total: Tensor
    work: Pending | None

    def wait(self, push: Push) -> Tensor:
        """Return the sum, once it is complete.

        Raises:
            TransportError: another holder did not join in time.
        """
        if self.work is not None:
            wait_for(f"gradient sum of tied {self.name}", self.work, push)
        return self.total


class GradientSync:
    """Sums the gradients of one device's stage replicas with those of their other holders."""

    def __init__(
        self,
        device: int,
        modules: Mapping[StageKey, StageModule],
        placement: tuple[tuple[int, ...], ...],
        tied: tuple[TiedHolders, ...],
        groups: Mapping[str, dist.ProcessGroup],
        member: int = 0,
        sharded: Mapping[StageKey, ShardedStage] | None = None,
        by_layer: bool = False,
        tuner: Callable[[int], FirstKTuner] | None = None,
        dtype: torch.dtype | None = None,
        expert_ranks: Sequence[int] | None = None,
    ) -> None:
        """Take the stages of one device.

        Args:
            device: its number.
            modules: its stage replicas.
            placement: device of each stage, per replica.
            tied: parameters that several stages hold.
            groups: process groups, named by ``sum_groups``.
            member: which of its device's processes this one is; the others hold other shares of what is divided.
            sharded: those of its stage replicas whose gradients their copies divide.
            by_layer: sum what the next forward needs first as early as the link allows (``prioritised``).
            tuner: makes, for a stage of so many layers, what chooses how many layers' weight gradients are postponed;
                None: none are.
            dtype: of the sums (``parallel.reduce_dtype``); None for that of the gradients.
            expert_ranks: which share of the experts each replica holds; None where experts are not divided.
        """
        self.groups, self._dtype = groups, dtype
        self.shards = sharded = dict(sharded or {})
        """The stage replicas that data-parallel copies divide."""
        self._scattering: deque[StageKey] = deque()
        """Those whose reduce-scatters are under way, oldest first."""
        self._collectives = Counter[str]()
        self._pending: dict[StageKey, Tensor | None] = {}
        """The started all-reduces, with what is summed beside the gradients."""
        self._turns: deque[StageKey] = deque()
        """The stage replicas whose all-reduces are still to be started in this step, in order."""
        self.totals: dict[StageKey, Tensor] = {}
        """What ``launch`` was given beside the gradients, summed; whoever takes it takes it out."""
        self.ties: list[tuple[TiedHolders, list[nn.Parameter]]] = []
        """The parameters that several stages hold, with this device's copies."""
        stage_shares = {m.named[name]: cut for m in modules.values() for name, cut in m.shards.items()}
        self._rows = {p: cut for p, cut in stage_shares.items() if cut.own_rank is not None}
        """Parameters that are some rows of what other stages hold whole, or other rows of."""
        spread: set[str] = set()
        for tie in tied:
            copies = [m.trained[n] for m in modules.values() for n in tie.parameters if n in m.trained]
            inside = tie.stage is not None and not any(stage == tie.stage for stage, _ in sharded)
            if not inside and (len(tie.ranks) > 1 or len(copies) > 1):
                spread.update(tie.parameters)
                if copies:
                    self.ties.append((tie, copies))
        self._own: dict[StageKey, list[nn.Parameter]] = {}
        """What is summed as a stage replica's alone."""
        for key, module in modules.items():
            apart = spread | sharded[key].names if key in sharded else spread
            self._own[key] = [p for name, p in module.trained.items() if name not in apart]
        of = [0] * len(placement) if expert_ranks is None else expert_ranks
        experts = {p for p, cut in stage_shares.items() if cut.axis == "experts"}
        self._unannounced: set[StageKey] = set()
        """Stage replicas with experts to sum for which this step's program has no AR, as where all else is sharded."""
        self._sums: dict[StageKey, BucketedAllReduce] = {}
        for key, parameters in self._own.items():
            everyone, alone = groups.get(stage_group(key[0])), groups.get(expert_sum_group(key[0], of[key[1]]))
            parameters = [p for p in parameters if (alone if p in experts else everyone) is not None]
            group = everyone if everyone is not None or not parameters else alone
            if group is None:  # nobody else has them, or they are divided
                continue
            what = f"gradient sum of stage {key[0]}"
            if by_layer:
                own = {id(p) for p in parameters}
                blocks = [[p for p in block if id(p) in own] for block in modules[key].trained_by_block]
                waiting = WaitingOperands()
                modules[key].queue.waiting = waiting if tuner is not None else None
                chosen = None if tuner is None else tuner(len(blocks))
                self._sums[key] = PrioritisedAllReduce(blocks, group, what, chosen, dtype, waiting)
            else:
                held = frozenset[Tensor](p for p in parameters if p in experts)
                self._sums[key] = BucketedAllReduce(buckets_of(parameters, held), group, what, dtype, (held, alone))
        # Each gradient counts once in the norm: at the lowest device that holds it, there at the first member unless
        # every member has a share of it.
        divided = {p for p, cut in stage_shares.items() if cut.axis == "tensor"}
        counted: list[nn.Parameter] = []
        for (stage, replica), parameters in self._own.items():
            holders = sorted((row[stage], r) for r, row in enumerate(placement))
            first = holders[0] == (device, replica)
            first_share = next(one for one in holders if of[one[1]] == of[replica]) == (device, replica)
            counted += [p for p in parameters if (first_share if p in experts else first)]
        counted += [copies[0] for tie, copies in self.ties if tie.ranks[0] == device]
        self._counted = [p for p in counted if member == 0 or p in divided]
        self._counted += [p for one in sharded.values() for p in one.counted(member)]
        every = {(device, stage) for row in placement for stage, device in enumerate(row)}
        whole = len(every) == len({device for device, _ in every}) * len(placement[0])
        self.complete = whole and not divided and not experts and not sharded
        """Every device holds every stage (data parallelism; Chimera of two stages): once its sums are there, each knows
        the global norm by itself."""
        # In one order on all devices: they must come to the same bits.
        firsts = {stage: (stage, replica) for stage, replica in sorted(self._own, reverse=True)}
        self._every = [p for _, key in sorted(firsts.items()) for p in self._own[key]]
        self._every += [copies[0] for _, copies in self.ties]
        if self.complete and self._counted:
            self._counted = self._every
        self._counts = set(self._counted)
        self._trained = {
            key: [*module.trained.values(), *(sharded[key].pieces if key in sharded else ())]
            for key, module in modules.items()
        }
        trained = next((p for some in self._trained.values() for p in some), None)
        self._device = torch.device("cpu") if trained is None else trained.device

    def begin_step(self, order: Iterable[StageKey]) -> None:
        """Announce the order in which this step will ``launch`` all-reduces."""
        self._turns = deque(key for key in order if key in self._sums)
        self._unannounced = {key for key in self.shards if key in self._sums and self._sums[key].order} - set(
            self._turns
        )
        for sum_ in self._sums.values():
            sum_.begin_step()

    @property
    def tuners(self) -> dict[StageKey, FirstKTuner]:
        """By stage replica, what chooses its k of reverse first-k; empty without."""
        sums = {key: self.prioritised(key) for key in self._sums}
        return {key: one.tuner for key, one in sums.items() if one is not None and one.tuner is not None}

    def prioritised(self, key: StageKey) -> PrioritisedAllReduce | None:
        """Return the all-reduce of a stage replica whose buckets can be waited for one by one; None if it has none."""
        sum_ = self._sums.get(key)
        return sum_ if isinstance(sum_, PrioritisedAllReduce) else None

    def early(self, key: StageKey) -> BucketedAllReduce | None:
        """Return the all-reduce of a stage replica if its buckets may be started before ``launch``.

        None if it has none, or if another stage's comes first: all devices start their all-reduces in one order.
        """
        return self._sums[key] if self._turns and self._turns[0] == key else None

    def open(self, key: StageKey, push: Push) -> None:
        """Let a stage replica's gradients accumulate where they will be summed, from now to the update.

        Where copies divide them, first wait until few enough earlier ones are still being reduced.

        Raises:
            TransportError: another copy did not join in time.
        """
        if key in self._sums:
            self._sums[key].open()
        if key in self.shards and not any(flat.gradients.opened for flat in self.shards[key].flats):
            self._finish_scatters(push, SCATTERS)
            for flat in self.shards[key].flats:
                flat.gradients.open()

    def launch(self, key: StageKey, beside: Tensor | None = None) -> None:
        """Start summing a stage replica's gradients over its holders; ``finish`` waits for it.

        ``beside``: one-dimensional, summed over the same devices; see ``totals``.
        """
        sum_ = self._sums.get(key)
        if sum_ is None:
            return
        if key in self._turns:
            self._turns.remove(key)
        if beside is not None:
            beside = beside.clone()
        sum_.start(beside)
        self._pending[key] = beside
        if self._own[key] or beside is not None:  # the gradients of a sharded stage are not summed here
            self._count("all-reduce", sum_.group)

    def gather(self, key: StageKey) -> None:
        """Start to gather the weights of a divided stage replica (AG)."""
        for flat in self.shards[key].flats:
            flat.gather()
        self._count("all-gather", self.shards[key].holders[0].group)

    def reduce_scatter(self, key: StageKey) -> None:
        """Start to reduce the gradients so far of a divided stage replica to this device's shard (RS)."""
        for flat in self.shards[key].flats:
            flat.reduce_scatter()
        self._scattering.append(key)
        self._count("reduce-scatter", self.shards[key].holders[0].group)

    def _finish_scatters(self, push: Push, left: int) -> None:
        while len(self._scattering) > left:
            for flat in self.shards[self._scattering.popleft()].flats:
                flat.add_oldest(push)

    def _count(self, kind: str, group: dist.ProcessGroup) -> None:
        self._collectives[kind] += 1 / group.size()  # type: ignore[assignment]

    def take_counts(self) -> list[float]:
        """Return this device's share of the all-reduces, gathers and reduce-scatters since the last call."""
        counts, self._collectives = self._collectives, Counter()
        return [float(counts[kind]) for kind in ("all-reduce", "all-gather", "reduce-scatter")]

    def finish(self, push: Push, clock: Clock) -> dict[StageKey, Mark]:
        """Wait for every started sum, then sum the tied parameters over all their copies.

        Returns when each all-reduce was complete; where the host's clock cannot say, when that was seen here.

        Raises:
            TransportError: another holder did not join in time.
        """
        self._finish_scatters(push, 0)
        completed: dict[StageKey, Mark | None] = {}
        for key, stage in sorted(self.shards.items()):
            for flat in stage.flats:
                flat.set_gradients(push)
            if (others := stage.holders[0].others) is not None:
                self._count("all-reduce", others)
                completed[key] = clock.mark()
        for key in sorted(self._unannounced):
            self.launch(key)
        completed |= {key: self.settle(key, push, clock) for key in list(self._pending)}
        self.finish_ties(push)
        return {key: at for key, at in completed.items() if at is not None}

    def finish_ties(self, push: Push) -> None:
        """Sum the parameters that several stages hold over all their copies.

        Raises:
            TransportError: another holder did not join in time.
        """
        for tie in self.start_ties():
            total = tie.wait(push)
            for copy in tie.copies:
                rows = self._rows.get(copy)
                own = total if rows is None else total.narrow(rows.dim, rows.rows.start, len(rows.rows))
                copy.grad = own if copy is tie.copies[0] and rows is None else own.clone()

    def settle(self, key: StageKey, push: Push, clock: Clock) -> Mark | None:
        """Wait for one stage replica's started sum; return when it was complete, None if none was started.

        Raises:
            TransportError: another holder did not join in time.
        """
        if key not in self._pending:
            return None
        beside = self._pending.pop(key)
        at = self._sums[key].finish(push, clock)
        if beside is not None:
            self.totals[key] = beside
        return at

    def start_ties(self) -> list[TieSum]:
        """Start to sum the parameters that several stages hold over all their copies."""
        started = []
        for tie, copies in self.ties:
            total = self._whole_gradient(copies[0])
            for copy in copies[1:]:
                total = total + self._whole_gradient(copy)
            group = self.groups.get(_tie_group(tie))
            work = None
            if group is not None:
                total = total.contiguous()
                work, _ = start_sum(total, group, self._dtype)
                self._count("all-reduce", group)
            started.append(TieSum(tie.name, copies, total, work))
        return started

    def _whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's gradient; of some rows of one, with zeros for the others."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        rows = self._rows.get(parameter)
        if rows is None:
            return gradient
        whole = gradient.new_zeros(rows.whole_shape(gradient.shape))
        whole.narrow(rows.dim, rows.rows.start, len(rows.rows)).copy_(gradient)
        return whole

    def norm_squared(self, of: Iterable[nn.Parameter] | None = None) -> Tensor:
        """This device's share of the squared global norm, float64 scalar; the shares of all devices add up to it.

        It stays on the device, as does ``known_norm_squared``. ``of``: the parameters that it is about; None for all.
        """
        return self._squares(self._counted if of is None else (p for p in of if p in self._counts))

    def known_norm_squared(self, share: Tensor) -> Tensor:
        """Return what this device knows of the squared global norm: its ``share``, or where it is ``complete``, all."""
        return self._squares(self._every) if self.complete and not self._counted else share

    def keep_memory(self, key: StageKey) -> list[Tensor]:
        """Let the gradients of a stage replica that are summed have the same memory in every step from now on.

        Returns their parameters.
        """
        return self._sums[key].keep_memory() if key in self._sums else []

    def drop(self, key: StageKey) -> None:
        """Drop a stage replica's gradients, after the update."""
        for p in self._trained[key]:
            p.grad = None
        if key in self._sums:
            self._sums[key].close()
        for flat in self.shards[key].flats if key in self.shards else ():
            flat.drop_gradients()

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of all process groups and of what is under way on them; return them. The gradients stay."""
        held = [*self.groups.values(), *(group for sum_ in self._sums.values() for group in sum_.leave())]
        held += [group for stage in self.shards.values() for group in stage.leave()]
        self.groups = {}
        self._pending.clear()
        self._scattering.clear()
        return held

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number, or by a float64 scalar on the device."""
        by_dtype = defaultdict[torch.dtype, list[Tensor]](list)
        for p in (p for some in self._trained.values() for p in some):
            if p.grad is not None:
                by_dtype[p.grad.dtype].append(p.grad)
        for dtype, gradients in by_dtype.items():
            if isinstance(factor, Tensor):  # one kernel for all needs their dtype; less than float32 would round it
                torch._foreach_mul_(gradients, factor.to(torch.promote_types(dtype, torch.float32)))
            elif dtype.itemsize < 4:  # here, too: the one kernel would round the number to 16 bits
                for gradient in gradients:
                    gradient.mul_(factor)
            else:
                torch._foreach_mul_(gradients, factor)

    def _squares(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the sum of the squares of all gradients."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        by_dtype = defaultdict[torch.dtype, list[Tensor]](list)
        for grad in grads:
            by_dtype[grad.dtype].append(grad)
        norms: list[Tensor] = []
        for dtype, some in by_dtype.items():  # a norm with bfloat16's 8 bits would be off by 0.4 %
            norms += torch._foreach_norm(some, dtype=torch.promote_types(dtype, torch.float32))
        return torch.stack(norms).double().square().sum()
