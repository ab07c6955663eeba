"""The loop around the loss: step, optimisers, mesh, checkpoints."""
