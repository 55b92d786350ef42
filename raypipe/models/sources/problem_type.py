"""What a model of transformers with a classification head learns: classes, several labels, or values.

The library decides it at the first mini-batch, by ``problem_type`` of the configuration, or else by the number of
labels and their dtype. Here it is decided by the data's fields, before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raypipe.errors import SpecError
from raypipe.job.model_spec import TaskName
from raypipe.models.task import Field, Labels, SeveralLabels, Task, Values

REGRESSION, CLASSES, SEVERAL = "regression", "single_label_classification", "multi_label_classification"
TASKS: dict[str, Callable[[], Task]] = {REGRESSION: Values, CLASSES: Labels, SEVERAL: SeveralLabels}


def task_of_labels(kind: str, config: Any, asked: TaskName | None, labels: Field | None) -> Task:
    """Return the task of a head, as transformers' ``ForSequenceClassificationLoss`` chooses it.

    Args:
        kind: name of the model's class.
        config: its configuration.
        asked: ``model.task``.
        labels: the data's labels; None if it has none, which another check names.

    Raises:
        SpecError: labels have a shape or a dtype that the head's loss does not take, or the job contradicts itself.
    """
    if "TokenClassification" in kind:
        return Labels()
    said = config.problem_type
    if asked == "regression":
        if said not in (None, REGRESSION):
            why = f"regression, but the model's problem_type is {said}"
            raise SpecError("model.task", why, "leave model.task out, or change model.config.problem_type")
        said = REGRESSION
    if said is None and config.num_labels == 1:
        said = REGRESSION
    if said is None:
        said = CLASSES if labels is None or not labels.dtype.is_floating_point else SEVERAL
    if labels is not None:
        _check(said, int(config.num_labels), labels)
    return TASKS[said]()


def _check(problem: str, count: int, labels: Field) -> None:
    """Raise an error if labels do not fit the problem type; ``count`` is ``num_labels``."""
    shape, floating, one = labels.shape, labels.dtype.is_floating_point, labels.shape in ((), (1,))
    has = f"labels hold {_name(labels)} of shape {['rows', *shape]}".replace("'", "")
    if problem == REGRESSION:
        fits, takes = one if count == 1 else shape == (count,), "one number" if count == 1 else f"{count} numbers"
        if not fits:
            fix = f"give labels of shape [rows{'' if count == 1 else f', {count}'}], or set num_labels"
            raise SpecError("data", f"{has}, and the model's head learns {takes} a row (regression)", fix)
        return
    if problem == SEVERAL:
        if floating and shape == (count,):
            return
        fix = f"give floats, 0 or 1, of shape [rows, {count}]"
        if one:
            fix += ", or whole numbers of shape [rows] for one of several classes"
        raise SpecError("data", f"{has}, and the model's head learns {count} labels a row ({SEVERAL})", fix)
    if floating or not one:
        fix = f"give whole numbers of shape [rows]; for several labels a row, floats of shape [rows, {count}]"
        raise SpecError("data", f"{has}, and the model's head learns one of {count} classes a row ({CLASSES})", fix)


def _name(labels: Field) -> str:
    return str(labels.dtype).removeprefix("torch.")
