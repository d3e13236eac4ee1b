"""How fast a training step ran: images, evaluations of the network and useful FLOPs of each device and second, memory, and compilation."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from densegrpo_jax import pipeline
from densegrpo_jax import policy as policies
from densegrpo_jax.config import Config, batch_size
from densegrpo_jax.flow import cost
from densegrpo_jax.plan import chips, roofline
from densegrpo_jax.plan import recipe as recipes
from densegrpo_jax.train.phases import Sampler
from densegrpo_jax_configs.variants import change

_compiled = {"seconds": 0.0}  # since the process began; jax takes listeners and gives none back


def _listen(event: str, seconds: float, **_) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled["seconds"] += seconds


jax.monitoring.register_event_duration_secs_listener(_listen)


class Work(NamedTuple):
    """What a training step does, on all devices together.

    Attributes:
      images: decoded and scored.
      evaluations: of the network, in sampling and completing; guided ones count once.
      flops: useful ones, see `plan.roofline`; None for the toy.
      peak: FLOP/s that the devices can do in the config's dtype; None where it is not known (`plan.chips`).
      devices: that take part.
    """

    images: int
    evaluations: int
    flops: float | None
    peak: float | None
    devices: int


def meter(config: Config, devices: int) -> Callable[[Sampler], Work]:
    """What says, of the tables of a training step, its work.

    Args:
      config: the run; its model is on this machine.
      devices: of the run.
    """
    recipe = None
    if config.model.path != "toy":
        folder = pipeline.find_folder(policies.folder(config.model.path), config.model.variant)
        recipe = recipes.read(change(config, model={"path": str(folder)}))
    chip, half = chips.of_device(jax.devices()[0].device_kind), config.model.dtype == "bfloat16"
    peak = devices * (chip.peak if half else chip.peak_float32) if chip else None

    def work(tables: Sampler) -> Work:
        c, batch = config.completion, batch_size(config)
        price = cost(config.sampling.num_steps, tables.scheme, tile=c.tile, tail=c.tail)
        flops = recipe and roofline.useful(recipe._replace(tables=tables, price=price))
        return Work(batch * (len(tables.scheme) + 1), batch * price.evaluations, flops, peak, devices)

    return work


def compiled() -> float:
    """Seconds that this process has spent compiling."""
    return _compiled["seconds"]


def speed(done: Work, seconds: float, compiling: float) -> dict[str, float | None]:
    """Metrics of a step that took `seconds`, of which it compiled for `compiling`; None where a number is not known.

    "images", "evaluations" and "tflops" are per device and second; "mfu" is the useful FLOPs over those that the devices can do;
    "peak_gib" is the most memory that a device of this process has held so far.
    """
    each = done.devices * seconds
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "images": done.images / each,
        "evaluations": done.evaluations / each,
        "tflops": done.flops and done.flops / each / 1e12,
        "mfu": done.flops and done.peak and done.flops / seconds / done.peak,
        "peak_gib": stats["peak_bytes_in_use"] / chips.GIB if "peak_bytes_in_use" in stats else None,
        "compile_seconds": compiling,
    }
