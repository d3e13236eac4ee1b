"""benchmarks/rewards.py: every network it names fits its scorer, rates are rates, and the page quotes what was measured."""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import rewards as benchmark  # noqa: E402

PAGE = (ROOT / "docs" / "rewards.md").read_text()


def test_the_published_networks_fit_their_scorers():
    images = jax.ShapeDtypeStruct((2, 512, 384, 3), jnp.uint8)
    for scorer, (_, network) in benchmark.SIZES["published"].items():
        function, shapes, texts = benchmark.case(scorer, network, jnp.dtype(jnp.bfloat16), 2)
        scores = jax.eval_shape(function, shapes, images, texts)
        assert scores.shape == (2,) and scores.dtype == jnp.float32


def test_rates_are_images_a_second_and_are_written(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rewards.json"
    monkeypatch.setattr(benchmark, "SIZES", {"tiny": {"aesthetic": benchmark.SIZES["tiny"]["aesthetic"]}, "base": {}, "published": {}})
    monkeypatch.setattr(sys, "argv", ["rewards.py", "--quick", "--images", "2", "--side", "64", "--rounds", "1", "--json", str(path)])
    benchmark.main()
    (row,) = json.loads(path.read_text())["rows"]
    printed = capsys.readouterr().out
    assert benchmark.line(benchmark.Row(**row)) in printed and "seed: 0" in printed and "jax: " in printed
    assert row["scorer"] == "aesthetic" and np.isfinite([row["forward"], row["gradient"]]).all() and row["forward"] > 1

    ticks = iter(range(0, 100, 5))
    monkeypatch.setattr(benchmark.time, "process_time", lambda: next(ticks))
    assert benchmark.rate(jnp.sin, (jnp.ones(3),), 20, 3) == 4.0  # twenty images in five seconds


def test_the_page_quotes_the_committed_results():
    parity = (ROOT / "docs" / "parity.md").read_text()
    quoted = re.findall(r"^\| (?:CLIP|HPSv2\.1|aesthetic|BLIP|ImageReward) .*\|$", PAGE, re.M)
    assert len(quoted) >= 7 and all(line in parity for line in quoted)
    rows = json.loads((ROOT / "docs" / "rewards.json").read_text())["rows"]
    assert len(rows) == 10 and all(benchmark.line(benchmark.Row(**row)) in PAGE for row in rows)
