"""`python -m windlass`: the same as the command."""

from windlass.cli import main

main(prog_name="windlass")
