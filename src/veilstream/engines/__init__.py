"""Who drives the algorithm."""
