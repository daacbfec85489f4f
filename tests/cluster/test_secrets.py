"""A secret value in a Secret is nowhere: not raw, encoded or escaped, whatever happens to the Secret."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import EngineFailed
from orca_infra.stack import engine as engine_module
from orca_infra.stack.engine import Engine, EngineConfig
from orca_infra.stack.outcome import Events, raise_for, read_events
from orca_infra.stack.program import Program, Registrar, secret
from orca_infra.testing.cluster import TestCluster

TOKENS = ('s3cr3t"x', 'ch4ng3d"y')
STACK = "test.secrets"


def program(namespace: str, value: str, kind: str = "Opaque") -> Program:
    def declare(registrar: Registrar) -> None:
        provider = registrar.register(
            "pulumi:providers:kubernetes", "cluster", {"enableServerSideApply": "true"}
        ).result()
        assert provider is not None
        properties = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "token", "namespace": namespace, "annotations": {"pulumi.com/patchForce": "true"}},
            "type": kind,
            "stringData": {"token": secret(value)},
        }
        registrar.register("kubernetes:core/v1:Secret", "token", properties, provider=provider).result()

    return declare


def forms(value: str) -> set[str]:
    """The value as it could show up: raw, as JSON has it once and twice, and in base64 at any offset."""
    once = json.dumps(value)[1:-1]
    encoded = {base64.b64encode(b" " * shift + value.encode())[4:-4].decode() for shift in range(3)}
    return {value, once, json.dumps(once)[1:-1], base64.b64encode(value.encode()).decode(), *encoded}


def test_the_forms_of_a_value_are_found() -> None:
    assert {'s3cr3t"x', 's3cr3t\\"x', 's3cr3t\\\\\\"x', "czNjcjN0Ing="} <= forms('s3cr3t"x')
    assert all(len(form) >= 4 for token in TOKENS for form in forms(token))


def test_a_secret_value_is_in_no_event_word_exception_or_state(
    cluster: TestCluster, namespace: str, objects: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def reading(lines: Any) -> Events:
        kept = list(lines)
        said.extend(kept)
        return read_events(kept)

    def raising(completed: Any, events: Events, what: str) -> None:
        said.extend([completed.stdout, completed.stderr, repr(events)])
        raise_for(completed, events, what)

    monkeypatch.setattr(engine_module, "read_events", reading)
    monkeypatch.setattr(engine_module, "raise_for", raising)
    (tmp_path / "passphrase").write_text("a passphrase of the tests")
    (tmp_path / "state").mkdir()
    config = EngineConfig(
        backend_url=(tmp_path / "state").as_uri(), passphrase_file=tmp_path / "passphrase", folder=tmp_path / "engine"
    )
    engine = Engine(config, {"KUBECONFIG": str(cluster.kubeconfig)})
    how: dict[str, Any] = {"targets": (), "deadline_seconds": 300, "on_start": lambda _: None}

    engine.up(STACK, program(namespace, TOKENS[0]), **how)
    assert base64.b64decode(objects.get("secrets", "token")["data"]["token"]).decode() == TOKENS[0]
    changed = base64.b64encode(TOKENS[1].encode()).decode()
    cluster.api.call("PATCH", f"/api/v1/namespaces/{namespace}/secrets/token", {"data": {"token": changed}})
    engine.preview(STACK, program(namespace, TOKENS[0]), deadline_seconds=300)
    engine.refresh(STACK, only_look=True, **how)
    engine.refresh(STACK, **how)
    engine.preview(STACK, program(namespace, TOKENS[0]), deadline_seconds=300)
    with pytest.raises(EngineFailed) as failed:
        engine.up(STACK, program(namespace, TOKENS[0], kind="kubernetes.io/dockerconfigjson"), **how)
    said.extend([str(failed.value), repr(failed.value.failures), repr(failed.value.changes), repr(engine.state(STACK))])
    engine.drop(STACK)

    assert any("kubernetes:core/v1:Secret" in text for text in said)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "passphrase"]
    texts = {f"what was said, {number}": text for number, text in enumerate(said)}
    texts |= {str(path): path.read_text(errors="replace") for path in written}
    found = [(place, form) for place, text in texts.items() for t in TOKENS for form in forms(t) if form in text]
    assert found == []
