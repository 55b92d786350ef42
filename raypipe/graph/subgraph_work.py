"""The work of a captured model's sub-graphs, in operations and bytes per sample, for the planner's cost model.

It is counted operation by operation at the sizes of one sample, as eager PyTorch runs them: the bytes that forward and
backward move, the FLOPs of products, and the tensors saved for the backward, in the item sizes that
autocast gives them (``operation_costs``). The loss is not an operation of the model; it is added to the last sub-graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from raypipe.cost.gpt_work import FUSED_BACKWARD, RAYPIPE, mask_bytes
from raypipe.cost.kernels import BLOCK
from raypipe.cost.layer_work import ExpertsWork, LayerWork, LinearHead, Product, TaskWork, linear_products, with_head
from raypipe.cost.tensor import Exchange, TensorRankWork, all_reduces
from raypipe.graph.counted import AUTOCAST_BYTES, Autocast, Counted, is_product, without_idle_casts
from raypipe.graph.dims import Sizes, evaluate_all
from raypipe.graph.operation_costs import (
    FusionRules,
    fused_work,
    is_view,
    keeps_result,
    kept_operands,
    matrix_flops,
    operand_types,
    passes_on,
    root,
)
from raypipe.graph.operations import ITEM_BYTES, OperationGraph
from raypipe.graph.subgraphs import Subgraphs

ATTENTION = "scaled_dot_product_attention"
LINEAR = {"linear", "addmm", "mm", "matmul"}
"""Products whose shape is that of a linear layer if they read one matrix of parameters."""
GROUPED = {"_grouped_mm", "grouped_mm_fallback"}
"""Products of rows with the matrices of their experts, which are stacked."""
COLLECTIVES = {"copy_to_group", "reduce_from_group", "gather_from_group", "gather_sequence", "scatter_sequence"}
INPUT_GRAD, WEIGHT_GRAD = 0.8, 0.3
"""Overhead of the input and the weight gradient relative to the forward, as for the built-in GPT's blocks."""
LABEL = 8
"""Bytes of a target or a token id."""


def captured_work(
    graph: OperationGraph,
    sharding: Subgraphs,
    one: Sizes,
    autocast: Autocast | None = None,
    loss_chunk: int | None = None,
) -> tuple[TensorRankWork, ...]:
    """Count the work of every sub-graph, with the collectives of tensor parallelism inside it.

    Args:
        graph: the model, or a tensor rank's share of it.
        sharding: its sub-graphs.
        one: sizes for inputs of one sample.
        autocast: that of the device, if it runs under 16-bit autocast.
        loss_chunk: ``train.loss_chunk_tokens``.
    """
    graph = without_idle_casts(graph, autocast)
    counted, unread = Counted(graph, one, autocast), unread_bytes(graph, sharding, one)
    made = [_tensor_rank(counted, sharding, i, unread[i], loss_chunk is not None) for i in range(sharding.count)]
    if loss_chunk is not None:
        made[-1] = made[-1]._replace(work=with_head(made[-1].work, _head(counted, loss_chunk)))
    return tuple(made)


