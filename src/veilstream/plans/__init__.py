"""A run as validated TOML, shipped plans, and from a plan to prepared parts."""
