"""The events of a run in words, the same in progress lines, the live table and the report."""

from __future__ import annotations

from typing import Any


def event_sentences(row: dict[str, Any]) -> list[str]:
    """Return the sentences that tell an event of events.jsonl; none for events that only programs read.

    An event that lacks a field, as one of another version of raypipe may, is told by its name alone.

    >>> event_sentences({"event": "restarted", "checkpoint": None})
    ['restarting from the start']
    """
    try:
        return _sentences(row)
    except (KeyError, TypeError, ValueError):
        return [str(row.get("event"))]


def _sentences(row: dict[str, Any]) -> list[str]:
    kind = row["event"]
    if kind == "started":
        lines = [f"{d['name']} on {d['device']}, {d['parameters']:,} parameters" for d in row["devices"]]
        return [*lines, f"resumed from step {row['resumed_from']}"] if row["resumed_from"] else lines
    step = f"step {row['step']:>5}  " if "step" in row else ""
    if kind == "predicted":
        return [f"predicted step {row['step_s']:.4f} s, {row['bubble_ratio']:.1%} idle"]
    if kind == "replanned":
        return [f"{step}replanned: {row['change']}; predicted gain {row['gain']:.1%} per step"]
    if kind == "realised":
        back = ", so it is reverted" if row["gain"] < 0 else ""
        return [f"{step}the change gained {row['gain']:.1%} per step{back}"]
    if kind == "restored":
        return [f"{step}change restored: steps without it are now {row['gain']:.1%} slower"]
    if kind == "drifted":
        return [f"{step}step time drifted from {row['was_s']:.4f} to {row['now_s']:.4f} s: measuring again"]
    if kind == "first_k":
        waits = f"weight gradients of the first {row['k']} layers of stage {row['stage']} wait"
        return [f"{step}{waits}; memory allows {row['most']}"]
    if kind == "early_stop":
        return [f"{step}stopped early: {row['message']}"]
    if kind == "paused":
        return [f"{step}paused: {row['message']}"]
    if kind == "interrupted":
        return [f"{step}ended by {row['message']}"]
    if kind == "resized":
        p = row["plan"]
        shape = f"{p['schedule']}, {p['stages']} stages x {p['replicas']} replicas, micro-batches of {p['microbatch']}"
        if row["devices"] == row["was"]:
            return [f"going on with {row['devices']} devices, as before: {shape}"]
        return [f"going on with {row['devices']} devices instead of {row['was']}: {shape}"]
    if kind == "devices_lost":
        return [f"devices are lost: {row['message']}"]
    if kind == "undone":
        return [f"{step}update undone and repeated with clipped gradients: their norm was {row['grad_norm']:.4g}"]
    if kind in ("failed", "error"):
        return [f"failed: {row['message']}"]
    if kind == "out_of_memory":
        return [f"out of memory, so it goes on with {row['change']}"]
    if kind == "restarted":
        if row.get("source") == "neighbour":
            return [f"going on from copies of step {row['step']} in the nodes' memory"]
        return [f"restarting from {row['checkpoint'] or 'the start'}"]
    if kind == "recovered":
        repeated = "one step repeated" if row["steps_repeated"] else "no step repeated"
        who = ", ".join(row["devices"])
        return [f"{step}replaced {who} in {row['seconds']:.1f} s, {repeated}: {row['message']}"]
    if kind == "skipped":
        return [f"{step}no update was made: {row['message']}"]
    if kind == "rewound":
        what = f"step {row['from_step']}: {row['message']}"
        return [f"{step}back to here from {what}; {row['left_out']} mini-batches are left out"]
    if kind == "compiling":
        return ["compiling stages beside the first steps" if row["beside"] else "compiling stages"]
    if kind == "compiled":
        copy = f" of copy {row['replica']}" if row["replica"] else ""
        if row["reason"] is not None:
            return [f"note: stage {row['stage']}{copy} runs eagerly: {row['reason']}"]
        eager = row.get("eager_share", 0.0)
        rest = (
            f" for {row['lengths']} lengths of samples; {eager:.0%} of its micro-batches run eagerly" if eager else ""
        )
        said = [f"compiled stage {row['stage']}{copy} in {row['seconds']:.1f} s{rest}"]
        why = row.get("eager_validation")
        return said if why is None else [*said, f"note: stage {row['stage']}{copy} validates eagerly: {why}"]
    if kind == "swapped":
        return [f"{step}compiled stages run from here on"]
    if kind == "notice":
        return [f"note: {row['message']}"]
    return []
