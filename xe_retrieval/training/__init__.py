"""Training: loop, step, optimisers, checkpoints, logs, cached features, several processes."""
