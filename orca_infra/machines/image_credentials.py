"""Logins of image registries, as a Docker configuration file keeps them."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HUB_NAMES = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER = re.compile(r"[A-Za-z0-9._-]+")
_HELPER_SECONDS = 10
_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Login:
    """A name and its password."""

    name: str
    password: str = field(repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.name}:{self.password}".encode()).decode()


def login_for(host: str, environment: Mapping[str, str] = os.environ) -> Login | None:
    """The login that `docker login` keeps for a registry, or None.

    `$DOCKER_CONFIG/config.json`, or `~/.docker/config.json`; a credential helper that it names is asked. A file that cannot
    be read has none: whoever needs it is told so by the registry.
    """
    folder = Path(environment.get("DOCKER_CONFIG") or Path(environment.get("HOME") or "~").expanduser() / ".docker")
    try:
        with open(folder / "config.json", "rb") as file:
            config = json.loads(file.read(_BYTES_MAX))
        return _login(config, host, environment)
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return None


def _login(config: Mapping[str, Any], host: str, environment: Mapping[str, str]) -> Login | None:
    wanted = _HUB_NAMES if host in _HUB_NAMES else {host}
    helpers = config.get("credHelpers") or {}
    helper = next((helpers[name] for name in helpers if _host(name) in wanted), config.get("credsStore"))
    if helper:
        found = _ask_helper(str(helper), _HUB_KEY if host in _HUB_NAMES else host, environment)
        if found is not None:
            return found
    for name, entry in (config.get("auths") or {}).items():
        if _host(name) not in wanted:
            continue
        if entry.get("username") and entry.get("password"):
            return Login(entry["username"], entry["password"])
        if entry.get("auth"):
            user, colon, password = base64.b64decode(entry["auth"]).decode().partition(":")
            if colon:
                return Login(user, password.rstrip("\0"))
    return None


def _host(name: str) -> str:
    return name.removeprefix("https://").removeprefix("http://").partition("/")[0]


def _ask_helper(helper: str, server: str, environment: Mapping[str, str]) -> Login | None:
    """https://github.com/docker/docker-credential-helpers: the server on its input, a JSON object on its output."""
    if not _HELPER.fullmatch(helper):
        return None
    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=server.encode(),
            capture_output=True,
            timeout=_HELPER_SECONDS,
            check=False,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    answer = json.loads(done.stdout)
    return Login(str(answer["Username"]), str(answer["Secret"]))
