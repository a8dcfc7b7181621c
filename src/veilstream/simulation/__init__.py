"""All learners, seeds and methods at once, on CPU or GPU."""
