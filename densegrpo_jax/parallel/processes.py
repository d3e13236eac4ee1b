"""The processes of one run: how they find each other, and what they tell each other. A process alone is all of them.

Every process runs the same program. Numbers that decide anything are brought to all of them, so that all decide alike; what is
written, the first one writes.
"""

import glob
import hashlib
import os
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from densegrpo_jax.config import Parallel
from densegrpo_jax.parallel.mesh import AXES

SAY = 20.0  # seconds between two lines while others are awaited
LIMIT = 300.0  # seconds until a process gives up


def join(settings: Parallel) -> None:
    """Joins the other processes of the run, where there are any; before jax has looked for devices.

    Processes are told of each other by the settings, or by what their cluster says: SLURM, where the job step has several tasks; GKE and
    Cloud TPU VMs, where the slice has several hosts; and, with coordinator = "cluster", whatever JAX knows how to ask. On one box without
    any of it this does nothing. Who waits says so; whoever has waited LIMIT seconds ends with exit code 1.

    Raises:
      ValueError: coordinator, processes and process are not given together, or do not fit.
    """
    told = {"processes": settings.processes, "process": settings.process}
    if settings.coordinator in (None, "cluster"):
        if given := [name for name, value in told.items() if value is not None]:
            raise ValueError(f"parallel.{given[0]} = {told[given[0]]}: goes with parallel.coordinator = HOST:PORT of the first process")
        if (found := _tasks(os.environ) or _tpu_hosts()) or settings.coordinator:
            try:
                _meet(f"one of several processes ({found or 'parallel.coordinator = cluster'})", "on every host")
            except ValueError as error:
                raise ValueError(f'parallel.coordinator = "cluster": JAX finds no cluster here ({error})') from error
        return
    host, colon, port = settings.coordinator.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(f'parallel.coordinator = {settings.coordinator!r}: write HOST:PORT, or "cluster"')
    if missing := [name for name, value in told.items() if value is None]:
        raise ValueError(f"parallel.coordinator = {settings.coordinator}: give parallel.{' and parallel.'.join(missing)} too")
    if not 0 <= settings.process < settings.processes:
        raise ValueError(f"parallel.process = {settings.process}: of {settings.processes} processes, choose 0 to {settings.processes - 1}")
    whole = settings.coordinator, settings.processes, settings.process
    _meet(
        f"process {settings.process} of {settings.processes}, which meet at {settings.coordinator}",
        f"with parallel.process = 0 to {settings.processes - 1}", *whole,
    )  # fmt: skip


def _meet(who: str, where: str, *whole: Any) -> None:
    """`jax.distributed.initialize`, which waits for all processes without a word and then aborts."""
    come = threading.Event()

    def watch() -> None:
        waited = 0.0
        while waited < LIMIT:
            if come.wait(SAY):
                return
            waited += SAY
            print(f"{who}: the others are awaited since {waited:.0f} s; start the same command {where}", file=sys.stderr, flush=True)
        print(f"{who}: the others did not come within {LIMIT:.0f} s; giving up", file=sys.stderr, flush=True)
        os._exit(1)  # from jax's waiting, which nothing else ends

    threading.Thread(target=watch, daemon=True).start()
    try:
        jax.distributed.initialize(*whole, initialization_timeout=int(LIMIT + 2 * SAY) + 1)
    finally:
        come.set()
    if primary():
        print(f"{jax.process_count()} processes with {jax.device_count()} devices are one run", flush=True)


def _tasks(environment: dict[str, str]) -> str | None:
    """What says that this is one of several tasks of a SLURM job step, or one of several hosts of a TPU slice that GKE has started."""
    slurm = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"} <= environment.keys()
    if slurm and int(environment["SLURM_NTASKS"]) > 1:
        return f"SLURM_NTASKS = {environment['SLURM_NTASKS']}"
    if (hosts := environment.get("TPU_WORKER_HOSTNAMES", "").count(",") + 1) > 1:
        return f"TPU_WORKER_HOSTNAMES has {hosts} hosts"
    if int(slices := environment.get("MEGASCALE_NUM_SLICES", "1")) > 1:
        return f"MEGASCALE_NUM_SLICES = {slices}; unset it where no such slices are left"
    return None


