"""The web page and its JSON API: one process, one index, one model."""
