"""What commands share: where they read, what they work on, how they print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orca_infra.printable import printable

if TYPE_CHECKING:
    from orca_infra.settings import Settings
    from orca_infra.surroundings import Surroundings

EXIT_FAILED = 1
EXIT_USER = 2

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables for people.")]


def plain(text: str) -> str:
    """Names and messages come from outside: no control characters for the terminal but the end of a line."""
    return printable(text, keep="\n")


def say(message: str) -> None:
    """To people, beside what is printed for whoever reads the output."""
    print(plain(message), file=sys.stderr, flush=True)


def read_environment() -> Settings:
    """The settings; names that look like one and are none are said."""
    from orca_infra.settings import read_settings, unknown_settings

    for sentence in unknown_settings(os.environ):
        say(f"warning: {sentence}")
    return read_settings(os.environ)


def open_for_command(say: Callable[[str], None] = say, *, secrets: bool = False) -> Surroundings:
    """What a command works on; `secrets`: with passphrase and token key, for one that runs the engine or makes machines."""
    from orca_infra.surroundings import open_surroundings

    return open_surroundings(read_environment(), say=say, with_passphrase=secrets, with_token_key=secrets)


def print_json(value: Any) -> None:
    """Print a value for programs; times as ISO 8601."""
    print(json.dumps(value, indent=2, default=lambda one: one.isoformat() if isinstance(one, datetime) else str(one)))
