"""Planning: memory and speed of a training step on a pod, from compiling it without running it."""
