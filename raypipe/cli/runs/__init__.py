"""Verbs that read a run directory."""
