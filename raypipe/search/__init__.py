"""Automatic schedules: search finds a short order for a placement and its costs, and proves a lower bound."""

from raypipe.search.objective import Objective
from raypipe.search.problem import Problem
from raypipe.search.search import Found, search

__all__ = ["Found", "Objective", "Problem", "search"]
