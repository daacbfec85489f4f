"""Where the policy pack is that the engine is given."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def pack_folder() -> Path:
    """The folder with PulumiPolicy.yaml: a checkout's, or the installed package's own."""
    checkout = _PACKAGE.parent / "policies"
    return checkout if (checkout / "PulumiPolicy.yaml").is_file() else _PACKAGE / "policies"
