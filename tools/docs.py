#!/usr/bin/env python3
"""Write the reference pages that the code is the source of: settings, commands, tables, policies, rights and so on.

    tools/docs.py            write them
    tools/docs.py --check    exit code 1, naming the pages that are not what the code says

To be run with the Python of .venv.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from orca_infra.cli import app
from orca_infra.metrics import DEFINITIONS, OTHER, POOLS_MOST, Definition, Kind
from orca_infra.policy.model import Rule
from orca_infra.policy.rules import RULES
from orca_infra.settings import SETTINGS
from orca_infra.stack.base_keys import KEYS
from orca_infra.stack.base_model import API, LOOP
from orca_infra.stack.base_rights import CLUSTER, RIGHTS, RUNS, RUNTIMES

CHECKOUT = Path(__file__).resolve().parent.parent
REFERENCE = CHECKOUT / "docs" / "reference"
MIGRATION = CHECKOUT / "orca_infra" / "db" / "migrations" / "0001_machines.sql"
COMMENTS = CHECKOUT / "orca_infra" / "db" / "comments.sql"
MADE = "<!-- Made by tools/docs.py from {source}; a change by hand is lost. -->"

_INSERT = re.compile(r"insert into orca\.run_transitions .*? values\s*(.*?\));$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^comment on (table|column|function) orca\.([\w.]+) is '((?:[^']|'')*)';$", re.MULTILINE)
_FIELD = re.compile(r"'((?:[^']|'')*)'")


def settings_page() -> str:
    """Every environment variable, in the order of SETTINGS."""
    lines = [
        "# Settings",
        "",
        MADE.format(source="orca_infra/settings"),
        "",
        (
            "Environment variables, read once at the start of a command. A variable that is set to nothing counts as unset. "
            "A name that is a slip away from one of these is named in a warning."
        ),
        "",
        "A duration is a number of seconds (`90`) or text such as `45s`, `10m`, `1h30m`, `2d`, `500ms`.",
        "",
        "| variable | default |",
        "|---|---|",
        *(f"| [`{s.name}`](#{s.name.lower()}) | {f'`{s.default}`' if s.default else 'see there'} |" for s in SETTINGS),
    ]
    for setting in SETTINGS:
        secret = " Its value is secret and never shown." if setting.secret else ""
        lines += [
            "",
            f"## {setting.name}",
            "",
            setting.meaning + secret,
            "",
            f"- Value: {setting.unit}",
            f"- Unset: {setting.unset}",
            f"- Why: {setting.why}",
        ]
    lines += [
        "",
        "## Beside these",
        "",
        "| variable | read by | meaning |",
        "|---|---|---|",
        (
            "| `ORCA_TOOLS_CACHE` | `tools/build.py`, `tools/setup.py` | where built tools are kept; unset: "
            "`~/.cache/orca-infra/tools` |"
        ),
        "| `PULUMI_HOME` | the search for Pulumi | the vendor's install folder; unset: `~/.pulumi` |",
    ]
    return "\n".join(lines) + "\n"


def transitions_page() -> str:
    """Who writes which transition of a run, from the rows that the migration inserts."""
    found = _INSERT.search(MIGRATION.read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{MIGRATION.name} has no insert into orca.run_transitions any more; teach tools/docs.py")
    rows = [_FIELD.findall(line) for line in found[1].splitlines() if line.strip()]
    lines = [
        "# Who writes which transition of a run",
        "",
        MADE.format(source=f"orca_infra/db/migrations/{MIGRATION.name}"),
        "",
        (
            "The rows of `orca.run_transitions`. `orca.move_run` refuses what is not among them; in a database whose tables "
            "orca-infra made itself, a trigger does too, whoever writes. "
            "Why: [ADR 6](../adr/0006-typed-run-transitions.md)."
        ),
        "",
        "| from | to | writer | when |",
        "|---|---|---|---|",
    ]
    for row in rows:
        before, after, writer, sense = (field.replace("''", "'") for field in row)
        lines.append(f"| {before} | {after} | {writer} | {sense} |")
    lines += ["", "A run begins as `queued`. `succeeded` has no way out."]
    return "\n".join(lines) + "\n"


def tables_page() -> str:
    """The page's own words on orca's tables, then every table, column and function of this program as its comment says."""
    page = (REFERENCE / "tables.md").read_text(encoding="utf-8")
    made = MADE.format(source="orca_infra/db/comments.sql")
    text = COMMENTS.read_text(encoding="utf-8")
    said = [(kind, name, words.replace("''", "'")) for kind, name, words in _COMMENT.findall(text)]
    lines = [page.partition(made)[0].rstrip(), "", made]
    for kind, name, words in said:
        if kind == "table":
            lines += ["", f"### {name}", "", words, "", "| column | meaning |", "|---|---|"]
        elif kind == "column":
            lines.append(f"| `{name.partition('.')[2]}` | {words.replace('|', chr(92) + '|')} |")
    lines += ["", "## Functions", "", "| function | |", "|---|---|"]
    lines += [f"| `{name}` | {words} |" for kind, name, words in said if kind == "function"]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric, of the loop and of the runtimes' HTTP face."""
    lines = [
        "# Metrics",
        "",
        MADE.format(source="orca_infra/metrics.py"),
        "",
        (
            "In the text form of Prometheus and in OpenMetrics, at `/metrics`. How they are served and scraped: "
            "[watch it](../howto/watch-it.md)."
        ),
        "",
        (
            "Labels have few values: no name of a pipeline, a run, a user or a machine is one. Of pools the first "
            f"{POOLS_MOST} have their own; those after them share `{OTHER}`. Counters and histograms count since the process "
            "began. Gauges about pools, machines, runs and runtimes are as the last pass saw them; a loop that does not lead "
            "has none."
        ),
    ]
    for heading, served_by in (("The loop", "loop"), ("The runtimes' HTTP face", "runtimes")):
        rows = [_metric(one) for one in DEFINITIONS if one.served_by == served_by]
        lines += ["", f"## {heading}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|", *rows]
    lines += ["", "Both also have `process_*`: CPU, memory, open files and the start of the process."]
    return "\n".join(lines) + "\n"


