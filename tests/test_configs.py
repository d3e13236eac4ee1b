"""Every config that ships, alone and with every variant: its arithmetic works out and its rewards have names."""

import numpy as np
import pytest

from densegrpo_jax import cli, config, flow, rewards
from densegrpo_jax.train import phases
from densegrpo_jax_configs.variants import VARIANTS

NAMES = sorted(path.stem for path in cli.CONFIGS.glob("*.py") if path.stem not in ("__init__", "variants", "places"))


def test_configs_are_listed_with_a_line_each(capsys):
    assert cli.main(["train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*NAMES, *VARIANTS):
        assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in lines), name


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic_works_out_with_every_variant(name):
    for chosen in (name, *(f"{name}:{variant}" for variant in VARIANTS)):
        settings = cli.load_config(chosen)
        sigmas = flow.sd3_sigmas(settings.sampling.num_steps)
        tables = phases.sampler(settings, sigmas, 3.0, step=0)
        for devices in (1, 4, 8):
            config.check(settings, int(tables.trained.sum()), devices)
        assert config.micro_batch(settings, int(tables.trained.sum())) >= min(4, settings.optimizer.micro_batch)
        assert np.isfinite(tables.kernel.std).all()
        for reward in config.reward_sources(settings):
            assert reward in rewards.NAMES or reward == "geneval", reward
