import itertools
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orca_infra.config import Config, load_config, parse_config
from orca_infra.config.lines import KeyPath, key_lines
from orca_infra.errors import ConfigError
from orca_infra.machines.model import MachineType, Pool
from orca_infra.machines.providers.local_config import LocalCloud
from orca_infra.names import machine_name
from orca_infra.runs.model import PodPlacement

WHOLE = """\
max_machines_total = 20
[pools.gpu]
provider = "local"
image = "registry.example/orca-worker:1"
locations = ["east", "west"]
max_machines = 5
idle_seconds = "10m"
[[pools.gpu.types]]
type = "small"
wait = "5m"
locations = ["west"]
price_per_hour = 0.12
spot = true
[[pools.gpu.types]]
type = "large"
[local.locations.east]
small = 0
[local.locations.west]
small = 3
[local]
create_seconds = 0.5
"""
POOL = """\
[pools.gpu]
provider = "local"
image = "worker:1"
locations = ["east"]
max_machines = 5
idle_seconds = 600
"""
TYPE = """\
[[pools.gpu.types]]
type = "small"
"""
HOW = "write seconds (90) or text such as 45s, 10m, 1h30m, 2d or 500ms"


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "orca.toml")
    return str(caught.value).split("\n")


def test_a_whole_file_becomes_frozen_values() -> None:
    assert parse_config(WHOLE, "orca.toml") == Config(
        pools=(
            Pool(
                name="gpu",
                provider="local",
                image="registry.example/orca-worker:1",
                max_machines=5,
                idle_seconds=600,
                max_booting=1,
                types=(
                    MachineType(type="small", locations=("west",), wait_seconds=300, price_per_hour=0.12, spot=True),
                    MachineType(type="large", locations=("east", "west")),
                ),
            ),
        ),
        max_machines_total=20,
        local=LocalCloud(locations={"east": {"small": 0}, "west": {"small": 3}}, create_seconds=0.5),
    )


def test_pools_keep_the_order_of_the_file() -> None:
    config = parse_config((POOL + TYPE).replace("gpu", "b") + (POOL + TYPE).replace("gpu", "a"), "orca.toml")
    assert [pool.name for pool in config.pools] == ["b", "a"]


def test_an_empty_table_of_pools_is_a_file_without_pools() -> None:
    assert parse_config("[pools]\n", "orca.toml") == Config(pools=(), max_machines_total=None, local=LocalCloud())


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n"])
def test_a_file_that_says_nothing_is_refused_since_it_would_drain_every_pool(text: str) -> None:
    assert refusal(text) == ["orca.toml: says nothing; a file without pools says so with [pools]"]


def test_a_byte_order_mark_and_windows_line_ends_are_read() -> None:
    text = "\ufeff" + WHOLE.replace("\n", "\r\n")
    assert parse_config(text, "orca.toml") == parse_config(WHOLE, "orca.toml")


def test_a_pool_without_locations_is_fine_when_each_type_has_its_own() -> None:
    text = POOL.replace('locations = ["east"]\n', "") + TYPE + 'locations = ["north"]\n'
    assert parse_config(text, "orca.toml").pools[0].types[0].locations == ("north",)


