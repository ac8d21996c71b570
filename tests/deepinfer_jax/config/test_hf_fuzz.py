"""Whatever stands in a config.json, reading it gives a config or a ConfigError."""

import copy

import pytest

from deepinfer_jax.config import presets
from deepinfer_jax.config.hf import config_from_hf, config_to_hf
from deepinfer_jax.errors import ConfigError

JUNK = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**40,
    2**70,
    10**400,
    1.5,
    float("inf"),
    "x",
    [],
    [0],
    [[1]],
    [-1],
    {},
    {"a": 1},
]


def paths_of(record, prefix=()):
    for name, value in record.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from paths_of(value, (*prefix, name))


@pytest.mark.parametrize("source", [presets._TINY_V41, presets._V4_FLASH_0731], ids=["v41", "v4"])
def test_any_value_anywhere(source):
    for path in list(paths_of(source)):
        for junk in JUNK:
            data = copy.deepcopy(source)
            record = data
            for name in path[:-1]:
                record = record[name]
            record[path[-1]] = junk
            try:
                config = config_from_hf(data)
            except ConfigError:
                continue
            assert config_from_hf(config_to_hf(config)) == config
