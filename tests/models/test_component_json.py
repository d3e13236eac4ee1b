"""Reading config.json: types are held to, nothing unknown passes."""

from dataclasses import dataclass

import pytest

from densegrpo_jax.models.component_json import read_fields


@dataclass(frozen=True)
class Config:
    width: int = 8
    rate: float = 0.5
    shift: float | None = None
    deep: bool = False
    kind: str = "a"
    sides: tuple[int, ...] = (1,)


def read(**values):
    return Config(**read_fields(Config, values, {"act": "silu"}, {"note"}))


def test_values_replace_defaults_and_lists_become_tuples():
    assert read() == Config()
    values = dict(width=3, rate=2, shift=0.1, deep=True, kind="b", sides=[4, 5])
    assert read(**values, act="silu", note=object()) == Config(3, 2, 0.1, True, "b", (4, 5))
    assert read(shift=None).shift is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": 3.0}, "width = 3.0 should be of type int"),
        ({"width": True}, "width = True"),
        ({"width": None}, "width = None"),
        ({"rate": "0.5"}, "rate = '0.5'"),
        ({"shift": "x"}, r"shift = 'x' should be of type float \| None"),
        ({"deep": 1}, "deep = 1"),
        ({"sides": 3}, "sides = 3"),
        ({"sides": [1, "2"]}, "sides"),
        ({"act": "relu"}, "act = 'relu' is not supported, only 'silu'"),
        ({"Width": 3}, "unknown option Width = 3"),
    ],
)
def test_whatever_does_not_fit_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        read(**values)