def test_a_type_may_be_tried_as_spot_first_and_lasting_then() -> None:
    assert len(parse_config(POOL + TYPE + "spot = true\n" + TYPE, "orca.toml").pools[0].types) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('idle_sec = "10m"', "idle_sec: unknown key; did you mean idle_seconds?"),
        ("max_boot = 1", "max_boot: unknown key; did you mean max_booting?"),
        (
            "colour = 1",
            (
                "colour: unknown key; the keys here are idle_seconds, image, locations, max_booting, max_machines, "
                "provider, types"
            ),
        ),
        ("'idle sec' = 1", '"idle sec": unknown key; did you mean idle_seconds?'),
        (
            "max_machines_total = 3",
            "max_machines_total: unknown key here; it belongs to the top of the file, before the first [table]",
        ),
        ("create_seconds = 3", "create_seconds: unknown key here; it belongs to [local]"),
        ("spot = true", "spot: unknown key here; it belongs to a pool's type, [[pools.NAME.types]]"),
        ("max_booting = 0", "max_booting: must be at least 1"),
        ('max_booting = "1"', "max_booting: must be a whole number, not text"),
        ("max_booting = 1.0", "max_booting: must be a whole number, not a number with a fraction"),
        ("max_booting = true", "max_booting: must be a whole number, not true or false"),
        ("max_booting = 1979-05-27", "max_booting: must be a whole number, not a date or a time"),
        ("max_booting = [1]", "max_booting: must be a whole number, not a list"),
        ("max_booting.x = 1", "[pools.gpu.max_booting]: must be a whole number, not a table"),
        (f"max_booting = 1{'0' * 400}", "max_booting: must be at most 1000000"),
    ],
)
def test_a_wrong_line_of_a_pool_is_named_with_what_to_do(line: str, message: str) -> None:
    where = "" if message.startswith("[") else "[pools.gpu] "
    assert refusal(f"{POOL}{line}\n{TYPE}") == [f"orca.toml:7: {where}{message}"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_machines = 5", "max_machines = -1", "5: [pools.gpu] max_machines: must be at least 0"),
        ("idle_seconds = 600", "idle_seconds = 0", "6: [pools.gpu] idle_seconds: must be more than 0"),
        ("idle_seconds = 600", "idle_seconds = -5", f"6: [pools.gpu] idle_seconds: must not be negative; {HOW}"),
        ("idle_seconds = 600", "idle_seconds = nan", f"6: [pools.gpu] idle_seconds: must be a finite duration; {HOW}"),
        ("idle_seconds = 600", "idle_seconds = true", f"6: [pools.gpu] idle_seconds: must be a duration; {HOW}"),
        (
            "idle_seconds = 600",
            'idle_seconds = "soon"',
            f'6: [pools.gpu] idle_seconds: "soon" is not a duration; {HOW}',
        ),
        ("idle_seconds = 600", "", '1: [pools.gpu] idle_seconds: missing; add idle_seconds = "10m"'),
        ("idle_seconds = 600", "idle_sec = 600", "6: [pools.gpu] idle_sec: unknown key; did you mean idle_seconds?"),
        (
            'image = "worker:1"',
            "",
            '1: [pools.gpu] image: missing; add image = "registry.example/orca-worker:1"',
        ),
        ('image = "worker:1"', 'image = " "', "3: [pools.gpu] image: must not be empty"),
        (
            'image = "worker:1"',
            'image = "a b"',
            "3: [pools.gpu] image: must not hold spaces; write an image such as registry.example/orca-worker:1",
        ),
        ('"local"', '"locl"', '2: [pools.gpu] provider: unknown provider "locl"; did you mean local?'),
        ('"local"', '"aws"', '2: [pools.gpu] provider: unknown provider "aws"; the providers are gcp, local'),
        ('["east"]', "[]", "4: [pools.gpu] locations: must name at least one location"),
        ('["east"]', '"east"', "4: [pools.gpu] locations: must be a list, not text"),
        ('["east"]', '["a", "b", "a"]', '4: [pools.gpu] locations: names "a" twice; remove one of them'),
        ('["east"]', '[\n"a",\n# b\n5]', "7: [pools.gpu] locations #2: must be text, not a whole number"),
        ('["east"]', '["a\\u0000b"]', "4: [pools.gpu] locations #1: must not hold control characters or other invisible ones"),
        (
            'locations = ["east"]',
            "",
            '1: [pools.gpu] locations: missing; add locations = ["east"], here or in each of its types',
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_pool_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in POOL
    assert refusal(POOL.replace(old, new) + TYPE) == [f"orca.toml:{message}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('wiat = "5m"', "wiat: unknown key; did you mean wait?"),
        ('wait_seconds = "5m"', "wait_seconds: unknown key; did you mean wait?"),
        ("location = ['a']", "location: unknown key; did you mean locations?"),
        ("max_machines = 1", "max_machines: unknown key here; it belongs to a pool, [pools.NAME]"),
        ("wait = -1", f"wait: must not be negative; {HOW}"),
        ("price_per_hour = -0.5", "price_per_hour: must be at least 0"),
        ("price_per_hour = inf", "price_per_hour: must be a finite number"),
        ("price_per_hour = '1'", "price_per_hour: must be a number, not text"),
        ("spot = 1", "spot: must be true or false, not a whole number"),
        ("spot = 'yes'", "spot: must be true or false, not text"),
        ("locations = []", "locations: must name at least one location"),
    ],
)
def test_a_wrong_line_of_the_second_type_is_named_with_its_number(line: str, message: str) -> None:
    text = f'{POOL}{TYPE}\n[[pools.gpu.types]]\ntype = "large"\n{line}\n'
    assert refusal(text) == [f"orca.toml:12: [[pools.gpu.types]] #2 {message}"]


def test_a_pool_without_types_is_refused() -> None:
    add = 'add at least one [[…types]] with type = "small"'
    assert refusal(POOL) == [f"orca.toml:1: [pools.gpu] types: missing; {add}"]
    assert refusal(POOL + "types = []\n") == [f"orca.toml:7: [pools.gpu] types: must not be empty; {add}"]
    assert refusal(POOL + "types = 'a'\n") == ["orca.toml:7: [pools.gpu] types: must be a list, not text"]


def test_a_type_without_its_type_is_refused_at_its_header() -> None:
    assert refusal(POOL + TYPE + "[[pools.gpu.types]]\nspot = true\n") == [
        'orca.toml:9: [[pools.gpu.types]] #2 type: missing; add type = "small"'
    ]


def test_a_type_that_is_listed_twice_for_the_same_locations_is_refused() -> None:
    pool = POOL.replace('["east"]', '["east", "west"]')
    assert refusal(pool + TYPE + TYPE + 'locations = ["west", "east"]\n') == [
        (
            "orca.toml:9: [[pools.gpu.types]] #2: the same type and locations as #1, which is tried before; "
            "remove one of the two"
        )
    ]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("\n[pool.x]\nimage = 'a'\n", ["2: [pool]: unknown table; did you mean pools?"]),
        ("[[pools]]\n", ["1: pools: must be a table, not a list"]),
        ("pools = 5\n", ["1: pools: must be a table, not a whole number"]),
        ("[pools]\ngpu = 5\n", ["2: [pools] gpu: must be a table, not a whole number"]),
        ("max_machines_totl = 5\n", ["1: max_machines_totl: unknown key; did you mean max_machines_total?"]),
        ("\nmax_machines_total = -1\n", ["2: max_machines_total: must be at least 0"]),
        ("[max_machines_total]\n", ["1: [max_machines_total]: must be a whole number, not a table"]),
        ("[locl]\n", ["1: [locl]: unknown table; did you mean local?"]),
        ("[local]\ncreate = 1\n", ["2: [local] create: unknown key; did you mean create_seconds?"]),
        ("[local]\ncreate_seconds = -1\n", [f"2: [local] create_seconds: must not be negative; {HOW}"]),
        ("[local.locations.a]\nsmall = -1\n", ["2: [local.locations.a] small: must be at least 0"]),
        ("[local.locations]\na = 1\n", ["2: [local.locations] a: must be a table, not a whole number"]),
        ("local.locations.a.small = 'x'\n", ["1: [local.locations.a] small: must be a whole number, not text"]),
        ("[local]\nlocations = {a = {x = 1, y = -1}}\n", ["2: [local.locations.a] y: must be at least 0"]),
    ],
)
def test_a_wrong_table_is_named(text: str, messages: list[str]) -> None:
    assert refusal(text) == [f"orca.toml:{message}" for message in messages]