@dataclass
class _Sums:
    """Sums over the operations of a sub-graph: FLOPs, bytes moved (``traffic``) and bytes kept."""

    forward_flops: float = 0.0
    input_flops: float = 0.0
    attention: float = 0.0
    """The part of ``forward_flops`` that is causal attention."""
    input_attention: float = 0.0
    """The same of ``input_flops``."""
    full_attention: float = 0.0
    """The part of ``forward_flops`` that is fused attention without a causal mask."""
    positions: int = 0
    head: int = 0
    """Keys that attention reads, and the width of its heads."""
    products: tuple[list[Product], list[Product], list[Product]] = field(default_factory=lambda: ([], [], []))
    """Of linear layers, in the forward, the input gradient and the weight gradient."""
    read: dict[int | str, int] = field(default_factory=dict)
    """Values of the activations that linear layers read, each once."""
    written: int = 0
    """Values that linear layers write."""
    key_values: float = 0.0
    """Bytes of the keys and values that causal attention reads."""
    weight_flops: float = 0.0
    operands: float = 0.0
    back_operands: float = 0.0
    waiting: float = 0.0
    traffic: float = 0.0
    back_traffic: float = 0.0
    weight_traffic: float = 0.0
    kernels: int = 0
    largest: float = 0.0
    """Bytes of the largest gradient of an activation."""
    scores: float = 0.0
    """Bytes of the gradients of attention's scores, where these are materialised."""
    loss: float = 0.0
    """Bytes of the gradients that the loss makes."""
    graded: float = 0.0
    """Bytes of the gradients that weight gradients of linear layers read."""
    looked_up: float = 0.0
    """Bytes that embeddings keep from B to W."""
    aside: float = 0.0
    """Bytes kept besides results: dropout masks, statistics of norms, token ids."""
    kept: dict[tuple[int, int | None], float] = field(default_factory=dict)
    """Bytes of the tensors saved for the backward. A key is (operation, None) for a result itself, or (operation,
    product) for the copy of it that autocast makes for a product."""
    matrices: dict[str, float] = field(default_factory=dict)
    """Number of elements of the parameters that products read."""
    tables: dict[str, float] = field(default_factory=dict)
    """Bytes of the parameters of embeddings."""
    ahead: list[Exchange] = field(default_factory=list)
    back: list[Exchange] = field(default_factory=list)
    """What tensor ranks exchange."""
    moved: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Per operation, the bytes that it moves, and in the backward."""
    grouped: list[int] = field(default_factory=list)
    """Products of rows with the matrices of their experts."""

    def add_forward(self, other: _Sums) -> None:
        """Add what another's forward does, without its backward and what is kept for that."""
        self.forward_flops += other.forward_flops
        self.attention += other.attention
        self.full_attention += other.full_attention
        self.positions, self.head = max(self.positions, other.positions), max(self.head, other.head)
        self.products[0].extend(other.products[0])
        self.read |= other.read
        self.operands += other.operands
        self.traffic += other.traffic
        self.kernels += other.kernels
        self.matrices |= other.matrices
        self.tables |= other.tables


def _head(c: Counted, chunk: int) -> LinearHead:
    product, *scales = c.graph.linear_head
    rows, inputs = evaluate_all(c.graph.sources[str(c.graph.operations[product].operands[1])].type.shape, c.one)
    return LinearHead(
        chunk=chunk,
        tokens=c.values(product) // rows,
        inputs=inputs,
        rows=rows,
        width=c.widths[product],
        master=ITEM_BYTES[c.graph.sources[str(c.graph.operations[product].operands[1])].type.dtype],
        statistic=_statistic(c, product),
        scales=len(scales),
    )


