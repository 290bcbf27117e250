"""Where metrics are written: metrics.jsonl, TensorBoard, W&B and the user's own writers."""
