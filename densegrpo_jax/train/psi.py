"""psi.json: calibrated noise levels as `densegrpo calibrate` writes them and training reads them."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import densegrpo_jax_configs
from densegrpo_jax.config import Config
from densegrpo_jax.flow import flow_scale
from densegrpo_jax.train import files

SAMPLERS = {"flow_sde": "multiplier", "psi_sde": "psi"}
"""Samplers that take a psi file, and which of its forms they read."""

PACKAGED = Path(densegrpo_jax_configs.__file__).parent / "psi"


class Psi(NamedTuple):
    """Noise levels of a grid.

    Attributes:
      sigmas: [T+1] the grid they were calibrated on.
      psi: [T] literal noise scales.
      multiplier: [T] psi over sqrt(t / (1 - t)), Flow-GRPO's a.
      calibrated: [T] bool; the other levels keep their start value.
    """

    sigmas: np.ndarray
    psi: np.ndarray
    multiplier: np.ndarray
    calibrated: np.ndarray


def find(source: Path) -> Path:
    """A file, or the one that ships under this name.

    Raises:
      ValueError: neither, with the names that ship.
    """
    for path in (source, PACKAGED / f"{source}.json"):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in PACKAGED.glob("*.json"))) or "none"
    raise ValueError(f"exploration.psi = {source}: there is no such file, and the psi files that ship are: {names}")


def read(source: Path) -> Psi:
    """Reads a file, or one that ships by its name.

    Raises:
      ValueError: no such file, or one that is not whole: missing entries, lengths that differ, numbers that are not noise levels, or two
        forms that do not agree.
    """
    path = find(source)
    try:
        values = json.loads(path.read_text())
        sigmas, psi, multiplier = (np.array(values[name], np.float64) for name in ("sigmas", "psi", "multiplier"))
        calibrated = np.array(values["calibrated"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a psi file of `densegrpo calibrate` ({type(error).__name__}: {error})") from error
    steps = (sigmas.size - 1,)
    if sigmas.ndim != 1 or psi.shape != steps or multiplier.shape != steps or calibrated.shape != steps or calibrated.dtype != bool:
        shapes = ", ".join(str(x.shape) for x in (sigmas, psi, multiplier, calibrated))
        raise ValueError(f"{path}: sigmas, psi, multiplier and calibrated have shapes {shapes}; expected [T+1] and three times [T]")
    if not (np.isfinite(psi).all() and (psi >= 0).all() and np.allclose(psi, multiplier * flow_scale(sigmas), rtol=1e-6, atol=0.0)):
        raise ValueError(f"{path}: psi must be finite, not negative, and multiplier times sqrt(t / (1 - t)); was the file edited by hand?")
    return Psi(sigmas, psi, multiplier, calibrated)


def noise_level(source: Path, sampler: str, sigmas: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """The noise levels [T] that a sampler takes from a file.

    Args:
      source: the file, or the name of one that ships.
      sampler: of the run.
      sigmas: grid of the run, [T+1].
      trained: [T] bool, every step that the run trains at some time.

    Raises:
      ValueError: a sampler that takes no psi, another grid, or a trained step that was not calibrated.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"exploration.psi goes with exploration.sampler {' or '.join(SAMPLERS)}, not {sampler}; leave it unset")
    found = read(source)
    if len(found.sigmas) != len(sigmas):
        ours, theirs = len(sigmas) - 1, len(found.sigmas) - 1
        raise ValueError(f"exploration.psi = {source} is for {theirs} steps, sampling.num_steps is {ours}: calibrate anew")
    if not np.allclose(found.sigmas, sigmas, rtol=0.0, atol=1e-6):
        i = int(np.argmax(np.abs(found.sigmas - sigmas)))
        raise ValueError(
            f"exploration.psi = {source} is for another grid (level {i} is {found.sigmas[i]:.4f} there and {sigmas[i]:.4f} here): "
            "calibrate anew, or set sampling.grid and sampling.shift to those of the calibration"
        )
    missing = np.flatnonzero(trained & ~found.calibrated)
    if missing.size:
        raise ValueError(
            f"exploration.psi = {source} has no calibrated value for the trained steps {missing.tolist()}: calibrate with this window"
        )
    return getattr(found, SAMPLERS[sampler])


def strange(config: Config) -> list[str]:
    """What a psi file was calibrated with and this run does not have, a line each: model, rewards, guidance. The levels still fit the grid,
    but the balance that they were sought for is another's. A file that says nothing of it is taken as it is.

    Raises:
      ValueError: settings of another form.
    """
    if config.exploration.psi is None:
        return []
    path = find(config.exploration.psi)
    try:
        said = json.loads(path.read_text()).get("settings", {})
        pairs = {
            "model.path": (said.get("model", {}).get("path"), config.model.path),
            "rewards": (said.get("rewards"), list(config.rewards)),
            "sampling.guidance_scale": (said.get("sampling", {}).get("guidance_scale"), config.sampling.guidance_scale),
        }
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path}: its settings are not those that `densegrpo calibrate` writes ({error})") from error
    return [
        f"exploration.psi = {config.exploration.psi} was calibrated with {name} = {theirs}, and this run has {ours}"
        for name, (theirs, ours) in pairs.items()
        if theirs is not None and theirs != ours
    ]


def write(path: Path, values: dict[str, Any]) -> None:
    """Writes a file, one entry a line, whole or not at all."""
    files.write(path, "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()) + "\n}\n")


def adopt(config: Config) -> Config:
    """Copies the psi file into the run's folder, from which the run then reads it, so that nothing changes it under a run.

    Returns:
      The config with `exploration.psi` the copy; as it was if there is none.

    Raises:
      ValueError: a continued run whose psi file has changed since.
    """
    if config.exploration.psi is None:
        return config
    copy, text = config.run.workdir / "psi.json", find(config.exploration.psi).read_text()
    if copy.exists() and copy.read_text() != text:
        raise ValueError(
            f"exploration.psi = {config.exploration.psi} has changed since this run began with {copy}; "
            "give another run.workdir, or the old file to continue it"
        )
    files.write(copy, text)
    return dataclasses.replace(config, exploration=dataclasses.replace(config.exploration, psi=copy))
