"""What a machine of a cloud does when it comes up: it runs the worker image, and powers off once its token is revoked.

One shell script does it on container-optimized OS and on Debian alike. Where cloud-init runs (container-optimized OS, Ubuntu,
Debian's genericcloud), `cloud_config` carries it; Google's own Debian images have no cloud-init but run `startup_script`.

The token stands in the script as TOKEN_PLACEHOLDER until the create. On the machine it is in a file that root alone reads and
in the worker's environment, never in the arguments of a process.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from orca_infra.errors import Refused
from orca_infra.machines.providers.port import TOKEN_PLACEHOLDER

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"projects/[a-z0-9:.-]+/secrets/[A-Za-z0-9_-]+(?:/versions/(?:latest|[0-9]+))?")
_NOT_PLAIN = re.compile(r"[^\n -~]")
#: Registries that take the machine's own service account.
_GOOGLE_REGISTRY = re.compile(r"(?:[a-z0-9-]+\.)?(?:gcr\.io|pkg\.dev)")

_PATH = "/var/lib/orca/boot.sh"
_UNIT = f"""[Unit]
Description=orca worker
Wants=network-online.target docker.service
After=network-online.target docker.service

[Service]
ExecStart=/bin/bash {_PATH}
StandardOutput=journal+console
StandardError=journal+console
Restart=on-failure
RestartSec=10

[Install]
WantedBy=multi-user.target
"""

_SCRIPT = r"""#!/bin/bash
# Runs an orca worker until its token is revoked, then powers the machine off. What it says is on the serial console.
set -u
umask 077
folder=${ORCA_BOOT_FOLDER:-/run/orca}
image=@IMAGE@
registry=@REGISTRY@
secret=@SECRET@
metadata=http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token
mkdir -p "$folder"
export HOME="$folder" # where docker keeps its login; the root folder may be read-only

say() { echo "orca: $*"; }

# Calls "$@" until it works, after 2 s, 4 s, ... 60 s.
until_it_works() {
  local wait=2
  until "$@"; do
    say "$1 failed; again in $wait s"
    sleep "$wait"
    wait=$((wait * 2 > 60 ? 60 : wait * 2))
  done
}

have_docker() {
  command -v docker >/dev/null && return
  DEBIAN_FRONTEND=noninteractive apt-get update -q &&
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends docker.io ca-certificates curl
}

docker_answers() { docker info >/dev/null; }

access_token() {
  curl -sfm 10 -H 'Metadata-Flavor: Google' "$metadata" | sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p'
}

log_in() {
  [ -z "$registry" ] && return
  local token
  token=$(access_token) && [ -n "$token" ] &&
    printf %s "$token" | docker login -u oauth2accesstoken --password-stdin "https://$registry" >/dev/null
}

pull() { log_in && docker pull -q "$image"; }

# The database's URL from Secret Manager, so that it is in no metadata and in no state.
read_secret() {
  [ -z "$secret" ] && return
  local token url
  token=$(access_token) && [ -n "$token" ] || return 1
  url=$(printf 'header = "Authorization: Bearer %s"\n' "$token" |
    curl -sfm 20 -K - "https://secretmanager.googleapis.com/v1/$secret:access" |
    tr -d '\n' | sed -n 's/.*"data" *: *"\([^"]*\)".*/\1/p' | base64 -d) && [ -n "$url" ] || return 1
  printf 'ORCA_DB=%s\n' "$url" >>"$folder/worker.env"
}

cat >"$folder/worker.env" <<'ORCA_END'
@ENVIRONMENT@
ORCA_END

say "worker @WORKER@ of pool @POOL@ boots"
until_it_works have_docker
until_it_works docker_answers
until_it_works read_secret
until_it_works pull
wait=2
while :; do
  docker rm -f orca-worker >/dev/null 2>&1
  started=$SECONDS
  docker run --rm --name orca-worker --network host --env-file "$folder/worker.env" "$image"
  code=$?
  if [ "$code" -eq 0 ]; then
    say "the worker ended well, its token is revoked: powering off"
    rm -f "$folder/worker.env"
    systemctl poweroff
    exit 0
  fi
  [ $((SECONDS - started)) -gt 300 ] && wait=2
  say "the worker ended with code $code; again in $wait s"
  sleep "$wait"
  wait=$((wait * 2 > 60 ? 60 : wait * 2))
done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What a machine is to run.

    Attributes:
        image: the worker image.
        worker: the worker's name, which is its machine's.
        pool: its pool, as pipelines name it.
        environment: what the worker finds around it besides, such as the address of its scheduler. It stands in the row, in
            the state and in the machine's metadata: no secrets.
        database_secret: `projects/P/secrets/S`, whose value becomes ORCA_DB on the machine; empty for none.

    """

    image: str
    worker: str
    pool: str
    environment: Mapping[str, str] = field(default_factory=dict)
    database_secret: str = ""


def cloud_config(boot: Boot) -> str:
    """The `user-data` for cloud-init. YAML takes JSON, so that little in it needs care with YAML's quoting.

    Raises Refused when a value cannot stand in an environment file.
    """
    config = {
        "write_files": [
            {"path": _PATH, "permissions": "0600", "owner": "root", "content": startup_script(boot)},
            {"path": "/etc/systemd/system/orca-worker.service", "permissions": "0644", "content": _UNIT},
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "start", "--no-block", "orca-worker.service"],
        ],
    }
    # JSON escapes a character beyond U+FFFF as two halves, which YAML takes for two characters that nothing can write.
    text = _NOT_PLAIN.sub(lambda found: f"\\U{ord(found[0]):08x}", json.dumps(config, indent=1, ensure_ascii=False))
    return f"#cloud-config\n{text}\n"


def startup_script(boot: Boot) -> str:
    """The `startup-script` for images without cloud-init; with the token's placeholder.

    Raises Refused when a value cannot stand in an environment file.
    """
    environment = {
        **boot.environment,
        "ORCA_WORKER": boot.worker,
        "ORCA_POOL": boot.pool,
        "ORCA_TOKEN": TOKEN_PLACEHOLDER,
    }
    if boot.database_secret and not SECRET.fullmatch(boot.database_secret):
        raise Refused(
            f"database_secret {boot.database_secret!r} is no secret's name: write projects/PROJECT/secrets/SECRET"
        )
    host = boot.image.partition("/")[0]
    secret = boot.database_secret
    if secret and "/versions/" not in secret:
        secret += "/versions/latest"
    filled = {
        "@IMAGE@": shlex.quote(boot.image),
        "@REGISTRY@": shlex.quote(host if _is_googles(host) else ""),
        "@SECRET@": shlex.quote(secret),
        "@ENVIRONMENT@": "\n".join(_line(name, value) for name, value in environment.items()),
        "@WORKER@": _shown(boot.worker),
        "@POOL@": _shown(boot.pool),
    }
    return re.sub("|".join(filled), lambda mark: filled[mark[0]], _SCRIPT)


def _is_googles(host: str) -> bool:
    return _GOOGLE_REGISTRY.fullmatch(host) is not None


def _line(name: str, value: str) -> str:
    """A line of Docker's environment file, which has no quoting: the value is all that follows the first `=`."""
    if not _VARIABLE.fullmatch(name):
        raise Refused(f"{name!r} is no name of an environment variable (letters, digits and _)")
    if any(character in value for character in "\r\n\0"):
        raise Refused(f"the value of {name} has more than one line, which a worker's environment cannot have")
    return f"{name}={value}"


def _shown(text: str) -> str:
    """The text as it may stand between double quotes in a shell."""
    return re.sub(r"[^A-Za-z0-9._ -]", "?", text)
