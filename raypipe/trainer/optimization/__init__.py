"""Optimizer and learning rates of a trainer, as keys of ``train``."""
