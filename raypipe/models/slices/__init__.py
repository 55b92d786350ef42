"""Micro-batches cut along the sequence: which slice is running, and causal attention of a slice."""
