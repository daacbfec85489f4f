"""The command line: arguments -> one call. A module each for a group of commands; `program` has them all."""

from orca_infra.cli.program import app, main

__all__ = ["app", "main"]
