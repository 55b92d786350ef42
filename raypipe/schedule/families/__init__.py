"""One file per family of generators: ``(Shape, CostTable) -> Schedule``."""