def _tensor_rank(
    counted: Counted, sharding: Subgraphs, number: int, unread: float, headless: bool = False
) -> TensorRankWork:
    """Return the work of a sub-graph; ``headless``: without the linear head and the loss, but with what it reads."""
    graph = counted.graph
    span = sharding.operations(range(number, number + 1))
    last = number == sharding.count - 1
    sums = _Sums()
    headless = headless and last
    counts = range(span.start, graph.linear_head[0]) if headless else span
    for i in counts:
        _count(counted, i, sums)
    if headless:
        _keep(counted, counts.stop, graph.operations[counts.stop].inputs, sums, counted.autocast is not None)
    fused = fused_work(_fusion(counted), counts)
    fused_traffic, fused_back, fused_kept = fused.forward, fused.backward, fused.kept
    aside, largest = sums.aside, max(sums.largest, sums.scores)
    if last and not headless:
        logits = _loss(counted, sums)
        # One kernel reads the logits twice; one of the backward writes their gradient.
        fused_traffic, fused_back, fused_kept = fused_traffic + 2 * logits, fused_back + 2 * logits, fused_kept + logits
        largest = max(largest, logits)
    ahead, inputs, grads = (tuple(p._replace(linear=not last) for p in each) for each in sums.products)
    names = graph.parameters_of([graph.operations[i] for i in span])
    wide = max((ITEM_BYTES[graph.sources[n].type.dtype] for n in names), default=4)
    # Autocast has no rule for grouped products: they are computed in the weights' own dtype.
    stacked = {counted.parameter_of(o) for i in sums.grouped for o in graph.operations[i].operands}
    narrowed = sum(values for name, values in sums.matrices.items() if name not in stacked)
    trained = {name: graph.parameters[name] for name in names if graph.sources[name].requires_grad}
    gradients = {name: values for name, values in sums.matrices.items() if name in trained}
    tables = {name: size for name, size in sums.tables.items() if name in trained}
    backward = any(graph.requires_grad[i] for i in span)
    copied = AUTOCAST_BYTES if counted.autocast is not None else 0
    # A cast is charged to every micro-batch (cost.gpt_work). A gradient is written, then read and accumulated.
    read = wide * sum(sums.matrices.values()) + 2 * copied * narrowed
    overhead = sums.kernels / BLOCK
    gradient = max([n * (wide + (name not in stacked) * copied) for name, n in gradients.items()], default=0.0)
    fixed = max([gradient, *tables.values()])
    cut = () if last else sharding.cuts[number]
    behind = [kind for i in cut if (kind := graph.operations[i].type) is not None]
    work = LayerWork(
        name=f"{number} {sharding.labels[number]}",
        parameters=sum(graph.parameters[name] for name in names),
        trained_parameters=sum(trained.values()),
        forward=TaskWork(
            flops=sums.forward_flops,
            operands=sums.operands,
            weights=read,
            traffic=sums.traffic,
            fused_traffic=fused_traffic,
            overhead=overhead,
            fused_overhead=fused.kernels / BLOCK,
            attention=sums.attention,
            full_attention=sums.full_attention,
            positions=sums.positions,
            head=sums.head,
            products=ahead,
            quantized=0.0 if last else sum(sums.read.values()),
        ),
        input_grad=TaskWork(
            flops=sums.input_flops,
            operands=sums.back_operands,
            weights=read if sums.input_flops else 0.0,
            traffic=sums.back_traffic,
            fused_traffic=fused_back,
            overhead=INPUT_GRAD * overhead if backward or not names else 0.0,
            attention=sums.input_attention,
            full_attention=FUSED_BACKWARD * sums.full_attention if backward else 0.0,
            positions=sums.positions,
            head=sums.head,
            products=inputs,
            quantized=0.0 if last else float(sums.written),
        ),
        # The gradient of an embedding is a whole table, mostly zeros, which is accumulated.
        weight_grad=TaskWork(
            flops=sums.weight_flops,
            operands=sums.waiting,
            weights=3 * wide * sum(gradients.values()) + 4 * sum(tables.values()),
            traffic=sums.weight_traffic,
            overhead=WEIGHT_GRAD * overhead if trained else 0.0,
            products=grads,
        ),
        kept_bytes=sum(sums.kept.values()) + sums.aside,
        fused_kept_bytes=fused_kept + aside,
        fused_operand_bytes=fused.operands,
        cast_bytes=narrowed * copied,
        unread_input_bytes=unread,
        waiting_bytes=sums.waiting + sums.looked_up,
        # Tensors that cross a cut have the dtype they were captured with, also under autocast.
        output_bytes=float(sum(kind.bytes(counted.one) for kind in behind)),
        output_floats=float(sum(kind.bytes(counted.one) for kind in behind if kind.floating)),
        # The gradient of the head's weight is made after those of the loss have been freed.
        workspace_bytes=max(sums.largest, sums.scores, sums.loss),
        fused_workspace_bytes=largest,
        workspace_fixed_bytes=max(0.0, fixed - sums.loss),
        split_workspace_bytes=max(2 * sums.largest, sums.scores, sums.loss),
        operand_bytes=sums.graded,
        key_value_bytes=sums.key_values,
        experts=_experts(counted, sums, names, wide),
    )
    return TensorRankWork(work, tuple(sums.ahead), tuple(sums.back))


