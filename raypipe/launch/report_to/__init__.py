"""Reports of a run to TensorBoard, MLflow and Weights & Biases, from the process that started it."""
