"""Numbers → plots and one self-contained page."""
