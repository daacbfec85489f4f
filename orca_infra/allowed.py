"""What the policies let the loop make. Standard library only: every `decide` keeps within it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the policies allow the loop to make (docs/reference/policies.md); what is not stated is allowed.

    Attributes:
        types, locations: patterns, in which `*` stands for anything; none: all.
        registries: hosts, or beginnings of repositories, that images may come from; none: any.
        machines_per_pool, machines: the most of one pool, and of all pools.

    """

    types: tuple[str, ...] = ()
    locations: tuple[str, ...] = ()
    registries: tuple[str, ...] = ()
    machines_per_pool: int | None = None
    machines: int | None = None

    def has_type(self, name: str) -> bool:
        return not self.types or any(fnmatchcase(name, pattern) for pattern in self.types)

    def has_location(self, name: str) -> bool:
        return not self.locations or any(fnmatchcase(name, pattern) for pattern in self.locations)

    def has_image(self, image: str) -> bool:
        places = [f"{registry.rstrip('/')}/" for registry in self.registries]
        return not places or any(f"{repository_of(image)}/".startswith(place) for place in places)


def repository_of(image: str) -> str:
    """The image's whole repository, without tag and digest: `python:3` is `docker.io/library/python`."""
    name = image.partition("@")[0]
    head, slash, rest = name.partition("/")
    is_host = slash and ("." in head or ":" in head or head == "localhost")
    host, path = (head, rest) if is_host else ("docker.io", name if slash else f"library/{name}")
    return f"{host}/{path.partition(':')[0]}"
