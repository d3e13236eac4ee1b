"""The preference scorer: a small CLIP (transformers' CLIPModel) that ranks pictures of the world by how well they fit a caption.

It is trained on the logit exp(logit_scale) * cosine with four losses, each a softmax over candidates of which one is right:

- drawn scenes against each other's captions, both ways (CLIP's loss; pairs that happen to fit are left out);
- a scene's caption against captions with one thing wrong (shape, number, colour, size, place, or a letter);
- a scene against the same scene corrupted, and of two strengths of noise or blur the weaker;
- of two pictures that the tiny model drew for one caption, the one that the judge prefers. Some get noise in their latents.

A fifth loss teaches the vision tower to see, which matching alone takes long to do: linear heads, dropped after training, name what stands
in each quarter of a drawn scene, or each letter.
"""

import json
import operator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from densegrpo_jax.models import clip
from densegrpo_jax.scenes import checker, glyphs, tiny_model, tokenizers, world
from densegrpo_jax.scenes.training import Run, fit, pooled_batches

PROJECTION = 64
CONFIG = clip.CLIPConfig(
    text=clip.CLIPTextConfig(
        vocab_size=tiny_model.VOCAB_CLIP,
        hidden_size=96,
        intermediate_size=384,
        projection_dim=PROJECTION,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizers.MAX_LENGTH,
        eos_token_id=tiny_model.VOCAB_CLIP - 1,
    ),
    vision=clip.CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        projection_dim=PROJECTION,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=world.SIZE,
        patch_size=8,
    ),
)
MODULE = clip.CLIP(CONFIG, scan_unroll=4)
MEAN, STD = 0.85, 0.25  # of pixels in [0, 1], all channels: most of a picture is background
MAX_LOG_SCALE = 4.0  # of the logit scale: at most 55
WRONG = 2  # captions with one thing wrong for each scene
GROUP = 8  # pictures the model draws for one caption
BLOCK = 256  # pictures drawn at once
LATENT_NOISE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.4)  # put into the latents of a group's pictures
CLEAR = 0.25  # difference of the judge's partial scores from which on a pair counts as clear


class Drawn(NamedTuple):
    """Pictures that the tiny model drew, by caption.

    Attributes:
      images: uint8 [captions, GROUP, 32, 32, 3].
      ids: CLIP tokens [captions, 16].
      partial, soft: the judge's scores [captions, GROUP].
    """

    images: np.ndarray
    ids: np.ndarray
    partial: np.ndarray
    soft: np.ndarray


SLOTS = 4  # quarters of the picture, or letters
NAMES = {"shape": 7, "color": 9, "size": 3, "letter": 27}  # what a slot may hold, 0 for nothing
QUARTER = ("shape", "color", "size")  # what the patches of a quarter say; the rest is the columns' affair


def init(seed: int) -> dict:
    """Returns random parameters: "clip", and the "heads" that serve in training only."""
    ids, pixels = jnp.zeros((1, tokenizers.MAX_LENGTH), jnp.int32), jnp.zeros((1, world.SIZE, world.SIZE, 3))
    width, all_names = CONFIG.vision.hidden_size, sum(NAMES.values())
    quarter = sum(NAMES[name] for name in QUARTER)
    shapes = {"whole": (width, SLOTS * all_names), "quarter": (width, quarter), "column": (width, NAMES["letter"])}
    return {
        "clip": MODULE.init(jax.random.key(seed), ids, pixels)["params"],
        "heads": {name: jnp.zeros(shape) for name, shape in shapes.items()},
    }


# ---- captions with one thing wrong


