"""Masks under which learners send their increments, so that only a sum over learners can be opened."""
