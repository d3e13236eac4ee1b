"""What `densegrpo calibrate --report` shows, in the manner of DenseGRPO's Figures 3 and 8: balance, spread and noise of the gains at each
step for fixed and calibrated noise levels, and how well the completions tell the reward. One HTML file, two PNG files, and the numbers."""

import dataclasses
import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from densegrpo_jax import credit, flow, parallel, rewards
from densegrpo_jax import policy as policies
from densegrpo_jax.calibrate import Figure, Setting, chunk, make_draw, missing, rewards_and_gains
from densegrpo_jax.config import Completion, batch_size, reward_weights
from densegrpo_jax.flow import calibration
from densegrpo_jax.train import files, loop, metrics, phases, psi, report
from densegrpo_jax.train.report import ACCENT, BAD, GOOD, INK, SOFT

FIGURE_EPOCH, ACCURACY_EPOCH = 2**20, 2**20 + 1  # address noise that the search does not reach
REFERENCE = "reference, 40 steps"
ESTIMATORS = (
    ("1", "euler"), ("2", "euler"), ("3", "euler"), ("all", "euler"), ("3", "ab2"), ("all", "ab2"), ("all", "dpmpp2m"),
    ("respaced 3", "dpmpp2m"), ("respaced 5", "euler"), ("respaced 5", "dpmpp2m"),
)  # fmt: skip


# --- numbers ---------------------------------------------------------------------------------------------------------------


def measure(
    s: Setting, draw: Callable, kernel: flow.Kernel, prompts: np.ndarray, members: int, epoch: int = FIGURE_EPOCH
) -> dict[str, Any]:
    """What a kernel does to the gains.

    Args:
      s: where the trajectories come from.
      draw: of `calibrate.make_draw`.
      kernel: table [T].
      prompts: indices of training prompts, [P].
      members: trajectories of each.
      epoch: addresses the noise, which is the same for every kernel.

    Returns:
      "excess_predicted" and "excess_measured" [T], and under "rewards", for each reward and "total": "positive", "negative", "zero" (shares
      [T]), "positive_error" (its standard error, clustered by prompt), "std" (within groups), "reward" [T+1], and "rank" and "difference"
      [T], rank correlation within groups and mean absolute difference of R at the step and at the trajectory's own end.
    """
    of, batch = np.repeat(prompts, members), batch_size(s.config)
    count = len(of)
    value: dict[str, list] = {}
    gains: dict[str, list] = {}
    squares = []
    for begin in range(0, count, batch):
        ids = np.arange(begin, begin + batch)
        rows = np.minimum(ids, count - 1)  # the last call is filled up, and cut below
        drawn = draw(kernel, epoch, of[rows].tolist(), ids)
        kept = slice(0, min(batch, count - begin))
        for name in drawn.rewards:
            value.setdefault(name, []).append(drawn.rewards[name][:, kept])
            gains.setdefault(name, []).append(drawn.gains[name][:, kept])
        levels = jnp.asarray(s.tables.levels)
        squares.append(np.asarray(_spread(drawn.trajectory, drawn.clean[: len(levels)], levels))[..., kept])
    ratio = np.full(len(s.tables.sigmas) - 1, np.nan)
    noisy, quiet = np.concatenate(squares, axis=-1).mean(-1, dtype=np.float64)  # [levels] each
    below = s.tables.sigmas[1:][s.tables.levels]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio[s.tables.levels] = np.sqrt(np.maximum(1.0 + (noisy - quiet) / below**2, 0.0))
    return {
        "excess_predicted": calibration.noise_ratio(kernel, s.tables.sigmas),
        "excess_measured": ratio,
        "rewards": {name: balance(np.hstack(value[name]), np.hstack(gains[name]), members) for name in value},
    }


