"""The comment: counts first, a table, folded diffs; cut to what GitHub takes; nothing from outside becomes markup."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_infra.preview.escape import code, fence_for, prose
from orca_infra.preview.markdown import LIMIT, comment, marker
from orca_infra.preview.model import Breach, Change, Cost, Decided, Decisions, Preview, Price, StackPreview
from orca_infra.preview.text import as_json, plain

POD = "kubernetes:core/v1:Pod"
CHANGE = Change(op="create", type=POD, name="driver", diff=('+ metadata.name: "driver"', "+ spec.a: 1"))
PREVIEW = Preview(
    stack="prod",
    stacks=(
        StackPreview(stack="prod", changes=(CHANGE, Change(op="delete", type=POD, name="old", diff=("- a: 1",)))),
        StackPreview(stack="prod.machines.gpu", note="it has no state yet"),
    ),
    decisions=Decisions(
        source="the demand of now",
        decided=(
            Decided(scope="machines", sentence="make 2 machines for gpu: 2 runs wait", acts=True),
            Decided(scope="machines", sentence="pool cpu: demand 0: no demand", acts=False),
        ),
        made=2,
    ),
    cost=Cost(
        now=Price(per_hour=0.34), after=Price(per_hour=1.02), most_before=Price(per_hour=2), most=Price(per_hour=4)
    ),
)


def test_the_whole_comment() -> None:
    assert comment(PREVIEW) == (
        """\
<!-- orca-infra preview of prod -->
## orca-infra: stack <code>prod</code>

| | |
|---|---|
| Base stack | 1 to create, 1 to delete |
| Machine stacks (1) | not previewed |
| Decisions | 1 to act on: machines +2 -0 |
| Policies | kept |
| Machines an hour, by the decisions | 0.34 → 1.02 |
| Machines an hour, at most | 2.00 → 4.00 |

- stack prod.machines.gpu: it has no state yet

### Changes

| change | stack | type | name |
|---|---|---|---|
| + create | <code>prod</code> | <code>kubernetes:core/v1:Pod</code> | <code>driver</code> |
| - delete | <code>prod</code> | <code>kubernetes:core/v1:Pod</code> | <code>old</code> |

### Decisions

What the loop would decide for the demand of now:

- machines: make 2 machines for gpu: 2 runs wait

<details><summary>Why nothing else: 1</summary>

- machines: pool cpu: demand 0: no demand

</details>

<details><summary>+ create <code>kubernetes:core/v1:Pod</code> <code>driver</code> in <code>prod</code></summary>

```diff
+ metadata.name: "driver"
+ spec.a: 1
```

</details>

<details><summary>- delete <code>kubernetes:core/v1:Pod</code> <code>old</code> in <code>prod</code></summary>

```diff
- a: 1
```

