"""Sharded data parallelism in a schedule: its collectives, its rules for the verifier, what devices hold of it."""
