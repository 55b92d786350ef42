"""raypipe plans, runs and explains pipeline-parallel training on Ray."""

__version__ = "0.1.0"
