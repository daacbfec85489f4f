"""What `pulumi preview` and `pulumi up` run: the base of a stack, and a look at the stacks that the loop owns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pulumi
from pulumi.runtime.config import CONFIG, is_config_secret

from orca_infra.config import Config, load_config
from orca_infra.db.connection import backend_url, is_local
from orca_infra.errors import OrcaError, SetupError, UserError
from orca_infra.kube.claim import claim_cluster, refuse_foreign
from orca_infra.kube.client import Kube
from orca_infra.machines.account import claim_account
from orca_infra.machines.observe import SQL, machine_stack
from orca_infra.machines.program import with_token
from orca_infra.machines.providers import resource_types
from orca_infra.machines.tokens import worker_token
from orca_infra.runtimes.declared import declared_objects
from orca_infra.settings import Settings, read_settings, unknown_settings
from orca_infra.stack.base_config import merged_environment, pod_settings, read_values
from orca_infra.stack.base_model import Base, BaseSecrets, Deployed
from orca_infra.stack.base_program import More, base_outputs, base_program
from orca_infra.stack.program import run_in_sdk
from orca_infra.surroundings import Surroundings, open_surroundings


def main() -> None:
    """Declare what this stack owns. A user's mistake becomes one sentence, without a traceback."""
    stack = pulumi.get_stack()
    try:
        asked = os.environ.get("ORCA_STACK") or stack
        if stack != asked and not stack.startswith(f"{asked}."):
            raise UserError(
                f"this shell is set for stack {asked!r}, and pulumi was asked for {stack!r}: "
                f'run `export ORCA_STACK={stack}`, then `eval "$(orca-infra env)"`'
            )
        config = _engine_config()
        values = read_values(config, stack, {key for key in config if is_config_secret(key)})
        environment = merged_environment(values, os.environ, stack)
        settings = read_settings(environment)
        for sentence in unknown_settings(environment):
            pulumi.log.warn(sentence)
        surroundings = open_surroundings(settings, say=pulumi.log.info, with_passphrase=False)
        try:
            if stack == settings.stack:
                _declare_base(values, environment, surroundings)
            else:
                _show_derived(stack, surroundings)
        finally:
            surroundings.close()
    except OrcaError as error:
        raise pulumi.RunError(str(error)) from None


def read_base(values: Mapping[str, Any], environ: Mapping[str, str], surroundings: Surroundings) -> Base:
    """What the base declares; nothing is contacted.

    Raises:
        SetupError: a sentence for everything that a deployment lacks.

    """
    settings = surroundings.settings
    deploys = values["loop"] or values["api"]
    secrets = _secrets(values, environ, surroundings)
    if values["api"] and not settings.runtimes_namespace:
        raise SetupError(
            "orca-infra:api is true, and orca-infra:runtimesNamespace is not set: there is nothing to serve"
        )
    pod_settings(values, settings.stack)  # what is wrong there is said also before anything is deployed
    if deploys:
        _refuse_incomplete(values, secrets, environ)
    runs = settings.runs_namespace if settings.runner else None
    runtimes = settings.runtimes_namespace
    by_place = {"runs": runs, "runtimes": runtimes}
    return Base(
        stack_id=surroundings.stack_id,
        family=settings.stack,
        runs_namespace=runs,
        runtimes_namespace=runtimes,
        system_namespace=values["systemNamespace"] if deploys else None,
        deployed=_deployed(values, settings) if deploys else None,
        secrets=secrets,
        run_secret=settings.run_secret,
        dista_port=settings.dista_port,
        network_policies=values["networkPolicies"],
        runtimes_from=values["runtimesFrom"],
        quotas={name: values[f"{place}Quota"] for place, name in by_place.items() if name and values[f"{place}Quota"]},
        limits={
            name: values[f"{place}Limits"] for place, name in by_place.items() if name and values[f"{place}Limits"]
        },
    )


def _engine_config() -> dict[str, str]:
    """The stack's configuration as the engine hands it to the program, secrets in clear."""
    return dict(CONFIG.get() or json.loads(os.environ.get("PULUMI_CONFIG") or "{}"))


def _declare_base(values: Mapping[str, Any], environ: Mapping[str, str], surroundings: Surroundings) -> None:
    claim = not pulumi.runtime.is_dry_run()
    # First: what is no good is refused before anything is registered.
    path = surroundings.settings.config_path
    config = read_pools(path, environ)
    base = read_base(values, environ, surroundings)
    if config is not None:
        base = replace(base, declared=_declared(config, base, path))
    if config is not None and config.gcp is not None:
        claim_account(surroundings.database, "gcp", config.gcp.project, remember=claim)
    more = [] if config is None else clouds_of(config, surroundings.stack_id)
    if base.uses_cluster:
        check_cluster(base, surroundings, claim=claim)
    run_in_sdk(base_program(base, more))
    for name, value in base_outputs(base).items():
        pulumi.export(name, value)


def read_pools(path: Path, environ: Mapping[str, str]) -> Config | None:
    """The file's content; None where none is named and none is there: there are no pools yet.

    A file that is named and is not there is refused (ConfigError): an `up` would remove all that it had declared.
    """
    return load_config(path) if environ.get("ORCA_CONFIG") or path.exists() else None


