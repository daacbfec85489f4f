"""Where the API server is and as whom we speak to it: the kubeconfig, or what a Pod is given.

lightkube reads the file and makes the TLS context. Ours on top: kubectl's order of places (lightkube prefers the Pod's own
account even when KUBECONFIG is set), several files in KUBECONFIG, `proxy-url`, `tls-server-name`, `as`, and credentials as
a header, whatever HTTP client sends it; programs that give them have a deadline.

No message here quotes a file's content: a line that cannot be read may hold a token.
"""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import msgspec
from lightkube.config import client_adapter, kubeconfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError as KubeConfigError

from orca_infra.errors import AuthFailed, SetupError
from orca_infra.kube.exec_credentials import ExecCredentials

_ACCOUNT_FOLDER = Path(kubeconfig.SERVICE_ACCOUNT)
_HOME_FILE = Path("~/.kube/config")
_CLUSTER_FILES = ("certificate-authority",)
_USER_FILES = ("client-certificate", "client-key", "tokenFile")
# What a file of the wrong shape makes lightkube and msgspec raise.
_BROKEN = (KubeConfigError, KeyError, TypeError, AttributeError, ValueError, msgspec.MsgspecError)


class Credentials(Protocol):
    """Who we are, as the value of a request's Authorization header. Any number of threads may ask."""

    def header(self, refused: str = "") -> str:
        """The value; where `refused` was answered with 401, another one if there is one by now.

        Raises:
            AuthFailed: there is none to be had.

        """
        ...


class _Fixed:
    """A token or a password that the kubeconfig holds."""

    def __init__(self, value: str) -> None:
        self._value = value

    def header(self, refused: str = "") -> str:  # noqa: ARG002 - there is no other
        return self._value