def spoil(request: dict, seed) -> dict:
    """Returns the request with exactly one attribute replaced by another value, phrased anew by `seed`."""
    rng = np.random.default_rng(seed)
    include = [dict(clause) for clause in request["include"]]
    fields = ("class", "color", "size", "position", "text")
    options = [(n, field) for n, clause in enumerate(include) for field in fields if field in clause]
    if request["tag"] == "word":
        options = [option for option in options if option[1] != "class"]
    if request["tag"] == "counting":
        options += [(0, "count")] * 2
    n, field = options[rng.integers(len(options))]
    clause = include[n]
    if field == "position":
        opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
        clause["position"] = [opposite[clause["position"][0]], clause["position"][1]]
    elif field == "text":
        place = rng.integers(len(clause["text"]))
        letter = rng.choice([x for x in glyphs.LETTERS if x != clause["text"][place]])
        clause["text"] = clause["text"][:place] + str(letter) + clause["text"][place + 1 :]
    else:
        values = {"class": world.SHAPES, "color": list(world.COLORS), "size": list(world.SIZES), "count": list(world.NUMBERS)}[field]
        used = [other.get(field) for other in include]
        clause[field] = values[rng.choice([k for k, value in enumerate(values) if value not in used])]
    return {"tag": request["tag"], "include": include, "prompt": world.phrase(request["tag"], include, (*seed, 1))}


# ---- data


def make_scenes(run: Run, tokens, seed, count: int, split: str = "train") -> dict:
    """Returns a pool of drawn scenes with a right caption, wrong captions, and a number that equal requests share."""
    scenes, images, requests = tiny_model.draw_pool(seed, count, split)
    wrong = [[spoil(request, (*seed, n, 2, k)) for k in range(WRONG)] for n, request in enumerate(requests)]
    keys = [json.dumps([sorted(map(str, request["include"]))]) for request in requests]
    numbers = {key: n for n, key in enumerate(sorted(set(keys)))}
    return {
        "images": images,
        "ids": tokens([request["prompt"] for request in requests])["clip"],
        "wrong": np.stack([tokens([row[k]["prompt"] for row in wrong])["clip"] for k in range(WRONG)], 1),
        "request": np.array([numbers[key] for key in keys], np.int32),
        "truth": np.stack([truth(scene) for scene in scenes]),
    }


def truth(scene: world.Scene) -> np.ndarray:
    """What stands in each slot of a scene: int [SLOTS, names], in the order of NAMES."""
    rows = np.zeros((SLOTS, len(NAMES)), np.int32)
    colors, sizes = list(world.COLORS), list(world.SIZES)
    for item in scene.items:
        slot = 2 * int(item.y > world.SIZE / 2) + int(item.x > world.SIZE / 2)
        rows[slot, :3] = world.SHAPES.index(item.shape) + 1, colors.index(item.color) + 1, sizes.index(item.size) + 1
    for slot, letter in enumerate(scene.word):
        rows[slot, 1], rows[slot, 3] = colors.index(scene.word_color) + 1, glyphs.LETTERS.index(letter) + 1
    return rows


