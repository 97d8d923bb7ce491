"""The `quantkit` command: typer commands, one file each, that parse, call and print.

Logs go to stderr, results to stdout. Importing this package imports neither torch nor pydantic.
"""

from quantkit.cli.app import main

__all__ = ["main"]
