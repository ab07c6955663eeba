"""Scores → probabilities and thresholds that hold in a collection of any size."""
