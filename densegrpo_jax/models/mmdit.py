"""What the transformers of Stable Diffusion 3 and FLUX are made of: joint blocks, modulated by one vector (MMDiT; Esser et al. 2024,
arXiv 2403.03206).

Image and text tokens are two streams with their own weights that meet in joint attention. The module names are those of diffusers, with
"_" for the dots inside a layer's name.

Legend: B batch, N image tokens, S text tokens, H heads, D width.
"""

from collections.abc import Callable, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import Precision

from densegrpo_jax.models.attention import attention, by_batch
from densegrpo_jax.models.layers import Dense, MLPEmbedding, RMSNorm, normalize, rotate, timestep_embedding
from densegrpo_jax.models.source import Source

EPS = 1e-6  # of every norm
OUTPUTS_SHARED = r"/(to_[qkv]|add_[qkv]_proj|net_0_proj|proj_mlp)/kernel$"  # weights whose outputs are heads or hidden units
INPUTS_SHARED = r"/(to_out_0|to_add_out|net_2)/kernel$"  # and whose inputs are
TIME_CHANNELS = 256  # of the sinusoidal embeddings
Rotary = tuple[jax.Array, jax.Array]  # cosines and sines, [N, D/2H] each


def modulate(y: jax.Array, shift: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Normalised tokens y [B, N, D], scaled and shifted by [B, 1, D]: in float32, where y is, and then in `dtype`."""
    return (y * (1 + scale) + shift).astype(dtype)


def gated(x: jax.Array, gate: jax.Array, update: jax.Array) -> jax.Array:
    """x [B, N, D] plus an update let in by a float32 gate [B, 1, D], in the type of x."""
    return (x + gate * update).astype(x.dtype)


def along_batch(layer: nn.Module, x: jax.Array) -> jax.Array:
    """A linear layer on tokens x [B, N, D], of which each device takes whole rows; so does its derivative. See `by_batch`."""
    return by_batch(layer(by_batch(x)))


class Modulation(nn.Module):
    """Shifts, scales and gates, in full float32: a linear map of the conditioning vector, zero at init (adaLN-Zero)."""

    parts: int
    lora_scale: float

    @nn.compact
    def __call__(self, c: jax.Array) -> list[jax.Array]:
        """Maps c [B, D] to `parts` arrays [B, 1, D]."""
        features = self.parts * c.shape[-1]
        dense = Dense(features, lora_scale=self.lora_scale, precision=Precision.HIGHEST, kernel_init=nn.initializers.zeros, name="linear")
        return jnp.split(dense(c)[:, None], self.parts, axis=-1)


class Attention(nn.Module):
    """Attention over one stream, joined by the text tokens if there are any.

    Attributes:
      heads: H.
      qk_norm: RMS-normalise the heads of q and k.
      dtype: of the token computation.
      impl: see `attention`.
      lora_scale: alpha / rank of the adapters.
      text_ends: nothing is read from the text stream afterwards.
      projected: with an output projection; otherwise the caller has one.
    """

    heads: int
    qk_norm: bool
    dtype: jnp.dtype
    impl: str
    lora_scale: float
    text_ends: bool = False
    projected: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, context: jax.Array | None = None, rotary: Rotary | None = None) -> tuple[jax.Array, jax.Array | None]:
        """Maps x [B, N, D] and context [B, S, D] or None to their attention outputs; None where there is no text output.

        Queries and keys of x turn by `rotary`; those of the text, whose positions are all zero, do not.
        """
        B, N, D = x.shape
        dense = partial(Dense, D, dtype=self.dtype, lora_scale=self.lora_scale)

        def heads(name, tokens, norm=None, rotary=None):
            y = along_batch(dense(name=name), tokens).reshape(B, -1, self.heads, D // self.heads)
            y = RMSNorm(EPS, self.dtype, name=norm)(y) if norm and self.qk_norm else y
            return y if rotary is None else rotate(y, *rotary)

        q, k, v = heads("to_q", x, "norm_q", rotary), heads("to_k", x, "norm_k", rotary), heads("to_v", x)  # [B, N, H, D/H]
        if context is not None:
            context_q = heads("add_q_proj", context, "norm_added_q")  # in the last block only for its weights' sake
            q = q if self.text_ends else jnp.concatenate([q, context_q], axis=1)  # [B, N + S, H, D/H]
            k = jnp.concatenate([k, heads("add_k_proj", context, "norm_added_k")], axis=1)
            v = jnp.concatenate([v, heads("add_v_proj", context)], axis=1)
        out = attention(q, k, v, impl=self.impl).reshape(B, -1, D)
        if not self.projected:
            return out, None
        has_text = context is not None and not self.text_ends
        own = along_batch(dense(name="to_out_0"), out[:, :N])
        return own, along_batch(dense(name="to_add_out"), out[:, N:]) if has_text else None


class FeedForward(nn.Module):
    """Two linear layers with tanh gelu between, four times as wide inside."""

    dtype: jnp.dtype
    lora_scale: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, N, D] to the same shape."""
        D = x.shape[-1]
        dense = partial(Dense, dtype=self.dtype, lora_scale=self.lora_scale)
        hidden = along_batch(dense(4 * D, name="net_0_proj"), x)
        return along_batch(dense(D, name="net_2"), jax.nn.gelu(hidden, approximate=True))


class JointBlock(nn.Module):
    """One block of two streams, in the form that `scanned` wants: (streams, (c, rotary)) -> (streams, None).

    Attributes:
      heads, qk_norm, dtype, impl, lora_scale: see `Attention`.
      dual: with a second attention over the image tokens alone (SD3.5-Medium).
      last: the block whose text stream ends in its attention (SD3).
    """

    heads: int
    qk_norm: bool
    dtype: jnp.dtype
    impl: str
    lora_scale: float
    dual: bool = False
    last: bool = False

    @nn.compact
    def __call__(
        self, streams: tuple[jax.Array, jax.Array], given: tuple[jax.Array, Rotary | None]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        """Maps image tokens [B, N, D] and text tokens [B, S, D], modulated by c [B, D]."""
        (x, context), (c, rotary) = streams, given
        attend = partial(Attention, self.heads, self.qk_norm, self.dtype, self.impl, self.lora_scale)
        modulation = partial(Modulation, lora_scale=self.lora_scale)

        modulated = partial(modulate, dtype=self.dtype)
        shift, scale, gate, ff_shift, ff_scale, ff_gate, *second = modulation(9 if self.dual else 6, name="norm1")(c)
        if self.last:
            context_scale, context_shift = modulation(2, name="norm1_context")(c)
        else:
            context_shift, context_scale, context_gate, *context_ff = modulation(6, name="norm1_context")(c)

        x_norm, context_norm = normalize(x, EPS), normalize(context, EPS)
        out, context_out = attend(text_ends=self.last, name="attn")(
            modulated(x_norm, shift, scale), modulated(context_norm, context_shift, context_scale), rotary
        )
        x = gated(x, gate, out)
        if self.dual:
            shift2, scale2, gate2 = second
            x = gated(x, gate2, attend(name="attn2")(modulated(x_norm, shift2, scale2))[0])
        feed_forward = partial(FeedForward, self.dtype, self.lora_scale)
        x = gated(x, ff_gate, feed_forward(name="ff")(modulated(normalize(x, EPS), ff_shift, ff_scale)))
        if not self.last:
            ff_shift, ff_scale, ff_gate = context_ff
            context = gated(context, context_gate, context_out)
            context = gated(context, ff_gate, feed_forward(name="ff_context")(modulated(normalize(context, EPS), ff_shift, ff_scale)))
        return (x, context), None


def scanned(block: type[nn.Module], length: int, remat: bool, unroll: int) -> Callable[..., nn.Module]:
    """`length` blocks with stacked weights as one module (carry, given) -> (carry, None), `given` being the same for all.

    Args:
      block: module of that form.
      length: number of blocks.
      remat: recompute each block in the backward pass.
      unroll: blocks per iteration of the loop.
    """
    return nn.scan(
        nn.remat(block, prevent_cse=False) if remat else block,
        variable_axes={"params": 0, "lora": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=length,
        unroll=min(unroll, length),
    )


def condition(width: int, lora_scale: float, scalars: dict[str, jax.Array], pooled: jax.Array) -> jax.Array:
    """The vector that modulates every block: silu of the sum of embedded scalars and pooled text, [B, D], float32.

    Args:
      width: D.
      lora_scale: alpha / rank of the adapters.
      scalars: by the name of their embedder, in [0, 1] or a few units, [B] each; the sinusoids see 1000 times that.
      pooled: pooled text [B, E].
    """
    embed = partial(MLPEmbedding, width, lora_scale)
    c = embed(name="text_embedder")(pooled)
    for name, value in scalars.items():
        c = c + embed(name=name)(timestep_embedding(1000 * value.astype(jnp.float32), TIME_CHANNELS))
    return jax.nn.silu(c)


# ---------------------------------------------------------------------------------------------------------------------
# Names


def add_linear(table: dict[str, Source], path: str, names: Sequence[str], stacked: bool = False) -> None:
    """Adds a linear layer, or a stack of them, to a name table."""
    table[f"{path}/kernel"] = Source(tuple(f"{name}.weight" for name in names), "transpose", stacked)
    table[f"{path}/bias"] = Source(tuple(f"{name}.bias" for name in names), "none", stacked)


def add_blocks(table: dict[str, Source], path: str, prefixes: Sequence[str], linears: Sequence[str], norms: Sequence[str]) -> None:
    """Adds a stack of blocks to a name table.

    Args:
      table: is extended.
      path: of the stack among our parameters.
      prefixes: of each block's torch names, with the last dot.
      linears: torch names of its linear layers; ours have "/" between modules and "_" within.
      norms: torch names of its RMS norms.
    """
    for name in linears:
        ours = name.replace("net.0.proj", "net_0_proj").replace("net.2", "net_2").replace("to_out.0", "to_out_0").replace(".", "/")
        add_linear(table, f"{path}/{ours}", [prefix + name for prefix in prefixes], stacked=True)
    for name in norms:
        names = tuple(f"{prefix}{name}.weight" for prefix in prefixes)
        table[f"{path}/{name.replace('.', '/')}/scale"] = Source(names, "none", stacked=True)


def add_joint_blocks(
    table: dict[str, Source], path: str, prefixes: Sequence[str], qk_norm: bool, dual: bool = False, last: bool = False
) -> None:
    """Adds a stack of `JointBlock`s to a name table; see `add_blocks`."""
    linears = ["norm1.linear", "norm1_context.linear", "ff.net.0.proj", "ff.net.2"]
    linears += [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")]
    linears += [] if last else ["attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2"]
    linears += [f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")] if dual else []
    norms = [f"attn.{name}" for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")]
    norms += ["attn2.norm_q", "attn2.norm_k"] if dual else []
    add_blocks(table, path, prefixes, linears, norms if qk_norm else [])


def add_ends(table: dict[str, Source], input_layers: Sequence[str], embedders: Sequence[str]) -> None:
    """Adds what stands before and after the blocks: linear layers of both streams, the embedders of `condition`, the output layer."""
    for name in (*input_layers, "norm_out.linear", "proj_out"):
        add_linear(table, name.replace(".", "/"), [name])
    for embedder in embedders:
        for linear in ("linear_1", "linear_2"):
            add_linear(table, f"{embedder}/{linear}", [f"time_text_embed.{embedder}.{linear}"])