def balance(value: np.ndarray, gains: np.ndarray, members: int) -> dict[str, np.ndarray]:
    """Statistics of rewards [T+1, B] and gains [T, B] whose groups are `members` trajectories in a row; see `measure`."""
    groups = np.arange(value.shape[1]) // members
    shares = credit.gain_balance(gains, groups)
    there = ~np.isnan(gains)
    residual = np.where(there, (gains > 0) - shares["positive"][:, None], 0.0)
    by_prompt = residual.reshape(len(gains), -1, members).sum(-1)  # [T, prompts]
    n = by_prompt.shape[1]
    error = np.sqrt((by_prompt**2).sum(1) * n / max(n - 1, 1)) / np.maximum(there.sum(1), 1)
    end = np.broadcast_to(value[-1], value[:-1].shape)
    return {name: shares[name] for name in ("positive", "negative", "zero", "std")} | {
        "positive_error": error,
        "reward": _mean(value),
        "rank": rank_correlation(value[:-1], end, members),
        "difference": _mean(np.abs(value[:-1] - end)),
    }


def rank_correlation(a: np.ndarray, b: np.ndarray, members: int) -> np.ndarray:
    """Spearman's correlation of a and b [L, B] within groups of `members` in a row, mean over the groups where both vary and none failed;
    NaN where there is none. [L]"""
    a, b = (x.reshape(len(x), -1, members) for x in (a, b))
    whole = np.isfinite(a).all(-1) & np.isfinite(b).all(-1)
    a, b = (stats.rankdata(np.where(whole[..., None], x, 0.0), axis=-1) - (members + 1) / 2 for x in (a, b))
    length = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    good = length > 0
    return _mean(np.where(good, (a * b).sum(-1) / np.where(good, length, 1.0), np.nan))


@jax.jit
def _spread(trajectory: flow.Trajectory, clean: jax.Array, levels: jax.Array) -> jax.Array:
    """Mean squares, over dimensions, around (1 - s) times the image to which the latent before the step completes: of the latent after
    the step, and of that of an ODE step. Their difference is the noise that the step added, less what it took away. [2, levels, B]"""
    x, v = trajectory.latents[levels], trajectory.velocity[levels]
    t, s = (trajectory.sigmas[levels + i].reshape((-1,) + (1,) * (x.ndim - 1)) for i in (0, 1))
    after = jnp.stack([trajectory.latents[levels + 1], x - (t - s) * v])
    return jnp.mean(((after - ((1.0 - s) * clean)[None]) ** 2).reshape(*after.shape[:3], -1), axis=-1)


def accuracy(s: Setting, draw: Callable, kernel: flow.Kernel, prompts: np.ndarray, members: int) -> dict[str, Any]:
    """How well estimators of R rank the members of a group, against completions of the same latents by 40 steps (AB2).

    Args:
      s, draw, kernel, prompts, members: see `measure`; all trajectories are taken at once.

    Returns:
      For each estimator: "evaluations" (of the network, mean over the steps completed), "rank" and "difference" [T] against the
      reference, and "rank_end", "difference_end" against the reward of the trajectory's own end.
    """
    of, count = np.repeat(prompts, members).tolist(), len(prompts) * members
    of += of[-1:] * missing(s, count)  # cut below
    drawn = draw(kernel, ACCURACY_EPOCH, of, np.arange(len(of)))
    schemes = estimators(s)
    decode = phases.make_decode(s.config, s.policy, parallel.shares(s.config.parallel) if s.mesh else 1)
    uncond = s.policy.encode([""]) if s.config.sampling.guidance_scale != 1.0 else None

    @jax.jit
    def complete(params, trained, cond, uncond, latents, velocities):
        velocity, every = s.policy.velocity(params, trained, uncond), tuple(b for scheme in schemes.values() for b in scheme)
        return calibration.complete_from(velocity, latents, velocities, every, cond=cond, chunk=chunk(s.config, len(of)))

    clean = complete(s.policy.params, s.trained, drawn.cond, uncond, drawn.trajectory.latents, drawn.trajectory.velocity)
    weights, found = reward_weights(s.config), {}
    plain = s.tables._replace(scheme=s.tables.scheme[: len(s.tables.levels)])  # without paired baselines
    for i, name in enumerate(schemes):
        rows = clean[i * len(plain.levels) : (i + 1) * len(plain.levels)]
        images = jnp.concatenate([rows, drawn.trajectory.latents[-1:]])
        scored = loop._score(s.policy, decode, {n: s.scorers[n] for n in weights}, s.prompts, of, images)
        found[name] = rewards_and_gains(rewards.weighted_sum(scored, weights), plain, len(of))[0][:, :count]
    end = np.broadcast_to(found[REFERENCE][-1], found[REFERENCE][:-1].shape)
    result = {}
    for name, value in found.items():
        r, reference = value[:-1], found[REFERENCE][:-1]
        result[name] = {
            "evaluations": float(np.mean([len(branch.plan) for branch in schemes[name]])),
            "rank": rank_correlation(r, reference, members),
            "difference": _mean(np.abs(r - reference)),
            "rank_end": rank_correlation(r, end, members),
            "difference_end": _mean(np.abs(r - end)),
        }
    return result


