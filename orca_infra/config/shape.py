"""The shape of orca.toml: each table is a class, each of its fields a key of the file. pydantic stays in this package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from orca_infra.config.lines import KeyPath
from orca_infra.config.report import nearest, quoted
from orca_infra.machines.boot import SECRET
from orca_infra.machines.model import MachineType, Pool
from orca_infra.machines.providers.gcp_config import COS, COS_ARM64, GcpCloud
from orca_infra.machines.providers.local_config import LocalCloud
from orca_infra.quantity import seconds_of
from orca_infra.runs.model import PodPlacement
from orca_infra.runtimes.resources import amount_of

PROVIDERS = ("gcp", "local")

_MOST_MACHINES = 1_000_000
_LONGEST_NAME = 200
_LONGEST_OBJECT_NAME = 253
_MOST_WARM = 10_000
_LONGEST_CULL_SECONDS = 100 * 365 * 86400
# k8s.io/apimachinery, util/validation: IsDNS1123Subdomain
_OBJECT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
# IsQualifiedName and IsValidLabelValue there, which nodes' labels and taints keep to
_LABEL_KEY = re.compile(
    rf"(?:(?=[^/]{{1,253}}/){_OBJECT_NAME.pattern}/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
)
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
# https://cloud.google.com/resource-manager/docs/creating-managing-projects, with the old form of domains
_PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")


def text_of_a_name(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    if len(value) > _LONGEST_NAME:
        raise ValueError(f"must have at most {_LONGEST_NAME} characters, not {len(value)}")
    if not value.isprintable():
        raise ValueError("must not hold control characters or other invisible ones")
    return value


def _image(value: str) -> str:
    if any(character.isspace() for character in value):
        raise ValueError("must not hold spaces; write an image such as registry.example/orca-worker:1")
    return value


def _provider(value: str) -> str:
    if value not in PROVIDERS:
        near = nearest(value, PROVIDERS)
        what_next = f"did you mean {near}?" if near else f"the providers are {', '.join(PROVIDERS)}"
        raise ValueError(f"unknown provider {quoted(value)}; {what_next}")
    return value


def _project(value: str) -> str:
    if not _PROJECT.fullmatch(value):
        raise ValueError("must be a project's id, such as my-project-123")
    return value


def _secret(value: str) -> str:
    if value and not SECRET.fullmatch(value):
        raise ValueError("must be a secret's name, such as projects/my-project-123/secrets/orca-db")
    return value


def _different(values: list[str]) -> list[str]:
    if not values:
        raise ValueError("must name at least one location")
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"names {quoted(value)} twice; remove one of them")
        seen.add(value)
    return values


def object_name(value: str) -> str:
    if len(value) > _LONGEST_OBJECT_NAME or not _OBJECT_NAME.fullmatch(value):
        raise ValueError("must be a name of Kubernetes: lower-case letters, digits, '-' and '.', at most 253 of them")
    return value


def _label_key(value: str) -> str:
    if not _LABEL_KEY.fullmatch(value):
        raise ValueError(
            f"{quoted(value)} is no key of a label: at most 63 letters, digits, '-', '_' and '.', perhaps after a domain/"
        )
    return value


def _label_keys(value: dict[str, str]) -> dict[str, str]:
    for key in value:
        _label_key(key)
    return value


def _label_value(value: str) -> str:
    if not _LABEL_VALUE.fullmatch(value) and "\0" not in value:  # of which every text is told apart (text_problems)
        raise ValueError(f"{quoted(value)} is no value of a label: at most 63 letters, digits, '-', '_' and '.'")
    return value


def _quantity(value: object) -> object:
    """A fraction as text, as the definitions take it."""
    amount_of(value)
    return str(value) if isinstance(value, float) else value


def _plain(value: object) -> object:
    """What goes to Kubernetes as it stands there: TOML's dates and infinities have no place in JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("must hold no dates, times, infinities or nan, which JSON does not have") from None
    return value


def _some_seconds(value: float) -> float:
    if value <= 0:
        raise ValueError("must be more than 0")
    return value


_Text = Annotated[str, AfterValidator(text_of_a_name)]
_Locations = Annotated[list[_Text], AfterValidator(_different)]
_Seconds = Annotated[float, BeforeValidator(seconds_of)]
_Count = Annotated[int, Field(ge=0, le=_MOST_MACHINES)]


_ObjectName = Annotated[str, AfterValidator(object_name)]
_LabelKey = Annotated[str, AfterValidator(_label_key)]
_LabelValue = Annotated[str, AfterValidator(_label_value)]
_Labels = Annotated[dict[str, _LabelValue], AfterValidator(_label_keys)]
_Quantities = dict[str, Annotated[str | int | float, BeforeValidator(_quantity)]]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Type(Table):
    type: _Text
    wait: _Seconds = 0
    locations: _Locations | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    spot: bool = False

    def freeze(self, pool_locations: list[str] | None) -> MachineType:
        return MachineType(
            type=self.type,
            locations=tuple(self.locations or pool_locations or ()),
            wait_seconds=self.wait,
            price_per_hour=self.price_per_hour,
            spot=self.spot,
        )


