"""Batch number n, computed by threads of this process or by worker processes."""