def _experts(c: Counted, sums: _Sums, names: Sequence[str], wide: int) -> ExpertsWork | None:
    """Return the experts of a sub-graph: what makes as many rows as its first grouped product reads is theirs."""
    if not sums.grouped:
        return None
    first = sums.grouped[0]
    operands = c.graph.operations[first].operands
    matrix = next(name for o in operands if (name := c.parameter_of(o)) is not None)
    at: int | str = next(o for o in operands if c.parameter_of(o) is None)
    row_bytes, rows = c.entering(first, at) / c.rows(first), c.rows(first)
    while isinstance(at, int) and c.rows(at) == rows and c.graph.operations[at].operands:
        at = c.graph.operations[at].operands[0]  # what the rows are gathered from: one for each token
    tokens = c.rows(at) if isinstance(at, int) and 0 < c.rows(at) < rows else rows
    own = {name for name in names if name.startswith(f"{matrix.rpartition('.')[0]}.")}
    routed = {i for i in sums.moved if c.rows(i) == rows}
    there, back = (sum(moved[side] for i, moved in sums.moved.items() if i in routed) for side in (0, 1))
    kept = sum(size for (i, _), size in sums.kept.items() if i in routed)
    beside = [values * wide for name, values in sums.matrices.items() if name not in own]
    return ExpertsWork(
        experts=evaluate_all(c.graph.sources[matrix].type.shape[:1], c.one)[0],
        per_token=rows // tokens,
        rows=rows,
        row_bytes=row_bytes,
        parameters=sum(c.graph.parameters[name] for name in own),
        trained=c.graph.sources[matrix].requires_grad,
        traffic=there / sums.traffic if sums.traffic else 0.0,
        back_traffic=back / sums.back_traffic if sums.back_traffic else 0.0,
        kept=kept / (sum(sums.kept.values()) + sums.aside) if kept else 0.0,
        fixed_beside=float(max(beside, default=0)),
    )


def _count(c: Counted, i: int, sums: _Sums) -> None:
    """Add one operation's forward and backward to the sums."""
    graph, name = c.graph, c.name(i)
    wanted = graph.requires_grad[i]
    if wanted:
        _gradients_of(c, i, sums)
    if is_view(graph, i) or c.replicated[i]:
        return
    if wanted:
        before = sums.traffic, sums.back_traffic
        _operation(c, i, sums)
        sums.moved[i] = sums.traffic - before[0], sums.back_traffic - before[1]
    else:  # before the first trained parameter nothing is kept, and no gradient is made
        apart = _Sums()
        _operation(c, i, apart)
        sums.add_forward(apart)
    if name in COLLECTIVES:
        _exchange(c, i, name, sums)


def _exchange(c: Counted, i: int, name: str, sums: _Sums) -> None:
    """Add what tensor ranks exchange in one operation's forward and backward."""
    operation = c.graph.operations[i]
    ahead: tuple[Exchange, ...] = ()
    back: tuple[Exchange, ...] = ()
    size, summed = float(c.bytes(i)), name.endswith("_sequence") and operation.args[3]
    if name == "reduce_from_group":
        ahead = all_reduces(size)
    elif name == "copy_to_group":
        back = all_reduces(size)
    elif name == "scatter_sequence":
        size *= operation.args[2]
        ahead, back = (Exchange("reduce_scatter", size),) * summed, (Exchange("all_gather", size),)
    else:  # what one rank has of the gradient, it takes without the others
        ahead, back = (Exchange("all_gather", size),), (Exchange("reduce_scatter", size),) * summed
    sums.ahead += ahead
    sums.back += back if c.graph.requires_grad[i] else ()


