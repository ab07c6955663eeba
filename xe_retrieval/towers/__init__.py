"""Text and image encoders."""
