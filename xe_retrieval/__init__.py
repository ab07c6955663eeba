"""Image-text retrieval with calibrated scores: Cross-Example Softmax on JAX/Flax."""
