"""Server and learners as processes: what is the same whichever engine carries the messages."""
