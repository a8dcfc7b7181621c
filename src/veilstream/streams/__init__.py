"""Where clients come from."""
