"""What a training step would take on a pod: compiled for it, not run."""
