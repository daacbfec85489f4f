"""Durations: how people write them and how people read them. Inside, a duration is always a number of seconds."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_UNIT_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_PLAIN = re.compile(_NUMBER)
_WITH_UNITS = re.compile(
    rf"(?:(?P<d>{_NUMBER})\s*d\s*)?(?:(?P<h>{_NUMBER})\s*h\s*)?(?:(?P<m>{_NUMBER})\s*m(?:in)?(?!s)\s*)?"
    rf"(?:(?P<s>{_NUMBER})\s*s\s*)?(?:(?P<ms>{_NUMBER})\s*ms)?",
    re.ASCII,
)
_PAIRS = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
_LONGEST_TEXT = 100
# Beyond this a date overflows somewhere later (datetime ends in the year 9999); a century is surely a slip.
_MOST_SECONDS = 36_500 * 86400.0
_HOW = "write seconds (90) or text such as 45s, 10m, 1h30m, 2d or 500ms"


def seconds_of(value: float | str) -> float:
    """Read a duration: a number is seconds; text is seconds ("90") or has units, largest first ("1h30m").

    Units are d, h, m (or min), s and ms, each at most once; spaces are allowed, so what `duration_text` writes is
    read too.

    Returns:
        Seconds, from 0 to 100 years.

    Raises:
        ValueError: the value is no such duration; its message is a sentence that the caller can show, after the name
            of the key or the variable.

    """
    seconds = _seconds_of_text(value) if isinstance(value, str) else _seconds_of_number(value)
    if seconds > _MOST_SECONDS:
        raise ValueError("must be at most 100 years (36500d)")
    return seconds


def _seconds_of_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a duration; {_HOW}")  # noqa: TRY004 - the one error that callers translate
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite duration; {_HOW}")
    if value < 0:
        raise ValueError(f"must not be negative; {_HOW}")
    # Compared before the conversion: an int may be larger than any float.
    return math.inf if value > _MOST_SECONDS else float(value)


def _seconds_of_text(text: str) -> float:
    bare = text.strip()
    if bare and len(bare) <= _LONGEST_TEXT:
        if _PLAIN.fullmatch(bare):
            return float(bare)
        match = _WITH_UNITS.fullmatch(bare)
        if match:
            return sum(float(n) * _UNIT_SECONDS[unit] for unit, n in match.groupdict().items() if n)
        if bare.startswith("-"):
            raise ValueError(f"must not be negative; {_HOW}")
    shown = text if len(text) <= _LONGEST_TEXT else text[:40] + "…"
    raise ValueError(f'"{shown}" is not a duration; {_HOW}')


def duration_text(seconds: float) -> str:
    """Write a duration for people, in its two largest units: "500 ms", "45 s", "10 min", "1 h 30 min", "2 d 3 h".

    What is smaller is rounded away, so this is for sentences and tables, never for what is read back as exact.
    """
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return "-" + duration_text(-seconds)
    millis = round(seconds * 1000)
    if millis < 1000:
        return f"{millis} ms" if millis else "0 s"
    if millis < 9950:
        return f"{round(seconds, 1):g} s"
    whole = round(seconds)
    for large, large_seconds, small, small_seconds in _PAIRS:
        # Rounded to the smaller unit first: 59 min 59.9 s is "1 h", never "60 min".
        count = round(whole / small_seconds)
        large_count, rest = divmod(count, large_seconds // small_seconds)
        if large_count:
            return f"{large_count} {large} {rest} {small}" if rest else f"{large_count} {large}"
    return f"{whole} s"


_CPU = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?:[eE](?P<exponent>[+-]?\d{1,2})|(?P<suffix>[mkMGTPE]))?", re.ASCII)
_CPU_FACTORS = {"m": Fraction(1, 1000)} | {unit: Fraction(1000) ** (n + 1) for n, unit in enumerate("kMGTPE")}


def cpu_millis(text: str) -> int:
    """A Kubernetes CPU quantity in thousandths of a core, exactly: `500m`, `2`, `1.5`, `0.1`, `1e3`, `2k`.

    Raises ValueError for what is none, is negative, or is finer than a thousandth (which Kubernetes refuses, too).
    The grammar is that of k8s.io/apimachinery/pkg/api/resource.
    """
    match = _CPU.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a CPU quantity such as 500m, 2 or 1.5")
    millis = (
        Fraction(match["number"])
        * Fraction(10) ** int(match["exponent"] or 0)
        * _CPU_FACTORS.get(match["suffix"], Fraction(1))
        * 1000
    )
    if millis.denominator != 1:
        raise ValueError("is finer than a thousandth of a core")
    return int(millis)


_MEMORY = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?:[eE](?P<exponent>[+-]?\d{1,2})|(?P<suffix>[KMGTPE]i|[kMGTPE]))?", re.ASCII
)
_MEMORY_FACTORS = {unit: 1000 ** (n + 1) for n, unit in enumerate("kMGTPE")} | {
    f"{unit}i": 1024 ** (n + 1) for n, unit in enumerate("KMGTPE")
}
_MEMORY_MOST = 2**63 - 1


def memory_bytes(text: str) -> int:
    """A Kubernetes memory quantity in bytes, exactly: `512Mi`, `1.5Gi`, `2G`, `1e9`.

    Raises ValueError for what is none, is negative, is finer than a byte, or more than Kubernetes counts.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a memory quantity such as 512Mi, 1.5Gi or 2G")
    factor = _MEMORY_FACTORS.get(match["suffix"], 1)
    size = Fraction(match["number"]) * Fraction(10) ** int(match["exponent"] or 0) * factor
    if size.denominator != 1:
        raise ValueError("is finer than a byte")
    if size > _MEMORY_MOST:
        raise ValueError("is more than Kubernetes can count")
    return int(size)
