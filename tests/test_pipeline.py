"""The whole path from text to pixels equals diffusers', and what the model cannot do is refused by name."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

torch = pytest.importorskip("torch")

from densegrpo_jax import flow, pipeline  # noqa: E402
from densegrpo_jax.models import lora as loras  # noqa: E402
from densegrpo_jax.pipeline import Conditioning  # noqa: E402
from tests.images import LENGTH, PROMPTS, our_images, torch_images, torch_pipeline  # noqa: E402
from tests.tiny_folder import make_flux_folder, make_sd3_folder  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_sd3_folder(tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="module")
def without_t5(tmp_path_factory):
    return make_sd3_folder(tmp_path_factory.mktemp("sd3-no-t5"), seed=1, t5=False)


@pytest.fixture(scope="module")
def pipe(folder):
    return pipeline.load(folder, jnp.float32)


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory):
    return make_flux_folder(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def flux_pipe(flux_folder):
    return pipeline.load(flux_folder, jnp.float32)


def noise_of(pipe, height, width, count=2):
    return flow.initial_noise(jax.random.key(0), 0, jnp.arange(count), pipeline.latent_shape(pipe.configs, height, width))


@pytest.mark.parity
@pytest.mark.parametrize("height, width, guidance", [(32, 32, 1.0), (32, 32, 4.5), (24, 48, 4.5), (24, 48, 1.0)])
def test_image_equals_diffusers(folder, pipe, guidance, height, width):
    noise = noise_of(pipe, height, width)
    theirs, ours = torch_images(torch_pipeline(folder), noise, guidance, 5), our_images(pipe, noise, guidance, 5)
    assert theirs.std() > 0.1 and ours.shape == theirs.shape == (2, height, width, 3)
    np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize("height, width, guidance", [(32, 32, 3.5), (24, 48, 3.5), (24, 48, 1.5)])
def test_flux_image_equals_diffusers(flux_folder, flux_pipe, guidance, height, width):
    noise = noise_of(flux_pipe, height, width)
    theirs, ours = torch_images(torch_pipeline(flux_folder), noise, guidance, 5), our_images(flux_pipe, noise, guidance, 5)
    assert theirs.std() > 0.1 and ours.shape == theirs.shape == (2, height, width, 3)
    np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=0)


@pytest.mark.parity
def test_flux_without_guidance_and_on_a_fixed_grid(tmp_path):
    """The kind of FLUX.1-schnell; diffusers takes any guidance for it and uses none."""
    folder = make_flux_folder(tmp_path, seed=1, schnell=True)
    pipe = pipeline.load(folder, jnp.float32)
    noise = noise_of(pipe, 32, 32)
    np.testing.assert_allclose(our_images(pipe, noise, 1.0, 4), torch_images(torch_pipeline(folder), noise, 7.0, 4), atol=2e-3, rtol=0)
    assert pipeline.few_steps(pipe.configs) and pipeline.default_guidance(pipe.configs) == 1.0
    with pytest.raises(ValueError, match=r"guidance scale 3\.5: this FLUX has no input for it"):
        pipeline.needs_uncond(pipe.configs, 3.5)


@pytest.mark.parity
def test_guidance_and_prompts_show_in_the_image_of_flux(flux_pipe):
    noise = noise_of(flux_pipe, 24, 48)
    base = our_images(flux_pipe, noise, 3.5, 5)
    others = our_images(flux_pipe, noise, 1.5, 5), our_images(flux_pipe, noise, 3.5, 5, prompts=PROMPTS[::-1])
    assert min(np.abs(base - other).max() for other in others) > 0.05
    np.testing.assert_array_equal(our_images(flux_pipe, noise, 3.5, 5, negative=""), base)  # there is no unconditional branch


@pytest.mark.parity
def test_guidance_and_prompts_show_in_the_image(pipe):
    """So that the test above would notice a branch mixed up or left out."""
    noise = noise_of(pipe, 32, 32)
    base = our_images(pipe, noise, 4.5, 5)
    others = (
        our_images(pipe, noise, 1.0, 5),
        our_images(pipe, noise, 4.5, 5, negative=""),
        our_images(pipe, noise, 4.5, 5, prompts=PROMPTS[::-1]),
    )
    assert min(np.abs(base - other).max() for other in others) > 0.05


@pytest.mark.parity
def test_without_t5(without_t5):
    pipe = pipeline.load(without_t5, jnp.float32)
    assert set(pipe.tokenizers) == {"tokenizer", "tokenizer_2"}
    noise = noise_of(pipe, 32, 32)
    theirs = torch_images(torch_pipeline(without_t5), noise, 3.0, 3)
    np.testing.assert_allclose(our_images(pipe, noise, 3.0, 3), theirs, atol=2e-3, rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize(
    "prompts", [[""], ["a red cat", "the dog says hello to the blue cat on the red sign " * 3], ["ünïcode — 猫", "A RED  cat"]]
)
def test_encoding_equals_diffusers(folder, pipe, flux_folder, flux_pipe, prompts):
    with torch.no_grad():
        context, uncond, pooled, uncond_pooled = torch_pipeline(folder).encode_prompt(prompts, None, None, max_sequence_length=LENGTH)
        flux_context, flux_pooled, _ = torch_pipeline(flux_folder).encode_prompt(prompts, max_sequence_length=LENGTH)
    cond = pipeline.encode_prompts(flux_pipe, prompts, LENGTH)
    np.testing.assert_allclose(cond.context, flux_context, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(cond.pooled, flux_pooled, atol=1e-5, rtol=1e-4)
    cond = pipeline.encode_prompts(pipe, [*prompts, ""], LENGTH)
    for ours, theirs, negative in ((cond.context, context, uncond), (cond.pooled, pooled, uncond_pooled)):
        np.testing.assert_allclose(ours[:-1], theirs, atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(ours[-1:], negative[:1], atol=1e-5, rtol=1e-4)


@pytest.mark.parity
@pytest.mark.parametrize("steps", [1, 2, 10, 40])
def test_sigmas_equal_diffusers(pipe, steps):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    np.testing.assert_allclose(pipeline.sigmas(pipe.configs, steps), scheduler.sigmas.numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("steps, height, width", [(1, 32, 32), (6, 512, 512), (28, 1024, 768)])
def test_flux_sigmas_follow_the_image_as_those_of_diffusers(flux_pipe, steps, height, width):
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    shape = pipeline.latent_shape(flux_pipe.configs, height, width)
    tokens = (height // 8) * (width // 8)  # four latents each; this autoencoder divides sides by four
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=calculate_shift(tokens))
    np.testing.assert_allclose(pipeline.sigmas(flux_pipe.configs, steps, shape), scheduler.sigmas.numpy(), atol=1e-6, rtol=1e-6)
    assert pipeline.shift(flux_pipe.configs, shape) == pytest.approx(np.exp(calculate_shift(tokens)))
    with pytest.raises(ValueError, match="follows the size of the image"):
        pipeline.sigmas(flux_pipe.configs, steps)


def test_prompts_are_encoded_once(pipe, monkeypatch):
    seen = []
    tokenize = pipeline._tokenize
    monkeypatch.setattr(pipeline, "_tokenize", lambda pipe, prompts, length: seen.append(prompts) or tokenize(pipe, prompts, length))
    cache: dict = {}
    first = pipeline.encode_prompts(pipe, ["a", "b", "a"], LENGTH, batch_size=2, cache=cache)
    np.testing.assert_array_equal(first.context[0], first.context[2])
    again = pipeline.encode_prompts(pipe, ["b", "c"], LENGTH, batch_size=2, cache=cache)
    np.testing.assert_array_equal(again.pooled[0], first.pooled[1])
    assert seen == [["a", "b"], ["c", ""]] and len(cache) == 3
    other = pipeline.encode_prompts(pipe, ["a"], 8, cache=cache)
    assert other.context.shape[1] == first.context.shape[1] - 8


def test_truncation_names_prompt_and_loss(pipe):
    assert pipeline.truncated(pipe, ["a red cat", ""], LENGTH) == []
    long = "a red cat on the sign says hello to the blue dog"
    lines = pipeline.truncated(pipe, [long, "a cat", long], 8)
    assert len(lines) == 3 and all(repr(long) in line for line in lines)
    assert lines[0].startswith("CLIP (tokenizer) sees 12 of") and lines[2].startswith("T5 sees 8 of")
    assert lines[2].endswith("blue dog'")
    assert len(pipeline.truncated(pipe, [long], 64)) == 2


@pytest.mark.parametrize("prompts, length", [([], 16), ("a cat", 16), (["a", 3], 16), (["a"], 0), (["a"], 513)])
def test_bad_prompts(pipe, prompts, length):
    with pytest.raises(ValueError, match=r"prompts must be|choose 1 to 512"):
        pipeline.encode_prompts(pipe, prompts, length)


class Linear:
    """A stand-in for the network, in which every argument shows: velocity = sigma x + mean(context) + mean(pooled)."""

    embeds_guidance = False

    def apply(self, variables, x, sigma, context, pooled):
        self.batch = x.shape[0]
        bias = context.mean((1, 2)) + pooled.mean(1) * variables["params"]["weight"] + variables.get("lora", {"weight": 0.0})["weight"]
        return sigma[:, None, None, None] * x + bias[:, None, None, None]


def test_velocity_is_the_guided_mean_of_both_branches():
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    x, sigma, model, params = array(3, 4, 6, 2), array(3), Linear(), {"weight": jnp.float32(2.0)}
    cond, uncond = Conditioning(array(3, 5, 7), array(3, 8)), Conditioning(array(1, 5, 7), array(1, 8))
    alone = pipeline.velocity(model, params)
    conditional = alone(x, sigma, cond)
    assert model.batch == 3
    unconditional = alone(x, sigma, jax.tree.map(lambda leaf: jnp.repeat(leaf, 3, axis=0), uncond))
    guided = pipeline.velocity(model, params, None, uncond, 4.5)(x, sigma, cond)
    assert model.batch == 6
    np.testing.assert_allclose(guided, unconditional + 4.5 * (conditional - unconditional), rtol=1e-5, atol=1e-5)
    per_row = jax.tree.map(lambda leaf: jnp.repeat(leaf, 3, axis=0), uncond)
    np.testing.assert_array_equal(pipeline.velocity(model, params, None, per_row, 4.5)(x, sigma, cond), guided)
    assert float(jnp.abs(pipeline.velocity(model, params, {"weight": 1.0})(x, sigma, cond) - conditional).min()) > 0.9


class WithGuidance(Linear):
    """The same with a guidance scale as an input."""

    embeds_guidance = True

    def apply(self, variables, x, sigma, context, pooled, guidance):
        assert guidance.shape == sigma.shape and guidance.dtype == jnp.float32
        return super().apply(variables, x, sigma, context, pooled) + guidance[:, None, None, None]


def test_embedded_guidance_goes_into_the_network_and_takes_one_pass():
    x, cond, params = jnp.ones((3, 2, 2, 1)), Conditioning(jnp.ones((3, 5, 7)), jnp.ones((3, 8))), {"weight": jnp.float32(2.0)}
    model = WithGuidance()
    v = pipeline.velocity(model, params, guidance_scale=3.5)(x, jnp.ones(3), cond)
    np.testing.assert_allclose(v, pipeline.velocity(Linear(), params)(x, jnp.ones(3), cond) + 3.5)
    assert model.batch == 3
    with pytest.raises(ValueError, match="leave uncond out"):
        pipeline.velocity(model, params, uncond=cond)


@pytest.mark.parametrize("detach, factor", [(False, 1.0), (True, 4.5)])
def test_gradient_through_both_branches_unless_detached(detach, factor):
    """d v / d lora is 1 in each branch of the stand-in: g + (1 - g) = 1 through both, g through the conditional one."""
    cond, x = Conditioning(jnp.zeros((2, 1, 1)), jnp.zeros((2, 1))), jnp.zeros((2, 1, 1, 1))
    uncond = jax.tree.map(lambda leaf: leaf[:1], cond)

    def loss(weight):
        call = pipeline.velocity(Linear(), {"weight": jnp.float32(0.0)}, {"weight": weight}, uncond, 4.5, detach_uncond=detach)
        return call(x, jnp.zeros(2), cond).mean()

    np.testing.assert_allclose(jax.grad(loss)(jnp.float32(0.0)), factor, rtol=1e-6)


def test_guided_pairs_stay_on_their_device(pipe):
    """Sharding the trajectories makes no collective in the guided velocity."""
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    cond = Conditioning(jnp.zeros((8, 28, 32)), jnp.zeros((8, 28)))
    uncond = jax.tree.map(lambda leaf: leaf[:1], cond)
    model = pipeline.network(pipe.configs)

    def guided(params, x, sigma, cond, uncond):
        return pipeline.velocity(model, params, None, uncond, 4.5)(x, sigma, cond)

    args = (pipe.params["transformer"], jnp.zeros((8, 8, 8, 16)), jnp.ones(8), cond, uncond)
    compiled = jax.jit(guided, in_shardings=(whole, rows, rows, rows, whole), out_shardings=rows).lower(*args).compile()
    text = compiled.as_text()
    assert not any(word in text for word in ("all-to-all", "collective-permute", "all-gather", "all-reduce"))


def test_adapter_changes_the_image_only_when_it_is_not_zero(pipe):
    noise = noise_of(pipe, 32, 32)
    base = our_images(pipe, noise, 4.5, 5)
    fresh = loras.init(jax.random.key(0), pipe.params["transformer"], rank=4)
    np.testing.assert_array_equal(our_images(pipe, noise, 4.5, 5, lora=fresh), base)
    trained = jax.tree.map(lambda leaf: leaf + 0.1, fresh)
    assert np.abs(our_images(pipe, noise, 4.5, 5, lora=trained) - base).max() > 0.01


def test_latent_shape(pipe):
    assert pipeline.default_side(pipe.configs) == 32
    assert pipeline.latent_shape(pipe.configs, 96, 40) == (24, 10, 16)
    for height, width, message in (
        (33, 32, "height = 33: the model takes multiples of 8 up to 96; nearest: 32 and 40"),
        (32, 104, "width = 104: .* nearest: 96"),
        (0, 32, "height = 0: .* nearest: 8"),
        (-8, 32, "height = -8"),
        (32, 4, "width = 4: .* nearest: 8"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline.latent_shape(pipe.configs, height, width)


def test_latent_shape_of_flux(flux_pipe):
    assert pipeline.default_side(flux_pipe.configs) == 512  # 128 latents, as diffusers; 1024 pixels with FLUX.1's own autoencoder
    assert pipeline.latent_shape(flux_pipe.configs, 1024, 40) == (256, 10, 16)
    real = flux_pipe.configs._replace(vae=dataclasses.replace(flux_pipe.configs.vae, block_out_channels=(8, 8, 8, 16)))
    assert pipeline.latent_shape(real, 1024, 768) == (128, 96, 16) and pipeline.default_side(real) == 1024
    with pytest.raises(ValueError, match="height = 1000: the model takes multiples of 16; nearest: 992 and 1008"):
        pipeline.latent_shape(real, 1000, 768)
    with pytest.raises(ValueError, match="width = 8: the model takes multiples of 16; nearest: 16"):
        pipeline.latent_shape(real, 1024, 8)


def test_decode_in_chunks_and_bytes(pipe):
    latents = jax.random.normal(jax.random.key(0), (4, 4, 6, 16))
    decode = jax.jit(pipeline.decode, static_argnums=0, static_argnames="chunk")
    images = decode(pipe.configs, pipe.params["vae"], latents)
    assert images.shape == (4, 16, 24, 3) and 0 <= float(images.min()) and float(images.max()) <= 1
    np.testing.assert_allclose(decode(pipe.configs, pipe.params["vae"], latents, chunk=2), images, atol=1e-5)
    broken = decode(pipe.configs, pipe.params["vae"], latents.at[1, 0, 0, 0].set(jnp.inf))
    pixels, finite = pipeline.to_uint8(broken)
    assert finite.tolist() == [True, False, True, True]
    np.testing.assert_array_equal(pixels[0], np.asarray(images[0] * 255).round().astype(np.uint8))
    flat = traverse_util.flatten_dict(pipe.params["vae"], sep="/")
    flat["decoder/conv_out/bias"] = jnp.array([jnp.inf, 0.0, 0.0])  # clipping would make this a plain red
    assert not pipeline.to_uint8(decode(pipe.configs, traverse_util.unflatten_dict(flat, sep="/"), latents))[1].any()


def test_bfloat16_is_close(folder, pipe):
    half = pipeline.load(folder, jnp.bfloat16)
    types = {name: {leaf.dtype for leaf in jax.tree.leaves(tree)} for name, tree in half.params.items()}
    assert types.pop("vae") == {jnp.dtype(jnp.float32)} and all(kinds == {jnp.dtype(jnp.bfloat16)} for kinds in types.values())
    exact, rough = (pipeline.encode_prompts(p, PROMPTS, LENGTH) for p in (pipe, half))
    assert rough.context.dtype == jnp.bfloat16
    error = np.abs(np.asarray(rough.context, np.float32) - np.asarray(exact.context)).mean() / np.abs(exact.context).mean()
    assert error < 0.05


def test_load_parts_and_shards(folder, pipe):
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding(component, shapes):
        assert component == "transformer"
        return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec(*[None] * (len(leaf.shape) - 1), "fsdp")), shapes)

    part = pipeline.load(folder, jnp.float32, only=("transformer",), sharding=sharding)
    assert set(part.params) == {"transformer"}
    jax.tree.map(np.testing.assert_array_equal, part.params["transformer"], pipe.params["transformer"])
    with pytest.raises(ValueError, match="has no component unet"):
        pipeline.load(folder, only=("unet",))
    with pytest.raises(ValueError, match="float16"):
        pipeline.load(folder, jnp.float16)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BAD_FOLDERS = {
    "another model": (lambda f: edit(f / "model_index.json", _class_name="UNet"), "'UNet' is not supported; choose"),
    "no index": (lambda f: (f / "model_index.json").unlink(), r"model_index\.json: cannot be read"),
    "no encoder": (lambda f: edit(f / "model_index.json", text_encoder=[None, None]), "has no text_encoder, which"),
    "no config": (lambda f: (f / "vae/config.json").unlink(), r"vae/config\.json: cannot be read"),
    "unknown option": (lambda f: edit(f / "transformer/config.json", novel=1), r"transformer/config\.json: .*novel"),
    "another depth": (lambda f: edit(f / "transformer/config.json", num_layers=5), r"missing: transformer_blocks\.3"),
    "another schedule": (lambda f: edit(f / "scheduler/scheduler_config.json", use_dynamic_shifting=True), "use_dynamic_shifting = True"),
    "bad shift": (lambda f: edit(f / "scheduler/scheduler_config.json", shift="three"), "shift = 'three' must be a positive number"),
    "no weights": (lambda f: (f / "text_encoder_2/model.safetensors").unlink(), r"text_encoder_2: has no .*model\.safetensors"),
    "cut weights": (lambda f: (f / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"cut"), "vae/.*not a readable safetensors"),
    "bad tokenizer": (lambda f: (f / "tokenizer_2/tokenizer.json").write_text("{}"), "tokenizer_2: not a readable tokenizer"),
    "other latents": (lambda f: edit(f / "vae/config.json", latent_channels=4), "do not fit together: .*in_channels .* 16 and 4"),
    "other pooling": (lambda f: edit(f / "text_encoder/config.json", projection_dim=8), "pooled_projection_dim .* 28 and 24"),
    "other T5": (lambda f: edit(f / "text_encoder_3/config.json", d_model=16), "joint_attention_dim .* 32 and 16"),
    "wide CLIP": (lambda f: edit(f / "text_encoder/config.json", hidden_size=32), "widths add to 44, above joint_attention_dim 32"),
    "no projection": (lambda f: edit(f / "text_encoder/config.json", architectures=["CLIPTextModel"]), "must have a projection"),
    "long tokenizer": (lambda f: edit(f / "tokenizer/tokenizer_config.json", model_max_length=77), "77 exceeds the 12 positions"),
    "foreign tokenizer": (lambda f: edit(f / "text_encoder/config.json", vocab_size=100), "tokenizer: has 212 .* embeds 100"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_refuses_folders(folder, tmp_path, case):
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage, message = BAD_FOLDERS[case]
    damage(copy)
    with pytest.raises(ValueError, match=message) as error:
        pipeline.load(copy, jnp.float32)
    assert "\n" not in str(error.value)


BAD_FLUX_FOLDERS = {
    "projection": (
        lambda f: edit(f / "text_encoder/config.json", architectures=["CLIPTextModelWithProjection"]), "must have no projection"
    ),
    "other pooling": (lambda f: edit(f / "transformer/config.json", pooled_projection_dim=8), "pooled_projection_dim .* 8 and 16"),
    "other T5": (lambda f: edit(f / "transformer/config.json", joint_attention_dim=16), "joint_attention_dim .* 16 and 32"),
    "other latents": (lambda f: edit(f / "transformer/config.json", in_channels=16), r"in_channels \(unpacked\) .* 4 and 16"),
    "no T5": (lambda f: edit(f / "model_index.json", text_encoder_2=[None, None]), "has no text_encoder_2, which FluxPipeline"),
    "guidance dropped": (lambda f: edit(f / "transformer/config.json", guidance_embeds=False), r"unexpected: .*guidance_embedder"),
    "another shift": (lambda f: edit(f / "scheduler/scheduler_config.json", time_shift_type="linear"), "time_shift_type = 'linear'"),
    "line upside down": (lambda f: edit(f / "scheduler/scheduler_config.json", base_image_seq_len=5000), "must be below"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FLUX_FOLDERS)
def test_refuses_flux_folders(flux_folder, tmp_path, case):
    copy = shutil.copytree(flux_folder, tmp_path / "copy")
    damage, message = BAD_FLUX_FOLDERS[case]
    damage(copy)
    with pytest.raises(ValueError, match=message):
        pipeline.load(copy, jnp.float32)
