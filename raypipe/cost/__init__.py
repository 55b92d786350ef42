"""Costs of tasks, messages and memory: from a model of the machine or from measurements, in one form."""
