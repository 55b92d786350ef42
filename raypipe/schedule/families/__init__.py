"""Generators of schedules, ``(Shape, CostTable) -> Schedule``, one file per family."""
