"""Pairs on disk → batches on devices."""
