"""The engine's event log -> changes: ops, diffs line by line, nothing secret. tests/engine has the real engine's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orca_infra.preview.events import Read, read_preview
from orca_infra.preview.secrets import Redactor, passwords_of

MARK = {"4dabf18193072939515e22adb298388d": "1b47061264138c4ac30d75fd1eb44270", "ciphertext": "[secret]"}
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
HIDDEN = "a secret that nobody may see"


def urn(kind: str, name: str) -> str:
    return f"urn:pulumi:dev::orca-infra::{kind}::{name}"


def step(
    op: str,
    old: dict[str, Any] | None,
    new: dict[str, Any] | None,
    kind: str = "kubernetes:core/v1:Pod",
    name: str = "x",
) -> dict[str, Any]:
    def state(inputs: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if inputs is None else {"type": kind, "inputs": inputs, "outputs": {}}

    metadata = {"op": op, "urn": urn(kind, name), "type": kind, "old": state(old), "new": state(new)}
    return {"resourcePreEvent": {"metadata": metadata, "planning": True}}


def read(*events: dict[str, Any], secrets: tuple[str, ...] = ()) -> Read:
    return read_preview("\n".join(json.dumps(event) for event in events), Redactor(secrets))


def diff(old: dict[str, Any] | None, new: dict[str, Any] | None, op: str = "update", **more: Any) -> tuple[str, ...]:
    [change] = read(step(op, old, new, **more)).changes
    return change.diff


def test_only_what_changes_something_is_a_change_and_each_once() -> None:
    ops = ["same", "create", "create", "create-replacement", "replace", "delete-replaced", "read", "refresh", "delete"]
    found = read(*(step(op, {}, {}) for op in ops)).changes
    assert [change.op for change in found] == ["create", "replace", "delete"]


def test_what_the_engine_declares_by_itself_is_no_change() -> None:
    kind = "pulumi:providers:kubernetes"
    found = read(step("create", None, {}, kind, "default_4_25_0"), step("create", None, {}, kind, "cluster")).changes
    assert [change.name for change in found] == ["cluster"]


def test_a_change_shows_each_property_that_differs_before_and_after() -> None:
    old = {"spec": {"replicas": 1, "kept": True, "gone": "x", "ports": [1, 2]}, "metadata": {"labels": {"a.b/c": "1"}}}
    new = {"spec": {"replicas": 2, "kept": True, "ports": [1, 3, 4]}, "metadata": {"labels": {"a.b/c": "2"}}}
    assert diff(old, new) == (
        "- spec.replicas: 1",
        "+ spec.replicas: 2",
        '- spec.gone: "x"',
        "- spec.ports[1]: 2",
        "+ spec.ports[1]: 3",
        '- metadata.labels["a.b/c"]: "1"',
        '+ metadata.labels["a.b/c"]: "2"',
        "+ spec.ports[2]: 4",
    )


def test_what_is_made_has_only_additions_and_what_is_deleted_only_removals() -> None:
    assert diff(None, {"a": {}, "b": [], "c": None}, "create") == ("+ a: {}", "+ b: []", "+ c: null")
    assert diff({"a": 1}, {"a": 1}, "delete") == ("- a: 1",)


def test_a_value_is_one_line_and_a_long_one_is_cut() -> None:
    (line,) = diff(None, {"script": "a\n```\nb" + "x" * 1000}, "create")
    assert line.startswith('+ script: "a\\n```\\nbxxx')
    assert line.endswith("… (1011 characters)")
    assert len(line) < 400


def test_what_is_known_after_the_up_only_says_so() -> None:
    assert diff({"ip": "10.0.0.1"}, {"ip": UNKNOWN}) == ('- ip: "10.0.0.1"', "+ ip: (known after the up)")


def test_a_very_long_diff_is_cut_at_a_line() -> None:
    lines = diff(None, {f"k{n}": n for n in range(3000)}, "create")
    assert len(lines) == 2001
    assert lines[-1] == "  … and 1000 lines more"


@pytest.mark.parametrize(
    "new",
    [
        {"data": MARK},
        {"spec": {"containers": [{"env": [{"name": "DB_PASSWORD", "value": HIDDEN}]}]}},
        {"spec": {"password": HIDDEN}},
        {"environment": {"ORCA_TOKEN": HIDDEN, "AWS_SECRET_ACCESS_KEY": HIDDEN}},
        {"apiKey": HIDDEN, "clientSecret": HIDDEN, "passphrase": HIDDEN},
    ],
)
def test_what_is_secret_or_called_so_is_not_shown(new: dict[str, Any]) -> None:
    lines = diff(None, new, "create")
    assert lines
    assert HIDDEN not in "\n".join(lines)
    assert all(line.endswith(": [secret]") or ".name: " in line for line in lines)


def test_a_secret_that_changed_says_so_and_one_that_did_not_is_left_out() -> None:
    assert diff({"password": "one-one-one", "a": 1}, {"password": "two-two-two", "a": 2}) == (
        "- password: [secret]",
        "+ password: [secret]",
        "- a: 1",
        "+ a: 2",
    )
    assert diff({"password": "one-one-one", "a": 1}, {"password": "one-one-one", "a": 2}) == ("- a: 1", "+ a: 2")
    event = step("update", {"spec": {"env": MARK}, "a": 1}, {"spec": {"env": MARK}, "a": 2})
    assert read(event).changes[0].diff == ("- a: 1", "+ a: 2")
    for touched in ({"diffs": ["spec"]}, {"detailedDiff": {"spec.env": {"kind": "update"}}}):
        event["resourcePreEvent"]["metadata"].update(touched)
        assert read(event).changes[0].diff[:2] == ("- spec.env: [secret]", "+ spec.env: [secret]")


def test_two_long_values_that_begin_alike_differ() -> None:
    assert len(diff({"a": "x" * 500}, {"a": "x" * 500 + "y"})) == 2


def test_names_of_secrets_are_shown() -> None:
    new = {
        "secretName": "orca-db",
        "secretKeyRef": {"name": "orca-db", "key": "url"},
        "automountServiceAccountToken": False,
        "imagePullSecrets": [{"name": "pull"}],
        "tokenPath": "/var/run/token",
    }
    assert "[secret]" not in "\n".join(diff(None, new, "create"))


def test_a_secret_of_kubernetes_shows_its_keys_and_never_its_values() -> None:
    kind = "kubernetes:core/v1:Secret"
    old = {"data": {"url": "b2xk"}, "stringData": {"a": {"b": HIDDEN}}, "metadata": {"name": "s"}}
    new = {"data": {"url": "bmV3", "more": "eA=="}, "metadata": {"name": "t"}}
    lines = diff(old, new, kind=kind)
    assert "+ data.more: [secret]" in lines
    assert '+ metadata.name: "t"' in lines
    assert not any(hidden in line for line in lines for hidden in ("b2xk", "bmV3", "eA==", HIDDEN))


@pytest.mark.parametrize(
    "spelled",
    [
        's3cr3t"x',
        r"s3cr3t\"x",
        "czNjcjN0Ing=",
        "czNjcjN0IngK",
        "s3cr3t%22x",
    ],
)
def test_a_known_secret_is_taken_out_in_every_spelling(spelled: str) -> None:
    redact = Redactor(['s3cr3t"x\n', ""])
    assert redact(f"before {spelled} after") == "before [secret] after"
    [change] = read(step("create", None, {"a": f"x {spelled}"}), secrets=('s3cr3t"x',)).changes
    assert spelled not in change.diff[0]


def test_a_secret_in_a_long_value_is_taken_out_before_the_value_is_cut() -> None:
    """Also where the cut would go through it."""
    for before in range(270, 310):
        [line] = diff_of_secret({"script": "x" * before + HIDDEN + "y" * 100})
        assert "a secret" not in line
        assert line.endswith("characters)")


def test_a_secret_with_an_umlaut_and_a_quote_is_known_where_it_is_escaped() -> None:
    [change] = read(step("create", None, {"a": 'x p\u00e4ss"word y'}), secrets=('p\u00e4ss"word',)).changes
    assert change.diff == ('+ a: "x [secret] y"',)


def diff_of_secret(new: dict[str, Any]) -> tuple[str, ...]:
    [change] = read(step("create", None, new), secrets=(HIDDEN,)).changes
    return change.diff


def test_tokens_of_workers_are_taken_out_and_digests_stay() -> None:
    digits = "0123456789abcdef" * 4
    assert Redactor([])(f"{digits} sha256:{digits}") == f"[secret] sha256:{digits}"


def test_short_values_are_no_secrets_that_could_be_found() -> None:
    assert Redactor(["x", "dev"])("x of dev") == "x of dev"


@pytest.mark.parametrize(
    ("url", "passwords"),
    [
        ("postgresql://u:p%40ss@db/orca", ["p%40ss", "p@ss"]),
        ("host=db password='a b' user=u", ["a b"]),
        ("host=db user=u password=abc", ["abc"]),
        ("file:///state", []),
        ("postgresql://[::1/orca", []),
    ],
)
def test_the_password_of_a_connection(url: str, passwords: list[str]) -> None:
    assert passwords_of(url) == passwords


def test_violations_and_errors_are_read_and_noise_is_not() -> None:
    breach = {
        "resourceUrn": urn("kubernetes:core/v1:Pod", "bad-s3cr3t"),
        "message": "<{%reset%}>Images are named by digest.\nimage-digests: Pod bad: named s3cr3t.\n",
        "policyName": "image-digests",
        "enforcementLevel": "advisory",
    }
    errors = ["update failed for s3cr3t\n", "preview failed\n", "Resource monitor has terminated, shutting down"]
    found = read(
        {"policyEvent": breach},
        {"policyEvent": breach},
        *({"diagnosticEvent": {"severity": "error", "message": message}} for message in errors),
        {"diagnosticEvent": {"severity": "warning", "message": "using a plugin"}},
        secrets=("s3cr3t",),
    )
    [one] = found.breaches
    assert (one.rule, one.resource, one.mandatory) == ("image-digests", "bad-[secret]", False)
    assert one.message == "image-digests: Pod bad: named [secret]."
    assert found.errors == ("update failed for [secret]",)


def test_a_log_that_is_cut_off_is_read_as_far_as_it_goes() -> None:
    text = json.dumps(step("create", None, {})) + '\n{"resourcePreEvent": {"meta'
    assert len(read_preview(text, Redactor([])).changes) == 1
