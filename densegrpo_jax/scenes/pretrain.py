"""Trains the tiny models of the scenes world from nothing: `python -m densegrpo_jax.scenes.pretrain --workdir DIR`.

Stages, each resumed from its last checkpoint when the command is given again:

1. vae: an AutoencoderKL on drawn scenes.
2. flow: an SD3 transformer by flow matching, its two CLIP text encoders and its T5 encoder trained along with it.
3. scorer: a small CLIP that prefers pictures that show what was asked.
4. export: the ordinary diffusers and transformers folders that ship with the package.
5. report: what the exported models reach on held-out requests, as report.json in the workdir, and a picture.

`--stages flux` is apart: it trains a small FLUX on the autoencoder and the text encoders of the tiny SD3 that ships, and writes it to the
folder tiny_flux in the workdir.
"""

import dataclasses
import json
import platform
from pathlib import Path

import flax
import jax
import numpy as np
import tyro

import densegrpo_jax
from densegrpo_jax import pipeline
from densegrpo_jax.models import vae
from densegrpo_jax.scenes import checker, export, scorer, tiny_flux, tiny_model, world
from densegrpo_jax.scenes.training import Run, load_leaves

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line can change.

    Attributes:
      workdir: for checkpoints and logs.
      stages: what to run, in this order.
      seed: of everything.
      vae_steps: optimiser steps of stage 1, batches of 32.
      flow_steps: optimiser steps of stage 2, batches of 32.
      scorer_steps: optimiser steps of stage 3.
      flux_steps: optimiser steps of the tiny FLUX, batches of 32.
      save_every: optimiser steps between checkpoints.
      out: where `export` puts tiny_sd3 and preference_clip.
    """

    workdir: Path
    stages: tuple[str, ...] = ("vae", "flow", "scorer", "export", "report")
    seed: int = 0
    vae_steps: int = 1200
    flow_steps: int = 16000
    scorer_steps: int = 2000
    flux_steps: int = 3000
    save_every: int = 500
    out: Path = HERE


def report(folder: Path, run: Run, per_tag: int = 64) -> dict:
    """Scores the exported models on held-out requests that no measure of the training used.

    Args:
      folder: holds tiny_sd3 and preference_clip.
      run: its workdir gets report.json and report.png, a row of pictures for each tag.
      per_tag: requests of each tag.

    Returns:
      What report.json holds: for each tag the judge's means over 40-step Euler pictures; the scorer's mean on those that the strict score
      passes and fails, and its agreement with the judge on groups of pictures for 192 more captions; and versions.
    """
    from densegrpo_jax.rewards import scenes as rewards  # imports this package
    from densegrpo_jax.rewards.clip import load_scorer

    pipe = pipeline.load(folder / "tiny_sd3", dtype=jax.numpy.float32)
    requests = tiny_model.heldout_requests(per_tag, (run.seed, 93))
    ids = tiny_model.Tokens(run.workdir)([request["prompt"] for request in requests])
    images = tiny_model.sample_images(pipe.params, pipe.params["vae"], pipe.configs.vae, ids, jax.random.key(run.seed + 3))
    shown = images.reshape(len(world.TAGS), per_tag, *images.shape[1:])[:, :16]
    tiny_model.save_grid(run.workdir / "report.png", shown.reshape(-1, *images.shape[1:]), columns=shown.shape[1])
    scores = {mode: checker.judge(images, requests, mode).reshape(-1, per_tag) for mode in checker.MODES}
    preference = np.asarray(rewards.preference(folder / "preference_clip")(images, [r["prompt"] for r in requests], requests))
    passed = scores["strict"].ravel() == 1
    drawn = scorer.draw_groups(run, tiny_model.Tokens(run.workdir), pipe.params, pipe.params["vae"], pipe.configs.vae, 192, "heldout", 2)
    judges = {"clip": load_scorer(folder / "preference_clip").params}
    result = {
        "pictures": len(images),
        "steps": tiny_model.ODE_STEPS,
        "tags": {tag: {mode: float(s[n].mean()) for mode, s in scores.items()} for n, tag in enumerate(world.TAGS)},
        "mean": {mode: float(s.mean()) for mode, s in scores.items()},
        "preference": {"passed": float(preference[passed].mean()), "failed": float(preference[~passed].mean())},
        "agreement": scorer.agreement(judges, drawn),
        "agreement without noise in the latents": scorer.agreement(judges, scorer.without_noise(drawn)),
        "seed": run.seed,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "densegrpo_jax": densegrpo_jax.__version__,
        },
    }
    (run.workdir / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def main(settings: Settings) -> None:
    """Runs the stages asked for."""
    settings.workdir.mkdir(parents=True, exist_ok=True)
    run = Run(settings.workdir, settings.seed, settings.save_every)
    if "flux" in settings.stages:
        pipe = tiny_flux.train(run, settings.flux_steps, HERE / "tiny_sd3")
        export.write_folder(settings.workdir / "tiny_flux", pipe.configs, pipe.params)
    if not {"vae", "flow", "scorer", "export", "report"} & set(settings.stages):
        return
    if "vae" in settings.stages:
        tiny_model.train_vae(run, settings.vae_steps)
    vae_params = load_leaves(run.workdir / "vae_best.safetensors", vae.init(jax.random.key(0), tiny_model.VAE))
    vae_config = tiny_model.with_measured_scale(vae_params, run.seed)
    if "flow" in settings.stages:
        tiny_model.train_flow(run, settings.flow_steps, vae_params, vae_config)
    if not {"scorer", "export", "report"} & set(settings.stages):
        return
    flow_params = load_leaves(run.workdir / "flow_best.safetensors", tiny_model.init_flow(jax.random.key(0)))
    if "scorer" in settings.stages:
        scorer.train_scorer(run, settings.scorer_steps, flow_params, vae_params, vae_config)
    if "export" in settings.stages:
        export.write_sd3(settings.out / "tiny_sd3", flow_params, vae_params, vae_config)
        scorer_params = load_leaves(run.workdir / "scorer_best.safetensors", scorer.init(run.seed))
        export.write_scorer(settings.out / "preference_clip", scorer_params["clip"])
    if "report" in settings.stages:
        print(json.dumps(report(settings.out, run), indent=2))


if __name__ == "__main__":
    main(tyro.cli(Settings))
