"""Text from outside for a terminal: names and messages that must not act on it."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """The text with a question mark for each control or invisible character but those of `keep`."""
    return "".join(character if character.isprintable() or character in keep else "?" for character in text)
