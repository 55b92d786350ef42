"""The protobuf messages of the Tinker API (client 0.38), by field number, and what they mean.

These travel as protobuf: a ``forward_backward`` request, its result, and that of sampling. They are described here,
rather than taken from the client's package, so that a server needs no client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from raypipe.errors import SpecError
from raypipe.runtime.session.call_data import Datum
from raypipe.runtime.session.token_losses import TARGETS
from raypipe.service.sampling import Continuation

PROTOBUF: Final = "application/x-protobuf"
FLOAT32, INT64, INT32 = 1, 2, 3
DTYPES: Final[Mapping[int, Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}

_F = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "str": _F.TYPE_STRING,
    "bytes": _F.TYPE_BYTES,
    "bool": _F.TYPE_BOOL,
    "i32": _F.TYPE_INT32,
    "i64": _F.TYPE_INT64,
    "double": _F.TYPE_DOUBLE,
}
_MESSAGES: Final[Mapping[str, Sequence[tuple[int, str, str]]]] = {
    "ForwardBackwardRequest": [
        (1, "model_id", "str"),
        (2, "seq_id", "i32"),
        (3, "data", "*Datum"),
        (4, "loss_fn", "str"),
        (5, "loss_fn_config", "{double"),
        (6, "forward_only", "bool"),
        (7, "loss_fn_config_v2", "{LossConfigValue"),
    ],
    "LossConfigValue": [(1, "number", "?double"), (2, "text", "?str")],
    "Datum": [(1, "model_input", "*Chunk"), (2, "loss_fn_inputs", "{Tensor")],
    "Chunk": [(1, "encoded_text", "EncodedTextChunk"), (2, "image", "Opaque"), (3, "dmel", "Opaque")],
    "EncodedTextChunk": [(1, "tokens", "bytes")],
    "Opaque": [],
    "Tensor": [(1, "dense", "?bytes"), (2, "sparse_csr", "Opaque"), (3, "dtype", "i32"), (4, "shape", "*i64")],
    "ForwardBackwardOutput": [
        (1, "loss_fn_output_type", "str"),
        (2, "loss_fn_outputs", "*ArrayRecord"),
        (3, "metrics", "{double"),
    ],
    "ArrayRecord": [(1, "type_tag", "str"), (2, "fields", "{BatchedTensor"), (3, "num_datums", "i64")],
    "BatchedTensor": [
        (1, "data", "bytes"),
        (2, "offsets", "bytes"),
        (3, "dtype", "i32"),
        (4, "trailing_shape", "*i64"),
    ],
    "SampleResponse": [(1, "sequences", "*SampledSequence"), (2, "prompt_logprobs", "?bytes")],
    "SampledSequence": [(1, "stop_reason", "i32"), (2, "tokens", "bytes"), (3, "logprobs", "?bytes")],
}
"""Per message, (number, name, type) of its fields: ``*`` many, ``{`` a map from strings, ``?`` one that may be absent.
"""


def _described() -> dict[str, type]:
    file = descriptor_pb2.FileDescriptorProto(name="raypipe/tinker.proto", package="raypipe", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, spec in fields:
            kind = spec.lstrip("*{?")
            if spec[0] == "{":
                entry = message.nested_type.add(name="".join(part.title() for part in field.split("_")) + "Entry")
                entry.options.map_entry = True
                _add(entry, 1, "key", "str")
                _add(entry, 2, "value", kind)
                _add(message, number, field, f"{name}.{entry.name}", many=True)
            else:
                _add(message, number, field, kind, many=spec[0] == "*", optional=spec[0] == "?")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"raypipe.{name}")) for name in _MESSAGES}


def _add(message: Any, number: int, name: str, kind: str, many: bool = False, optional: bool = False) -> None:
    field = message.field.add(number=number, name=name, label=_F.LABEL_REPEATED if many else _F.LABEL_OPTIONAL)
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = _F.TYPE_MESSAGE, f".raypipe.{kind}"
    if optional:
        message.oneof_decl.add(name=f"_{name}")
        field.oneof_index, field.proto3_optional = len(message.oneof_decl) - 1, True


_CLASSES = _described()


def read_request(body: bytes) -> Any:
    """Return a ``forward_backward`` request.

    Raises:
        SpecError: it is none.
    """
    request = _CLASSES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise SpecError("forward_backward", "the body is no such protobuf message", "use the tinker client") from None
    return request


def options_of(request: Any) -> dict[str, float]:
    """Return ``loss_fn_config``: of its two forms, the newer one where it is there.

    Raises:
        SpecError: an option is no number.
    """
    found = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        if not value.HasField("number"):
            raise SpecError(f"loss_fn_config.{name}", "is no number", "give one")
        found[name] = value.number
    return found


def data_of(request: Any) -> list[Datum]:
    """Return the sequences of a request.

    Raises:
        SpecError: something in it is no text, or no dense tensor of one dimension.
    """
    return [_datum(f"data[{i}]", one) for i, one in enumerate(request.data)]


def _datum(where: str, one: Any) -> Datum:
    chunks = []
    for chunk in one.model_input:
        if not chunk.HasField("encoded_text") or chunk.HasField("image") or chunk.HasField("dmel"):
            raise SpecError(f"{where}.model_input", "holds a chunk that is no text", "send tokens alone")
        chunks.append(_numbers(f"{where}.model_input", chunk.encoded_text.tokens, DTYPES[INT32]))
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    inputs = {name: _tensor(f"{where}.loss_fn_inputs.{name}", value) for name, value in one.loss_fn_inputs.items()}
    return Datum(tokens.astype(np.int64), inputs)


def _tensor(where: str, value: Any) -> NDArray[Any]:
    if value.HasField("sparse_csr") or len(value.shape) > 1:
        raise SpecError(where, "has more than one dimension", "send one target, and one number, for each token")
    if value.dtype not in (FLOAT32, INT64):
        raise SpecError(where, f"has a dtype of number {value.dtype}", "send float32 or int64")
    found = _numbers(where, value.dense, DTYPES[value.dtype])
    if value.shape and value.shape[0] != len(found):
        raise SpecError(where, f"has {len(found)} numbers, and a shape of {value.shape[0]}", "make them agree")
    whole = where.endswith(f".{TARGETS}")
    return found if whole else found.astype(np.float64)


def _numbers(where: str, data: bytes, dtype: Any) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise SpecError(where, f"has {len(data)} bytes, no whole number of {dtype} values", "use the tinker client")
    return np.frombuffer(data, dtype)


def output_bytes(logprobs: Sequence[NDArray[Any]], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a ``forward_backward`` or a forward."""
    result = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = result.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    field = record.fields["logprobs"]
    flat = [np.asarray(one, DTYPES[FLOAT32]) for one in logprobs]
    field.data = b"".join(one.tobytes() for one in flat)
    ends = np.cumsum([0, *(one.nbytes for one in flat)])
    field.offsets, field.dtype = ends.astype(DTYPES[INT64]).tobytes(), FLOAT32
    result.metrics.update(metrics)
    made: bytes = result.SerializeToString()
    return made


def samples_bytes(made: Sequence[Continuation], prompt_logprobs: NDArray[np.float32] | None) -> bytes:
    """Return the result of a request for samples."""
    result = _CLASSES["SampleResponse"]()
    for one in made:
        stop_reason = 0 if one.stopped else 1
        tokens, logprobs = one.tokens.astype("<i4").tobytes(), one.logprobs.astype("<f4").tobytes()
        result.sequences.add(stop_reason=stop_reason, tokens=tokens, logprobs=logprobs)
    if prompt_logprobs is not None:
        result.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    written: bytes = result.SerializeToString()
    return written
