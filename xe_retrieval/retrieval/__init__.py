"""Embeddings → ranks, precision and recall, thresholds, indexes."""
