"""Growth curves as SVG: a few lines of text, since a library for it would be larger than this program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 320, 60, 36, 190, 44
_COLOURS = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#6639ba", "#57606a")

Curve = Sequence[tuple[float, float]]


def plot(path: Path, title: str, x_label: str, y_label: str, curves: Mapping[str, Curve]) -> None:
    """Write one figure; both axes begin at 0, so that what is flat looks flat."""
    most_x = max(x for curve in curves.values() for x, _ in curve) or 1
    most_y = _round_up(max(y for curve in curves.values() for _, y in curve))
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide * x / most_x, _TOP + high * (1 - y / most_y)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for step in range(5):
        y = most_y * step / 4
        _, at = place(0, y)
        lines.append(f'<path d="M{_LEFT} {at:.1f}h{wide}" stroke="#d0d7de"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in sorted({x for curve in curves.values() for x, _ in curve}):
        at, _ = place(x, 0)
        lines.append(f'<text x="{at:.1f}" y="{_TOP + high + 16}" text-anchor="middle">{x:,.0f}</text>')
    lines.append(f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    middle = _TOP + high / 2
    lines.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )
    for number, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [place(x, y) for x, y in curve]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{corners}"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        at = _TOP + 14 + 18 * number
        lines.append(f'<rect x="{_WIDTH - _RIGHT + 14}" y="{at - 9}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{_WIDTH - _RIGHT + 30}" y="{at}">{escape(name)}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, so that quarters of it are round."""
    unit = 1e-9
    while unit * 10 <= value:
        unit *= 10
    return next(unit * times for times in (1, 2, 4, 8, 10, 20) if unit * times >= value)
