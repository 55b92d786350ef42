"""Values of tensors that follow from the graph alone."""
