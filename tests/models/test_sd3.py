"""The MMDiT equals diffusers' in values and gradients, for every branch; scanned, rematerialised, sharded and adapted forms agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from densegrpo_jax.models import lora as adapters
from densegrpo_jax.models.sd3 import SD3Config, SD3Transformer, block_groups, name_table

SMALL = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 12,
}
VARIANTS = {
    "sd3": {},
    "sd3.5-large": {"qk_norm": "rms_norm"},
    "sd3.5-medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
    "scattered dual": {"dual_attention_layers": (1, 3), "qk_norm": "rms_norm"},
    "one block": {"num_layers": 1},
    "one dual block, patch 1": {"num_layers": 1, "dual_attention_layers": (0,), "patch_size": 1, "sample_size": 12, "out_channels": 6},
}
# transformer/config.json of the published checkpoints
PUBLISHED = {
    "SD3-Medium": dict(
        attention_head_dim=64, caption_projection_dim=1536, in_channels=16, joint_attention_dim=4096, num_attention_heads=24,
        num_layers=24, out_channels=16, patch_size=2, pooled_projection_dim=2048, pos_embed_max_size=192, sample_size=128,
    ),
    "SD3.5-Medium": dict(
        attention_head_dim=64, caption_projection_dim=1536, dual_attention_layers=list(range(13)), in_channels=16,
        joint_attention_dim=4096, num_attention_heads=24, num_layers=24, out_channels=16, patch_size=2, pooled_projection_dim=2048,
        pos_embed_max_size=384, qk_norm="rms_norm", sample_size=128,
    ),
    "SD3.5-Large": dict(
        attention_head_dim=64, caption_projection_dim=2432, in_channels=16, joint_attention_dim=4096, num_attention_heads=38,
        num_layers=38, out_channels=16, patch_size=2, pooled_projection_dim=2048, pos_embed_max_size=192, qk_norm="rms_norm",
        sample_size=128,
    ),
}  # fmt: skip


def make_inputs(config, batch=2, height=10, width=6, text=5):
    keys = jax.random.split(jax.random.key(7), 4)
    return (
        jax.random.normal(keys[0], (batch, height, width, config.in_channels)),
        jnp.linspace(0.03, 1.0, batch),
        jax.random.normal(keys[2], (batch, text, config.joint_attention_dim)),
        jax.random.normal(keys[3], (batch, config.pooled_projection_dim)),
    )


def random_params(config, seed=0, std=0.3):
    """Random everywhere, also where training starts from zero."""
    shapes = jax.eval_shape(SD3Transformer(config).init, jax.random.key(0), *make_inputs(config))["params"]
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(treedef, [std * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)])


def random_lora(params, rank=3):
    lora = adapters.init(jax.random.key(1), params, rank=rank)
    return jax.tree.map(lambda leaf: 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), lora)


def close(ours, theirs, bound=2e-5):
    scale = np.abs(np.asarray(theirs)).max()
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=bound * scale, rtol=0)


@pytest.fixture(scope="module")
def medium():
    config = SD3Config(**SMALL, **VARIANTS["sd3.5-medium"])
    params = random_params(config)
    return config, params, random_lora(params), make_inputs(config, batch=8)


# --- parity with diffusers ---


def torch_pair(config_values):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    from tests.models.convert import params_from_torch

    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel(**config_values).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    config = SD3Config.from_json(dict(model.config))
    return torch, model, config, params_from_torch(model.state_dict(), name_table(config))


@pytest.mark.parity
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformer_equals_diffusers_in_value_and_latent_gradient(variant):
    torch, model, config, params = torch_pair({**SMALL, **VARIANTS[variant]})
    latents, sigma, context, pooled = make_inputs(config)
    weights = jax.random.normal(jax.random.key(3), (*latents.shape[:3], config.channels_out))

    def loss(x):
        out = SD3Transformer(config).apply({"params": params}, x, sigma, context, pooled)
        return (out * weights).sum(), out

    (_, ours), our_grad = jax.value_and_grad(loss, has_aux=True)(latents)

    x, context, pooled = (torch.tensor(np.asarray(a)) for a in (latents.transpose(0, 3, 1, 2), context, pooled))
    x.requires_grad_(True)
    theirs = model(x, context, pooled, torch.tensor(np.asarray(sigma)) * 1000).sample
    (theirs * torch.tensor(np.asarray(weights)).permute(0, 3, 1, 2)).sum().backward()
    close(ours, theirs.detach().permute(0, 2, 3, 1))
    close(our_grad, x.grad.permute(0, 2, 3, 1))
