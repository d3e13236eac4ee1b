"""The study of completions and the page that quotes it: fields and figures are what they say, the page names what exists."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = (ROOT / "docs" / "methods.md").read_text()
sys.path.insert(0, str(BENCHMARKS))

import completions  # noqa: E402
import fields  # noqa: E402

from densegrpo_jax import flow  # noqa: E402

FIELD = fields.mixtures(0, prompts=2, dimensions=6)
PROMPT = jnp.array([0, 1, 1])


def samples(sigma):
    return jnp.asarray(np.random.default_rng(1).normal(size=(3, 6)), jnp.float32) * sigma + (1 - sigma) * FIELD.means[PROMPT, 5]


@pytest.mark.parametrize("sigma", [0.95, 0.5, 0.1])
def test_velocity_is_that_of_the_marginal_density(sigma):
    """v = -(x + t grad log p_t(x)) / (1 - t), the score taken by differentiation."""

    def log_density(x, means):
        variance = (1 - sigma) ** 2 * FIELD.std**2 + sigma**2  # [1, D]
        return jax.nn.logsumexp(-0.5 * jnp.sum((x[None] - (1 - sigma) * means) ** 2 / variance, axis=-1))

    x = samples(sigma)
    score = jax.vmap(jax.grad(log_density))(x, FIELD.means[PROMPT])
    v = fields.velocity(FIELD)(x, jnp.full(3, sigma), PROMPT)
    np.testing.assert_allclose(v, -(x + sigma * score) / (1 - sigma), rtol=1e-3, atol=1e-3)


def test_guidance_extrapolates_from_one_gaussian():
    x, sigma = samples(0.5), jnp.full(3, 0.5)
    plain, two, three = (fields.velocity(FIELD, w)(x, sigma, PROMPT) for w in (1.0, 2.0, 3.0))
    np.testing.assert_allclose(two - plain, three - two, atol=1e-5)
    mean = FIELD.means.mean(axis=1)[PROMPT]
    variance = FIELD.means.var(axis=1)[PROMPT] + FIELD.std**2
    score = -(x - 0.5 * mean) / (0.25 * variance + 0.25)
    np.testing.assert_allclose(2 * plain - two, -(x + 0.5 * score) / 0.5, rtol=1e-4, atol=1e-4)


def test_rewards_see_what_they_are_meant_to_see():
    at_target = FIELD.means[PROMPT, FIELD.target[PROMPT]]
    clean = fields.rewards(FIELD, at_target, PROMPT)
    noisy = fields.rewards(FIELD, at_target + 0.24, PROMPT)
    assert clean["discrete"].tolist() == [1.0, 1.0, 1.0]
    assert np.all(clean["detail"] - noisy["detail"] > 0.3)
    assert np.all(np.abs(clean["smooth"] - noisy["smooth"]) < 0.3)


def test_rank_correlation_is_scipys():
    a, b = np.random.default_rng(2).normal(size=(2, 3, 2 * completions.GROUP)).round(1)  # rounded: with ties
    expected = [np.mean([stats.spearmanr(x, y)[0] for x, y in zip(np.split(p, 2), np.split(q, 2))]) for p, q in zip(a, b)]
    np.testing.assert_allclose(completions.rank_correlation(a, b), expected)
    assert np.all(completions.rank_correlation(np.ones_like(b), b) == 0.0)


def test_two_fidelities_recover_rewards_that_lie_on_a_line():
    cheap = np.random.default_rng(3).normal(size=(11, 2 * completions.GROUP))
    offset = np.repeat([[1.0, -4.0]], completions.GROUP, axis=1).reshape(1, -1)
    exact = np.linspace(0.5, 2.0, 11)[:, None] * cheap + offset
    np.testing.assert_allclose(completions.two_fidelity(cheap, exact, 6), exact)
    bent = exact + 0.1 * cheap**2
    corrected = completions.two_fidelity(cheap, bent, 6).reshape(11, 2, -1)
    np.testing.assert_array_equal(corrected[..., :6], bent.reshape(11, 2, -1)[..., :6])
    assert np.all(np.abs(corrected - bent.reshape(11, 2, -1))[..., 6:].max(-1) > 0)


def test_sloped_gains_are_uncorrelated_with_the_baseline():
    r = np.random.default_rng(4).normal(size=(11, 2 * completions.GROUP)).cumsum(axis=0)
    residual = completions.within_groups(completions.sloped(r))
    np.testing.assert_allclose((residual * completions.within_groups(r)[:-1]).sum((1, 2)), 0.0, atol=1e-9)


@pytest.mark.parametrize("name", ["skip_call n=3 ab2", "paired n=2 ab2", "n=2, all below 4 ab2"])
def test_estimates_are_those_of_the_walk(name):
    s, scheme = completions.setting("sd3", 1.0, seeds=1), completions.schemes("sd3", quick=False)[name]
    rewards, baseline = completions.estimate(s, scheme)["smooth"]
    velocity = fields.velocity(s.field)
    walk = jax.jit(
        lambda x, noise: flow.rollout_and_complete(velocity, x, s.kernel, s.sigmas, noise, scheme.branches, cond=s.prompt, tail=scheme.tail)
    )
    trajectory, clean = walk(s.trajectory.latents[0], s.trajectory.noise)
    score = jax.vmap(lambda x: fields.rewards(s.field, x, s.prompt)["smooth"])
    for branch, expected in zip(scheme.branches, score(clean)[: completions.STEPS]):
        np.testing.assert_allclose(rewards[branch.start], expected, atol=1e-4)
    np.testing.assert_allclose(rewards[-1], score(trajectory.latents[-1:])[0], atol=1e-4)
    assert (baseline is not None) == scheme.paired
    if scheme.paired:
        np.testing.assert_allclose(baseline, score(clean)[completions.STEPS :], atol=1e-4)


def test_quick_run(tmp_path):
    path = tmp_path / "completions.json"
    script = [sys.executable, str(BENCHMARKS / "completions.py"), "--quick", "--json", str(path)]
    output = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert "seeds: [0]" in output and "jax" in output
    result = json.loads(path.read_text())
    rows = {row["scheme"]: row for row in result["schemes"]}
    assert {name: (row["eval"], row["calls"]) for name, row in rows.items() if name.endswith("euler")} == {
        "n=1 euler": (10, 10),
        "n=2 euler": (19, 10),
        "n=all euler": (55, 10),
    }
    assert rows["reference"]["cos"] == 1.0 and rows["reference"]["gain"] == 0.0
    assert rows["n=1 euler"]["cos"] == rows["n=1 ab2"]["cos"]  # one step: the same
    assert rows["n=1 euler"]["cos"] < rows["n=2 euler"]["cos"] < rows["n=all euler"]["cos"] < 1
    assert rows["n=all ab2"]["slope"] > rows["n=all ab2"]["true"]
    assert set(result["wall"][0]["programs"]) == {"naive loop", "n=1 euler", "n=all euler"}


def test_the_page_names_functions_and_tests_that_exist():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    assert not [(path, name) for path, name in named if f"def {name}(" not in (ROOT / "tests" / path).read_text()]
    functions = set(re.findall(r"`((?:flow|credit|objective)\.[\w.]+)", PAGE))
    assert len(functions) > 50
    for function in functions:
        module, _, name = f"densegrpo_jax.{function}".rpartition(".")
        assert hasattr(importlib.import_module(module), name), function


def test_the_page_quotes_the_committed_results():
    rows = {row["scheme"]: row for row in json.loads((ROOT / "docs" / "completions.json").read_text())["schemes"]}
    table = re.findall(r"^\| scheme.*eval.*\n(?:\|.*\n)+", PAGE, re.M)[0]
    header, *lines = [line.strip("|").split("|") for line in table.splitlines()]
    columns = [cell.strip() for cell in header]
    assert len(lines) > 10
    for line in lines[1:]:
        cells = dict(zip(columns, (cell.strip(" `") for cell in line)))
        row = rows[cells.pop("scheme")]
        quoted = {name: "–" if row[name] is None else f"{row[name]:g}" if name == "eval" else f"{row[name]:.2f}" for name in cells}
        assert quoted == cells
