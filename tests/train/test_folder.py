"""The same trainer on a model folder in diffusers layout: a tiny random Stable Diffusion 3.5, with guidance."""

import dataclasses

import jax
import numpy as np
import pytest

from densegrpo_jax import cli
from densegrpo_jax.config import Adapter, Completion, Config, Evaluation, Model, Optimizer, Prompts, Run, Sampling
from densegrpo_jax.train import checkpoint, metrics
from densegrpo_jax.train.loop import train

pytest.importorskip("torch")
from tests.tiny_folder import make_sd3_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_sd3_folder(tmp_path_factory.mktemp("sd3") / "model")


pytestmark = pytest.mark.usefixtures("plain_dispatch")


def brightness(images, prompts, metadata):
    return np.asarray(images, np.float64).mean((1, 2, 3)) / 255.0


def config(folder, workdir, tmp_path, **run):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\nred\n")
    return Config(
        model=Model(path=str(folder), max_sequence_length=16),
        prompts=Prompts(train=str(prompts), evaluation=str(prompts), per_step=2, group_size=4),
        rewards=("brightness",),
        sampling=Sampling(num_steps=4, guidance_scale=3.0),
        completion=Completion(steps="2"),
        adapter=Adapter(rank=4, alpha=8.0),
        optimizer=Optimizer(updates=2, micro_batch=12, learning_rate=1e-3),
        evaluation=Evaluation(every=1, num_steps=4, images_per_prompt=1, prompts=2),
        run=Run(workdir=workdir, **{"steps": 1} | run),
    )


def test_a_folder_trains_and_its_adapter_comes_out(folder, tmp_path):
    workdir = tmp_path / "run"
    train(config(folder, workdir, tmp_path, steps=2), extra_rewards={"brightness": brightness})
    first, second = metrics.read(workdir / "metrics.jsonl")
    assert first["first_update"]["ratio_min"] == pytest.approx(1.0, abs=1e-5) == first["first_update"]["ratio_max"]
    assert second["last_update"]["grad_norm"] > 0.0
    adapter, model = checkpoint.trained_adapter(workdir)
    assert model["path"] == str(folder)
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(adapter.lora))
    for form in ("diffusers", "peft", "merged"):
        assert cli.main(["export", str(workdir), "--out", str(tmp_path / form), "--format", form]) == 0
    resumed = dataclasses.replace(
        config(folder, tmp_path / "again", tmp_path), adapter=Adapter(rank=4, alpha=8.0, start=tmp_path / "diffusers")
    )
    train(resumed, extra_rewards={"brightness": brightness})
    assert metrics.read(tmp_path / "again" / "evaluation.jsonl")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"resolution": (33, 32)}}, "height = 33"),
        ({"adapter": {"targets": ("attn.nothing",)}}, "matches no linear layer"),
        ({"model": {"path": "/no/such/folder"}}, "/no/such/folder"),
    ],
)
def test_what_does_not_fit_the_folder_is_named(folder, tmp_path, change, reason):
    base = config(folder, tmp_path / "run", tmp_path)
    for section, fields in change.items():
        base = dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **fields)})
    with pytest.raises(ValueError, match=reason):
        train(base, extra_rewards={"brightness": brightness})