def _operation(c: Counted, i: int, sums: _Sums) -> None:
    """Add the kernels of one operation that is no view."""
    graph, operation, name = c.graph, c.graph.operations[i], c.name(i)
    sums.kernels += 1
    for operand in c.casts(i):
        if not c.is_parameter(operand):
            sums.traffic += c.bytes(operand) + c.entering(i, operand)
            sums.back_traffic += c.bytes(operand) + c.entering(i, operand)
    flops = matrix_flops(graph, operation, c.one)
    if name == ATTENTION:
        _attention(c, i, flops or 0.0, sums)
    elif flops is not None:
        _product(c, i, flops, sums)
    elif name == "embedding":
        _look_up(c, i, sums)
    elif name == "dropout" and operation.random:
        moved, kept = mask_bytes(c.widths[i], RAYPIPE)
        sums.traffic += moved * c.values(i)
        sums.back_traffic += 3 * c.bytes(i)
        sums.aside += kept * c.values(i)
    else:
        _plain(c, i, sums)


def _gradients_of(c: Counted, i: int, sums: _Sums) -> None:
    """Add the traffic of accumulating a result's gradient over its readers, or of joining it from parts."""
    readers = sum(c.graph.requires_grad[user] for user in c.graph.users[i])
    if c.graph.operations[i].type is None:
        sums.back_traffic += 2 * sum(c.bytes(o) for o in c.graph.operations[i].inputs if c.graph.requires_grad[o])
    elif readers > 1:
        sums.back_traffic += 3 * (readers - 1) * c.bytes(i)
    if not is_view(c.graph, i):
        sums.largest = max(sums.largest, c.bytes(i))


def _keep(c: Counted, i: int, numbers: Sequence[int], sums: _Sums, autocast: bool = False) -> None:
    """Add the results that are saved for the backward of operation ``i``, each piece of memory once."""
    for number in numbers:
        at = root(c.graph, number)
        if c.replicated[at]:
            continue  # shared by all sub-graphs of a stage
        cast = autocast and c.widths[at] > AUTOCAST_BYTES  # autocast caches only the casts of parameters
        if cast:
            sums.kept[number, i] = float(c.values(number) * AUTOCAST_BYTES)
        else:
            sums.kept[at, None] = c.bytes(at if c.graph.operations[at].type is not None else number)


def _product(c: Counted, i: int, flops: float, sums: _Sums) -> None:
    graph, operation = c.graph, c.graph.operations[i]
    own = [name for o in operation.operands if (name := c.parameter_of(o)) is not None]
    matrices = [name for name in own if len(graph.sources[name].type.shape) > 1]
    vectors = [name for name in own if len(graph.sources[name].type.shape) == 1]
    read = [o for o in operation.operands if c.parameter_of(o) is None]
    moved = sum(c.entering(i, o) for o in read) + c.bytes(i)
    sums.forward_flops += flops
    sums.operands += moved
    for name in matrices:
        sums.matrices[name] = c.values(name)
    back = sum(graph.requires_grad[o] for o in read if isinstance(o, int))
    if len(matrices) == 1 and c.name(i) in LINEAR | GROUPED and operation.type is not None and c.values(i):
        outputs = evaluate_all(operation.type.shape, c.one)[-1]
        rows, width = c.values(i) // outputs, round(flops / (2 * c.values(i)))
        groups = evaluate_all(graph.sources[matrices[0]].type.shape[:1], c.one)[0] if c.name(i) in GROUPED else 0
        sums.grouped.extend([i] * bool(groups))
        ahead, inputs, grads = linear_products(rows, width, outputs, groups=groups)
        trained = graph.sources[matrices[0]].requires_grad
        for each, product, made in zip(sums.products, (ahead, inputs, grads), (True, back, trained), strict=True):
            each.extend([product] * bool(made))
        sums.read |= {o: c.values(o) for o in read}
        sums.written += c.values(i) if back or trained else 0
        # A gradient by grouped products is no product of two matrices: it is computed where its operands are.
        sums.graded += c.bytes(i) if trained and not groups else 0.0
    if back:
        times = 1 if matrices else min(back, 2)
        sums.input_flops += times * flops
        sums.back_operands += times * moved
    if any(graph.sources[name].requires_grad for name in matrices):
        sums.weight_flops += flops
        sums.waiting += moved
    if any(graph.sources[name].requires_grad for name in vectors):
        sums.weight_traffic += c.bytes(i)
    kept = [o for o in kept_operands(graph, i) if c.parameter_of(o) is None]
    _keep(c, i, kept, sums, c.autocast is not None and is_product(operation, c.autocast))


