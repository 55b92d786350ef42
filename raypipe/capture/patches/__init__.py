"""What torch and models do differently while a model is traced, so that more of them can be."""