def estimators(s: Setting) -> dict[str, tuple[flow.Branch, ...]]:
    """Schemes by name, each a branch from every level of `s.tables`; the run's own first, the reference last."""
    sigmas, shift = s.tables.sigmas, policies.shift(s.config, s.policy)
    own = s.config.completion
    result = {}
    for steps, solver in dict.fromkeys([(own.steps, own.solver), *ESTIMATORS]):
        completion = Completion(steps=steps, solver=solver)
        changed = dataclasses.replace(s.config, completion=completion)
        name = steps if steps.startswith("respaced") else f"n={'k' if steps == 'all' else steps}"
        result[f"{name} {solver}"] = phases.sampler(changed, sigmas, shift, step=0).scheme
    fine = []
    for level in s.tables.levels:
        nodes = flow.shift_sigma(np.linspace(flow.unshift_sigma(sigmas[level], shift), 0.0, 41), shift)
        fine.append(flow.Branch(int(level), flow.plan(np.append(sigmas[level], nodes[1:]), "ab2")))
    return result | {REFERENCE: tuple(fine)}


def _mean(x: np.ndarray) -> np.ndarray:
    """Mean over the last axis of what is there, NaN where nothing is."""
    there = np.isfinite(x)
    return np.where(there.any(-1), np.where(there, x, 0.0).sum(-1) / np.maximum(there.sum(-1), 1), np.nan)


# --- the report ------------------------------------------------------------------------------------------------------------


def write(s: Setting, folder: Path, options: Figure) -> Path:
    """Measures what is not measured yet and writes report.html, balance.png, accuracy.png and report.json into `folder`.

    Args:
      s: where the trajectories come from.
      folder: of a calibration, with its psi.json. Killed while measuring, the next call continues.
      options: what to measure.

    Returns:
      report.html.
    """
    found = json.loads((folder / "psi.json").read_text())
    sigmas, stochastic = s.tables.sigmas, s.tables.kernel.std > 0.0
    scale, multiplier = flow.flow_scale(sigmas), np.array(found["multiplier"])
    settings = {f"a = {a:g}": np.where(s.tables.trained, a, multiplier) for a in options.levels} | {"calibrated psi": multiplier}
    draw = make_draw(s)

    def kernel(levels: np.ndarray) -> flow.Kernel:
        return calibration.table(sigmas, levels * scale, stochastic)

    log = folder / "report.jsonl"
    done = {json.dumps(record["key"]): record["result"] for record in metrics.read(log)}

    def once(key: list, compute: Callable[[], dict]) -> dict:
        if json.dumps(key) not in done:
            print(f"measuring {key[0]}", flush=True)
            record = metrics.plain({"key": key, "result": compute()})
            metrics.append(log, record)
            done[json.dumps(key)] = record["result"]
        return done[json.dumps(key)]

    first = np.arange(max(options.prompts, options.accuracy_prompts)) % len(s.prompts.texts)  # again from the first where there are fewer
    sizes = [options.prompts, options.members]
    measured = {
        name: once([name, levels.tolist(), *sizes], lambda levels=levels: measure(s, draw, kernel(levels), first[: sizes[0]], sizes[1]))
        for name, levels in settings.items()
    }
    numbers = {"levels": {name: levels.tolist() for name, levels in settings.items()}, "measured": measured, "psi": found}
    if options.accuracy_prompts:
        sizes = [options.accuracy_prompts, options.accuracy_members]
        key = ["accuracy of completions", multiplier.tolist(), *sizes]
        numbers["accuracy"] = once(key, lambda: accuracy(s, draw, kernel(multiplier), first[: sizes[0]], sizes[1]))
    psi.write(folder / "report.json", numbers)
    return draw_report(folder, numbers, s.policy.name)


