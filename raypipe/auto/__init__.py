"""Automatic schedules: the best order found for a placement and its costs, with a proven bound beside it."""

from raypipe.auto.measure import Objective
from raypipe.auto.problem import Problem
from raypipe.auto.search import Found, search

__all__ = ["Found", "Objective", "Problem", "search"]