class _Pool(Table):
    provider: Annotated[str, AfterValidator(_provider)]
    image: Annotated[_Text, AfterValidator(_image)]
    locations: _Locations | None = None
    max_machines: _Count
    idle_seconds: Annotated[_Seconds, AfterValidator(_some_seconds)]
    max_booting: Annotated[int, Field(ge=1, le=_MOST_MACHINES)] = 1
    types: Annotated[list[_Type], Field(min_length=1)]

    def freeze(self, name: str) -> Pool:
        return Pool(
            name=name,
            provider=self.provider,
            image=self.image,
            max_machines=self.max_machines,
            idle_seconds=self.idle_seconds,
            max_booting=self.max_booting,
            types=tuple(entry.freeze(self.locations) for entry in self.types),
        )


class _LocalType(Table):
    architecture: _Text


class _Local(Table):
    locations: dict[str, dict[str, _Count]] = {}
    create_seconds: _Seconds = 0
    types: dict[str, _LocalType] = {}

    def freeze(self) -> LocalCloud:
        return LocalCloud(
            locations=self.locations,
            create_seconds=self.create_seconds,
            architectures={name: kind.architecture for name, kind in self.types.items()},
        )


class _GcpType(Table):
    architecture: _Text


class _Gcp(Table):
    project: Annotated[str, AfterValidator(_project)]
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    boot_image: _Text = COS
    boot_image_arm64: _Text = COS_ARM64
    disk_gb: Annotated[int, Field(ge=10, le=65536)] = 30
    disk_type: str = ""
    external_address: bool = False
    secure_boot: bool = True
    environment: dict[str, str] = {}
    database_secret: Annotated[str, AfterValidator(_secret)] = ""
    types: dict[str, _GcpType] = {}

    def freeze(self) -> GcpCloud:
        return GcpCloud(
            project=self.project,
            network=self.network,
            subnetwork=self.subnetwork,
            service_account=self.service_account,
            boot_image=self.boot_image,
            boot_image_arm64=self.boot_image_arm64,
            disk_gb=self.disk_gb,
            disk_type=self.disk_type,
            external_address=self.external_address,
            secure_boot=self.secure_boot,
            environment=self.environment,
            database_secret=self.database_secret,
            architectures={name: kind.architecture for name, kind in self.types.items()},
        )


class _Toleration(Table):
    key: _LabelKey | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: _LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _is_one_of_a_pod(self) -> Self:
        """What the API server would say of every Pod: ValidateTolerations of k8s.io/kubernetes, pkg/apis/core/validation."""
        if self.key is None and self.operator != "Exists":
            raise ValueError('needs a key, or operator = "Exists" for every taint')
        if self.operator == "Exists" and self.value:
            raise ValueError('takes no value with operator = "Exists"')
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError('toleration_seconds needs effect = "NoExecute"')
        return self

    def freeze(self) -> dict[str, object]:
        said = {
            "key": self.key,
            "operator": self.operator,
            "value": self.value,
            "effect": self.effect,
            "tolerationSeconds": self.toleration_seconds,
        }
        return {name: value for name, value in said.items() if value is not None}


class _Pipeline(Table):
    image_pull_secrets: list[_ObjectName] = []
    node_selector: _Labels = {}
    tolerations: list[_Toleration] = []
    priority_class: _ObjectName | None = None
    non_root: bool | None = None

    def freeze(self) -> PodPlacement:
        return PodPlacement(
            image_pull_secrets=tuple(self.image_pull_secrets),
            node_selector=dict(self.node_selector),
            tolerations=tuple(toleration.freeze() for toleration in self.tolerations),
            priority_class=self.priority_class,
            non_root=self.non_root,
        )


class _Resources(Table):
    requests: _Quantities = {}
    limits: _Quantities = {}

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        for what, asked in self.requests.items():
            if what in self.limits and amount_of(asked) > amount_of(self.limits[what]):
                raise ValueError(f"requests more {what} ({asked}) than its limit ({self.limits[what]})")
        return self

    def freeze(self) -> dict[str, object]:
        return {name: value for name, value in (("requests", self.requests), ("limits", self.limits)) if value}


class _ResourcesRanges(Table):
    default: _Resources = _Resources()


class _Kernel(Table):
    given_name_template: _Text | None = None


