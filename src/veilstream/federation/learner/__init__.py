"""The learner process."""
