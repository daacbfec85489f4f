"""The program of the base stack, and what a person sees of the others: run by `pulumi preview` and `pulumi up`."""

from __future__ import annotations

import os

import pulumi

from orca_infra.errors import UserError
from orca_infra.settings import read_settings
from orca_infra.surroundings import open_surroundings


def main() -> None:
    """Declare what this stack owns. A user's mistake becomes one sentence, without a traceback."""
    try:
        settings = read_settings(os.environ)
        if pulumi.get_stack() != settings.stack:
            raise UserError(
                f"this shell is set for stack {settings.stack!r}, and pulumi was asked for {pulumi.get_stack()!r}: "
                f'run `export ORCA_STACK={pulumi.get_stack()}`, then `eval "$(orca-infra env)"`'
            )
        surroundings = open_surroundings(settings, say=pulumi.log.info)
    except UserError as error:
        raise pulumi.RunError(str(error)) from None
    declare(surroundings.stack_id, settings.stack)
    surroundings.close()


def declare(stack_id: str, family: str) -> None:
    """The base: for now the identity, which makes the engine refuse a database that belongs to another state."""
    pulumi.CustomResource(
        "orca:index:Identity", "identity", {"id": stack_id, "stack": family}, pulumi.ResourceOptions(protect=False)
    )
    pulumi.export("id", stack_id)
    pulumi.export("family", family)
