"""A collection of images on disk, and queries to it."""
