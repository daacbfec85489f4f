"""The program of a machine stack's targeted `up`: it declares the machines that are made now, and those alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orca_infra.machines.providers.port import TOKEN_PLACEHOLDER
from orca_infra.stack.program import Program, Registrar, secret


def machine_program(resource_type: str, machines: Mapping[str, tuple[Mapping[str, Any], str]]) -> Program:
    """A program that declares these machines: name -> (declaration of its row, token)."""

    def program(registrar: Registrar) -> None:
        pending = [
            registrar.register(resource_type, name, with_token(declaration, secret, token))
            for name, (declaration, token) in machines.items()
        ]
        for registration in pending:
            registration.result()

    return program


def with_token(value: Any, seal: Any, token: str) -> Any:
    """The declaration with the token wherever its placeholder stands, also within longer text, sealed as a secret."""
    if isinstance(value, str) and TOKEN_PLACEHOLDER in value:
        return seal(value.replace(TOKEN_PLACEHOLDER, token))
    if isinstance(value, Mapping):
        return {key: with_token(inner, seal, token) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_token(inner, seal, token) for inner in value]
    return value
