"""What is said between processes: batches, alerts, topics and their bytes."""
