import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from orca_infra.cli import app
from orca_infra.config.shape import table_of
from orca_infra.runtimes.openapi import openapi

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# In code only: in prose, "orca-infra reads" names the program. Options before the command count as none.
CODE = re.compile(r"```.*?```|`[^`\n]+`|^    .*$", re.DOTALL | re.MULTILINE)
CALL = re.compile(r"(?<![\w/-])(?:\.venv/bin/)?orca-infra((?: [a-z][a-z-]*)+)")


def calls(text: str) -> Iterator[list[str]]:
    """The words after each `orca-infra` in code, with what is not lower-case words left off."""
    for code in CODE.findall(text):
        for found in CALL.finditer(code):
            yield found[1].split()


def is_command(words: list[str]) -> bool:
    command: Any = typer.main.get_command(app)
    for word in words:
        below = getattr(command, "commands", None)
        if below is None:
            return True  # the rest are arguments
        if word not in below:
            return False
        command = below[word]
    return True


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_pages_that_are_made_from_the_code_are_what_the_code_says() -> None:
    checked = subprocess.run(
        [sys.executable, CHECKOUT / "tools" / "docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_stale_page_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    docs = runpy.run_path(str(CHECKOUT / "tools" / "docs.py"))
    docs["PAGES"].clear()
    docs["PAGES"]["cli.md"] = lambda: "something else\n"
    assert docs["main"](["--check"]) == 1
    assert capsys.readouterr().out == "docs/reference/cli.md: stale; run tools/docs.py\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_link_inside_the_checkout_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_command_that_is_mentioned_exists(page: Path) -> None:
    wrong = [" ".join(words) for words in calls(page.read_text(encoding="utf-8")) if not is_command(words)]
    assert wrong == []


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    said = "`orca-infra fly`, `x; orca-infra db stop`, orca-infra is prose\n\n    orca-infra strays remove --yes\n"
    assert [words for words in calls(said) if not is_command(words)] == [["fly"], ["strays", "remove"]]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert said.returncode == 0, said.stderr


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {CHECKOUT / "README.md"}
    todo = list(reached)
    while todo:
        page = todo.pop()
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            there = (page.parent / target.partition("#")[0]).resolve()
            if there.suffix == ".md" and there.is_file() and there not in reached:
                reached.add(there)
                todo.append(there)
    assert set(PAGES) - reached == set()


def test_each_test_that_the_security_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (CHECKOUT / "docs/explanation/security.md").read_text(encoding="utf-8")))
    sources = "".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob("test_*.py"))
    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in sources} == set()


SECTION = re.compile(r"^## (?P<heading>[^\n]+)$(?P<body>.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
TABLES_OF_ORCA_TOML = {
    "Top of the file": (),
    "[pools.NAME]": ("pools", "x"),
    "[[pools.NAME.types]]": ("pools", "x", "types", 0),
    "[local]": ("local",),
    "[local.types.NAME]": ("local", "types", "x"),
    "[gcp]": ("gcp",),
    "[gcp.types.NAME]": ("gcp", "types", "x"),
    "[pipelines.NAME]": ("pipelines", "x"),
    "[environments.NAME]": ("environments", "x"),
    "[runtime_pools.NAME]": ("runtime_pools", "x"),
}
#: Tables of their own, with a heading.
SUBTABLES = {"pools", "pipelines", "environments", "runtime_pools", "local", "gcp"}


@pytest.mark.parametrize("heading", TABLES_OF_ORCA_TOML)
def test_the_reference_of_orca_toml_has_the_keys_that_the_file_may_have(heading: str) -> None:
    page = (CHECKOUT / "docs" / "reference" / "orca-toml.md").read_text(encoding="utf-8")
    sections = {found["heading"]: found["body"] for found in SECTION.finditer(page)}
    said: dict[str, bool] = {}
    for names, _kind, default in re.findall(r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \|", sections[heading], re.MULTILINE):
        said |= {name.partition(".")[0]: default.startswith("required") for name in re.findall(r"`([^`]+)`", names)}
    table = table_of(TABLES_OF_ORCA_TOML[heading])
    assert table is not None
    has_headings = {"types", "locations"} if heading in {"[local]", "[gcp]"} else set()
    fields = {name: field.is_required() for name, field in table.model_fields.items()}
    assert said == {name: needed for name, needed in fields.items() if name not in SUBTABLES | has_headings}


def test_the_reference_of_http_has_each_call() -> None:
    page = (CHECKOUT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    calls = {
        f"{verb.upper()} {path}" for path, verbs in openapi()["paths"].items() for verb in verbs if verb != "parameters"
    }
    said = {
        f"{verb} {path.partition('?')[0]}" for verb, path in re.findall(r"`(GET|POST|PATCH|PUT|DELETE) (/[^` ]*)", page)
    }
    for_operators = {"GET /openapi.json", "GET /healthz", "GET /readyz", "GET /metrics"}
    assert said - for_operators == calls