class _TokenFile:
    """A token that the kubelet or somebody else renews in its file (client-go's tokenFileAuth)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._value = ""

    def header(self, refused: str = "") -> str:
        if not self._value or self._value == refused:
            try:
                self._value = f"Bearer {self._path.read_text().strip()}"
            except (OSError, ValueError):
                raise AuthFailed(f"the token file {self._path} cannot be read") from None
        return self._value


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Login:
    """All that a connection needs.

    Attributes:
        server: the API server's URL, as the kubeconfig has it.
        tls: what verifies the server, and holds the client's certificate.
        credentials: a token or password; None when the certificate is enough.
        headers: sent with every request (impersonation).
        proxy: the proxy's URL; None: the environment decides (HTTPS_PROXY, NO_PROXY).
        tls_name: the name that the server's certificate has to carry where it is not the URL's.

    """

    server: str
    tls: ssl.SSLContext
    credentials: Credentials | None
    headers: tuple[tuple[str, str], ...]
    proxy: str | None
    tls_name: str | None


def find_login(
    path: Path | None,
    context: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    account_folder: Path = _ACCOUNT_FOLDER,
) -> Login:
    """How to reach the cluster.

    Args:
        path: the kubeconfig; None: KUBECONFIG, then the Pod's own account, then ~/.kube/config.
        context: the context's name; None: the current one.
        environment: the variables to look at; None: the process's own.
        account_folder: where a Pod finds its account.

    Raises:
        SetupError: there is none, or it cannot be used.

    """
    environment = os.environ if environment is None else environment
    if path is not None:
        return _from_files([path], context)
    named = [Path(part) for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    if named:  # files that are not there are passed over, as kubectl does, unless none is
        return _from_files([part for part in named if part.expanduser().is_file()] or named[:1], context)
    if context is None and environment.get("KUBERNETES_SERVICE_HOST") and (account_folder / "token").is_file():
        return _from_account(account_folder)
    if _HOME_FILE.expanduser().is_file():
        return _from_files([_HOME_FILE], context)
    raise SetupError("no cluster is configured: set KUBECONFIG to a kubeconfig file, or write one to ~/.kube/config")


def _from_account(folder: Path) -> Login:
    try:
        single = kubeconfig.KubeConfig.from_service_account(folder).get()
    except (*_BROKEN, OSError) as error:
        raise SetupError(f"the Pod's service account in {folder} cannot be used ({type(error).__name__})") from None
    assert single is not None
    return _login(single, {}, {}, str(folder))


def _from_files(paths: list[Path], context: str | None) -> Login:
    """One login from kubeconfig files; where two define the same name, the first does (kubectl's rule)."""
    merged: dict[str, Any] = {"clusters": {}, "contexts": {}, "users": {}}
    where = os.pathsep.join(map(str, paths))
    for path in paths:
        for key, value in _read(path).items():
            if key in ("clusters", "contexts", "users"):
                for name, entry in value.items():
                    merged[key].setdefault(name, entry)
            elif value:
                merged.setdefault(key, value)
    wanted = context or merged.get("current-context")
    if not wanted:
        raise SetupError(f"{where} has no current context; set one (kubectl config use-context)")
    for section, name in _names(merged, str(wanted), where):
        if name not in merged[section]:
            raise SetupError(f"{where} has no {section[:-1]} {name!r}, which context {wanted!r} names")
    chosen = merged["contexts"][wanted]["context"]
    shape = {key: list(merged[key].values()) for key in ("clusters", "contexts", "users")}
    try:
        single = kubeconfig.KubeConfig.from_dict(shape).get(wanted)
    except _BROKEN as error:
        raise SetupError(f"{where} is not a kubeconfig that can be used ({type(error).__name__})") from None
    assert single is not None
    user = merged["users"][chosen["user"]]["user"] if chosen.get("user") else {}
    return _login(single, merged["clusters"][chosen["cluster"]]["cluster"], user, where)


def _names(merged: Mapping[str, Any], wanted: str, where: str) -> list[tuple[str, str]]:
    """Which entries the context needs."""
    if wanted not in merged["contexts"]:
        raise SetupError(f"{where} has no context {wanted!r}; it has {', '.join(sorted(merged['contexts'])) or 'none'}")
    chosen = merged["contexts"][wanted].get("context")
    if not isinstance(chosen, dict) or not chosen.get("cluster"):
        raise SetupError(f"{where}: context {wanted!r} names no cluster")
    return [("clusters", str(chosen["cluster"])), *([("users", str(chosen["user"]))] if chosen.get("user") else [])]


def _read(path: Path) -> dict[str, Any]:
    """One file, its lists by name, and the files that it names made absolute, relative to itself."""
    file = path.expanduser()
    try:
        content = msgspec.yaml.decode(file.read_bytes())
    except FileNotFoundError:
        raise SetupError(f"the kubeconfig {path} does not exist") from None
    except OSError as error:
        raise SetupError(f"the kubeconfig {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError):
        raise SetupError(f"the kubeconfig {path} is not valid YAML") from None
    if not isinstance(content, dict):
        raise SetupError(f"the kubeconfig {path} is not a kubeconfig")
    found: dict[str, Any] = {"current-context": content.get("current-context")}
    for section, files in (("clusters", _CLUSTER_FILES), ("contexts", ()), ("users", _USER_FILES)):
        try:
            found[section] = {str(entry["name"]): entry for entry in content.get(section) or ()}
            for entry in found[section].values():
                inner = entry[section[:-1]] = entry.get(section[:-1]) or {}
                for key in files:
                    if inner.get(key):
                        inner[key] = str(file.parent.resolve() / inner[key])
        except (KeyError, TypeError, AttributeError):
            raise SetupError(f"the kubeconfig {path} is not a kubeconfig: its {section} have no names") from None
    return found


def _login(single: kubeconfig.SingleConfig, cluster: dict[str, Any], stated: dict[str, Any], where: str) -> Login:
    user = single.user or User()
    server = single.cluster.server
    if not server.startswith(("http://", "https://")):
        raise SetupError(f"{where}: the cluster's server is not a URL that begins with https://")
    if user.token is not None:
        user.token = user.token.strip()  # a line's end in a header would be refused, in words that quote the token
    try:
        tls = client_adapter.verify_cluster(single.cluster, user, single.abs_file)
        credentials = _credentials(user, server)
    except KubeConfigError as error:
        raise SetupError(f"{where}: {error}") from error
    except (OSError, ValueError, TypeError) as error:  # ssl's errors are OSErrors
        problem = (
            f"{type(error).__name__}{f': {error.strerror}' if isinstance(error, OSError) and error.strerror else ''}"
        )
        raise SetupError(f"{where}: a certificate or key cannot be used ({problem})") from None
    return Login(
        server=server,
        tls=tls,
        credentials=credentials,
        headers=tuple(_impersonation(stated)),
        proxy=cluster.get("proxy-url"),
        tls_name=cluster.get("tls-server-name"),
    )


def _credentials(user: User, server: str) -> Credentials | None:
    """In kubectl's order. Raises KubeConfigError for what only old kubectls know."""
    if user.token_file is not None:
        return _TokenFile(Path(user.token_file))
    if user.token is not None:
        return _Fixed(f"Bearer {user.token}")
    if user.exec:
        return ExecCredentials(user.exec)
    if user.auth_provider:
        raise KubeConfigError("auth-provider not supported")
    url = urlsplit(server)
    named = (
        (user.username, user.password) if user.username else (unquote(url.username or ""), unquote(url.password or ""))
    )
    if not named[0]:
        return None
    return _Fixed("Basic " + base64.b64encode(f"{named[0]}:{named[1] or ''}".encode()).decode())


def _impersonation(user: Mapping[str, Any]) -> list[tuple[str, str]]:
    """As whom the user wants to act; lightkube would pass it over and act with the user's own, larger rights."""
    headers = [("Impersonate-User", str(user["as"]))] if user.get("as") else []
    headers += [("Impersonate-Uid", str(user["as-uid"]))] if user.get("as-uid") else []
    return headers + [("Impersonate-Group", str(group)) for group in user.get("as-groups") or ()]