def draw_report(folder: Path, numbers: dict, model: str) -> Path:
    """report.html and the PNG files of numbers that are there."""
    found = numbers["psi"]
    note = f"{model}; rewards {', '.join(found['settings']['rewards'])}; {found['iterations']} iterations of "
    note += f"{found['settings']['trajectories']} trajectories, the last {found['averaged']} averaged"
    cards = [(f"{b:.2f}" if c else "–", f"step {i}") for i, (b, c) in enumerate(zip(found["multiplier"], found["calibrated"]))]
    shown = "".join(f"<div class=card style='min-width:60px'><b>{value}</b><span>{name}</span></div>" for value, name in cards)
    figure = _balance_figure(numbers)
    figure.savefig(folder / "balance.png", dpi=110)
    parts = [
        f"<h1>Calibration of exploration</h1><p class=note>{html.escape(note)}</p>",
        f"<p>Noise level of each denoising step, as the multiplier b of psi = b √(t / (1 − t)):</p><div class=cards>{shown}</div>",
        report._section("Balance of the gains", report._svg(figure) + _balance_note() + _balance_tables(numbers)),
        report._section("The search", report._svg(_trace_figure(found)) + _trace_note(found)),
    ]
    if "accuracy" in numbers:
        figure = _accuracy_figure(numbers["accuracy"])
        figure.savefig(folder / "accuracy.png", dpi=110)
        parts.append(report._section("What completions know of the reward", report._svg(figure) + _accuracy_tables(numbers["accuracy"])))
    details = html.escape(json.dumps({k: v for k, v in found.items() if k not in ("trace", "reward_by_level")}, indent=1))
    parts.append(report._section("psi.json, without its trace", f"<pre>{details}</pre>"))
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>Calibration</title><style>{report.STYLE}</style>"
    files.write(folder / "report.html", page + "<main>" + "".join(parts) + "</main></html>")
    return folder / "report.html"


COLORS = ("#8854d0", ACCENT, "#fa8231", INK, "#20bf6b", "#eb3b5a")


def _row(values: list) -> np.ndarray:
    return np.array([report._number(v) for v in values])


