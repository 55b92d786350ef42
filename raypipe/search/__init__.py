"""Automatic schedules: the best order found for a placement and its costs, with a proven bound beside it."""

from raypipe.search.objective import Objective
from raypipe.search.problem import Problem
from raypipe.search.search import Found, search

__all__ = ["Found", "Objective", "Problem", "search"]
