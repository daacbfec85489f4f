"""Where the HTTP face cannot be served, that is said in a sentence."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import SetupError
from orca_infra.runtimes.serve import serve


def _serve(**more: Any) -> None:
    given: dict[str, Any] = {"host": "127.0.0.1", "port": 1, **more}
    serve(None, None, **given)  # type: ignore[arg-type]


def test_a_port_that_is_taken_and_a_host_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_infra.runtimes.serve.make_app", lambda *_, **__: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1, port {port}: .*in use; --host and --port"):
            _serve(port=port)
    with pytest.raises(SetupError, match="cannot listen on 127.0.0.1.9, port 80: "):
        _serve(host="127.0.0.1.9", port=80)


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--key needs --certificate"):
        _serve(key=tmp_path / "key")
    with pytest.raises(SetupError, match="--certificate .*/none cannot be used: No such file"):
        _serve(certificate=tmp_path / "none")
    text = tmp_path / "text"
    text.write_text("no certificate")
    with pytest.raises(SetupError, match="--key .*text cannot be used: they are no PEM certificate with its key"):
        _serve(certificate=text, key=text)
