"""Any model, unmodified, as a sequence of sub-graphs, and the best cut of these into stages.

Capturing and building need torch (``capture``, ``subgraph``); planning the cut does not (``operations``, ``shard``,
``liveness``, ``balance``), so nothing is imported here.
"""
