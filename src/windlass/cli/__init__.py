"""Command line: parse, call the app, print."""

from windlass.cli.main import main

__all__ = ["main"]