def _attention(c: Counted, i: int, flops: float, sums: _Sums) -> None:
    """Add attention: fused, or with materialised scores if it has dropout, since no kernel accepts a dropout mask.

    What causal attention hides in such scores is left out: a byte per pair of positions, once a micro-batch.
    """
    graph, operation = c.graph, c.graph.operations[i]
    moved = sum(c.entering(i, o) for o in operation.operands) + c.bytes(i)
    shapes = [evaluate_all(t.shape, c.one) for t in operand_types(graph, operation)[:3] if t is not None]
    *batch, queries, _ = shapes[0]
    width = c.widths[i]
    sums.positions, sums.head = max(sums.positions, shapes[1][-2]), max(sums.head, shapes[0][-1])
    if operation.random:
        scores = prod(batch) * queries * shapes[1][-2]
        mask_moved, mask_kept = mask_bytes(width, RAYPIPE)
        sums.kernels += 6
        sums.forward_flops += flops
        sums.input_flops += 2 * flops
        # Scores are written by the product, scaled, masked, normalised and read by the product; likewise in backward.
        sums.traffic += moved + (8 * width + mask_moved) * scores
        sums.back_traffic += 2 * moved + (9 + 3) * width * scores
        sums.aside += (2 * width + mask_kept) * scores
        sums.scores = max(sums.scores, 2.0 * width * scores)
    else:
        share = 0.5 if operation.causal else 1.0  # masked scores are not computed
        sums.forward_flops += share * flops
        sums.input_flops += share * FUSED_BACKWARD * flops
        if not operation.causal:
            sums.full_attention += flops
        else:
            sums.attention += share * flops
            sums.input_attention += share * FUSED_BACKWARD * flops
            sums.key_values += sum(c.entering(i, o) for o in operation.operands[1:3])
        sums.traffic += moved
        sums.back_traffic += 2 * moved
        sums.aside += prod(batch) * queries * _statistic(c, i)
        _keep(c, i, [i], sums)
    _keep(c, i, kept_operands(graph, i), sums, c.autocast is not None)


def _look_up(c: Counted, i: int, sums: _Sums) -> None:
    table = next((o for o in c.graph.operations[i].operands if c.is_parameter(o)), None)
    read = sum(c.values(o) for o in c.graph.operations[i].operands if not c.is_parameter(o))
    sums.traffic += 2 * c.bytes(i)
    sums.aside += LABEL * read
    if table is not None:
        sums.tables[str(table)] = c.bytes(table)
        sums.weight_traffic += 3 * c.bytes(i)
        sums.looked_up += c.bytes(i) + LABEL * read


