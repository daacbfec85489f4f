"""The Pulumi programs of the machine stacks. The only module of this room that imports the SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pulumi

from orca_infra.machines.providers.port import TOKEN_PLACEHOLDER


def machine_program(resource_type: str, machines: Mapping[str, tuple[Mapping[str, Any], str]]) -> Callable[[], None]:
    """A program that declares these machines alone: name -> (declaration of its row, token)."""

    def program() -> None:
        for name, (declaration, token) in machines.items():
            pulumi.CustomResource(resource_type, name, _with_token(declaration, token))

    return program


def _with_token(value: Any, token: str) -> Any:
    """The declaration with the token as a secret wherever its placeholder stands, also within longer text."""
    if isinstance(value, str) and TOKEN_PLACEHOLDER in value:
        return pulumi.Output.secret(value.replace(TOKEN_PLACEHOLDER, token))
    if isinstance(value, Mapping):
        return {key: _with_token(inner, token) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_token(inner, token) for inner in value]
    return value
