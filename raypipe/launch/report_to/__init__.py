"""What a run tells TensorBoard, MLflow and Weights & Biases, from the process that started it."""