</details>
"""
    )


def test_the_exit_code_says_what_there_is() -> None:
    nothing = Preview(stack="prod", stacks=(StackPreview(stack="prod"),))
    assert nothing.exit_code == 0
    assert PREVIEW.exit_code == 2
    assert replace(nothing, decisions=PREVIEW.decisions).exit_code == 2
    idle = Decisions(source="x", decided=(Decided(scope="machines", sentence="s", acts=False),))
    assert replace(nothing, decisions=idle).exit_code == 0
    assert replace(nothing, decisions=Decisions(source="x", error="no")).exit_code == 1
    assert replace(PREVIEW, stacks=(StackPreview(stack="prod", error="no"),)).exit_code == 1
    breach = Breach(rule="r", resource="x", message="m", mandatory=True)
    assert replace(nothing, stacks=(StackPreview(stack="prod", breaches=(breach,)),)).exit_code == 1
    advice = replace(breach, mandatory=False)
    assert replace(nothing, stacks=(StackPreview(stack="prod", breaches=(advice,)),)).exit_code == 0


def test_failures_and_broken_policies_come_before_the_changes() -> None:
    broken = Breach(
        rule="pod-privileges", resource="x", message="pod-privileges: Pod x: bad. Remedy: y.", mandatory=True
    )
    advice = replace(broken, rule="image-digests", mandatory=False)
    stack = StackPreview(stack="prod", changes=(CHANGE,), breaches=(advice, broken), error="first\n```\nsecond")
    said = comment(replace(PREVIEW, stacks=(stack,)))
    order = ["| Base stack | **failed**, 1 to create |", "| Policies | 1 broken, 1 advisory |", "**Failed**"]
    order += ["````text\nstack prod: first\n```\nsecond\n````", "| **mandatory** | <code>prod</code> | <code>pod-priv"]
    order += ["| advisory |", "### Changes", "### Decisions", "<details>"]
    places = [said.find(text) for text in order]
    assert -1 not in places
    assert places == sorted(places)


def long_preview(lines: int, text: str = "x" * 60, changes: int = 40) -> Preview:
    diff = tuple(f"+ key{n}: {text}" for n in range(lines))
    made = tuple(Change(op="create", type=POD, name=f"pod-{n}", diff=diff) for n in range(changes))
    return replace(PREVIEW, stacks=(StackPreview(stack="prod", changes=made),))


def whole_lines(said: str, preview: Preview) -> bool:
    """Every line of a diff that is shown is shown whole."""
    known = {line for one in preview.stacks for change in one.changes for line in change.diff}
    return all(line in known for line in said.splitlines() if line.startswith("+ key"))


def balanced(said: str) -> bool:
    """Every fence that opens closes, with nothing of it left open; and so does what is folded."""
    fence = ""
    for line in said.splitlines():
        found = re.fullmatch(r"(`{3,})(\w*)", line)
        if found and not fence and found[2]:
            fence = found[1]
        elif found and not found[2] and found[1] == fence:
            fence = ""
    outside = re.sub(r"(?ms)^(`{3,})\w+$.*?^\1$", "", said)
    return not fence and outside.count("<details>") == outside.count("</details>")


@pytest.mark.parametrize("text", ["x" * 60, "😀" * 60, "日本語" * 20, "```", "`````" * 3])
def test_a_long_one_is_cut_at_a_line_with_a_note_and_everything_closed(text: str) -> None:
    preview = long_preview(300, text)
    said = comment(preview)
    assert len(said) <= LIMIT
    # A comment is stored in four bytes for each character.
    assert len(said.encode()) <= 4 * LIMIT
    assert balanced(said)
    assert whole_lines(said, preview)
    assert said.startswith(marker("prod"))
    last = said.rstrip().splitlines()[-1]
    assert last.startswith("> **Cut here**: ")
    shown = sum(line.startswith("+ key") for line in said.splitlines())
    assert f"{40 * 300 - shown:,} more lines do" in last
    assert len(said) > LIMIT - 1000  # no more is cut than has to be


def test_one_that_fits_is_not_cut() -> None:
    assert "Cut here" not in comment(long_preview(5))


def test_a_line_as_long_as_a_comment_leaves_out_nothing_but_its_end() -> None:
    stack = StackPreview(stack="prod", changes=(replace(CHANGE, diff=("+ " + "k" * 70_000,)),), error="e" * 70_000)
    said = comment(replace(PREVIEW, stacks=(stack,)))
    assert balanced(said)
    assert "Cut here" not in said
    assert all(text in said for text in ("eee…", "kkk…", "### Changes", "### Decisions"))


def test_thousands_of_changes_are_cut_in_the_table() -> None:
    said = comment(long_preview(1, changes=5000))
    assert len(said) <= LIMIT
    assert said.rstrip().splitlines()[-1].startswith("> **Cut here**")
    assert said.index("| Base stack | 5000 to create |") < said.index("### Changes")


@given(st.integers(900, 4000), st.lists(st.text(max_size=80), max_size=60), st.text(max_size=200))
def test_whatever_is_in_it_the_limit_holds_and_everything_is_closed(limit: int, lines: list[str], name: str) -> None:
    diff = tuple(f"+ {' '.join(line.splitlines())}" for line in lines)
    changes = (Change(op="update", type=POD, name=name, diff=diff),) * 3
    preview = replace(PREVIEW, stacks=(StackPreview(stack="prod", changes=changes, error=name),))
    said = comment(preview, limit=limit)
    assert len(said) <= limit
    assert balanced(said)


HOSTILE = [
    "a|b",
    "a\nb",
    "`rm`",
    "<script>alert(1)</script>",
    "@everyone",
    "[x](https://evil.example)",
    "![x](y)",
    "#1",
    "**bold**",
    "_x_",
    "~~x~~",
    "</code>",
    "www.evil.example",
    "http://evil.example",
    "--> x",
    "\u202eright to left",
    "\x1b[31mred",
    "$(x)$",
    "&lt;",
    "\\|",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_becomes_no_markup_no_link_and_no_mention(name: str) -> None:
    change = Change(op="create", type=POD, name=name, diff=("+ a: 1",))
    decided = (Decided(scope="machines", sentence=f"make 1 machine for {name}: because", acts=True),)
    breach = Breach(rule="r", resource=name, message=f"r: Pod {name}: bad", mandatory=False)
    preview = Preview(
        stack="prod",
        stacks=(StackPreview(stack="prod", changes=(change,), breaches=(breach,)),),
        decisions=Decisions(source=name, decided=decided),
    )
    plain_name = comment(replace(preview, stacks=(), decisions=None))
    said = comment(preview)
    tables = [line for line in said.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in tables[:3]} == {3}
    assert [line.count("|") for line in tables if "+ create" in line] == [5]
    assert [line.count("|") for line in tables if "advisory |" in line and "Pod" in line] == [5]
    outside = re.sub(r"(?s)```diff.*?```", "", said.replace(plain_name, ""))
    for markup in (
        "<script",
        "</code></code>",
        "@everyone",
        "](",
        "**bold**",
        "~~",
        "http://",
        "https://",
        "www.",
        "\x1b",
    ):
        assert markup not in outside
    assert "\u202e" not in said
    assert not re.search(r"(?<!<code>)`rm`", outside)


def test_text_is_still_readable() -> None:
    assert code("kubernetes:core/v1:Pod") == "<code>kubernetes:core/v1:Pod</code>"
    assert prose("pool p: 2 runs wait (max_machines)") == "pool p: 2 runs wait (max&#95;machines)"
    assert code("a@b") == "<code>a&#64;b</code>"
    assert prose("@team") == "@\u200bteam"
    assert prose("fixes #12") == "fixes &#35;\u200b12"  # no reference to that issue
    assert code("") == ""
    assert len(prose("x" * 1000)) == 300


def test_a_fence_is_longer_than_any_in_it() -> None:
    assert fence_for(["a"]) == "```"
    assert fence_for(["+ ```", "````` x"]) == "``````"


def test_as_text_all_of_it_is_there() -> None:
    said = plain(long_preview(300))
    assert said.count("+ key") == 40 * 300
    assert said.splitlines()[:3] == [
        "stack prod",
        "  Base stack: 40 to create",
        "  Decisions: 1 to act on: machines +2 -0",
    ]
    hostile = Change(op="create", type=POD, name="\x1b[31m", diff=("+ a: \x07",))
    assert "\x1b" not in plain(Preview(stack="p", stacks=(StackPreview(stack="p", changes=(hostile,)),)))


def test_as_json_for_programs() -> None:
    found = as_json(PREVIEW)
    assert found["exit_code"] == 2
    assert found["counts"] == {"prod": {"create": 1, "delete": 1}, "prod.machines.gpu": {}}
    assert found["cost"]["most"] == {"per_hour": 4, "unpriced": 0}
    assert found["stacks"][0]["changes"][0]["diff"] == CHANGE.diff


def test_prices_have_two_decimals_or_as_many_as_they_need() -> None:
    cost = Cost(now=Price(per_hour=0.0042), after=Price(per_hour=1234.5, unpriced=2))
    assert (
        "| Machines an hour, by the decisions | 0.0042 → 1,234.50 or more: 2 machines of types without a price |"
        in (comment(Preview(stack="prod", cost=cost)))
    )
