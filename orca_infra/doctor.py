"""What was found, in which version; and for what is missing, the one command that gets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orca_infra import __version__
from orca_infra.errors import OrcaError, UserError
from orca_infra.settings import Settings, read_settings
from orca_infra.stack.tools import find_tool, pulumi_home, remedy

_VERSION_SECONDS = 20
#: The runtime pools' definitions have the API server check quantities: https://kubernetes.io/docs/reference/using-api/cel/
_OLDEST_MINOR = 29
_STATE = "mount it, or set PULUMI_BACKEND_URL back: docs/howto/recover.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked for. `remedy` is empty when nothing has to be done."""

    what: str
    found: str
    remedy: str = ""
    needed: bool = True


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Look at everything; an item that is wrong does not keep the others from being looked at."""
    findings = [
        Finding(what="orca-infra", found=f"{__version__} on Python {sys.version.split()[0]}"),
        _tool("pulumi", ["version"]),
        _plugin("pulumi-resource-orca"),
        _plugin("pulumi-language-python"),
    ]
    try:
        settings = read_settings(environ)
    except UserError as error:
        return [*findings, Finding(what="settings", found=str(error), remedy="mend the environment variable")]
    findings += [*_config(settings), _database(settings), *_state(settings), *_secrets(settings)]
    return [*findings, *_cluster(settings)]


def all_is_there(findings: list[Finding]) -> bool:
    """Whether nothing that is needed is missing."""
    return all(not finding.remedy or not finding.needed for finding in findings)


def show(findings: list[Finding]) -> None:
    """Print the findings for people."""
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark = "ok" if not finding.remedy else ("missing" if finding.needed else "note")
        print(f"{mark:7}  {finding.what:{width}}  {finding.found}")
        if finding.remedy:
            print(f"{'':7}  {'':{width}}  -> {finding.remedy}")


def _tool(name: str, arguments: list[str]) -> Finding:
    program = find_tool(name)
    if program is None:
        return Finding(what=name, found="not found", remedy=remedy(name))
    try:
        said = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=True,
            env={"PULUMI_SKIP_UPDATE_CHECK": "true", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(what=name, found=f"{program} does not run: {error}", remedy=remedy(name))
    return Finding(what=name, found=f"{said.stdout.strip()} at {program}")


def _plugin(name: str) -> Finding:
    program = find_tool(name)
    if program is None:
        return Finding(what=name, found="not found", remedy=remedy("pulumi"), needed=name != "pulumi-language-python")
    stand_in = " (a stand-in for the vendor's)" if "stand-ins" in program.parts else ""
    return Finding(what=name, found=f"{program}{stand_in}")


def _config(settings: Settings) -> list[Finding]:
    """Whether the file is good, and the provider of the cloud that it uses."""
    from orca_infra.config import load_config

    try:
        config = load_config(settings.config_path)
    except UserError as error:
        return [
            Finding(
                what="configuration",
                found=str(error).splitlines()[0],
                remedy="`orca-infra check` shows all that is wrong with it",
                needed=False,
            )
        ]
    found = Finding(what="configuration", found=f"{settings.config_path}, pools: {len(config.pools)}")
    return [found, _provider("gcp")] if any(pool.provider == "gcp" for pool in config.pools) else [found]


def _database(settings: Settings) -> Finding:
    from orca_infra.db.connection import Database, check_reachable, describe
    from orca_infra.db.migrate import check_schema

    if settings.db is None:
        found = f"the embedded Postgres in {settings.home / 'postgres'} (ORCA_DB is not set)"
        there = next(
            folder for folder in (settings.home, *settings.home.absolute().parents) if os.access(folder, os.F_OK)
        )
        is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        return Finding(
            what="database",
            found=found if is_writable else f"{found}: {there} cannot be written",
            remedy="" if is_writable else "set ORCA_HOME to a folder that can be written",
        )
    try:
        check_reachable(settings.db)
        database = Database(settings.db)
        try:
            check_schema(database)
        finally:
            database.close()
    except OrcaError as error:
        return Finding(what="database", found=str(error), remedy="`orca-infra db migrate`, once ORCA_DB is right")
    return Finding(what="database", found=describe(settings.db))


def _state(settings: Settings) -> list[Finding]:
    """Whether the engine's state is where it was; nothing while the database cannot say that, which is a finding itself."""
    from orca_infra.db.connection import Database, backend_url, check_reachable
    from orca_infra.db.migrate import check_schema
    from orca_infra.stack.presence import missing_state, place_of

    if settings.db is None:
        return []
    try:
        check_reachable(settings.db)
        url = settings.backend_url or backend_url(settings.db)
        database = Database(settings.db)
        try:
            check_schema(database)
            said = missing_state(database, url)
        finally:
            database.close()
    except OrcaError:
        return []
    what = "engine's state"
    return [Finding(what=what, found=said, remedy=_STATE) if said else Finding(what=what, found=place_of(url))]


