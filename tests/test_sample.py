"""`densegrpo sample`: the PNG holds diffusers' pixels and its own recipe; what cannot be done is said first."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from PIL import Image

torch = pytest.importorskip("torch")

from densegrpo_jax import flow, pipeline, sample  # noqa: E402
from densegrpo_jax.models import lora as loras  # noqa: E402
from densegrpo_jax.models.adapter import Adapter, write_adapter  # noqa: E402
from densegrpo_jax.sample import Sample  # noqa: E402
from tests.tiny_folder import make_sd3_folder  # noqa: E402

PROMPTS = ("a red cat", "the sign says hello")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_sd3_folder(tmp_path_factory.mktemp("sd3"))


def settings(folder, out, **changes):
    fields = {"images": 2, "height": 24, "width": 32, "steps": 3, "max_sequence_length": 16, "dtype": "float32", "batch_size": 2}
    return Sample(**{"model": str(folder), "prompt": PROMPTS, "out": out, **fields, **changes})


def pixels(path):
    return np.asarray(Image.open(path), np.int32)


@pytest.mark.parity
def test_grid_holds_the_images_of_diffusers(folder, tmp_path, capsys):
    args = settings(folder, tmp_path / "grid.png", negative_prompt="blue dog")
    sheet = pixels(sample.main(args))
    from diffusers import StableDiffusion3Pipeline

    reference = StableDiffusion3Pipeline.from_pretrained(folder)
    noise = flow.initial_noise(jax.random.key(0), 0, jnp.arange(4), (6, 8, 16))
    images = reference(
        [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2,
        negative_prompt=["blue dog"] * 4,
        height=24,
        width=32,
        num_inference_steps=3,
        guidance_scale=4.5,
        latents=torch.from_numpy(np.array(noise)).permute(0, 3, 1, 2),
        max_sequence_length=16,
        output_type="np",
    ).images
    expected = sample.grid((images * 255).round().astype(np.uint8), 2).astype(np.int32)
    assert sheet.shape == expected.shape == (2 * 24 + 4, 2 * 32 + 4, 3)
    assert np.abs(sheet - expected).max() <= 1  # rounding to bytes
    out = capsys.readouterr().out
    assert "4 images of 24 x 32" in out and "warning" not in out


def test_metadata_says_how_it_was_made(folder, tmp_path):
    args = settings(folder, tmp_path / "grid.png", prompt=("naïve 猫 <b>",), seed=7, guidance=1.0, height=24, width=None, steps=1)
    path = sample.main(args)
    info = json.loads(Image.open(path).info["densegrpo"])
    assert info["prompt"] == ["naïve 猫 <b>"] and info["seed"] == 7 and info["guidance"] == 1.0
    assert (info["height"], info["width"]) == (24, 32)  # the width is the model's own
    assert info.keys() == {field.name for field in dataclasses.fields(Sample)}
    again = Sample(**{**info, "prompt": tuple(info["prompt"]), "out": tmp_path / "again.png", "lora": None})
    np.testing.assert_array_equal(pixels(sample.main(again)), pixels(path))


def test_images_do_not_depend_on_the_batch(folder):
    pipe = pipeline.load(folder, jnp.float32)
    cond = pipeline.encode_prompts(pipe, ["a cat", "a dog", "hello"], 16)
    uncond = jax.tree.map(lambda leaf: leaf[:1], cond)
    noise = flow.initial_noise(jax.random.key(1), 0, jnp.arange(3), (6, 8, 16))
    together, alone = (sample.draw(pipe, noise, cond, uncond, 4.5, num_steps=2, batch_size=size).astype(int) for size in (8, 2))
    assert together.shape == (3, 24, 32, 3)
    assert np.abs(together - alone).max() <= 1
    assert np.abs(together[0] - together[1]).max() > 10


def test_adapter_and_truncation_are_reported(folder, tmp_path, capsys):
    pipe = pipeline.load(folder, jnp.float32, only=("transformer",))
    lora = jax.tree.map(lambda leaf: leaf + 0.1, loras.init(jax.random.key(0), pipe.params["transformer"], rank=2))
    write_adapter(tmp_path / "adapter", Adapter(lora, 6.0), pipeline.name_table(pipe.configs, "transformer"), "peft")
    args = settings(folder, tmp_path / "a.png", lora=tmp_path / "adapter", max_sequence_length=4, images=1)
    with_adapter = pixels(sample.main(args))
    out = capsys.readouterr().out
    assert "rank 2" in out and f"{loras.count_modules(lora)} layers" in out
    assert "warning: T5 sees 4 of 5 tokens of 'the sign says hello'; lost: 'hello'" in out
    without = pixels(sample.main(dataclasses.replace(args, lora=None)))
    assert np.abs(with_adapter - without).max() > 10


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"height": 30}, "height = 30: the model takes multiples of 8 up to 96; nearest: 24 and 32"),
        ({"width": 1024}, "width = 1024"),
        ({"out": "missing/grid.png"}, "does not exist"),
        ({"lora": "nowhere.safetensors"}, r"nowhere\.safetensors: not a readable safetensors file"),
        ({"model": "nowhere"}, "neither a folder"),
    ],
)
def test_refusals_write_nothing(folder, tmp_path, changes, message):
    changes = {key: tmp_path / value if key in ("out", "lora") else value for key, value in changes.items()}
    args = dataclasses.replace(settings(folder, tmp_path / "grid.png"), **changes)
    with pytest.raises(ValueError, match=message):
        sample.main(args)
    assert not list(tmp_path.iterdir())


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "field, value",
    [
        ("images", 0),
        ("steps", 0),
        ("steps", 1001),
        ("guidance", 0.5),
        ("guidance", NAN),
        ("guidance", INF),
        ("seed", -1),
        ("seed", 2**63),
        ("max_sequence_length", 0),
        ("max_sequence_length", 513),
        ("batch_size", 0),
    ],
)
def test_settings_are_checked(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"{field} = .*must be from"):
        settings("folder", tmp_path / "grid.png", **{field: value})


def test_more_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"must be a \.png file"):
        settings("folder", tmp_path / "grid.jpg")
    with pytest.raises(ValueError, match="give at least one"):
        Sample("folder", ())


def test_broken_network_is_named(folder):
    pipe = pipeline.load(folder, jnp.float32)
    cond = pipeline.encode_prompts(pipe, ["a cat", "a dog"], 16)
    noise = jnp.zeros((2, 6, 8, 16)).at[1].set(jnp.nan)
    with pytest.raises(ValueError, match="image 1 is not finite"):
        sample.draw(pipe, noise, cond, num_steps=1)


def test_grid():
    images = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((3, 2, 5, 3), np.uint8)
    sheet = sample.grid(images, 2, gap=1)
    assert sheet.shape == (5, 11, 3)
    assert (sheet[:2, 6:] == 1).all() and (sheet[3:, :5] == 2).all() and (sheet[3:, 6:] == 255).all() and (sheet[2] == 255).all()


def test_command_line():
    args = tyro.cli(Sample, args=["owner/model", "--prompt", "a cat", "a dog", "--lora", "x", "--guidance", "1"])
    assert args.model == "owner/model" and args.prompt == ("a cat", "a dog") and args.guidance == 1.0
