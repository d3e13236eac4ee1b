"""report.html: what a run did, in pictures, in one file that needs nothing beside it. Rewritten while the run goes on."""

import base64
import html
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from densegrpo_jax import parallel
from densegrpo_jax.config import reward_name
from densegrpo_jax.rewards.health import alarms, paired_change
from densegrpo_jax.train import checkpoint, files, metrics

INK, ACCENT, GOOD, BAD, SOFT = "#1f2933", "#3867d6", "#20bf6b", "#eb3b5a", "#cbd2d9"

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1f2933;background:#f7f8fa;margin:0}
main{max-width:1080px;margin:0 auto;padding:32px 24px}
h1{font-size:26px;margin:0 0 4px} h2{font-size:19px;margin:36px 0 8px}
section{background:#fff;border:1px solid #e4e7eb;border-radius:10px;padding:16px 20px;margin:14px 0}
.cards{display:flex;flex-wrap:wrap;gap:12px}
.card{background:#fff;border:1px solid #e4e7eb;border-radius:10px;padding:12px 18px;min-width:150px}
.card b{display:block;font-size:24px}.card span{color:#616e7c;font-size:13px}
.pairs{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:14px}
img.pixels{image-rendering:pixelated;width:100%} figure{margin:0} figcaption{color:#616e7c;font-size:13px}
table{border-collapse:collapse;font-size:14px}td,th{padding:2px 14px 2px 0;text-align:left;vertical-align:top}
pre{font-size:12px;overflow:auto;max-height:340px;margin:0} svg{max-width:100%;height:auto}
.note{color:#616e7c;font-size:14px}
"""


def write(workdir: Path) -> Path:
    """Writes workdir/report.html from the metrics, evaluations and images there; whole or not at all.

    Args:
      workdir: of a run.

    Returns:
      The file.
    """
    if not parallel.primary():
        return workdir / "report.html"
    steps, evaluations = metrics.read(workdir / "metrics.jsonl"), comparable(workdir / "evaluation.jsonl")
    config, manifest = (json.loads((workdir / name).read_text()) for name in ("config.json", "manifest.json"))
    pair = compared(workdir)
    parts = [_head(steps, pair, config, manifest)]
    if pair:
        parts += [_section("Against the base model, held-out", _comparison(*pair))]
    if evaluations:
        parts += [_section("Before and after", _pictures(workdir, evaluations))]
    if steps:
        parts += [_section("Reward", _rewards(steps, evaluations, config)), _section("Along the trajectory", _levels(steps))]
        parts += [_section("Health", _health(steps, config) + _kept(workdir))]
    details = html.escape(json.dumps({"config": config, "manifest": manifest}, indent=1))
    parts.append(_section("Settings and versions", f"<pre>{details}</pre>"))
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(workdir.name)}</title><style>{STYLE}</style>"
    files.write(workdir / "report.html", page + "<main>" + "".join(parts) + "</main></html>")
    return workdir / "report.html"


def paired_difference(before: dict, after: dict, name: str | None = None) -> tuple[float, float]:
    """Mean difference of two evaluations on the same prompts and noise, and its standard error clustered by prompt.

    Args:
      before: record of evaluation.jsonl.
      after: another.
      name: a reward; None for the weighted total.
    """
    pick = (lambda r: r["total"]) if name is None else (lambda r: r["rewards"][name])
    return paired_change(pick(before), pick(after), before["prompt"])


def compared(workdir: Path) -> tuple[dict, dict] | None:
    """The base model and the newest weights on the same prompts and noise: the large comparison if there is one, else the latest
    evaluation; None while there are not two."""
    for name in ("final.jsonl", "evaluation.jsonl"):
        records = comparable(workdir / name)
        if len(records) > 1:
            return records[0], records[-1]
    return None


def comparable(path: Path) -> list[dict]:
    """Evaluations of the same prompts as the last one: what is evaluated may change while a run goes on."""
    records = metrics.read(path)
    return [record for record in records if record["prompt"] == records[-1]["prompt"]]


def summary(before: dict, after: dict) -> str:
    """Lines for the terminal: each reward of the base model and after training, and the difference with its standard error."""
    lines = [f"held-out, {len(after['prompt'])} images of {len(set(after['prompt']))} prompts, against the base on the same noise:"]
    for name in after["rewards"]:
        mean, error = paired_difference(before, after, name)
        lines.append(f"  {name:<24} {_mean(before, name):.4f} -> {_mean(after, name):.4f}   {mean:+.4f} (standard error {error:.4f})")
    return "\n".join(lines)


def _mean(record: dict, name: str, chosen: np.ndarray | slice = slice(None)) -> float:
    return float(np.nanmean(np.array(record["rewards"][name], float)[chosen]))


# --- sections ----------------------------------------------------------------------------------------------------------


def _head(steps, pair, config, manifest) -> str:
    cards = [(f"{len(steps)} / {config['run']['steps']}", "training steps")]
    if pair:
        mean, error = paired_difference(*pair)
        cards.append((f"{mean:+.4f}", f"held-out reward against the base (± {error:.4f})"))
        cards.append((f"{np.nanmean(np.array(pair[1]['total'], float)):.4f}", "held-out reward now"))
    if steps:
        cards.append((f"{np.median([s['seconds'] for s in steps]):.2f} s", "per training step (median)"))
        shares = [s["speed"]["mfu"] for s in steps if s.get("speed", {}).get("mfu")]
        if shares:
            cards.append((f"{np.median(shares):.0%}", "MFU, useful FLOPs over what the devices can do (median)"))
        cards.append((f"{manifest['evaluations_per_trajectory']}", "network evaluations per trajectory"))
    shown = "".join(f"<div class=card><b>{value}</b><span>{html.escape(name)}</span></div>" for value, name in cards)
    method = html.escape(f"{config['credit']['method']} on {manifest['model']}, rewards {', '.join(config['rewards'])}")
    return f"<h1>DenseGRPO run</h1><p class=note>{method}</p><div class=cards>{shown}</div>"


def _comparison(before, after) -> str:
    """Tables: each reward, and each kind of prompt where the prompts have kinds."""
    rows = ["<tr><th>reward</th><th>base</th><th>now</th><th>difference</th><th>standard errors</th></tr>"]
    for name in after["rewards"]:
        mean, error = paired_difference(before, after, name)
        cells = [html.escape(name), f"{_mean(before, name):.4f}", f"{_mean(after, name):.4f}", f"{mean:+.4f} ± {error:.4f}"]
        cells.append(f"{mean / error:+.1f}" if error > 0 else "")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    note = f"{len(after['prompt'])} images of {len(set(after['prompt']))} prompts; ± is one standard error, clustered by prompt."
    text = f"<table>{''.join(rows)}</table><p class=note>{note}</p>"
    kinds = [kind for kind in dict.fromkeys(after.get("kind", [])) if kind]
    if not kinds:
        return text
    of = np.array(after["kind"])
    rows = ["<tr><th>kind</th><th>images</th>" + "".join(f"<th>{html.escape(name)}</th>" for name in after["rewards"]) + "</tr>"]
    for kind in kinds:
        cells = [html.escape(kind), str((of == kind).sum())]
        cells += [f"{_mean(before, n, of == kind):.3f} → {_mean(after, n, of == kind):.3f}" for n in after["rewards"]]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return text + f"<table>{''.join(rows)}</table>"


def _pictures(workdir: Path, evaluations) -> str:
    """Pairs of images, base model and now, of the same prompt and noise."""
    prompts = json.loads((workdir / "samples" / "prompts.json").read_text())
    strips = [Image.open(workdir / "samples" / f"{record['done']:06d}.png").convert("RGB") for record in (evaluations[0], evaluations[-1])]
    side = strips[0].width // len(prompts)
    cells = []
    for i, prompt in enumerate(prompts):
        pair = Image.new("RGB", (2 * side + max(1, side // 16), strips[0].height), "white")
        for k, strip in enumerate(strips):
            pair.paste(strip.crop((i * side, 0, (i + 1) * side, strip.height)), (k * (pair.width - side), 0))
        buffer = io.BytesIO()
        pair.save(buffer, "PNG")
        data = base64.b64encode(buffer.getvalue()).decode()
        image = f'<img class=pixels src="data:image/png;base64,{data}">'
        cells.append(f"<figure>{image}<figcaption>{html.escape(prompt)}</figcaption></figure>")
    note = f"Left: base model. Right: after {evaluations[-1]['done']} steps. Same prompt, same noise, ODE sampling; not chosen."
    return f"<div class=pairs>{''.join(cells)}</div><p class=note>{note}</p>"


def _rewards(steps, evaluations, config) -> str:
    names = sorted(evaluations[0]["rewards"]) if evaluations else []
    figure, axes = _figure(1 + len(names), 3.1)
    axis = axes[0]
    axis.plot([s["step"] + 1 for s in steps], [_number(s["reward"]) for s in steps], color=SOFT, lw=1.5, label="training samples (SDE)")
    if evaluations:
        done = [e["done"] for e in evaluations]
        axis.plot(done, [np.nanmean(np.array(e["total"], float)) for e in evaluations], "o-", color=ACCENT, label="held-out (ODE)")
    axis.set_title("weighted reward")
    axis.legend(frameon=False)
    for axis, name in zip(axes[1:], names):
        pairs = [paired_difference(evaluations[0], e, name) for e in evaluations]
        mean, error = np.array(pairs).T
        axis.axhline(0.0, color=SOFT, lw=1)
        axis.fill_between(done, mean - 2 * error, mean + 2 * error, color=ACCENT, alpha=0.15)
        axis.plot(done, mean, "o-", color=ACCENT)
        axis.set_title(name + ("" if name in map(reward_name, config["rewards"]) else " (witness)"))
        axis.set_ylabel("held-out, minus the base")
    for axis in axes:
        axis.set_xlabel("training step")
    found = "".join(f"<p><b>{html.escape(alarm.line())}</b></p>" for alarm in alarms(evaluations, config["rewards"]))
    return found + _svg(figure) + "<p class=note>Bands are two standard errors, clustered by prompt.</p>"


def _levels(steps) -> str:
    recent = steps[-20:]
    rows = np.array([[_number(v) for v in s["level_reward"]] for s in recent])
    gains = [s["gains"] for s in recent if "gains" in s]
    advantage = np.full((len(recent), rows.shape[1] - 1), np.nan)
    for row, step in zip(advantage, recent):
        row[step["trained"]] = [_number(v) for v in step["advantage_abs"]]
    figure, axes = _figure(4 if gains else 2, 3.0)
    axes[0].plot(np.arange(rows.shape[1]), _mean_of(rows), "o-", color=ACCENT)
    axes[0].set_title("R along the trajectory (0 = noise)")
    if gains:
        table = {k: _mean_of(np.array([[_number(v) for v in g[k]] for g in gains])) for k in ("positive", "negative", "std")}
        positive, negative, spread = table.values()
        at = np.arange(len(positive))
        axes[1].bar(at, positive, color=GOOD)
        axes[1].bar(at, -negative, color=BAD)
        axes[1].axhline(0.0, color=INK, lw=0.8)
        axes[1].set_ylim(-1, 1)
        axes[1].set_title("positive and negative gains")
        axes[2].bar(at, spread, color=ACCENT)
        axes[2].set_title("spread of gains in groups")
    axes[-1].bar(np.arange(advantage.shape[1]), np.nan_to_num(_mean_of(advantage)), color=ACCENT)
    axes[-1].set_title("mean |advantage|")
    for axis in axes:
        axis.set_xlabel("denoising step")
    return _svg(figure) + f"<p class=note>Mean of the last {len(recent)} training steps.</p>"


def _health(steps, config) -> str:
    """What the update and the images look like; lines that should lie below another show that one dashed."""
    at, clip_range = [s["step"] + 1 for s in steps], config["objective"]["clip_range"]
    drift = [s.get("log_prob_drift", s["log_ratio_before"]) for s in steps]
    curves = (
        ("|log-ratio| before the first update", [_worst(s["log_ratio_before"]) for s in steps], clip_range),
        ("rollout against update, |log-ratio|", [_worst(levels) for levels in drift], clip_range),
        ("gradient RMS, and Adam's eps", [s["last_update"].get("grad_rms") for s in steps], config["optimizer"]["eps"]),
        ("clipped share", [s["clip"] for s in steps], None),
        ("ratio, smallest and largest", [[s["last_update"][f"ratio_{end}"] for end in ("min", "max")] for s in steps], None),
        ("KL to the base", [s["last_update"]["kl"] for s in steps], None),
        ("gradient norm", [s["last_update"]["grad_norm"] for s in steps], None),
        ("adapter norm", [s["last_update"]["adapter_norm"] for s in steps], None),
        ("groups with equal rewards", [s["equal_groups"] for s in steps], None),
        ("brightness and contrast", [[s["images"].get(name) for name in ("brightness", "contrast")] for s in steps], None),
        ("mean and std of the final latents", [[s["images"].get(name) for name in ("latent_mean", "latent_std")] for s in steps], None),
        ("not finite: updates left out", [_left_out(s) for s in steps], None),
    )
    figure, axes = _figure(len(curves), 2.6)
    for axis, (title, values, bound) in zip(axes, curves):
        values = np.array(values, np.float64)  # None becomes NaN
        axis.plot(at, np.maximum(values, 1e-12) if bound else values, color=ACCENT)
        if bound:
            axis.set_yscale("log")
            axis.axhline(bound, color=INK, lw=0.8, ls="--")
        axis.set_title(title)
    masked, bad = sum(s["masked"] for s in steps), _left_out(steps[-1])
    note = f"{masked} scores failed and were masked, and {bad} updates were left out as not finite, in {len(steps)} steps."
    return _svg(figure) + f"<p class=note>{note}</p>"


def _worst(levels: dict) -> float:
    """The largest over the trained steps, 0 where there is none."""
    values = np.array(levels["delta_log_prob_max"], np.float64)
    return float(values[np.isfinite(values)].max(initial=0.0))


def _left_out(step: dict) -> int:
    return step.get("nonfinite", {"total": 0})["total"]  # runs of before this was counted go on


def _kept(workdir: Path) -> str:
    path = workdir / checkpoint.RECORD
    kept = json.loads(path.read_text()) if path.exists() else {"best": None, "kept": []}
    if not kept["best"]:
        return ""
    step, listed = kept["best"]["step"], ", ".join(map(str, kept["kept"]))
    note = f"Checkpoints kept: {listed}; step {step} had the highest held-out reward, a choice by its height that is no result of the run."
    return f"<p class=note>{note}</p>"


# --- drawing -----------------------------------------------------------------------------------------------------------


def _figure(count: int, height: float):
    from matplotlib.figure import Figure  # no global state, no display

    columns = min(count, 4)
    rows = -(-count // columns)
    figure = Figure(figsize=(13, height * rows), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel())
    for axis in axes[count:]:
        axis.remove()
    for axis in axes[:count]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
        axis.title.set_fontsize(11)
    return figure, axes[:count]


def _svg(figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2><section>{body}</section>"


def _number(value) -> float:
    return float("nan") if value is None else float(value)


def _mean_of(rows: np.ndarray) -> np.ndarray:
    """Column means over what is there."""
    there = np.isfinite(rows)
    return np.where(there.any(0), np.where(there, rows, 0.0).sum(0) / np.maximum(there.sum(0), 1), np.nan)