@pytest.mark.parametrize(
    ("key", "shown", "says"),
    [
        ('""', '""', "must not be empty"),
        ('"  "', '"  "', "must not be empty"),
        ('"a\\nb"', '"a\\nb"', "must not hold control characters or other invisible ones"),
        ('"a\\u007f"', '"a\\u007f"', "must not hold control characters or other invisible ones"),
        ('"*"', '"*"', "must not be *, under which the pause of the whole stack is kept"),
        ("x" * 201, f'"{"x" * 60}…"', "must have at most 200 characters, not 201"),
    ],
)
def test_a_pool_name_that_cannot_be_is_refused(key: str, shown: str, says: str) -> None:
    text = "# names\n" + (POOL + TYPE).replace("gpu", key)
    assert refusal(text) == [f"orca.toml:2: [pools.{shown}]: a pool's name {says}; rename the pool"]


def test_pool_names_of_the_field_are_all_accepted_together() -> None:
    names = ["Jane.Doe", "gpu_A100", "x" * 70, "a.b", "a-b", "é"]
    text = "".join((POOL + TYPE).replace("gpu", f'"{name}"') for name in names)
    assert [pool.name for pool in parse_config(text, "orca.toml").pools] == names


def colliding_names() -> tuple[str, str]:
    """Two names of which the first characters and 32 bits of sha256 are alike; by brute force, since no other are."""
    found: dict[str, str] = {}
    for number in itertools.count():
        name = f"{'x' * 50}.{number}"
        machine = machine_name(name, 1)
        if machine in found:
            return found[machine], name
        found[machine] = name
    raise AssertionError


