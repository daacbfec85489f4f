"""A worker's token: an HMAC of the stack's id and the machine's name. Nothing stores it; any leader renders it again."""

from __future__ import annotations

import hashlib
import hmac


def worker_token(key: bytes, stack_id: str, machine: str) -> str:
    """The token, 64 hexadecimal digits. A new key reaches only later machines: their hash was stored with the old one."""
    return hmac.new(key, f"{stack_id}/{machine}".encode(), hashlib.sha256).hexdigest()


def token_hash(token: str) -> bytes:
    """What the database keeps; orca.machine_of compares with the same function."""
    return hashlib.sha256(token.encode()).digest()