def _secrets(settings: Settings) -> list[Finding]:
    """The passphrase and the token key: made by themselves beside the embedded database, the operator's own elsewhere."""
    own = settings.db is not None
    passphrase = settings.passphrase_file
    findings = []
    if passphrase is not None and not (passphrase.is_file() and passphrase.stat().st_size):
        findings.append(
            Finding(
                what="passphrase",
                found=f"{passphrase} is missing or empty",
                remedy=f"`openssl rand -hex 32 > {passphrase}`",
            )
        )
    elif passphrase is None and own:
        findings.append(
            Finding(
                what="passphrase",
                found="PULUMI_CONFIG_PASSPHRASE_FILE is not set",
                remedy="`openssl rand -hex 32 > FILE`, and set it to that file",
            )
        )
    else:
        findings.append(Finding(what="passphrase", found=str(passphrase or settings.home / "passphrase")))
    if settings.token_key is None and own:
        findings.append(
            Finding(
                what="token key",
                found="ORCA_TOKEN_KEY is not set",
                remedy="set it to the output of `openssl rand -hex 32`",
            )
        )
    else:
        where = "ORCA_TOKEN_KEY" if settings.token_key else str(settings.home / "token-key")
        findings.append(Finding(what="token key", found=where))
    return findings


def _provider(name: str) -> Finding:
    program = f"pulumi-resource-{name}"
    installed = sorted((pulumi_home() / "plugins").glob(f"resource-{name}-v*/{program}"))
    if found := find_tool(program) or (installed[-1] if installed else None):
        return Finding(what=program, found=str(found))
    command = f"`pulumi plugin install resource {name}` gets it from its vendor"
    return Finding(what=program, found="not found", remedy=f"{command}; or put it on PATH")


def _cluster(settings: Settings) -> list[Finding]:
    """The cluster that is used, if one is, its provider, and whether the namespaces are there."""
    from orca_infra.kube.client import Kube
    from orca_infra.kube.kinds import NAMESPACE, Ref

    if not settings.uses_cluster:
        return []
    names = (settings.runs_namespace if settings.runner else None, settings.runtimes_namespace)
    findings = [_provider("kubernetes")]
    try:
        with Kube.connect(kubeconfig=settings.kubeconfig) as kube:
            version = kube.version()
            minor = re.match(r"v?1\.(\d+)", version)
            too_old = minor is not None and int(minor[1]) < _OLDEST_MINOR
            remedy_of_age = f"Kubernetes 1.{_OLDEST_MINOR} or newer is needed" if too_old else ""
            findings.append(Finding(what="cluster", found=f"{version} at {kube.server}", remedy=remedy_of_age))
            for name in sorted({name for name in names if name}):
                is_there = kube.get(Ref(kind=NAMESPACE, name=name)) is not None
                findings.append(
                    Finding(
                        what="namespace",
                        found=name if is_there else f"{name} is not there",
                        remedy="" if is_there else f"`pulumi up --refresh -s {settings.stack}` makes it",
                        needed=False,
                    )
                )
    except OrcaError as error:
        remedy_of_access = "set KUBECONFIG to a file whose cluster answers, and whose user may look"
        findings.append(Finding(what="cluster", found=str(error), remedy=remedy_of_access))
    return findings
