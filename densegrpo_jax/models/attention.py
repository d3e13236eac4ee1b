"""Scaled dot-product attention: one function, three implementations, chosen by name or by backend and size.

Legend: B batch, S tokens (Q queries, K keys), H heads, D head width.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

BATCH_AXES = ("data", "fsdp")  # mesh axes that the batch is sharded over
HEAD_AXIS = "tensor"  # mesh axis that the heads are sharded over
SPLASH_BLOCK = 512  # tokens per block of the TPU kernel
SPLASH_MIN_TOKENS = 2048  # below this, XLA's attention fits in memory and is as fast
IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")


def by_batch(x: jax.Array) -> jax.Array:
    """Keeps x [B, ...] spread along B over the ambient mesh; its other axes lie as the compiler likes.

    For products with weights that are shared over the batch's own axes: without it the compiler may gather the activations, which are
    many times larger, and leave the weights where they are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in BATCH_AXES if name in mesh.axis_names)
    if not axes:
        return x
    return jax.lax.with_sharding_constraint(x, jax.P(axes, *[jax.P.UNCONSTRAINED] * (x.ndim - 1)))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    impl: str = "auto",
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """softmax(scale q k^T + bias) v for each head; the softmax is in float32.

    Args:
      q: queries, [B, Q, H, D].
      k: keys, [B, K, H, D].
      v: values, [B, K, H, D].
      impl: "xla" anywhere; "cudnn" on NVIDIA GPUs in bfloat16; "splash" on TPU, sharded over the ambient mesh
        (`jax.set_mesh`); "auto" picks one of them by backend and size.
      bias: added to the scaled logits, [1 or B, 1 or H, Q, K] (masks, relative positions); "xla" and "auto" only.
      scale: of the logits, 1 / sqrt(D) by default.

    Returns:
      [B, Q, H, D] in the dtype of `q`.

    Raises:
      ValueError: shapes that do not fit, an unknown `impl`, or a bias where it is not taken.
    """
    B, Q, H, D = q.shape
    K = k.shape[1]
    if k.shape != (B, K, H, D) or v.shape != k.shape:
        raise ValueError(f"attention: k {k.shape} and v {v.shape} do not fit q {q.shape}; expected both [{B}, K, {H}, {D}]")
    if bias is not None and (bias.ndim != 4 or any(n not in (1, m) for n, m in zip(bias.shape[:2], (B, H))) or bias.shape[2:] != (Q, K)):
        raise ValueError(f"attention: bias {bias.shape} must be [1 or {B}, 1 or {H}, {Q}, {K}]")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"attention: unknown impl {impl!r}; choose one of {', '.join(IMPLEMENTATIONS)}")
    if bias is not None and impl in ("cudnn", "splash"):
        raise ValueError(f"attention: impl {impl!r} takes no bias here; use 'xla'")
    scale = 1 / math.sqrt(D) if scale is None else scale
    if impl == "auto":
        impl = "xla" if bias is not None else default_impl(jax.default_backend(), K, D, q.dtype)
    if impl == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn")
    if impl == "splash":
        return splash_attention(q, k, v, scale)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * jnp.asarray(scale, q.dtype), k, v))  # [B, H, S, D]
    return _attend(q, k, v, bias).transpose(0, 2, 1, 3)


def default_impl(backend: str, tokens: int, head_dim: int, dtype) -> str:
    """The implementation that "auto" stands for: "splash" for long sequences on TPU, "cudnn" where it exists, else "xla"."""
    if backend == "tpu" and tokens >= SPLASH_MIN_TOKENS:
        return "splash"
    if backend == "gpu" and dtype == jnp.bfloat16 and head_dim % 8 == 0 and head_dim <= 128:
        return "cudnn"
    return "xla"


@jax.custom_vjp
def _attend(q, k, v, bias):
    """Attention on [B, H, S, D] with q scaled already. The derivative keeps the exponentials instead of making them again."""
    return _attend_fwd(q, k, v, bias)[0]


