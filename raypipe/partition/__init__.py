"""Any model, unmodified, as a sequence of sub-graphs, and the best deal of these to stages.

Capturing and building need torch (``capture``, ``subgraph``); planning the cut does not (``operations``, ``shard``,
``liveness``, ``balance``), so nothing is imported here.
"""