def _metric(one: Definition) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    bounds = f" Buckets: {', '.join(f'{bound:g}' for bound in one.buckets)} s." if one.kind is Kind.HISTOGRAM else ""
    return f"| `{one.full_name}` | {one.kind} | {labels} | {one.meaning}{bounds} |"


def cli_page() -> str:
    """Every command with its arguments and options, as its --help has them."""
    root: Any = typer.main.get_command(app)
    lines = ["# Commands", "", MADE.format(source="orca_infra/cli/"), "", root.help, "", *_parameters(root)]
    for name, command in commands(root, "orca-infra"):
        usage = " ".join([name, *_usage(command)])
        about = [line for paragraph in command.help.split("\n\n") for line in ("", _example(paragraph))]
        lines += ["", f"## {name}", "", f"    {usage}", *about, *_with_gap(_parameters(command))]
    return "\n".join(lines) + "\n"


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command below a group with its whole name, sorted."""
    for word, command in sorted(group.commands.items()):
        yield f"{name} {word}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")


def _example(paragraph: str) -> str:
    said = paragraph.removeprefix("Example: ")
    return paragraph if said == paragraph else f"Example: `{said}`"


def _usage(command: Any) -> list[str]:
    words = ["[OPTIONS]"] if any(p.param_type_name == "option" for p in command.params) else []
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words += [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments]
    if hasattr(command, "commands"):
        words.append("[COMMAND]" if command.invoke_without_command else "COMMAND")
    return words


def _parameters(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        shown = ", ".join(parameter.opts) if parameter.param_type_name == "option" else parameter.name.upper()
        rows.append(f"| `{shown}` | {parameter.help} |")
    return ["| argument or option | meaning |", "|---|---|", *rows] if rows else []


def _with_gap(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []


def policies_page() -> str:
    """Every rule of the policy pack with its configuration."""
    lines = [
        "# Policies",
        "",
        MADE.format(source="orca_infra/policy"),
        "",
        (
            "The rules of the pack in `policies/`: `pulumi preview --policy-pack policies`, and each `orca-infra preview`. "
            "A mandatory rule that is broken fails the preview; an advisory one is only said. How to set them: "
            "[policies](../howto/policies.md)."
        ),
        "",
        "| rule | level | what has to be so |",
        "|---|---|---|",
        *(f"| [`{rule.name}`](#{rule.name}) | {_level(rule)} | {rule.description} |" for rule in RULES),
    ]
    for rule in RULES:
        lines += ["", f"## {rule.name}", "", f"{rule.description} By default {_level(rule)}."]
        if rule.properties:
            lines += ["", "| key | value | default | meaning |", "|---|---|---|---|"]
        for key, schema in rule.properties.items():
            kind = {"array": "list of texts", "integer": "whole number", "string": "text"}[schema["type"]]
            lines.append(f"| `{key}` | {kind} | `{json.dumps(schema['default'])}` | {schema['description']} |")
    return "\n".join(lines) + "\n"


def _level(rule: Rule) -> str:
    return "advisory" if rule.advisory else "mandatory"


def stack_config_page() -> str:
    """Every key of a stack's file, in the order of KEYS."""
    lines = [
        "# A stack's file",
        "",
        MADE.format(source="orca_infra/stack/base_keys.py"),
        "",
        (
            "`stacks/Pulumi.STACK.yaml` says what the base stack of STACK has. Each key is written with the project's name "
            "before it (`orca-infra:runner`), or set by `pulumi config set -s STACK runner kubernetes`; a secret one with "
            "`--secret`."
        ),
        "",
        (
            "Where a key and an environment variable say the same thing, one of the two is enough, and they may not differ. "
            "A key that there is none of is refused."
        ),
        "",
        "| key | type | default | variable |",
        "|---|---|---|---|",
    ]
    for key in KEYS:
        shown = "" if key.default in ("", [], {}) else f"`{json.dumps(key.default)}`"
        variable = f"[`{key.variable}`](settings.md#{key.variable.lower()})" if key.variable else ""
        kind = f"{key.type}, secret" if key.secret else key.type
        lines.append(f"| [`{key.name}`](#{key.name.lower()}) | {kind} | {shown} | {variable} |")
    for key in KEYS:
        lines += ["", f"## {key.name}", "", key.meaning]
    return "\n".join(lines) + "\n"


