"""Where the cluster is found, what of a kubeconfig is understood, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import AuthFailed, SetupError
from orca_infra.kube.credentials import Login, find_login

SECRET = "s3cr3t"


def config(server: str = "https://one", /, **user: Any) -> dict[str, Any]:
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
    }


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def sent(login: Login, *codes: int) -> list[str]:
    """The Authorization header of each request, when the server answers the first with 401 or not."""
    assert login.credentials is not None
    seen = [login.credentials.header()]
    if codes == (401,):
        seen.append(login.credentials.header(refused=seen[0]))
    return seen


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_the_order_of_places(tmp_path: Path) -> None:
    account = tmp_path / "account"
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(SetupError, match="no cluster is configured: set KUBECONFIG"):
        find_login(None, environment={}, account_folder=account)

    write(tmp_path / "home/.kube/config", config("https://home"))
    assert find_login(None, environment={}, account_folder=account).server == "https://home"
    assert find_login(None, environment=inside, account_folder=account).server == "https://home"  # no account there

    named = write(tmp_path / "named", config("https://named"))
    assert find_login(None, environment={"KUBECONFIG": str(named)}, account_folder=account).server == "https://named"
    given = write(tmp_path / "given", config("https://given"))
    assert find_login(given, environment={"KUBECONFIG": str(named)}).server == "https://given"


def test_a_pods_own_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    for key, value in inside.items():
        monkeypatch.setenv(key, value)
    write(tmp_path / "account/token", SECRET)
    with pytest.raises(SetupError, match="service account .* cannot be used"):
        find_login(None, environment=inside, account_folder=tmp_path / "account")
    write(tmp_path / "account/namespace", "orca")
    with pytest.raises(SetupError, match="certificate or key cannot be used"):
        find_login(None, environment=inside, account_folder=tmp_path / "account")
    make_authority(tmp_path / "account/ca.crt")
    login = find_login(None, environment=inside, account_folder=tmp_path / "account")
    assert login.server == "https://[fd00::1]:443"
    assert sent(login) == [f"Bearer {SECRET}"]


def make_authority(path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "1"]
    subprocess.run([*command, "-keyout", "/dev/null", "-out", str(path)], check=True, capture_output=True)


def test_several_files_are_one_and_paths_are_the_files_own(tmp_path: Path) -> None:
    first = write(tmp_path / "a/one", {"users": config(tokenFile="token")["users"]})
    write(tmp_path / "a/token", SECRET + "\n")
    second = write(tmp_path / "b/two", config("https://two", token="other"))
    variables = {"KUBECONFIG": f"{first}:{tmp_path / 'missing'}:{second}"}
    login = find_login(None, environment=variables)
    assert login.server == "https://two"
    assert sent(login) == [f"Bearer {SECRET}"]


def test_a_rotated_token_file_is_read_again_when_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "token", "old")
    login = find_login(write(tmp_path / "k", config(tokenFile="token")))
    assert sent(login) == ["Bearer old"]
    file.write_text("new\n")
    assert sent(login, 401) == ["Bearer old", "Bearer new"]


def test_what_lightkube_passes_over(tmp_path: Path) -> None:
    content = config(token=f"{SECRET}\n", **{"as": "jane", "as-groups": ["a", "b"], "as-uid": "7"})
    content["clusters"][0]["cluster"] |= {"proxy-url": "http://proxy:1", "tls-server-name": "inner"}
    login = find_login(write(tmp_path / "k", content))
    expected = (
        ("Impersonate-User", "jane"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
    )
    assert login.headers == expected
    assert (login.proxy, login.tls_name) == ("http://proxy:1", "inner")
    assert sent(login) == [f"Bearer {SECRET}"]
    assert SECRET not in repr(login)


def test_a_context_without_a_user_has_no_credentials(tmp_path: Path) -> None:
    content = config()
    content["contexts"] = [{"name": "c", "context": {"cluster": "c"}}]
    assert find_login(write(tmp_path / "k", content)).credentials is None


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in config().items() if name != key}


@pytest.mark.parametrize(
    ("content", "context", "says"),
    [
        (f"users: [token: {SECRET}: {SECRET}\n\t", None, "is not valid YAML"),
        ("[]", None, "is not a kubeconfig"),
        (without("current-context"), None, "has no current context"),
        (without("contexts"), None, "has no context 'c'; it has none"),
        (without("clusters"), None, "has no cluster 'c'"),
        (without("users"), None, "has no user 'u'"),
        (config(), "other", "has no context 'other'; it has c"),
        ({**config(), "users": [{"user": {"token": SECRET}}]}, None, "its users have no names"),
        ({**config(), "users": {"u": SECRET}}, None, "is not a kubeconfig"),
        (config(token={"a": SECRET}), None, "not a kubeconfig that can be used"),
        (config("one:6443"), None, "not a URL"),
        (
            config(**{"client-certificate": "missing", "client-key": "missing"}),
            None,
            "certificate or key cannot be used",
        ),
        (
            config(**{"client-certificate-data": SECRET, "client-key-data": SECRET}),
            None,
            "certificate or key cannot be",
        ),
        (config(**{"auth-provider": {"name": "gcp"}}), None, "auth-provider not supported"),
        (config(exec={"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "x"}), None, "v1alpha1"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, content: object, context: str | None, says: str
) -> None:
    path = write(tmp_path / "k", content)
    with pytest.raises(SetupError, match=says) as caught:
        find_login(path, context)
    assert str(path) in str(caught.value) or "v1alpha1" in says
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kubeconfig_that_is_missing_is_named(tmp_path: Path) -> None:
    asks: tuple[Callable[[], Login], ...] = (
        lambda: find_login(tmp_path / "missing"),
        lambda: find_login(None, environment={"KUBECONFIG": str(tmp_path / "missing")}),
    )
    for login in asks:
        with pytest.raises(SetupError, match="missing does not exist"):
            login()


# ---- credential programs


def program(folder: Path, body: str, version: str = "v1") -> dict[str, Any]:
    file = write(folder / "program", f"#!{sys.executable}\nimport json, os, sys\nfrom pathlib import Path\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {
        "apiVersion": f"client.authentication.k8s.io/{version}",
        "command": str(file),
        "args": ["one"],
        "env": [{"name": "FOLDER", "value": str(folder)}],
    }


COUNTING = """
count = Path(os.environ["FOLDER"], "count")
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential" and sys.argv[1:] == ["one"]
print(json.dumps({"status": {"token": f"token-{number}", "expirationTimestamp": ENDS}}))
"""


def test_a_program_is_asked_once_and_again_when_its_token_is_refused(tmp_path: Path) -> None:
    content = config(exec=program(tmp_path, COUNTING.replace("ENDS", "None")))
    login = find_login(write(tmp_path / "k", content))
    assert sent(login) == ["Bearer token-1"]
    assert sent(login) == ["Bearer token-1"]
    assert sent(login, 401) == ["Bearer token-1", "Bearer token-2"]


def test_a_token_that_is_over_is_not_sent(tmp_path: Path) -> None:
    content = config(exec=program(tmp_path, COUNTING.replace("ENDS", '"2020-01-01T00:00:00Z"'), "v1beta1"))
    login = find_login(write(tmp_path / "k", content))
    assert sent(login) == ["Bearer token-1"]
    assert sent(login) == ["Bearer token-2"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (f"print('{SECRET}')", "answered without a token"),
        (f"print(json.dumps({{'status': '{SECRET}'}}))", "answered without a token"),
        (f"sys.exit('{SECRET}')", "ended with 1; run it by hand"),
    ],
)
def test_a_program_that_fails_is_named_and_not_quoted(tmp_path: Path, body: str, says: str) -> None:
    login = find_login(write(tmp_path / "k", config(exec=program(tmp_path, body))))
    with pytest.raises(AuthFailed, match=says) as caught:
        sent(login)
    assert str(tmp_path / "program") in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    wanted = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-program"}
    login = find_login(write(tmp_path / "k", config(exec=wanted)))
    with pytest.raises(AuthFailed, match="no-such-program cannot be run"):
        sent(login)