def test_two_pools_whose_machines_would_share_names_are_refused() -> None:
    one, other = colliding_names()
    text = (POOL + TYPE).replace("gpu", f'"{one}"') + (POOL + TYPE).replace("gpu", f'"{other}"')
    assert refusal(text) == [
        (
            f'orca.toml:9: [pools."{other}"]: its machines would have the name of pool "{one}"\'s; '
            "rename one of the two pools"
        )
    ]


def test_all_mistakes_are_reported_in_the_order_of_the_file() -> None:
    text = """\
max_machines_total = "many"
[pools.gpu]
provider = "lokal"
image = "worker:1"
locations = ["east", "east"]
max_machine = 5
idle_seconds = "10m"
[[pools.gpu.types]]
type = "small"
[[pools.gpu.types]]
type = "small"
wait = []
[local]
create_second = 1
"""
    assert refusal(text) == [
        "orca.toml:1: max_machines_total: must be a whole number, not text",
        'orca.toml:3: [pools.gpu] provider: unknown provider "lokal"; did you mean local?',
        'orca.toml:5: [pools.gpu] locations: names "east" twice; remove one of them',
        "orca.toml:6: [pools.gpu] max_machine: unknown key; did you mean max_machines?",
        (
            "orca.toml:10: [[pools.gpu.types]] #2: the same type and locations as #1, which is tried before; "
            "remove one of the two"
        ),
        f"orca.toml:12: [[pools.gpu.types]] #2 wait: must be a duration; {HOW}",
        "orca.toml:14: [local] create_second: unknown key; did you mean create_seconds?",
    ]


def test_at_most_20_mistakes_are_reported_and_how_many_more() -> None:
    messages = refusal("".join(f"unknown{number} = 1\n" for number in range(25)))
    assert len(messages) == 21
    assert messages[19].startswith("orca.toml:20: unknown19: unknown key")
    assert messages[20] == "orca.toml: and 5 more; mend these first"


