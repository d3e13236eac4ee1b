"""Our FLUX transformer against diffusers' in torch, on CPU in float32: forward pass, LoRA step, ten-step sampling.

    python benchmarks/flux_vs_torch.py [--json PATH] [--quick]

What is timed and how is that of sd3_vs_torch.py: one process, the same weights and inputs, results compared before they are timed, seconds
as medians, ratios torch / ours. The adapter is on the attention and feed-forward layers of the double blocks and on the attention of the
single ones. The network has the guidance input of FLUX.1-dev, at 3.5.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sd3_vs_torch import Kind, main

GUIDANCE = 3.5


def config(size):
    head = size["width"] // size["heads"]
    return dict(
        in_channels=64, num_layers=size["layers"], num_single_layers=size["single_layers"], num_attention_heads=size["heads"],
        attention_head_dim=head, joint_attention_dim=256, pooled_projection_dim=256, guidance_embeds=True,
        axes_dims_rope=(head // 8, head * 7 // 16, head * 7 // 16),
    )  # fmt: skip


def ours():
    from densegrpo_jax.models.flux import FluxConfig, FluxTransformer, name_table

    return FluxConfig, FluxTransformer, name_table


def targets():
    from densegrpo_jax.models.lora import ATTENTION_TARGETS, FEED_FORWARD_TARGETS

    return (*ATTENTION_TARGETS, *FEED_FORWARD_TARGETS)


def given(batch):
    import jax.numpy as jnp

    return (jnp.full(batch, GUIDANCE),)


def call(model, x, sigma, context, pooled):
    import torch

    side = round(x.shape[1] ** 0.5)
    rows, columns = (axis.reshape(-1) for axis in torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"))
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=1).to(x.dtype)
    return model(
        hidden_states=x, encoder_hidden_states=context, pooled_projections=pooled, timestep=sigma, img_ids=ids,
        txt_ids=torch.zeros(context.shape[1], 3), guidance=torch.full((len(x),), GUIDANCE),
    ).sample  # fmt: skip


def to_torch(x):
    """[..., H, W, C] to tokens [..., H/2 W/2, 4 C], of channels by rows by columns."""
    *lead, height, width, channels = x.shape
    n = len(lead)
    x = x.reshape(*lead, height // 2, 2, width // 2, 2, channels)
    return x.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(*lead, height * width // 4, 4 * channels)


def from_torch(x, side):
    """Tokens [B, N, 4 C] to [B, side, side, C]."""
    return x.reshape(len(x), side // 2, side // 2, -1, 2, 2).transpose(0, 1, 4, 2, 5, 3).reshape(len(x), side, side, -1)


FLUX = Kind(
    sizes={
        "tiny": dict(width=128, layers=2, single_layers=4, heads=4, side=16, text=32, batch=96, chunk=16, grad_chunk=32),
        "mid": dict(width=512, layers=4, single_layers=8, heads=8, side=32, text=77, batch=4, chunk=4, grad_chunk=4),
    },
    config=config,
    torch_class="FluxTransformer2DModel",
    ours=ours,
    call=call,
    to_torch=to_torch,
    from_torch=from_torch,
    given=given,
    targets=targets,
)

if __name__ == "__main__":
    main(FLUX, __file__, __doc__)
