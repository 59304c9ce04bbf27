"""`python -m nalora.cli`."""

from nalora.cli import main

main()