@pytest.mark.timeout(600)
def test_a_file_of_nothing_but_mistakes_is_refused_in_the_end() -> None:
    text = "".join(f"idle_secon{number} = 1\n" for number in range(30_000))
    assert refusal(text)[-1] == "orca.toml: and 29980 more; mend these first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pools.gpu]\nimage worker\n", "2: is not TOML: expected '=' after a key in a key/value pair (column 7); mend this line"),
        ("[pools.gpu]\n\nimage = worker\n", "3: is not TOML: invalid value (column 9); mend this line"),
        ("[pools.gpu\n", "1: is not TOML: expected ']' at the end of a table declaration (column 11); mend this line"),
        ("a = 1\n\na = 2\n", "3: is not TOML: cannot overwrite a value (column 6); mend this line"),
        ("[pools]\nlocations = [\n'a',\n", "3: is not TOML: invalid value at the end; is the file cut short?"),
        ('[pools]\nimage = """a\n', "2: is not TOML: unterminated string at the end; is the file cut short?"),
        ("[pools]\ngpu = 2000-02-30\n", "2: is not TOML: invalid date or datetime (column 7); mend this line"),
    ],
)  # fmt: skip
def test_what_is_not_toml_is_refused_at_its_line(text: str, message: str) -> None:
    assert refusal(text) == [f"orca.toml:{message}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 50_000, "orca.toml: is nested too deeply; orca.toml needs no such lists or tables"),
        ("a = 1" + "0" * 5000, "orca.toml: holds a number with too many digits; write a shorter one"),
        ("#" * (1024 * 1024 + 1), "orca.toml: is larger than 1 MiB; name the right file, or make it smaller"),
    ],
)
def test_what_would_break_the_parser_is_refused_in_a_sentence(text: str, message: str) -> None:
    assert refusal(text) == [message]


def test_a_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "orca.toml"
    path.write_text(WHOLE, encoding="utf-8")
    assert load_config(path) == parse_config(WHOLE, "orca.toml")


