"""Names that every target accepts, made so that two names never become one.

Google Cloud and Kubernetes take lower-case letters, digits and '-', 63 characters, a letter first (RFC 1035
labels: https://cloud.google.com/compute/docs/naming-resources and
https://kubernetes.io/docs/concepts/overview/working-with-objects/names/).
A name that is refused there is changed and gets '-' and 8 hex digits of the sha256 of the original. A valid name that
already *ends* in '-' and 8 hex digits counts as refused, since it could be what another name is changed to: a name with
such an end always comes from here, so an unchanged name never meets a changed one. Two changed names meet only when 32
bits of sha256 do and the rest is alike; `orca_infra.config` refuses such a pair when the file is loaded.
"""

from __future__ import annotations

import hashlib
import re
import secrets

_LIMIT = 63
_HASH_CHARACTERS = 8
_SHORTEST_LIMIT = _HASH_CHARACTERS + 2
_VALID = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_NOT_VALID = re.compile(r"[^a-z0-9]+")
_HASHED = re.compile(r".*-[0-9a-f]{8}", re.DOTALL)

_STACK_LIMIT = 100  # Pulumi's own: letters, digits, '-', '_' and '.', 1 to 100 of them
_FAMILY = re.compile(r"[A-Za-z0-9_-]{1,40}")
_STACK_VALID = re.compile(r"[A-Za-z0-9_-]+")
_STACK_NOT_VALID = re.compile(r"[^A-Za-z0-9_]+")

_NUMBER_DIGITS = 10
_MACHINE_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_PART_LIMIT = _LIMIT - len("orca-") - len("-") - _NUMBER_DIGITS

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ID_CHARACTERS = _ID_LETTERS + "234567"
_ID_LENGTH = 16


def fit_name(*parts: str, limit: int = _LIMIT) -> str:
    """Join `parts` with '-' into a valid name of at most `limit` characters.

    The joined text is the name: `fit_name("a-b", "c")` is `fit_name("a", "b-c")`, so at most one part may be free text
    that holds a '-' of its own.

    Args:
        parts: at least one; any text.
        limit: from 10 to 63 characters.

    Raises:
        ValueError: no parts, or a limit that leaves no room for the hash; a mistake of the caller.

    """
    if not parts or not _SHORTEST_LIMIT <= limit <= _LIMIT:
        raise ValueError(f"a name needs a part and a limit from {_SHORTEST_LIMIT} to {_LIMIT}, not {limit}")
    text = "-".join(parts)
    if len(text) <= limit and _VALID.fullmatch(text) and not _HASHED.fullmatch(text):
        return text
    kept = _NOT_VALID.sub("-", text.lower()).strip("-")
    if not kept[:1].isalpha():
        kept = f"x-{kept}"
    return _with_hash(kept, text, limit)


def label_value(text: str) -> str:
    """Make a value that is valid as a label on Google Cloud and on Kubernetes, by the rules of `fit_name`."""
    return fit_name(text)


def machine_name(pool: str, number: int) -> str:
    """Name a machine: `orca-<pool>-<number>`, at most 63 characters for every number of up to 10 digits.

    Raises:
        ValueError: the number is negative or has more digits.

    """
    digits = str(int(number))
    if not _MACHINE_NUMBER.fullmatch(digits):
        raise ValueError(f"a machine's number is from 0 to {10**_NUMBER_DIGITS - 1}, not {number}")
    return f"orca-{fit_name(pool, limit=_PART_LIMIT)}-{digits}"


def machine_number(pool: str, name: str) -> int | None:
    """Read the number back out of a machine's name; None when the name is not one of this pool's."""
    start = f"orca-{fit_name(pool, limit=_PART_LIMIT)}-"
    digits = name.removeprefix(start)
    if name.startswith(start) and _MACHINE_NUMBER.fullmatch(digits):
        return int(digits)
    return None


def derived_stack(family: str, *parts: str) -> str:
    """Name a stack of a family: `prod.machines.gpu`, at most 100 characters.

    The dot separates, so each part is made free of dots. Letters keep their case, since Pulumi's names do.

    Raises:
        ValueError: the family is not a family's name (letters, digits, '-' and '_', at most 40 characters), there are
            no parts, or so many that no room is left for the last.

    """
    if not _FAMILY.fullmatch(family) or not parts:
        raise ValueError(f'a derived stack needs a family (letters, digits, "-", "_") and a part, not {family!r}')
    name = family
    for part in parts:
        room = min(_PART_LIMIT, _STACK_LIMIT - len(name) - 1)
        if room < _SHORTEST_LIMIT:
            raise ValueError(f"too many parts for a stack's name of {_STACK_LIMIT} characters: {', '.join(parts)}")
        name = f"{name}.{_fit_stack_part(part, room)}"
    return name


def _fit_stack_part(text: str, limit: int) -> str:
    if len(text) <= limit and _STACK_VALID.fullmatch(text) and not _HASHED.fullmatch(text):
        return text
    return _with_hash(_STACK_NOT_VALID.sub("-", text).strip("-") or "x", text, limit)


def _with_hash(kept: str, original: str, limit: int) -> str:
    # surrogatepass: text from the environment may hold lone surrogates, and a name must not fail on them.
    digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARACTERS]
    return f"{kept[: limit - _HASH_CHARACTERS - 1].rstrip('-')}-{digest}"


def new_stack_id() -> str:
    """Make the id of a new stack: 16 characters from a-z and 2-7, a letter first, so that it is valid in every name.

    Unguessable (just under 80 bits): whoever can guess it could claim this stack's objects.
    """
    rest = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH - 1))
    return secrets.choice(_ID_LETTERS) + rest