def draw_groups(run: Run, tokens, flow_params, vae_params, vae_config, captions: int, split: str, seed: int) -> Drawn:
    """Lets the tiny model draw GROUP pictures for each of `captions` captions, a third each with 5, 10 and 20 Euler steps.

    Raises:
      ValueError: a third of the pictures is no multiple of BLOCK.
    """
    if captions * GROUP % (3 * BLOCK):
        raise ValueError(f"captions is {captions}; it must be a multiple of {3 * BLOCK // GROUP}")
    scenes = [world.sample_scene((run.seed, 96, seed, n), split) for n in range(captions)]
    requests = [world.metadata(scene, (run.seed, 96, seed, n, 1)) for n, scene in enumerate(scenes) for _ in range(GROUP)]
    ids = tokens([request["prompt"] for request in requests])
    side = tiny_model.MMDIT.sample_size
    shape = (BLOCK, side, side, tiny_model.VAE.latent_channels)
    level = jnp.tile(jnp.array(LATENT_NOISE), BLOCK // GROUP)[:, None, None, None]
    images = []
    for start in range(0, len(requests), BLOCK):
        noise_key, extra_key = jax.random.split(jax.random.fold_in(jax.random.key(run.seed + 2), start + 1_000_000 * seed))
        block = jax.tree.map(operator.itemgetter(slice(start, start + BLOCK)), ids)
        steps = (5, 10, 20)[3 * start // len(requests)]
        latents = tiny_model.sample_latents(flow_params, block, jax.random.normal(noise_key, shape), steps)
        images.append(tiny_model.decode_latents(vae_params, vae_config, latents + level * jax.random.normal(extra_key, shape)))
    images = np.concatenate(images)
    scores = {mode: checker.judge(images, requests, mode).reshape(captions, GROUP) for mode in ("partial", "soft")}
    return Drawn(images.reshape(captions, GROUP, *images.shape[1:]), ids["clip"][::GROUP], **scores)


def without_noise(drawn: Drawn) -> Drawn:
    """The pictures of each group that got no noise in their latents."""
    plain = np.array(LATENT_NOISE) == 0
    return Drawn(drawn.images[:, plain], drawn.ids, drawn.partial[:, plain], drawn.soft[:, plain])


# ---- the loss


def prepare(images) -> jax.Array:
    """uint8, or float in [0, 255] -> what the vision tower takes."""
    return (jnp.asarray(images, jnp.float32) / 255.0 - MEAN) / STD


def corrupt(key, images):
    """Returns two corrupted versions of pictures [B, 32, 32, 3] in [0, 255], the second the stronger: noise, blur, or a covered patch.

    Each is the picture mixed with a fully corrupted one, so that strength is one number per picture.
    """
    kind_key, strength_key, noise_key, place_key = jax.random.split(key, 4)
    count = len(images)
    strength = jnp.sort(jax.random.uniform(strength_key, (2, count), minval=0.05), axis=0)[:, :, None, None, None]
    kind = jax.random.randint(kind_key, (count,), 0, 3)[None, :, None, None, None]
    noisy = images[None] + 90.0 * strength**2 * jax.random.normal(noise_key, images.shape)[None]
    mean = jax.lax.reduce_window(images, 0.0, jax.lax.add, (1, 5, 5, 1), (1, 1, 1, 1), "SAME")
    area = jax.lax.reduce_window(jnp.ones_like(images[:1]), 0.0, jax.lax.add, (1, 5, 5, 1), (1, 1, 1, 1), "SAME")
    blurred = images[None] + strength * (mean / area - images)[None]
    centre = jax.random.uniform(place_key, (2, 1, count, 1, 1, 1), minval=6.0, maxval=26.0)
    axis = jnp.arange(world.SIZE, dtype=jnp.float32)
    half = 2.0 + 7.0 * strength
    covered = (jnp.abs(axis[None, None, :, None, None] - centre[0]) < half) & (jnp.abs(axis[None, None, None, :, None] - centre[1]) < half)
    covered = jnp.where(covered, jnp.array(world.BACKGROUND, jnp.float32)[None, None, None, None], images[None])
    both = jnp.where(kind == 0, noisy, jnp.where(kind == 1, blurred, covered))
    return jnp.clip(both, 0.0, 255.0)


def loss(params, key, batch):
    """The sum of the five losses of the module's docstring, in nats."""
    images = batch["images"].astype(jnp.float32)
    count = len(images)
    weak, strong = corrupt(key, images)
    pairs = batch["pairs"].astype(jnp.float32)  # [P, 2, 32, 32, 3], the judge prefers the first
    pixels = jnp.concatenate([images, weak, strong, pairs.reshape(-1, *images.shape[1:])])
    texts = jnp.concatenate([batch["ids"], batch["wrong"].reshape(-1, batch["ids"].shape[-1]), batch["pair_ids"]])
    clip_params = params["clip"]
    pictures, seen = MODULE.apply({"params": clip_params}, prepare(pixels), method="embed_images", mutable=["intermediates"])
    words = MODULE.apply({"params": clip_params}, texts, method="embed_text")
    scale = jnp.exp(jnp.minimum(clip_params["logit_scale"], MAX_LOG_SCALE))
    plain, weak, strong = pictures[:count], pictures[count : 2 * count], pictures[2 * count : 3 * count]
    pairs = pictures[3 * count :].reshape(-1, 2, PROJECTION)
    right, wrong, pair_words = words[:count], words[count : count * (1 + WRONG)], words[count * (1 + WRONG) :]

    def nats(logits):  # of the first candidate
        return -jax.nn.log_softmax(logits, axis=-1)[..., 0].mean()

    logits = scale * plain @ right.T
    same = batch["request"][:, None] == batch["request"][None]
    masked = jnp.where(same & ~jnp.eye(count, dtype=bool), -1e9, logits)
    both_ways = -(jnp.diag(jax.nn.log_softmax(masked, 0)) + jnp.diag(jax.nn.log_softmax(masked, 1))).mean() / 2
    true = jnp.diag(logits)
    wrong_logits = scale * jnp.einsum("bp,bwp->bw", plain, wrong.reshape(count, WRONG, PROJECTION))
    wrong_nats = nats(jnp.concatenate([true[:, None], wrong_logits], 1))
    weak_logit, strong_logit = (scale * (x * right).sum(-1) for x in (weak, strong))
    order_nats = nats(jnp.stack([true, weak_logit], 1)) + nats(jnp.stack([weak_logit, strong_logit], 1))
    pair_logits = scale * jnp.einsum("pkd,pd->pk", pairs, pair_words)
    pair_nats = nats(pair_logits)
    tokens = seen["intermediates"]["vision_model"]["tokens"][0][: 2 * count]
    named_nats = naming(params["heads"], tokens, jnp.tile(batch["truth"], (2, 1, 1)))
    logs = {"clip": both_ways, "wrong_nats": wrong_nats, "order": order_nats, "pair": pair_nats, "named": named_nats, "scale": scale}
    return both_ways + 2 * wrong_nats + order_nats + 2 * pair_nats + named_nats, logs


def naming(heads, tokens, labels):
    """Nats per slot and name of the heads' guesses, from tokens [B, 1 + N, D] and labels [B, SLOTS, names].

    The class token names everything; a quarter's patches its shape; the middle patches of a column its letter.
    """
    count, width = len(tokens), tokens.shape[-1]
    side = world.SIZE // CONFIG.vision.patch_size
    patches = tokens[:, 1:].reshape(count, 2, side // 2, 2, side // 2, width)
    quarters = patches.mean((2, 4)).reshape(count, SLOTS, width)
    columns = tokens[:, 1:].reshape(count, side, SLOTS, side // SLOTS, width)[:, side // 4 : -(side // 4)].mean((1, 3))
    whole = (tokens[:, 0] @ heads["whole"]).reshape(count, SLOTS, -1)
    total = 0.0
    for logits, names in ((whole, tuple(NAMES)), (quarters @ heads["quarter"], QUARTER), (columns @ heads["column"], ("letter",))):
        start = 0
        for name in names:
            guess = jax.nn.log_softmax(logits[..., start : start + NAMES[name]])
            start += NAMES[name]
            total -= jnp.take_along_axis(guess, labels[..., list(NAMES).index(name), None], axis=-1).mean()
    return total


# ---- training and measures


def ordered_pairs(rng, drawn: Drawn, count: int) -> dict:
    """Picks pairs from groups whose scores (mean of partial and soft) differ by at least .1, the better first."""
    score = (drawn.partial + drawn.soft) / 2
    rows = rng.integers(len(score), size=8 * count)
    a, b = rng.integers(GROUP, size=(2, 8 * count))
    keep = np.flatnonzero(score[rows, a] - score[rows, b] >= 0.1)[:count]
    rows, a, b = rows[keep], a[keep], b[keep]
    return {"pairs": np.stack([drawn.images[rows, a], drawn.images[rows, b]], 1), "pair_ids": drawn.ids[rows]}


@jax.jit
def _embed_images(params, images):
    return MODULE.apply({"params": params["clip"]}, prepare(images), method="embed_images")


@jax.jit
def _embed_text(params, ids):
    return MODULE.apply({"params": params["clip"]}, ids, method="embed_text")


def agreement(params, drawn: Drawn) -> dict[str, float]:
    """How the scorer's order of the pictures of one caption agrees with the judge's partial score.

    Returns:
      clear and all: the share of pairs in the same order, those more than CLEAR apart and all unequal ones; the same against the soft
      score; rank: Spearman's correlation with the mean of both scores, within captions where they differ, averaged.
    """
    from scipy.stats import spearmanr

    captions, group = drawn.partial.shape
    pictures = np.asarray(_embed_images(params, drawn.images.reshape(-1, *drawn.images.shape[2:]))).reshape(captions, group, -1)
    score = np.einsum("cgp,cp->cg", pictures, np.asarray(_embed_text(params, drawn.ids)))
    upper = np.triu_indices(group, 1)
    ours = (score[:, :, None] - score[:, None])[:, *upper]
    row = {}
    for name, judged in (("partial", drawn.partial), ("soft", drawn.soft)):
        theirs = (judged[:, :, None] - judged[:, None])[:, *upper]
        for kind, least in (("clear", CLEAR), ("all", 1e-6)):
            pairs = np.abs(theirs) > least
            row[f"{name}/{kind}"] = float((np.sign(ours) == np.sign(theirs))[pairs].mean())
    judged = (drawn.partial + drawn.soft) / 2
    row["rank"] = float(np.mean([spearmanr(score[n], judged[n]).statistic for n in range(captions) if np.ptp(judged[n]) > 1e-6]))
    return row


def train_scorer(run: Run, steps: int, flow_params, vae_params, vae_config, captions: int = 1536) -> Any:
    """Stage 3; measured by the agreement on clear pairs of held-out captions' pictures."""
    tokens = tiny_model.Tokens(run.workdir)
    draw = partial(draw_groups, run, tokens, flow_params, vae_params, vae_config)
    cache = run.workdir / "drawn.npz"
    if not cache.exists():
        drawn, heldout = draw(captions, "train", 0), draw(96, "heldout", 1)
        np.savez(cache, **{f"{name}{k}": value for k, d in enumerate((drawn, heldout)) for name, value in d._asdict().items()})
    with np.load(cache, allow_pickle=False) as file:
        drawn, heldout = (Drawn(**{name: file[f"{name}{k}"] for name in Drawn._fields}) for k in (0, 1))
    scenes = make_scenes(run, tokens, (run.seed, 95), 256, "heldout")
    noise = np.random.default_rng(run.seed).normal(size=scenes["images"].shape)

    def measure(params):
        right = np.asarray(_embed_text(params, scenes["ids"]))
        wrong = np.asarray(_embed_text(params, scenes["wrong"][:, 0]))
        row = agreement(params, heldout)
        means = []
        for sigma in (0, 16, 32, 64):
            pictures = np.asarray(_embed_images(params, np.clip(scenes["images"] + sigma * noise, 0, 255)))
            score = (pictures * right).sum(-1)
            if sigma == 0:
                row["wrong"] = float((score > (pictures * wrong).sum(-1)).mean())
                clean = score
            else:
                row[f"noise{sigma}"] = float((clean > score).mean())
            means.append(float(score.mean()))
        row |= {f"cosine{sigma}": mean for sigma, mean in zip((0, 16, 32, 64), means, strict=True)}
        return {"score": row["partial/clear"], **row}

    make = partial(_scene_pool, run, tokens)

    def batches(start):
        for step, batch in enumerate(pooled_batches(make, start, size=4096, batch=32, passes=8, seed=run.seed), start):
            yield batch | _fixed_pairs(np.random.default_rng((run.seed, 94, step)), drawn, 24)

    return fit("scorer", run, init(run.seed), loss, batches, steps, peak=1e-3, ema_decay=0.998, measure=measure)


def _scene_pool(run, tokens, number):
    return make_scenes(run, tokens, (run.seed, 4, number), 4096)


def _fixed_pairs(rng, drawn, count):
    pairs = ordered_pairs(rng, drawn, count)
    rows = np.resize(np.arange(len(pairs["pair_ids"])), count)  # one shape always: repeats if too few differ
    return {name: values[rows] for name, values in pairs.items()}
