"""Our SD3 transformer against diffusers' in torch, on CPU in float32: forward pass, LoRA step, ten-step sampling.

Both sides run in one process on the same weights and inputs, turn by turn, and their results are compared before they are
timed. Printed are seconds and ratios torch / ours: above 1 ours is faster. Each number of threads has a process of its own,
pinned to as many cores.

    python benchmarks/sd3_vs_torch.py [--json PATH] [--quick]

What is timed:
  forward   one velocity for the whole batch
  lora      forward, backward and AdamW for a rank-16 adapter on the eight attention projections (peft on the torch side)
  sampling  ten Euler-Maruyama steps with given noise

Each side runs in its best form: torch takes the batch whole (cut up it is slower), ours in one program that maps over chunks of
the batch, which keeps XLA's temporaries in cache. Seconds are medians of wall time; `cpu` is the same ratio in processor time of
the process, which other programs on the machine disturb less.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# One arena that keeps its pages: XLA takes its temporaries afresh at every call, and page faults then cost as much as the
# arithmetic. Torch gains from it too, so it is set for both.
ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736:glibc.malloc.arena_max=1"
SEED = 0
STEPS = 10
RANK = 16


class Kind(NamedTuple):
    """A kind of transformer to compare.

    Attributes:
      sizes: by name: side of the latent, tokens of text, chunks of the batch without and with gradients (ours), and what `config` reads.
      config: size -> the content of transformer/config.json.
      torch_class: name in diffusers.
      ours: () -> our config class, module class and name table.
      call: (torch module, latents, sigma, context, pooled) -> velocity in the layout of the latents.
      to_torch, from_torch: arrays [..., H, W, C] to torch's layout and back, the latter with (H, W).
      given: what our module takes besides (latents, sigma, context, pooled), for a batch of that size.
      targets: names of the layers with adapters.
    """

    sizes: dict[str, dict]
    config: Callable[[dict], dict]
    torch_class: str
    ours: Callable[[], tuple[Any, Any, Callable]]
    call: Callable
    to_torch: Callable
    from_torch: Callable
    given: Callable[[int], tuple]
    targets: Callable[[], tuple[str, ...]]


def sd3_config(size):
    return dict(
        sample_size=size["side"], patch_size=2, in_channels=16, out_channels=16, num_layers=size["layers"],
        num_attention_heads=size["heads"], attention_head_dim=size["width"] // size["heads"], caption_projection_dim=size["width"],
        joint_attention_dim=256, pooled_projection_dim=256, pos_embed_max_size=32, qk_norm="rms_norm",
    )  # fmt: skip


def sd3_ours():
    from densegrpo_jax.models.sd3 import SD3Config, SD3Transformer, name_table

    return SD3Config, SD3Transformer, name_table


def attention_targets():
    from densegrpo_jax.models.lora import ATTENTION_TARGETS

    return ATTENTION_TARGETS


SD3 = Kind(
    sizes={
        "tiny": dict(width=128, layers=6, heads=4, side=16, text=32, batch=96, chunk=16, grad_chunk=32),
        "mid": dict(width=512, layers=12, heads=8, side=32, text=77, batch=4, chunk=4, grad_chunk=4),
    },
    config=sd3_config,
    torch_class="SD3Transformer2DModel",
    ours=sd3_ours,
    call=lambda model, x, sigma, context, pooled: model(x, context, pooled, 1000 * sigma).sample,
    to_torch=lambda x: x.swapaxes(-1, -2).swapaxes(-2, -3),  # channels first
    from_torch=lambda x, side: x.swapaxes(-3, -2).swapaxes(-2, -1),
    given=lambda batch: (),
    targets=attention_targets,
)


def torch_side(kind, size, inputs, noise, sigmas):
    """The torch model with its adapter, and the three things to time on it, eager and compiled."""
    import diffusers
    import numpy as np
    import peft
    import torch

    make = getattr(diffusers, kind.torch_class)
    torch.manual_seed(SEED)
    model = make(**kind.config(size)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    base = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    x, noise = (torch.tensor(np.ascontiguousarray(kind.to_torch(np.asarray(a)))) for a in (inputs[0], noise))
    sigma, context, pooled = (torch.tensor(np.asarray(a)) for a in inputs[1:4])

    plain = make(**kind.config(size)).eval()
    plain.load_state_dict(model.state_dict())
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=list(kind.targets())))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.05)
    adapter = {name: parameter.detach().numpy().copy() for name, parameter in trained.items()}

    def build(plain, model):
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-4, weight_decay=0.01)

        def forward():
            with torch.no_grad():
                return kind.call(plain, x, sigma, context, pooled)

        def lora():
            optimizer.zero_grad(set_to_none=True)
            loss = kind.call(model, x, sigma, context, pooled).square().mean()
            loss.backward()
            gradient = torch.stack([parameter.grad.square().sum() for parameter in trained.values()]).sum().sqrt()
            optimizer.step()
            return torch.stack([loss.detach(), gradient])

        def sampling():
            with torch.no_grad():
                y = x
                for i in range(STEPS):
                    v = kind.call(plain, y, torch.full((len(y),), float(sigmas[i])), context, pooled)
                    step = float(sigmas[i + 1] - sigmas[i])
                    y = y + step * v + 0.3 * (-step) ** 0.5 * noise[i]
                return y

        return {"forward": forward, "lora": lora, "sampling": sampling}

    def restore():
        for name, parameter in trained.items():
            parameter.data.copy_(torch.tensor(adapter[name]))

    compiled = build(torch.compile(plain), torch.compile(model))
    return base, adapter, build(plain, model), compiled, restore


def our_side(kind, size, base, adapter, inputs, noise, sigmas, unroll):
    """The same three things, jitted."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import traverse_util

    config_class, module, name_table = kind.ours()
    config = config_class.from_json(kind.config(size))
    turn = {"none": lambda a: a, "transpose": lambda a: a.T, "conv": lambda a: a.transpose(2, 3, 1, 0)}
    params, lora = {}, {}
    for path, source in name_table(config).items():
        arrays = [turn[source.transform](base[name]) for name in source.names]
        params[path] = jnp.asarray(np.stack(arrays) if source.stacked else arrays[0])
        layers = [name.removesuffix(".weight") for name in source.names]
        if f"{layers[0]}.lora_A.default.weight" in adapter:
            for leaf, theirs in (("a", "lora_A"), ("b", "lora_B")):
                stack = [adapter[f"{name}.{theirs}.default.weight"].T for name in layers]
                lora[path.replace("kernel", leaf)] = jnp.asarray(np.stack(stack))
    params, lora = (traverse_util.unflatten_dict(tree, sep="/") for tree in (params, lora))
    model = module(config, scan_unroll=unroll)
    optimizer = optax.adamw(1e-4, weight_decay=0.01)

    def cut(tree, chunk):  # [batch, ...] -> [batch / chunk, chunk, ...]
        return jax.tree.map(lambda a: a.reshape(len(a) // chunk, chunk, *a.shape[1:]), tree)

    @jax.jit
    def forward(params, inputs):
        return jax.lax.map(lambda chunk: model.apply({"params": params}, *chunk), cut(inputs, size["chunk"])).reshape(inputs[0].shape)

    @jax.jit
    def lora_step(params, lora, opt_state, inputs):
        def add_chunk(total, chunk):
            loss = lambda l: jnp.square(model.apply({"params": params, "lora": l}, *chunk)).sum() / inputs[0].size  # noqa: E731
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(lora)), None

        zero = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), lora))
        (loss, grads), _ = jax.lax.scan(add_chunk, zero, cut(inputs, size["grad_chunk"]))
        updates, opt_state = optimizer.update(grads, opt_state, lora)
        return jnp.stack([loss, optax.global_norm(grads)]), optax.apply_updates(lora, updates), opt_state

    @jax.jit
    def sampling(params, inputs, noise):
        def one_chunk(chunk):
            x, context, pooled, *given, noise = chunk

            def step(x, level):
                sigma, next_sigma, noise = level
                v = model.apply({"params": params}, x, jnp.full(len(x), sigma), context, pooled, *given)
                return x + (next_sigma - sigma) * v + 0.3 * jnp.sqrt(sigma - next_sigma) * noise, None

            return jax.lax.scan(step, x, (sigmas[:-1], sigmas[1:], noise.swapaxes(0, 1)))[0]

        chunks = cut((inputs[0], *inputs[2:], noise.swapaxes(0, 1)), size["chunk"])
        return jax.lax.map(one_chunk, chunks).reshape(inputs[0].shape)

    state = {"lora": lora, "opt": optimizer.init(lora)}

    def train():
        figures, state["lora"], state["opt"] = jax.block_until_ready(lora_step(params, state["lora"], state["opt"], inputs))
        return figures

    def restore():
        state.update(lora=lora, opt=optimizer.init(lora))

    run = {
        "forward": lambda: jax.block_until_ready(forward(params, inputs)),
        "lora": train,
        "sampling": lambda: jax.block_until_ready(sampling(params, inputs, noise)),
    }
    return run, restore


