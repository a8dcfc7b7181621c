"""The run folder, typed: written by simulation and server, read by reports."""
