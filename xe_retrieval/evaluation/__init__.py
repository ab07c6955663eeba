"""Embeddings → figures: ranks, precision and recall, calibration, intervals."""
