"""Images and labels -> the labels that fit, or none of these."""
