"""Re-ranking: a joint encoder orders the first candidates of a dual encoder, its first stage."""
