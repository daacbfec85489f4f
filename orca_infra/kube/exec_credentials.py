"""Tokens from a credential program (`exec` in a kubeconfig), as GKE's and others' plugins give them.

What the program has to answer: client-go credential plugins, `client.authentication.k8s.io`.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

from lightkube.config.models import UserExec

from orca_infra.errors import AuthFailed, SetupError

_VERSIONS = tuple(f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1"))
_DEADLINE_SECONDS = 30.0
_EARLY = timedelta(seconds=60)  # a token is renewed so long before its end


class ExecCredentials:
    """The program's token as a header (credentials.Credentials).

    The program is run when there is no token yet, it ends soon, or it was refused.

    Raises:
        SetupError: the kubeconfig asks for a version of the exchange that this program does not speak.

    """

    def __init__(self, program: UserExec) -> None:
        if program.apiVersion not in _VERSIONS:
            raise SetupError(f"the kubeconfig's credential program speaks {program.apiVersion!r}; known: {_VERSIONS}")
        self._program = program
        self._lock = threading.Lock()
        self._token = ""
        self._until: datetime | None = None

    def header(self, refused: str = "") -> str:
        """The token; another one than was refused, if the program has one. Raises AuthFailed when it gives none."""
        return f"Bearer {self._current(refused=refused.removeprefix('Bearer '))}"

    def _current(self, *, refused: str) -> str:
        with self._lock:  # one program for all threads that find the same token too old
            ends = self._until is not None and self._until - _EARLY < datetime.now(UTC)
            if not self._token or self._token == refused or ends:
                self._token, self._until = self._run()
            return self._token

    def _run(self) -> tuple[str, datetime | None]:
        program = self._program
        name = program.command
        request = {"apiVersion": program.apiVersion, "kind": "ExecCredential", "spec": {"interactive": False}}
        variables = {**os.environ, **{entry.name: entry.value for entry in program.env or ()}}
        variables["KUBERNETES_EXEC_INFO"] = json.dumps(request)
        try:
            ended = subprocess.run(
                [name, *(program.args or ())],
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_DEADLINE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise AuthFailed(f"the credential program {name} gave no token in {_DEADLINE_SECONDS:.0f} s") from None
        except OSError as error:
            raise AuthFailed(f"the credential program {name} cannot be run: {error.strerror}") from error
        if ended.returncode != 0:
            raise AuthFailed(f"the credential program {name} ended with {ended.returncode}; run it by hand to see why")
        return self._read(ended.stdout)

    def _read(self, output: bytes) -> tuple[str, datetime | None]:
        """The token and its end. The output itself is never quoted."""
        status: Any = None
        try:
            status = json.loads(output)["status"]
            token, until = str(status["token"]).strip(), status.get("expirationTimestamp")
            return token, datetime.fromisoformat(until) if until else None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise AuthFailed(f"the credential program {self._program.command} answered without a token") from None