class _Environment(Table):
    docker_image: Annotated[_Text, AfterValidator(_image)]
    title: str = ""
    language: str = ""
    description: str = ""
    resources_ranges: _ResourcesRanges = _ResourcesRanges()
    env: dict[_Text, str] = {}
    snippets: Annotated[Any, AfterValidator(_plain)] = None
    kernel: _Kernel = _Kernel()
    example: str = ""
    icon: str = ""

    def freeze(self) -> dict[str, object]:
        """The spec of a RuntimeEnvironment."""
        default, template = self.resources_ranges.default.freeze(), self.kernel.given_name_template
        said = {
            "dockerImage": self.docker_image,
            "title": self.title,
            "language": self.language,
            "description": self.description,
            "resourcesRanges": {"default": default} if default else None,
            "env": [{"name": name, "value": value} for name, value in self.env.items()],
            "snippets": self.snippets,
            "kernel": {"givenNameTemplate": template} if template else None,
            "example": self.example,
            "icon": self.icon,
        }
        return {name: value for name, value in said.items() if value}


class _Cull(Table):
    seconds: Annotated[_Seconds, AfterValidator(_some_seconds), Field(le=_LONGEST_CULL_SECONDS)]


class _RuntimePool(Table):
    environment: _ObjectName
    size: Annotated[int, Field(ge=0, le=_MOST_WARM)]
    burning_rate: Annotated[float, Field(ge=0)] = 0.0
    resources: _Resources | None = None
    cull: _Cull | None = None
    affinity: Annotated[dict[str, Any], AfterValidator(_plain)] = {}
    node_selector: _Labels = {}
    tolerations: list[_Toleration] = []

    def freeze(self) -> dict[str, object]:
        """The spec of a RuntimePool. A size of 0 is said, too."""
        said = {
            "burningRate": self.burning_rate,
            "resources": self.resources.freeze() if self.resources else None,
            "cull": {"seconds": self.cull.seconds} if self.cull else None,
            "affinity": self.affinity,
            "nodeSelector": self.node_selector,
            "tolerations": [toleration.freeze() for toleration in self.tolerations],
        }
        stated = {name: value for name, value in said.items() if value}
        return {"environment": self.environment, "size": self.size, **stated}


class File(Table):
    max_machines_total: _Count | None = None
    pools: dict[str, _Pool] = {}
    pipelines: dict[str, _Pipeline] = {}
    environments: dict[str, _Environment] = {}
    runtime_pools: dict[str, _RuntimePool] = {}
    local: _Local = _Local()
    gcp: _Gcp | None = None


EXAMPLES = {
    "type": 'type = "small"',
    "provider": 'provider = "local"',
    "image": 'image = "registry.example/orca-worker:1"',
    "locations": 'locations = ["east"], here or in each of its types',
    "max_machines": "max_machines = 5",
    "idle_seconds": 'idle_seconds = "10m"',
    "architecture": 'architecture = "arm64"',
    "project": 'project = "my-project-123"',
    "docker_image": 'docker_image = "registry.example/python:1"',
    "environment": 'environment = "python", as [environments.python] or kubectl declares it',
    "size": "size = 3",
    "seconds": 'seconds = "1h"',
    "types": 'at least one [[…types]] with type = "small"',
}


#: Which table stands where; a type stands for any name or number.
_TABLES: Mapping[tuple[str | type, ...], type[Table]] = {
    (): File,
    ("pools", str): _Pool,
    ("pools", str, "types", int): _Type,
    ("local",): _Local,
    ("local", "types", str): _LocalType,
    ("gcp",): _Gcp,
    ("gcp", "types", str): _GcpType,
    ("pipelines", str): _Pipeline,
    ("pipelines", str, "tolerations", int): _Toleration,
    ("environments", str): _Environment,
    ("environments", str, "kernel"): _Kernel,
    ("environments", str, "resources_ranges"): _ResourcesRanges,
    ("environments", str, "resources_ranges", "default"): _Resources,
    ("runtime_pools", str): _RuntimePool,
    ("runtime_pools", str, "cull"): _Cull,
    ("runtime_pools", str, "resources"): _Resources,
    ("runtime_pools", str, "tolerations", int): _Toleration,
}


def table_of(path: KeyPath) -> type[Table] | None:
    """Say which table stands at a path; None where names are free."""
    for where, table in _TABLES.items():
        if len(where) == len(path) and all(
            isinstance(key, place) if isinstance(place, type) else key == place
            for place, key in zip(where, path, strict=True)
        ):
            return table
    return None


HOMES: Mapping[type[Table], str] = {
    File: "to the top of the file, before the first [table]",
    _Pool: "to a pool, [pools.NAME]",
    _Type: "to a pool's type, [[pools.NAME.types]]",
    _Local: "to [local]",
    _LocalType: "to a type of the local cloud, [local.types.NAME]",
    _Gcp: "to [gcp]",
    _GcpType: "to a type of Google Cloud, [gcp.types.NAME]",
    _Pipeline: "to a pipeline, [pipelines.NAME]",
    _Toleration: "to a toleration, [[pipelines.NAME.tolerations]]",
    _Environment: "to an environment, [environments.NAME]",
    _RuntimePool: "to a runtime pool, [runtime_pools.NAME]",
}