def _balance_figure(numbers: dict):
    measured = numbers["measured"]
    figure, axes = report._figure(4 * -(-len(measured) // 4) + 4, 2.9)
    for axis, (name, m) in zip(axes, measured.items()):
        total = m["rewards"]["total"]
        at = np.arange(len(total["positive"]))
        axis.bar(at, _row(total["positive"]), color=GOOD, yerr=_row(total["positive_error"]), ecolor=INK)
        axis.bar(at, -_row(total["negative"]), color=BAD)
        axis.axhline(0.0, color=INK, lw=0.8)
        axis.set_ylim(-1.05, 1.05)
        axis.set_title(f"{name}: gains + and −")
    for axis in axes[len(measured) : -4]:
        axis.remove()
    panels = ("noise level, as multiplier", "spread of the gains in groups", "mean reward of the completions", "noise left / noise due")
    for axis, title in zip(axes[-4:], panels):
        axis.set_title(title)
    for color, (name, m) in zip(COLORS, measured.items()):
        total = m["rewards"]["total"]
        lines = (numbers["levels"][name], total["std"], total["reward"], m["excess_predicted"])
        for axis, values in zip(axes[-4:], lines):
            axis.plot(np.arange(len(values)), _row(values), "-" if values is lines[-1] else "o-", ms=3, color=color, label=name)
        axes[-1].plot(np.arange(len(lines[-1])), _row(m["excess_measured"]), "o", ms=4, color=color)
    axes[-1].set_yscale("log")
    axes[-3].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.set_xlabel("denoising step")
    return figure


def _balance_note() -> str:
    text = (
        "Above: shares of positive and negative gains, the rest is exactly 0; whiskers are standard errors, clustered by prompt. "
        "Below, right: noise in a latent after its step over the noise that its level should have. Lines: by the closed form for an exact "
        "velocity. Dots: measured around the image to which the latent before the step completes."
    )
    return f"<p class=note>{text}</p>"


def _balance_tables(numbers: dict) -> str:
    names = {
        "positive": "share of positive gains", "negative": "share of negative gains", "std": "spread within groups",
        "reward": "mean reward of the completions (the last is the image's own)",
        "rank": "rank correlation of R with the image's own reward", "difference": "mean |R − the image's own reward|",
    }  # fmt: skip
    rows = {title: {n: m["rewards"]["total"][key] for n, m in numbers["measured"].items()} for key, title in names.items()}
    for key in ("excess_predicted", "excess_measured"):
        rows[key.replace("excess_", "noise left / noise due, ")] = {n: m[key] for n, m in numbers["measured"].items()}
    return "".join(_table(title, values) for title, values in rows.items())


def _trace_figure(found: dict):
    figure, axes = report._figure(2, 3.2)
    values = np.array(found["trace"]["value"]).reshape(found["iterations"], -1)
    counts = {name: np.array(found["trace"][name]) for name in ("positive", "negative", "zero")}
    map_ = np.linspace(0.0, 0.9, max(values.shape[1], 1))
    for i in np.flatnonzero(found["calibrated"]) if len(values) else []:
        color = (0.22 + 0.6 * map_[i], 0.40, 0.84 - 0.6 * map_[i])
        axes[0].plot(values[:, i], color=color, lw=1.2, label=f"step {i}")
        total = np.maximum(sum(part[:, i] for part in counts.values()), 1)
        axes[1].plot((counts["positive"][:, i] - counts["negative"][:, i]) / total, color=color, lw=0.8)
    axes[0].set_title("psi" if found["settings"]["calibration"]["mode"] == "printed" else "multiplier")
    axes[1].set_title("(positive − negative) / all")
    axes[1].axhline(0.0, color=INK, lw=0.8)
    axes[0].legend(frameon=False, fontsize=7, ncols=2)
    for axis in axes:
        axis.set_xlabel("iteration")
    return figure


def _trace_note(found: dict) -> str:
    ended = "The search came to rest." if found["came_to_rest"] else "The search ended at its number of iterations."
    bounds = f"At the lower bound: steps {found['at_low']}; at the upper: {found['at_high']}; not calibrated: {found['not_calibrated']}."
    chance = f"The rule calls a level of symmetric gains balanced with probability {found['chance_balanced']:.2f}; "
    return f"<p class=note>{ended} {bounds} {chance}above 1/2 such a level rises to the bound.</p>"


def _accuracy_figure(found: dict):
    figure, axes = report._figure(2, 3.6)
    for i, (name, a) in enumerate(found.items()):
        color, style = (SOFT, "s--") if name == REFERENCE else (COLORS[i % len(COLORS)], ("o-", "x--")[i // len(COLORS)])
        for axis, key in zip(axes, ("rank", "rank_end")):
            axis.plot(np.arange(len(a[key])), _row(a[key]), style, ms=4, lw=1.2, color=color, label=name)
    axes[0].set_title("rank correlation of R within groups, with the reference")
    axes[1].set_title("with the reward of the trajectory's own end")
    axes[0].legend(frameon=False, fontsize=7, ncols=2)
    for axis in axes:
        axis.set_xlabel("denoising step")
    return figure


def _accuracy_tables(found: dict) -> str:
    note = "Evaluations of the network per completion: " + ", ".join(f"{name} {a['evaluations']:.1f}" for name, a in found.items()) + "."
    titles = {
        "rank": "rank correlation with the reference", "difference": "mean |R − reference|",
        "rank_end": "rank correlation with the image's own reward", "difference_end": "mean |R − the image's own reward|",
    }  # fmt: skip
    tables = "".join(_table(title, {name: a[key] for name, a in found.items()}) for key, title in titles.items())
    return f"<p class=note>{html.escape(note)}</p>{tables}"


def _table(title: str, rows: dict[str, list]) -> str:
    """Rows of numbers by denoising step."""
    width = max(len(values) for values in rows.values())
    head = "".join(f"<th>{i}</th>" for i in range(width))
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>" + "".join(f"<td>{'–' if v is None else format(v, '.3g')}</td>" for v in values) + "</tr>"
        for name, values in rows.items()
    )
    return f"<h3>{html.escape(title)}</h3><table><tr><th>step</th>{head}</tr>{body}</table>"
