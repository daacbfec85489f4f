"""Which architectures a worker image has variants for; a type of another is left out of a pool's search."""

from __future__ import annotations

from typing import Protocol


class ImageArchitectures(Protocol):
    """Asks an image's registry; an answer is kept for ORCA_POOL_IMAGE_SECONDS, since a tag can be pushed again."""

    def __call__(self, image: str) -> frozenset[str] | None:
        """The architectures, as Go names them (amd64, arm64); None when they are not known, and nothing is left out then.

        Raises OrcaError when the registry cannot be asked, which counts as not known.
        """


def unknown_architectures(image: str) -> frozenset[str] | None:  # noqa: ARG001  (the port's)
    """Knows nothing, so that no type is left out."""
    return None
