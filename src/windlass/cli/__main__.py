"""`python -m windlass.cli` is the command `windlass`."""

from windlass.cli.main import main

main()
