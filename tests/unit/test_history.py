"""The engine's history in a folder: the newest stay, whatever the order of their names; other stacks' too."""

from __future__ import annotations

from pathlib import Path

from orca_infra.stack.history import prune_history


def test_all_but_the_newest_entries_of_that_stack_go(tmp_path: Path) -> None:
    history = tmp_path / ".pulumi" / "history" / "orca-infra"
    for stack in ("dev.machines.p", "dev"):
        (history / stack).mkdir(parents=True)
        for number in range(8, 13):
            for kind in ("history", "checkpoint"):
                for end in ("", ".attrs"):  # the engine keeps a second file beside each
                    (history / stack / f"{stack}-{number}.{kind}.json{end}").write_text("{}")
    assert prune_history(tmp_path.as_uri(), "dev.machines.p", kept=2) == 6
    left = sorted(path.name for path in (history / "dev.machines.p").iterdir())
    assert left == [
        f"dev.machines.p-{n}.{kind}.json{end}"
        for n in (11, 12)
        for kind in ("checkpoint", "history")
        for end in ("", ".attrs")
    ]
    assert len(list((history / "dev").iterdir())) == 20
    assert prune_history(tmp_path.as_uri(), "dev.machines.p", kept=2) == 0
    assert prune_history("s3://bucket", "dev.machines.p") == 0
