"""Full-size configs on slices and boxes: `densegrpo train sd35_medium_pickscore:v6e-2x4`, as `densegrpo plan --topology v6e:2x4 --search`
finds them.

Chunks are sums over all chips. Nothing that is learnt depends on them, so that a run may go on in another place.
"""

from collections.abc import Callable
from pathlib import Path

from densegrpo_jax.config import Config
from densegrpo_jax_configs.variants import change


def place(
    chunk: int, decode_chunk: int, micro_batch: int, remat: bool, attention: str = "auto", fsdp: int = 1, encoders: str = "device"
) -> Callable[[Config], Config]:
    """What sets a config to a place."""
    return lambda config: change(
        config,
        model={"attention": attention},
        sampling={"chunk": chunk, "decode_chunk": decode_chunk},
        optimizer={"micro_batch": micro_batch, "remat": remat},
        parallel={"fsdp": fsdp, "encoders": encoders},
    )


PLACES = {
    "sd35_medium_pickscore": {
        "v5e-4x4": place(chunk=32, decode_chunk=64, micro_batch=64, remat=True, attention="splash", fsdp=8),
        "v6e-2x4": place(chunk=32, decode_chunk=32, micro_batch=32, remat=True, attention="splash", fsdp=2),
        "v6e-4x4": place(chunk=64, decode_chunk=64, micro_batch=64, remat=True, attention="splash"),
        "v4-2x2x2": place(chunk=32, decode_chunk=32, micro_batch=8, remat=False, attention="splash", encoders="host"),
        "v5p-2x2x1": place(chunk=16, decode_chunk=16, micro_batch=16, remat=False, attention="splash"),
        "a100-80-8": place(chunk=32, decode_chunk=32, micro_batch=24, remat=False),
        "h100-1": place(chunk=4, decode_chunk=4, micro_batch=2, remat=False),
        "h100-8": place(chunk=32, decode_chunk=32, micro_batch=24, remat=False),
        "h100-16": place(chunk=64, decode_chunk=64, micro_batch=48, remat=False),
        "h200-1": place(chunk=4, decode_chunk=4, micro_batch=4, remat=False),
        "h200-8": place(chunk=32, decode_chunk=32, micro_batch=32, remat=False),
    },
    "sd35_medium_geneval": {
        "v5e-4x4": place(chunk=64, decode_chunk=48, micro_batch=64, remat=True, attention="splash", fsdp=2),
        "v6e-2x4": place(chunk=32, decode_chunk=32, micro_batch=32, remat=True, attention="splash"),
        "v6e-4x4": place(chunk=64, decode_chunk=64, micro_batch=64, remat=True, attention="splash"),
        "h100-8": place(chunk=32, decode_chunk=32, micro_batch=24, remat=False),
    },
    "sd35_medium_ocr": {
        "v5e-4x4": place(chunk=64, decode_chunk=48, micro_batch=64, remat=True, attention="splash", fsdp=2),
        "v6e-2x4": place(chunk=32, decode_chunk=32, micro_batch=32, remat=True, attention="splash"),
        "v6e-4x4": place(chunk=64, decode_chunk=64, micro_batch=64, remat=True, attention="splash"),
        "h100-8": place(chunk=32, decode_chunk=32, micro_batch=24, remat=False),
    },
    "sd35_medium_pickscore_1024": {
        "v6e-8x8": place(chunk=128, decode_chunk=64, micro_batch=192, remat=True),
        "v5p-2x2x2": place(chunk=32, decode_chunk=32, micro_batch=8, remat=False),
        "h100-8": place(chunk=32, decode_chunk=32, micro_batch=8, remat=False, fsdp=8),
        "h200-8": place(chunk=32, decode_chunk=32, micro_batch=8, remat=False),
    },
    "flux_dev_pickscore": {
        "v6e-2x4": place(chunk=48, decode_chunk=32, micro_batch=48, remat=True, attention="splash", fsdp=4),
        "v6e-4x4": place(chunk=96, decode_chunk=64, micro_batch=96, remat=True, attention="splash", fsdp=4),
        "v5p-2x2x1": place(chunk=16, decode_chunk=16, micro_batch=4, remat=False),
        "v5p-2x2x2": place(chunk=32, decode_chunk=32, micro_batch=8, remat=False),
        "h100-8": place(chunk=32, decode_chunk=32, micro_batch=8, remat=False, encoders="host"),
        "h100-16": place(chunk=64, decode_chunk=64, micro_batch=16, remat=False),
        "h200-1": place(chunk=4, decode_chunk=4, micro_batch=2, remat=False),
        "h200-8": place(chunk=32, decode_chunk=32, micro_batch=24, remat=False),
    },
}
"""Config -> place -> what sets it."""


def of(config: str) -> dict[str, Callable[[Config], Config]]:
    """The places of a config by its name."""
    return PLACES.get(config, {})


def topology(name: str) -> str | None:
    """The topology of a config at a place as `densegrpo plan` writes it, "v6e:2x4" of "CONFIG:v6e-2x4"; None where no place is named."""
    config, *rest = name.split(":")
    found = next((word for word in rest if word in of(Path(config).stem)), None)
    return found and ":".join(found.rsplit("-", 1))
