"""A run shown elsewhere while it goes on: TensorBoard, MLflow, Weights & Biases, a directory, object storage."""
