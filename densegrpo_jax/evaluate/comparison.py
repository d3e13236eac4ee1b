"""Two evaluations side by side: the paired difference, and a page of images."""

import base64
import html
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from densegrpo_jax.evaluate.intervals import RESAMPLES, estimate, scores_of
from densegrpo_jax.evaluate.manifest import differences, read, write_whole
from densegrpo_jax.train import metrics, report


def compare(before: Path, after: Path, out: Path | None = None, shown: int = 48) -> tuple[Path, dict]:
    """The paired difference of two evaluations over the images that both have, and a page of those images side by side.

    Args:
      before: folder of a finished evaluation, A.
      after: another, B.
      out: HTML file to write; by default in B, named after A.
      shown: pairs of images on the page.

    Returns:
      The file, and the numbers, which are also written beside it as JSON: "A", "B" and "difference" (B - A), each as of `summarize`
      over the pairs in which both have a score; and "settings", what else differs.

    Raises:
      ValueError: not two finished evaluations of the same seed with a common prompt and reward, or a scorer of other weights.
    """
    folders = [Path(folder).expanduser() for folder in (before, after)]
    manifests = [read(folder) for folder in folders]
    for folder in folders:
        if not (folder / "summary.json").exists():
            raise ValueError(f"{folder}: this evaluation is not finished; its command continues it")
    if (seeds := [m["sampling"]["seed"] for m in manifests])[0] != seeds[1]:
        raise ValueError(f"seeds {seeds[0]} and {seeds[1]} are other noise: nothing is paired; evaluate both with one seed")
    names = [name for name in manifests[0]["rewards"] if name in manifests[1]["rewards"]]
    if not names:
        raise ValueError(f"no reward is in both: {', '.join(manifests[0]['rewards'])}; {', '.join(manifests[1]['rewards'])}")
    for name in names:
        if manifests[0]["rewards"][name] != manifests[1]["rewards"][name]:
            raise ValueError(f"reward {name!r} had other weights in {before} than in {after}: its scores do not compare")
    found = [{(r["prompt"], r["image"]): r for r in metrics.read(folder / "items.jsonl")} for folder in folders]
    places = [place for place in found[0] if place in found[1]]
    for place in places:
        texts = [records[place]["text"] for records in found]
        if texts[0] != texts[1]:
            raise ValueError(f"prompt {place[0]} is {texts[0]!r} in {before} and {texts[1]!r} in {after}: not the same prompts")
    if not places:
        raise ValueError(f"{before} and {after} have no image of the same prompt and number")

    pairs = [[records[place] for place in places] for records in found]
    prompt, tag = np.array([place[0] for place in places]), [r["tag"] for r in pairs[0]]
    numbers: dict[str, Any] = {part: {"rewards": {}} for part in ("A", "B", "difference")}
    for name in names:
        a, b = (scores_of(records, name) for records in pairs)
        both = np.isfinite(a) & np.isfinite(b)
        for part, value in (("A", a), ("B", b), ("difference", b - a)):
            numbers[part]["rewards"][name] = estimate(np.where(both, value, np.nan), prompt, tag)
    numbers |= {"pairs": len(places), "unpaired": [len(records) - len(places) for records in found]}
    numbers["settings"] = differences(*manifests)
    path = folders[1] / f"against_{folders[0].absolute().name}.html" if out is None else Path(out).expanduser()
    if path.suffix != ".html":
        raise ValueError(f"out = {path}: must be a .html file")
    write_whole(path, _page(folders, numbers, pairs, shown))
    write_whole(path.with_suffix(".json"), json.dumps(metrics.plain(numbers), indent=1))
    return path, numbers


def _page(folders: list[Path], numbers: dict, pairs: list[list[dict]], shown: int) -> str:
    a, b = (html.escape(folder.absolute().name) for folder in folders)
    note = f"A: {a}. B: {b}. {numbers['pairs']} pairs of images with the same prompt and initial noise."
    settings = "\n".join(numbers["settings"]) or "none"
    parts = [
        f"<h1>{b} against {a}</h1><p class=note>{note}</p>",
        report._section("Difference B - A", _table(numbers)),
        report._section("Images", _pictures(folders, pairs, shown)),
        report._section("What else differs between the manifests", f"<pre>{html.escape(settings)}</pre>"),
    ]
    style = report.STYLE + ".two{display:flex;gap:4px}.two img{width:50%;min-width:0}"
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>{b} against {a}</title><style>{style}</style>"
    return page + "<main>" + "".join(parts) + "</main></html>"


def _table(numbers: dict) -> str:
    rows = ["<tr><th>reward</th><th>images</th><th>A</th><th>B</th><th>difference</th><th>95 % interval</th></tr>"]
    for name, whole in numbers["difference"]["rewards"].items():
        three = [whole, *(numbers[side]["rewards"][name] for side in "AB")]
        kinds = [(name, *three), *((f"– {tag}", *(part["tags"][tag] for part in three)) for tag in whole.get("tags", ()))]
        if "overall" in whole:
            kinds.append(("– mean of tags", *(part["overall"] for part in three)))
        for label, difference, a, b in kinds:
            cells = [html.escape(label), str(difference.get("images", "")), f"{a['mean']:.4f}", f"{b['mean']:.4f}"]
            cells.append(f"{difference['mean']:+.4f}")
            cells.append(f"{difference['low']:+.4f} to {difference['high']:+.4f}" if np.isfinite(difference["low"]) else "")
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    missing = {name: whole["missing"] for name, whole in numbers["difference"]["rewards"].items() if whole["missing"]}
    left_out = "".join(f" {html.escape(name)}: {count} pairs without a score are left out." for name, count in missing.items())
    return f"<table>{''.join(rows)}</table><p class=note>Intervals: bootstrap over prompts, {RESAMPLES} resamples.{left_out}</p>"


def _pictures(folders: list[Path], pairs: list[list[dict]], shown: int) -> str:
    chosen = np.unique(np.linspace(0, len(pairs[0]) - 1, min(shown, len(pairs[0]))).round().astype(int))
    cells = []
    for i in chosen:
        a, b = pairs[0][i], pairs[1][i]
        files = [folder / "images" / Path(record["file"]).name for folder, record in zip(folders, (a, b))]
        with Image.open(files[0]) as image:
            kind = "class=pixels " if image.width <= 128 else ""  # small ones are magnified
        data = [base64.b64encode(file.read_bytes()).decode() for file in files]
        images = [f'<img {kind}src="data:image/png;base64,{text}">' for text in data]
        scores = "; ".join(f"{name} {_score(a, name)} → {_score(b, name)}" for name in a["scores"] if name in b["scores"])
        caption = f"{html.escape(a['text'])}<br>{html.escape(scores)}"
        cells.append(f"<figure><div class=two>{''.join(images)}</div><figcaption>{caption}</figcaption></figure>")
    note = f"Left: A. Right: B. {len(chosen)} of {len(pairs[0])} pairs, evenly spread, not chosen."
    return f"<div class=pairs>{''.join(cells)}</div><p class=note>{note}</p>"


def _score(record: dict, name: str) -> str:
    value = record["scores"][name]
    return "none" if value is None else f"{value:.3f}"