def measure(kind, sizes, repeats, threads, unroll, with_compile):
    """One process's share: every size and task with one number of threads. Returns the rows of the table."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before any thread pool is made
    import jax
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    rows = []
    for name in sizes:
        size = kind.sizes[name]
        blocks = unroll or max(size["layers"], size.get("single_layers", 0))  # per iteration of our layer scans
        keys = jax.random.split(jax.random.key(SEED), 4)
        shape = (size["batch"], size["side"], size["side"], 16)
        inputs = (
            jax.random.normal(keys[0], shape),
            jax.numpy.linspace(0.1, 1.0, size["batch"]),
            jax.random.normal(keys[1], (size["batch"], size["text"], 256)),
            jax.random.normal(keys[2], (size["batch"], 256)),
            *kind.given(size["batch"]),
        )
        noise = jax.random.normal(keys[3], (STEPS, *shape))
        sigmas = jax.numpy.linspace(1.0, 0.0, STEPS + 1)
        base, adapter, eager, compiled, restore_torch = torch_side(kind, size, inputs, noise, np.asarray(sigmas))
        ours, restore = our_side(kind, size, base, adapter, inputs, noise, sigmas, blocks)
        for task in ("forward", "lora", "sampling"):
            sides = {"ours": ours[task], "eager": eager[task]} | ({"compile": compiled[task]} if with_compile else {})
            results, first = {}, {}
            for side, f in sides.items():
                restore_torch()
                start = time.perf_counter()
                results[side] = np.asarray(f())
                first[side] = time.perf_counter() - start
            theirs = results["eager"] if task == "lora" else kind.from_torch(results["eager"], size["side"])
            scale = np.abs(theirs) if task == "lora" else np.abs(theirs).max()  # lora: the loss and the norm of the gradient
            error = float((np.abs(results["ours"] - theirs) / scale).max())
            if not error < 1e-4:
                raise RuntimeError(f"{name} {task}: ours and torch differ by {error:.1e} of the largest value; nothing to time")
            restore()
            wall, cpu = ({side: [] for side in sides} for _ in range(2))
            for _ in range(repeats[name]):
                for side, f in sides.items():
                    start = time.perf_counter(), time.process_time()
                    f()
                    wall[side].append(time.perf_counter() - start[0])
                    cpu[side].append(time.process_time() - start[1])
            seconds, cpu_seconds = ({side: statistics.median(times[side]) for side in sides} for times in (wall, cpu))
            row = dict(
                size=name, task=task, threads=threads, error=error, unroll=blocks, repeats=repeats[name],
                seconds=seconds, cpu_seconds=cpu_seconds, first_call=first,
                ratio={side: seconds[side] / seconds["ours"] for side in sides if side != "ours"},
                cpu_ratio={side: cpu_seconds[side] / cpu_seconds["ours"] for side in sides if side != "ours"},
            )  # fmt: skip
            rows.append(row)
            ratios = "  ".join(f"{side}/ours {row['ratio'][side]:.2f} (cpu {row['cpu_ratio'][side]:.2f})" for side in row["ratio"])
            print(f"{name:5} {task:9} threads {threads}  ours {seconds['ours']:7.3f} s  {ratios}  difference {error:.0e}", flush=True)
    return rows


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(kind, script, doc):
    """The command of `script`, whose docstring is `doc`, for one kind of transformer."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--quick", action="store_true", help="tiny only, one thread, eager only, three repeats")
    parser.add_argument("--sizes", nargs="+", choices=list(kind.sizes), default=list(kind.sizes))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--unroll", type=int, default=0, help="blocks per iteration of our layer scan (0: all)")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)  # threads of this process
    args = parser.parse_args()
    sizes, threads = (["tiny"], [1]) if args.quick else (args.sizes, args.threads)
    repeats = {"tiny": 3, "mid": 3} if args.quick else {"tiny": 9, "mid": 5}
    if args.child:
        rows = measure(kind, sizes, repeats, args.child, args.unroll, with_compile=not args.quick)
        args.json.write_text(json.dumps(rows))
        return

    from importlib.metadata import version

    about = dict(
        cpu=cpu_name(), cores=os.cpu_count(), load=os.getloadavg()[0], python=platform.python_version(), seed=SEED, allocator=ALLOCATOR,
        **{package: version(package) for package in ("jax", "flax", "torch", "diffusers", "peft")},
    )  # fmt: skip
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    print("ratios above 1: ours is faster; difference: largest, relative to the largest value")
    rows = []
    for n in threads:
        part = Path(os.environ.get("TMPDIR", "/tmp")) / f"{Path(script).stem}.{os.getpid()}.json"
        environment = os.environ | {"GLIBC_TUNABLES": ALLOCATOR, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(n)}
        subprocess.run([sys.executable, script, *sys.argv[1:], "--child", str(n), "--json", str(part)], env=environment, check=True)
        rows += json.loads(part.read_text())
        part.unlink()
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(SD3, __file__, __doc__)