def _declared(config: Config, base: Base, path: Path) -> list[dict[str, Any]]:
    if not config.environments and not config.runtime_pools:
        return []
    if base.runtimes_namespace is None:
        raise UserError(
            f"{path} declares environments or runtime pools, and ORCA_RUNTIMES_NAMESPACE is not set: "
            "set it to the namespace that they are to be in"
        )
    return declared_objects(
        config.environments, config.runtime_pools, namespace=base.runtimes_namespace, stack_id=base.stack_id
    )


def check_cluster(base: Base, surroundings: Surroundings, *, claim: bool) -> None:
    """Raises SetupError when the cluster is not the one first seen, or a namespace is another stack's.

    `claim`: remember the cluster as this stack's, unless one is remembered; a preview does not.
    """
    with Kube.connect(kubeconfig=surroundings.settings.kubeconfig) as kube:
        claim_cluster(kube, surroundings.database, remember=claim)
        for namespace in base.namespaces:
            refuse_foreign(kube, namespace, base.stack_id)


def clouds_of(config: Config, stack_id: str) -> list[More]:
    """What declares that which the file's pools need where they are. Raises Refused."""
    zones = [zone for pool in config.pools if pool.provider == "gcp" for kind in pool.types for zone in kind.locations]
    if config.gcp is None or not zones:
        return []
    from orca_infra.machines.providers.gcp_base import gcp_base

    return [gcp_base(stack_id, config.gcp, zones)]


def _secrets(values: Mapping[str, Any], environ: Mapping[str, str], surroundings: Surroundings) -> BaseSecrets:
    url = values["db"] or surroundings.settings.db
    backend = values["backendUrl"] or surroundings.settings.backend_url or ""
    if not values["backendUrl"] and backend.startswith("postgres") and backend == backend_url(surroundings.url):
        backend = ""  # beside the database, which Pods may reach by another address
    return BaseSecrets(
        database_url=None if url is None or is_local(url) else url,
        token_key=surroundings.token_key.decode(errors="surrogateescape"),
        passphrase=_passphrase(surroundings.settings, environ),
        backend_url=backend,
    )


def _passphrase(settings: Settings, environ: Mapping[str, str]) -> str:
    """As the engine itself takes it: the file first, then the variable."""
    file = settings.passphrase_file
    try:
        return file.read_text(errors="surrogateescape").strip() if file else environ.get("PULUMI_CONFIG_PASSPHRASE", "")
    except OSError as error:
        raise SetupError(
            f"PULUMI_CONFIG_PASSPHRASE_FILE names {file}, which cannot be read: {error.strerror}"
        ) from error


def _refuse_incomplete(values: Mapping[str, Any], secrets: BaseSecrets, environ: Mapping[str, str]) -> None:
    wrong = []
    if secrets.database_url is None:
        wrong.append(
            "the loop and the API need a database that Pods reach: `pulumi config set --secret db postgresql://…` "
            "(ORCA_DB is not set, or its address is this machine's own)"
        )
    if values["loop"] and not secrets.passphrase:
        wrong.append(
            "the loop needs the passphrase of the engine's state: set PULUMI_CONFIG_PASSPHRASE_FILE, as for `orca-infra env`"
        )
    if values["loop"] and secrets.backend_url.startswith("file:"):
        wrong.append(
            "the loop's state cannot be in files (PULUMI_BACKEND_URL), which other nodes do not have: "
            "leave it unset, for a state beside the database, or name a bucket"
        )
    if values["loop"] and not Path(environ.get("ORCA_CONFIG") or "orca.toml").is_file():
        wrong.append(
            f"the loop needs an orca.toml, and {environ.get('ORCA_CONFIG') or 'orca.toml'} is missing: "
            "`pulumi config set orcaToml stacks/orca.toml`"
        )
    if wrong:
        raise SetupError("\n".join(wrong))


def _deployed(values: Mapping[str, Any], settings: Settings) -> Deployed:
    toml = settings.config_path.read_text(encoding="utf-8") if values["loop"] else ""
    return Deployed(
        image=values["image"],
        loop_replicas=values["loopReplicas"] if values["loop"] else None,
        api_replicas=values["apiReplicas"] if values["api"] else None,
        pull_secrets=values["imagePullSecrets"],
        logs_claim=values["logsClaim"],
        account_annotations={key: str(value) for key, value in values["serviceAccountAnnotations"].items()},
        environment=pod_settings(values, settings.stack),
        toml=toml,
    )


def _show_derived(stack: str, surroundings: Surroundings) -> None:
    """Preview what the rows of a pool want against what its stack's state holds; only the loop changes it."""
    if not pulumi.runtime.is_dry_run():
        raise UserError(
            f"stack {stack} is the loop's: `orca-infra run --once` makes one pass over it; by hand it is only previewed"
        )
    with surroundings.database.snapshot() as transaction:
        rows = transaction.dicts(SQL["declared_machines"])
    types = resource_types()
    for row in rows:
        if machine_stack(surroundings.settings.stack, row["pool"]) == stack:
            token = worker_token(surroundings.token_key, surroundings.stack_id, row["name"])
            declaration = with_token(row["rendered"], pulumi.Output.secret, token)
            pulumi.CustomResource(types[row["provider"]], row["name"], declaration)
