"""Captions of the stored CLIP and SigLIP outputs; apart, because make_references.py needs torch."""

CAPTIONS = ["a red circle", "Two blue squares, above it!", "the cat on the mat", "b " * 20, ""]