def test_a_mistake_in_a_file_names_its_path(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("[pool]\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}:1: [pool]: unknown table; did you mean pools?"


def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    missing, latin, large = tmp_path / "no.toml", tmp_path / "latin.toml", tmp_path / "large.toml"
    latin.write_bytes(b"[pools]\n# caf\xe9\n")
    large.write_bytes(b"#" * (1024 * 1024 + 1))
    for path, message in [
        (missing, f"{missing}: no such file; write it, or name another with ORCA_CONFIG"),
        (tmp_path, f"{tmp_path}: is a folder; name the file itself, such as {tmp_path / 'orca.toml'}"),
        (latin, f"{latin}:2: the text is not UTF-8; save the file as UTF-8"),
        (large, f"{large}: is larger than 1 MiB; name the right file, or make it smaller"),
        (latin / "x", f"{latin / 'x'}: cannot be read (Not a directory); check the path and its permissions"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == message


TRICKY = '''\
title = """
[pools.fake]
idle = 1 """ # [x]
other = \'\'\'
[[pools.fake.types]]\'\'\'
quotes = """a""\\"""" # five quotes close here: x = 1
five = """a"""""

"a.b" . 'c d'."\\u00e9" = [ # [not.a.header]
  "]", # ]
  { x = 1, "y" = { z = "}" } },
  [ 1,
    2 ],
]
[pools.gpu]
image = "# not a comment [x]"
  [[pools.gpu.types]] # one
  type = \'a\'
[[pools.gpu.types]]

type = "b"
[pools.gpu.types.extra]
k = 2001-01-01 10:00:00
[ pools . "x" ]
inline = { a.b = 1, c = [ 2, { d = 3 } ] }
[pools]
own = 1
'''


def test_the_line_of_each_key_is_found_past_all_that_only_looks_like_toml() -> None:
    lines = key_lines(TRICKY)
    expected: dict[KeyPath, int] = {
        ("title",): 1,
        ("other",): 4,
        ("quotes",): 6,
        ("five",): 7,
        ("a.b",): 9,
        ("a.b", "c d", "é"): 9,
        ("a.b", "c d", "é", 0): 10,
        ("a.b", "c d", "é", 1): 11,
        ("a.b", "c d", "é", 1, "y", "z"): 11,
        ("a.b", "c d", "é", 2): 12,
        ("a.b", "c d", "é", 2, 1): 13,
        ("pools",): 26,
        ("pools", "gpu"): 15,
        ("pools", "gpu", "image"): 16,
        ("pools", "gpu", "types"): 17,
        ("pools", "gpu", "types", 0): 17,
        ("pools", "gpu", "types", 0, "type"): 18,
        ("pools", "gpu", "types", 1): 19,
        ("pools", "gpu", "types", 1, "type"): 21,
        ("pools", "gpu", "types", 1, "extra"): 22,
        ("pools", "gpu", "types", 1, "extra", "k"): 23,
        ("pools", "x"): 24,
        ("pools", "x", "inline", "a", "b"): 25,
        ("pools", "x", "inline", "c", 1, "d"): 25,
        ("pools", "own"): 27,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert not any("fake" in path for path in lines)


def test_every_value_of_a_file_has_a_line() -> None:
    assert paths_of(tomllib.loads(TRICKY)) == set(key_lines(TRICKY))


def paths_of(value: object, path: KeyPath = ()) -> set[KeyPath]:
    entries: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    return ({path} if path else set()).union(*(paths_of(inner, (*path, key)) for key, inner in entries))


@example('"\x08"')
@given(st.text(max_size=40) | st.text(alphabet="[]{}=.,#'\"\\\na1 ", max_size=40))
def test_any_text_is_read_or_refused_with_a_sentence_and_its_outline_found(text: str) -> None:
    try:
        document = tomllib.loads(text)
    except ValueError:
        key_lines(text)  # never raises, whatever it finds
    else:
        assert {path for path in paths_of(document) if len(path) <= 8} == set(key_lines(text))
    try:
        parse_config(text, "orca.toml")
    except ConfigError as error:
        assert all(line.startswith("orca.toml:") for line in str(error).split("\n"))


def test_a_pipeline_says_where_its_pods_go() -> None:
    text = """
    [pools]
    [pipelines.reports]
    image_pull_secrets = ["registry"]
    node_selector = { disk = "ssd" }
    priority_class = "low"
    non_root = true
    [[pipelines.reports.tolerations]]
    key = "gpu"
    operator = "Exists"
    effect = "NoSchedule"
    """
    assert parse_config(text, "orca.toml").pipelines == {
        "reports": PodPlacement(
            image_pull_secrets=("registry",),
            node_selector={"disk": "ssd"},
            tolerations=({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},),
            priority_class="low",
            non_root=True,
        )
    }


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('node_selectors = { a = "b" }', "[pipelines.p.node_selectors]: unknown table; did you mean node_selector?"),
        ("non_root = 1", "[pipelines.p] non_root: must be true or false"),
        (
            'tolerations = [{ effect = "Never" }]',
            "[[pipelines.p.tolerations]] #1 effect: must be 'NoSchedule', 'PreferNoSchedule' or 'NoExecute'",
        ),
        ("tolerations = [{}]", '[[pipelines.p.tolerations]] #1: needs a key, or operator = "Exists"'),
        (
            'tolerations = [{ key = "a", operator = "Exists", value = "b" }]',
            '[[pipelines.p.tolerations]] #1: takes no value with operator = "Exists"',
        ),
        (
            'tolerations = [{ key = "a", toleration_seconds = 5 }]',
            '[[pipelines.p.tolerations]] #1: toleration_seconds needs effect = "NoExecute"',
        ),
        ('tolerations = [{ key = "a b" }]', '[[pipelines.p.tolerations]] #1 key: "a b" is no key of a label'),
        ('tolerations = [{ key = "a", value = "x y" }]', '#1 value: "x y" is no value of a label'),
        ('node_selector = { "a b" = "c" }', '[pipelines.p.node_selector]: "a b" is no key of a label'),
        ('node_selector = { "b.c/" = "c" }', '"b.c/" is no key of a label'),
        ('node_selector = { "b.c/d" = "-" }', '[pipelines.p.node_selector] "b.c/d": "-" is no value of a label'),
        ('image_pull_secrets = ["A b"]', "[pipelines.p] image_pull_secrets #1: must be a name of Kubernetes"),
        ('priority_class = "High"', "[pipelines.p] priority_class: must be a name of Kubernetes"),
    ],
)
def test_a_pipelines_table_that_is_wrong_is_said_where(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"[pools]\n[pipelines.p]\n{line}\n", "orca.toml")
    assert said in str(caught.value)
    assert str(caught.value).startswith("orca.toml:3:")
