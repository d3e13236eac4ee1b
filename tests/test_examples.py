"""The scripts in examples/, run as a user runs them."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from densegrpo_jax.train import metrics

EXAMPLES = Path(__file__).parents[1] / "examples"


pytestmark = pytest.mark.usefixtures("plain_dispatch")


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"own_credit.py", "own_reward.py"}


@pytest.mark.parametrize("name", ["own_credit.py", "own_reward.py"])
def test_example(tmp_path, monkeypatch, name):
    options = ["toy", "--run.steps", "2", "--run.workdir", str(tmp_path), "--evaluation.every", "0"]
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    records = metrics.read(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1]
    assert all(np.isfinite(r["reward"]) and r["last_update"]["grad_norm"] > 0 for r in records)
    assert list(records[0]["rewards"]) == (["contrast"] if name == "own_reward.py" else ["toy_spot"])


def test_regressed_gain_is_the_residual_of_a_regression():
    regressed_gain = runpy.run_path(str(EXAMPLES / "own_credit.py"))["regressed_gain"]
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1], 8)
    rewards = np.cumsum(rng.normal(size=(4, 16)), axis=0)
    credit = regressed_gain(rewards, groups)
    centred = rewards - np.array([rewards[:, groups == g].mean(1) for g in groups]).T
    np.testing.assert_allclose((credit * centred[:-1]).sum(1), 0.0, atol=1e-9)  # no rest depends on the reward before
    rewards[2, 3] = np.nan
    assert (np.isnan(regressed_gain(rewards, groups)) == np.isnan(np.diff(rewards, axis=0))).all()
