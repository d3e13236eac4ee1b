"""The table of docs/parity.md: its figures are what they say, a wrong network would show, and the quick run stays under every bound."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import parity  # noqa: E402

PARAMS = {"kernel": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)}


def compare(ours):
    kernel, x = torch.from_numpy(PARAMS["kernel"]), np.random.default_rng(1).normal(size=(2, 5, 6, 3)).astype(np.float32)

    def theirs(x):  # channels first
        y = torch.tanh(torch.einsum("bchw,cd->bdhw", x, kernel))
        return y, y.mean((2, 3))

    return parity.compare("layer", "tanh", ours, theirs, PARAMS, x)


def layer(params, x, dtype, first=1.0, second=1.0):
    y = jnp.tanh(x.astype(dtype) @ params["kernel"])
    return first * y, second * y.mean((1, 2))


def test_equal_layers_differ_by_rounding_only():
    row = compare(layer)
    assert row.holds and row.value < 1e-6 and row.gradient < 1e-6
    assert 1e-4 < row.bfloat16 < 3e-2


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_each_wrong_output_shows_in_value_and_gradient(wrong):
    row = compare(partial(layer, **{wrong: 1.01}))
    assert row.value == pytest.approx(1e-2, rel=0.01) and 2e-4 < row.gradient < 2e-2
    assert not row.holds and "**over**" in parity.line(row)
    assert not row._replace(gradient=None).holds and not row._replace(value=0.0).holds
    broken = compare(partial(layer, **{wrong: np.nan}))
    assert np.isnan(broken.value) and np.isnan(broken.gradient) and not broken.holds


def test_outputs_must_agree_in_number_and_shape():
    with pytest.raises(ValueError, match="shapes differ"):
        compare(lambda *args: (layer(*args)[0], layer(*args)[1][:, :1]))
    with pytest.raises(ValueError, match="zip"):
        compare(lambda *args: layer(*args)[:1])


def test_only_the_text_between_the_markers_is_replaced(tmp_path):
    path, row = tmp_path / "page.md", parity.Row("part", "kind", 1.234e-6, None, 0.01, 1e-4)
    path.write_text(f"before\n{parity.BEGIN}\nold\n{parity.END}\nafter\n")
    for _ in range(2):  # twice: the markers stay
        parity.write_markdown(path, {"seed": 0}, [row])
        text = path.read_text()
        assert text.startswith(f"before\n{parity.BEGIN}\n| component") and text.endswith(f"seed 0.\n{parity.END}\nafter\n")
        assert "\n| part | kind | 1.2e-06 |  | 1e-04 | 1.0e-02 |\n" in text and "old" not in text
    path.write_text("no markers")
    with pytest.raises(ValueError, match="needs one line"):
        parity.write_markdown(path, {}, [row])


def rows(path):
    return [parity.Row(**row) for row in json.loads(path.read_text())["rows"]]


@pytest.mark.parity
def test_quick_run_is_under_every_bound_and_covers_what_the_documentation_quotes(tmp_path):
    path, page = tmp_path / "parity.json", tmp_path / "parity.md"
    page.write_text(f"{parity.BEGIN}\n{parity.END}\n")
    script = [sys.executable, str(ROOT / "benchmarks" / "parity.py"), "--quick", "--json", str(path), "--markdown", str(page)]
    output = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    quick, quoted = rows(path), rows(ROOT / "docs" / "parity.json")
    assert all(row.holds for row in quick + quoted)
    assert {row.component for row in quick} == {row.component for row in quoted}
    assert all(parity.line(row) in output and parity.line(row) in page.read_text() for row in quick)
    assert "seed: 0" in output and "threads: torch 1" in output and "diffusers" in output
    documented = (ROOT / "docs" / "parity.md").read_text()
    assert [line for line in documented.splitlines() if line.startswith("| ")][2:] == [parity.line(row) for row in quoted]
