"""A preview as one comment on GitHub: counts, a table of changes, each diff folded; cut to what GitHub takes. Pure.

GitHub takes 65,536 characters, of whatever number of bytes each (a comment is stored in 262,144 bytes, four for each).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from orca_infra.preview.escape import code, fence_for, prose, shortened
from orca_infra.preview.model import Change, Preview
from orca_infra.preview.words import counts
from orca_infra.printable import printable

LIMIT = 65_536
_SIGNS = {
    "create": "+ create",
    "update": "~ update",
    "replace": "± replace",
    "delete": "- delete",
    "import": "= import",
}
#: Room for the sentence that says what was left out.
_NOTE_ROOM = 300
_LONGEST_LINE = 4_000


def marker(stack: str) -> str:
    """The hidden first line by which a comment is found again."""
    return f"<!-- orca-infra preview of {stack} -->"


def comment(preview: Preview, *, limit: int = LIMIT) -> str:
    """The comment, at most `limit` characters; what does not fit is cut at the end of a line, and said."""
    page = _Page(limit - _NOTE_ROOM)
    page.add([marker(preview.stack), f"## orca-infra: stack {code(preview.stack)}"])
    for section in _sections(preview):
        page.add_section(section)
    return page.text()


@dataclass(frozen=True, slots=True)
class _Section:
    """Lines between what opens and what closes them; of a section that does not fit whole, the first lines are kept."""

    opening: Sequence[str]
    lines: Sequence[str]
    closing: Sequence[str] = ()


@dataclass(slots=True)
class _Page:
    room: int
    lines: list[str] = field(default_factory=list)
    left_out: int = 0

    def add(self, lines: Sequence[str]) -> None:
        self.lines += lines
        self.room -= _size(lines)

    def add_section(self, section: _Section) -> None:
        around = _size(section.opening) + _size(section.closing)
        # What follows a cut is left out whole: a comment with holes would be read wrongly.
        if self.left_out or around + _size(section.lines[:1]) > self.room:
            self.left_out += len(section.lines)
            return
        room = self.room - around
        kept: list[str] = []
        for line in section.lines:
            if _size([line]) > room:
                break
            room -= _size([line])
            kept.append(line)
        self.left_out += len(section.lines) - len(kept)
        self.add([*section.opening, *kept, *section.closing])

    def text(self) -> str:
        lines = list(self.lines)
        if self.left_out:
            said = f"{self.left_out:,} more line{'s do' if self.left_out > 1 else ' does'} not fit into a comment"
            lines += [
                "",
                f"> **Cut here**: {said}. The output of `orca-infra preview`, in the job's log, has all of it.",
            ]
        return "\n".join(lines) + "\n"


def _size(lines: Sequence[str]) -> int:
    """In characters, with the ends of the lines."""
    return sum(len(line) + 1 for line in lines)


def _sections(preview: Preview) -> Iterator[_Section]:
    # Counts first.
    yield _Section(["", "| | |", "|---|---|"], [f"| {name} | {said} |" for name, said in counts(preview)])
    for error in preview.errors:
        # Line by line: an engine's message may have many, and one that is too long would leave out all that follows.
        lines = [shortened(printable(line), _LONGEST_LINE) for line in error.splitlines()]
        fence = fence_for(lines)
        yield _Section(["", "**Failed**", "", f"{fence}text"], lines, [fence])
    notes = [*preview.notes, *(f"stack {one.stack}: {one.note}" for one in preview.stacks if one.note)]
    if notes:
        yield _Section([""], [f"- {prose(note, 600)}" for note in notes])
    if preview.breaches:
        yield _Section(
            ["", "### Policies", "", "| level | stack | rule | what, and the remedy |", "|---|---|---|---|"],
            [
                f"| {'**mandatory**' if breach.mandatory else 'advisory'} | {code(stack)} | {code(breach.rule)} "
                f"| {prose(breach.message, 800)} |"
                for stack, breach in preview.breaches
            ],
        )
    changes = [(one.stack, change) for one in preview.stacks for change in one.changes]
    if changes:
        yield _Section(
            ["", "### Changes", "", "| change | stack | type | name |", "|---|---|---|---|"],
            [
                f"| {_SIGNS[change.op]} | {code(stack)} | {code(change.type)} | {code(change.name)} |"
                for stack, change in changes
            ],
        )
    yield from _decisions(preview)
    for stack, change in changes:
        if change.diff:
            yield _folded(stack, change)


def _decisions(preview: Preview) -> Iterator[_Section]:
    decisions = preview.decisions
    if decisions is None or decisions.error:
        return
    heading = ["", "### Decisions", "", prose(f"What the loop would decide for {decisions.source}:", 600), ""]
    acting = [one for one in decisions.decided if one.acts]
    lines = [f"- {one.scope}: {prose(one.sentence, 1000)}" for one in acting]
    yield _Section(heading, lines or ["- nothing"])
    idle = [f"- {one.scope}: {prose(one.sentence, 1000)}" for one in decisions.decided if not one.acts]
    if idle:
        summary = f"<details><summary>Why nothing else: {len(idle)}</summary>"
        yield _Section(["", summary, ""], idle, ["", "</details>"])


def _folded(stack: str, change: Change) -> _Section:
    lines = [shortened(printable(line), _LONGEST_LINE) for line in change.diff]
    fence = fence_for(lines)
    about = f"{_SIGNS[change.op]} {code(change.type)} {code(change.name)} in {code(stack)}"
    return _Section(["", f"<details><summary>{about}</summary>", "", f"{fence}diff"], lines, [fence, "", "</details>"])
