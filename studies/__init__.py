"""Programs that try to break it; each has a short form in the suite."""
