"""`[local.types.NAME]`: what the local cloud's types are said to be."""

from __future__ import annotations

import pytest

from orca_infra.config import parse_config
from orca_infra.errors import ConfigError
from orca_infra.machines.providers.local_config import LocalCloud


def test_a_type_may_state_its_architecture() -> None:
    config = parse_config('[local.types.small]\narchitecture = "arm64"\n', "orca.toml")
    assert config.local == LocalCloud(architectures={"small": "arm64"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[local.types.small]\n", '[local.types.small] architecture: missing; add architecture = "arm64"'),
        ("[local.types.small]\narchitecture = ''\n", "[local.types.small] architecture: must not be empty"),
        (
            "[local.types.small]\narchitecture = 64\n",
            "[local.types.small] architecture: must be text, not a whole number",
        ),
        (
            "[local.types.small]\narchitectur = 'x'\n",
            "[local.types.small] architectur: unknown key; did you mean architecture?",
        ),
        (
            "[local]\narchitecture = 'x'\n",
            "[local] architecture: unknown key here; it belongs to a type of the local cloud",
        ),
    ],
)
def test_a_mistake_is_said_where_it_is(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "orca.toml")
    assert words in str(caught.value)