def _attend_fwd(q, k, v, bias):
    logits = jnp.matmul(q, k.swapaxes(2, 3), preferred_element_type=jnp.float32)  # [B, H, Q, K]
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    norm = 1 / weights.sum(-1, keepdims=True)  # [B, H, Q, 1]
    weights = weights.astype(v.dtype)
    # Dividing after the product touches Q x D numbers, not Q x K.
    out = (jnp.matmul(weights, v, preferred_element_type=jnp.float32) * norm).astype(q.dtype)
    return out, (q, k, v, bias, weights, norm, out)


def _attend_bwd(residuals, g):
    q, k, v, bias, weights, norm, out = residuals
    g = g.astype(jnp.float32) * norm
    dot = (g * out.astype(jnp.float32)).sum(-1, keepdims=True)  # [B, H, Q, 1]
    g = g.astype(v.dtype)
    dweights = jnp.matmul(g, v.swapaxes(2, 3), preferred_element_type=jnp.float32)
    dlogits = weights.astype(jnp.float32) * (dweights - dot)
    dbias = None
    if bias is not None:
        shared = tuple(i for i in (0, 1) if bias.shape[i] == 1)
        dbias = dlogits.sum(shared, keepdims=True).astype(bias.dtype)
    dlogits = dlogits.astype(q.dtype)
    dq = jnp.matmul(dlogits, k)
    dk = jnp.matmul(dlogits.swapaxes(2, 3), q)
    dv = jnp.matmul(weights.swapaxes(2, 3), g)
    return dq, dk, dv, dbias


_attend.defvjp(_attend_fwd, _attend_bwd)


def splash_attention(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, interpret: bool = False) -> jax.Array:
    """Flash attention on TPU: no [Q, K] array is ever held. Sequences are padded to whole blocks, and the pad masked.

    Under an ambient mesh (`jax.set_mesh`) each device works on its own share of the batch and, with an axis "tensor", of the heads.

    Args:
      q: [B, Q, H, D].
      k: [B, K, H, D].
      v: [B, K, H, D].
      scale: of the logits.
      interpret: run the kernel's Python form, on any backend (tests).

    Returns:
      [B, Q, H, D] in the dtype of `q`.
    """
    local = partial(_splash_local, scale=scale, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return local(q, k, v)
    batch = tuple(name for name in BATCH_AXES if name in mesh.axis_names)
    spec = jax.P(batch or None, None, HEAD_AXIS if HEAD_AXIS in mesh.axis_names else None, None)
    return jax.shard_map(local, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)(q, k, v)


def _splash_local(q, k, v, scale, interpret):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # only where it runs: the import is slow

    heads, tokens = q.shape[2], q.shape[1]
    q, block_q, segment_q = _pad_to_blocks(q * jnp.asarray(scale, q.dtype))
    k, block_kv, segment_kv = _pad_to_blocks(k)
    v, _, _ = _pad_to_blocks(v)
    blocks = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    mask = splash.MultiHeadMask([splash.FullMask((q.shape[2], k.shape[2]))] * heads)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks, interpret=interpret)
    segments = splash.SegmentIds(q=segment_q, kv=segment_kv)
    out = jax.vmap(kernel, in_axes=(0, 0, 0, None))(q, k, v, segments)  # [B, H, Q + pad, D]
    return out[:, :, :tokens].transpose(0, 2, 1, 3)


def _pad_to_blocks(x):
    """[B, S, H, D] -> [B, H, S + pad, D], the block size, and segment ids [S + pad]: 1 for tokens, 0 for the pad."""
    tokens = x.shape[1]
    block = min(SPLASH_BLOCK, -(-tokens // 128) * 128)
    pad = -tokens % block
    segment = jnp.asarray([1] * tokens + [0] * pad, jnp.int32)
    return jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, pad), (0, 0))), block, segment