def _plain(c: Counted, i: int, sums: _Sums) -> None:
    """Add an operation that moves memory and has negligible FLOPs."""
    graph, operation = c.graph, c.graph.operations[i]
    read = [o for o in operation.operands if not c.is_parameter(o)]
    sums.traffic += sum(c.bytes(o) for o in read) + c.bytes(i)
    kept = kept_operands(graph, i)
    _keep(c, i, [*kept, *([i] if keeps_result(graph, i) else [])], sums)
    if c.name(i) in ("layer_norm", "rms_norm"):
        shape = operation.type.shape if operation.type is not None else ()
        sums.aside += 2 * _statistic(c, i) * c.values(i) // max(1, evaluate_all(shape, c.one)[-1])
    if not passes_on(graph, i):
        used = sum(c.bytes(o) for o in kept) + c.bytes(i) * keeps_result(graph, i)
        written = sum(c.bytes(o) for o in operation.inputs if graph.requires_grad[o])
        sums.back_traffic += c.bytes(i) + used + written


def _statistic(c: Counted, i: int) -> int:
    """Return the bytes of a norm's mean, of attention's log-sum-exp, or of a log-probability."""
    kind = c.graph.operations[i].type
    return 8 if kind is not None and kind.dtype == "float64" else 4


def _fusion(c: Counted) -> FusionRules:
    """Return what fusing needs to know of the operations."""
    graph = c.graph

    def size(i: int) -> float:
        return 0.0 if c.replicated[i] or c.parameter_of(i) is not None else c.bytes(i)

    def alone(i: int) -> bool:
        name = c.name(i)
        return name in COLLECTIVES or name == "embedding" or matrix_flops(graph, graph.operations[i], c.one) is not None

    def keeps(i: int) -> list[int]:
        results = keeps_result(graph, i) or c.name(i) == ATTENTION
        kept = [o for o in kept_operands(graph, i) if not c.replicated[root(graph, o)]]
        return [*kept, *([i] if results and graph.requires_grad[i] else [])]

    def share(i: int, o: int) -> float:
        reads_cast = o != i and c.autocast is not None and is_product(graph.operations[i], c.autocast) and c.bytes(o)
        return c.entering(i, o) / c.bytes(o) if reads_cast else 1.0

    return FusionRules(graph, alone, lambda i: root(graph, i), keeps, size, share)


def _loss(c: Counted, sums: _Sums) -> float:
    """Add the cross-entropy of the model's output: cast to float32 under autocast, log-softmax, and backward.

    Return the bytes of the outputs.
    """
    result = 0.0
    for output in c.graph.outputs.values():
        kind = c.graph.operations[output].type
        if kind is None or not kind.shape:
            continue
        logits, width = c.values(output), _statistic(c, output)
        sums.kernels += 2
        sums.traffic += (c.widths[output] + width if c.widths[output] < width else 0) * logits + 2 * width * logits
        sums.back_traffic += 4 * width * logits
        sums.aside += width * logits + LABEL * (logits // max(1, evaluate_all(kind.shape, c.one)[-1]))
        sums.loss += 2.0 * width * logits
        result += c.bytes(output)
    return result


def unread_bytes(graph: OperationGraph, sharding: Subgraphs, one: Sizes) -> tuple[float, ...]:
    """Return, per sub-graph, the bytes that it receives, uses last, and that no operation saves for its backward.

    A sum that a ReLU reads first thing is an example: the ReLU saves its own result. A stage that begins with the
    sub-graph holds what it received all the same.

    Args:
        graph: the model.
        sharding: its sub-graphs.
        one: sizes for inputs of one sample.
    """
    numbers = range(len(graph.operations))
    saved = {root(graph, kept) for n in numbers for kept in kept_operands(graph, n)}
    saved |= {root(graph, n) for n in numbers if keeps_result(graph, n)}
    result = [0.0]
    for i, arriving in enumerate(sharding.cuts):
        passed_on = sharding.cuts[i + 1] if i + 1 < len(sharding.cuts) else ()
        held = saved | {root(graph, n) for n in passed_on}
        unread = {root(graph, n): kind for n in arriving if (kind := graph.operations[n].type) is not None}
        result.append(float(sum(t.bytes(one) for at, t in unread.items() if t.floating and at not in held)))
    return tuple(result)
