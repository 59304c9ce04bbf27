"""`python -m nalora` is the command line."""

from nalora.cli import main

main()
