"""What a deployed learner must never forget."""
