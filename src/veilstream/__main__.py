"""`python -m veilstream`."""

from veilstream.cli import main

main()
