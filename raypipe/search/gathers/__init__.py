"""Where a sharded step gathers its weights: windows within memory, and the search for them."""
