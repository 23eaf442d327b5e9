"""A run shown elsewhere while it goes on: TensorBoard, MLflow, Weights & Biases, object storage."""