def _tpu_hosts(devices: tuple[str, ...] = ("/dev/accel*", "/dev/vfio/*"), server: str = "metadata.google.internal") -> str | None:
    """What says that this is one of several hosts of a Cloud TPU slice: TPUs here, and Google Cloud's metadata of the machine."""
    if not any(glob.glob(pattern) for pattern in devices):
        return None
    address = f"http://{server}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers={"Metadata-Flavor": "Google"}), timeout=2) as answer:
            hosts = answer.read().decode().count(",") + 1
    except OSError:  # not Google Cloud
        return None
    return f"a Cloud TPU slice of {hosts} hosts" if hosts > 1 else None


def primary() -> bool:
    """Whether this process is the one that writes, prints, moves and removes."""
    return jax.process_index() == 0


def together(name: str) -> None:
    """Waits for all processes at a place of this name."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"densegrpo_{name}")


def same_everywhere(content: bytes) -> bool:
    """Whether all processes have the same bytes."""
    digests = gather(np.frombuffer(hashlib.sha256(content).digest(), np.uint8)[None])
    return bool((digests == digests[0]).all())


def anyone(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    return bool(gather(np.array([flag])).any())


def gather(rows: np.ndarray) -> np.ndarray:
    """Rows [n, ...] of every process, one after the other [sum of n, ...], bit by bit. The numbers n may differ."""
    if jax.process_count() == 1:
        return rows
    from jax.experimental import multihost_utils

    mine = np.frombuffer(np.ascontiguousarray(rows).tobytes(), np.uint8)  # bytes, as jax would round float64
    sizes = multihost_utils.process_allgather(np.int32(mine.size)).reshape(-1)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: mine.size] = mine
    found = multihost_utils.process_allgather(padded)
    parts = [np.frombuffer(found[i, :size].tobytes(), rows.dtype) for i, size in enumerate(sizes)]
    return np.concatenate(parts).reshape(-1, *rows.shape[1:])


def to_host(array: jax.Array) -> np.ndarray:
    """All of an array, in every process."""
    if not (array.is_fully_addressable or array.is_fully_replicated):
        array = jax.device_put(array, NamedSharding(array.sharding.mesh, jax.P()))
    return np.asarray(array)


def mine(rows: np.ndarray, *arrays: jax.Array) -> tuple[Any, ...]:
    """This process's part of rows: those that lie with it, or an equal share where they do not lie apart. Each is one process's only, the
    first one's of those that it lies with.

    Args:
      rows: [n] numbers of the rows.
      arrays: [n, ...] on the devices of the run.

    Returns:
      rows and arrays [m, ...], m may be 0; as they are where there is one process.
    """
    if jax.process_count() == 1:
        return rows, *arrays
    spans = [_owned(array) for array in arrays]
    if any(array.is_fully_replicated for array in arrays) or any(of.keys() != spans[0].keys() for of in spans):
        first, last = (len(rows) * (jax.process_index() + i) // jax.process_count() for i in (0, 1))
        return rows[first:last], *(to_host(array)[first:last] for array in arrays)
    order = sorted(spans[0])
    empty = (np.zeros((0, *array.shape[1:]), array.dtype) for array in arrays)
    parts = (np.concatenate([none, *(of[span] for span in order)]) for none, of in zip(empty, spans))
    return np.concatenate([rows[:0], *(rows[slice(*span)] for span in order)]), *parts


def _owned(array: jax.Array) -> dict[tuple[int, int], jax.Array]:
    """Parts of an array by the rows that they are, those of which no earlier process has a copy."""
    first: dict[tuple[int, int], int] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        span = index[0].indices(len(array))[:2]
        first[span] = min(device.process_index, first.get(span, device.process_index))
    spans = ((shard.index[0].indices(len(array))[:2], shard.data) for shard in array.addressable_shards)
    return {span: data for span, data in spans if first[span] == jax.process_index()}


def of_process(mesh: Mesh | None) -> Mesh | None:
    """The part of the mesh that this process drives; the mesh itself where it drives all of it."""
    if mesh is None or jax.process_count() == 1:
        return mesh
    own = np.array([device for device in mesh.devices.flat if device.process_index == jax.process_index()])
    return Mesh(own.reshape(-1, 1, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def alone(mesh: Mesh | None) -> AbstractContextManager:
    """Within it, programs run on this process's part of the mesh, apart from the other processes."""
    return jax.set_mesh(of_process(mesh)) if jax.process_count() > 1 else nullcontext()


def apart(mesh: Mesh | None, function: Callable) -> Callable:
    """The function, always called `alone`."""
    if jax.process_count() == 1:
        return function

    @wraps(function)
    def called(*args: Any) -> Any:
        with alone(mesh):
            return function(*args)

    return called