def rights_page() -> str:
    """What the loop and the API may do in the cluster, and why."""
    whose = {LOOP: "The loop", API: "The API"}
    where = {RUNS: "in the runs' namespace", RUNTIMES: "in the runtimes' namespace", CLUSTER: "in the whole cluster"}
    lines = [
        "# Rights in the cluster",
        "",
        MADE.format(source="orca_infra/stack/base_rights.py"),
        "",
        (
            "The base stack gives the loop and the runtimes' API an account each, with these rights and no others. A test "
            "takes each away on a real API server and sees what it is for fail; another has both do all that they do."
        ),
    ]
    for account, who in whose.items():
        for place, there in where.items():
            rights = [right for right in RIGHTS if (right.account, right.place) == (account, place)]
            if not rights:
                continue
            lines += ["", f"## {who} {there}", "", "| objects | verb | why |", "|---|---|---|"]
            for right in rights:
                name = f"{right.resource}.{right.group}" if right.group else right.resource
                only = " (its own namespaces and `kube-system`)" if right.names else ""
                lines += [f"| `{name}`{only} | {verb} | {reason} |" for verb, reason in right.verbs.items()]
    return "\n".join(lines) + "\n"


PAGES = {
    "rights.md": rights_page,
    "stack-config.md": stack_config_page,
    "policies.md": policies_page,
    "settings.md": settings_page,
    "run-transitions.md": transitions_page,
    "cli.md": cli_page,
    "tables.md": tables_page,
    "metrics.md": metrics_page,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page is stale")
    options = parser.parse_args(arguments)
    stale = []
    for name, page in PAGES.items():
        path = REFERENCE / name
        text = page()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(CHECKOUT))
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for page_path in stale:
        print(f"{page_path}: stale; run tools/docs.py" if options.check else f"wrote {page_path}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
