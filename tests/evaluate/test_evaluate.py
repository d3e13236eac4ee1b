"""`densegrpo eval`: the same bytes from the manifest, whatever happened in between; intervals that cover; pairs that are pairs."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from densegrpo_jax import cli, evaluate, flow, pipeline, policy
from densegrpo_jax.evaluate import Evaluate, noise_of
from densegrpo_jax.evaluate.comparison import compare
from densegrpo_jax.evaluate.intervals import bootstrap, estimate
from densegrpo_jax.models import lora as loras
from densegrpo_jax.models.adapter import Adapter, write_adapter
from densegrpo_jax.train import checkpoint, metrics
from densegrpo_jax.train.loop import train

QUICK = {"prompts": "toy", "rewards": ("toy_spot", "brightness"), "images": 2, "steps": 4, "batch_size": 4}


pytestmark = pytest.mark.usefixtures("plain_dispatch")


def brightness(images, prompts, metadata):
    """Gives no score for two of the prompts."""
    value = np.asarray(images, np.float64).mean((1, 2, 3)) / 255.0
    return value, np.array(["centre" not in prompt for prompt in prompts])


def run(out, model="toy", reward=brightness, **changes):
    return evaluate.main(Evaluate(**{"model": str(model), "out": out, **QUICK, **changes}), extra_rewards={"brightness": reward})


def content(folder):
    """Bytes of images, items and summary."""
    files = [*sorted((folder / "images").iterdir()), folder / "items.jsonl", folder / "summary.json"]
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """Two steps of training the toy, with a rate that shows."""
    jax.config.update("jax_debug_key_reuse", False)
    workdir, base = tmp_path_factory.mktemp("run") / "toy", cli.load_config("toy")
    changes = {
        "run": {"steps": 2, "workdir": workdir, "save_every": 1, "report_every": 0},
        "evaluation": {"every": 0},
        "optimizer": {"learning_rate": 0.005},
    }
    train(dataclasses.replace(base, **{k: dataclasses.replace(getattr(base, k), **v) for k, v in changes.items()}))
    return workdir


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The toy before training, all nine prompts, two images of each."""
    jax.config.update("jax_debug_key_reuse", False)
    return run(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def tuned(toy_run, tmp_path_factory):
    jax.config.update("jax_debug_key_reuse", False)
    return run(tmp_path_factory.mktemp("tuned") / "tuned", toy_run)


# ------------------------------------------------------------------------------------------------- the same again, to the bit


def test_what_is_written(base):
    items = metrics.read(base / "items.jsonl")
    assert [(r["prompt"], r["image"]) for r in items] == [(p, n) for p in range(9) for n in range(2)]
    assert len(list((base / "images").iterdir())) == 18
    for r in items:
        pixels = np.asarray(Image.open(base / r["file"]))
        assert pixels.shape == (8, 8, 3) and r["seed"] == 0
        centre = r["text"] == "a spot at the centre"
        assert r["valid"] == {"toy_spot": True, "brightness": not centre}
        expected = None if centre else pytest.approx(pixels.mean() / 255.0, abs=1e-12)
        assert r["scores"]["brightness"] == expected
    summary = json.loads((base / "summary.json").read_text())["rewards"]
    spot = summary["toy_spot"]
    assert spot["mean"] == pytest.approx(np.mean([r["scores"]["toy_spot"] for r in items]))
    assert spot["low"] < spot["mean"] < spot["high"]
    assert (summary["brightness"]["missing"], summary["brightness"]["images"], summary["brightness"]["prompts"]) == (2, 16, 8)


def test_manifest_repeats_the_evaluation_to_the_bit(base, tmp_path):
    args, expected = evaluate.repeated(Evaluate(repeat=base, out=tmp_path / "again"))
    again = evaluate.main(args, extra_rewards={"brightness": brightness}, expected=expected)
    assert content(again) == content(base)
    expected["prompts"]["sha256"] = "0" * 64
    with pytest.raises(ValueError, match=r"not be the same evaluation: prompts\.sha256: 0000"):
        evaluate.main(dataclasses.replace(args, out=tmp_path / "third"), extra_rewards={"brightness": brightness}, expected=expected)
    assert not (tmp_path / "third").exists()


@pytest.mark.mesh
def test_devices_share_the_images_of_a_batch(base, tmp_path):
    shared = run(tmp_path / "shared", devices=4, fsdp=2)
    for a, b in zip(metrics.read(base / "items.jsonl"), metrics.read(shared / "items.jsonl"), strict=True):
        assert a["file"] == b["file"] and a["scores"]["toy_spot"] == pytest.approx(b["scores"]["toy_spot"], abs=1e-2)  # a step of a pixel
    with pytest.raises(ValueError, match="devices: None -> 4"):
        run(base, devices=4)
    with pytest.raises(ValueError, match="batch_size = 4: 3 devices do not share it evenly"):
        run(tmp_path / "uneven", devices=3)


def test_killed_and_continued_is_the_same_to_the_bit(base, tmp_path):
    class Killed(Exception):
        pass

    calls = []

    def dying(images, prompts, metadata):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise Killed
        return brightness(images, prompts, metadata)

    out = tmp_path / "out"
    with pytest.raises(Killed):
        run(out, reward=dying)
    assert len(metrics.read(out / "items.jsonl")) == 8 and not (out / "summary.json").exists()
    with (out / "items.jsonl").open("a") as file:  # a whole line of a batch that is not, and a torn one
        file.write((base / "items.jsonl").read_text().splitlines()[8] + '\n{"prompt": 4, "ima')
    (out / "images" / "000004_000.png").write_bytes(b"torn")
    calls.clear()
    run(out, reward=lambda *args: calls.append(len(args[1])) or brightness(*args))
    assert calls == [4, 4, 2]  # what was scored is kept; none is filled up
    assert content(out) == content(base)
    calls.clear()
    run(out, reward=lambda *args: calls.append(len(args[1])) or brightness(*args))
    assert calls == [] and content(out) == content(base)


def test_a_missing_image_is_drawn_again(base, tmp_path):
    out = shutil.copytree(base, tmp_path / "out")
    (out / "images" / "000007_001.png").unlink()
    assert content(run(out)) == content(base)


def test_a_subset_draws_the_same_images(base, tmp_path):
    some = run(tmp_path / "some", count=3)
    assert len(metrics.read(some / "items.jsonl")) == 6
    one = run(tmp_path / "one", images=1, batch_size=5)  # other places in other batches
    for folder in (some, one):
        for file in (folder / "images").iterdir():
            pixels = [np.asarray(Image.open(f), int) for f in (file, base / "images" / file.name)]
            assert np.abs(pixels[0] - pixels[1]).max() <= 1  # rounding
    other = run(tmp_path / "other", count=1, seed=1)
    pixels = [np.asarray(Image.open(f / "images" / "000000_000.png"), int) for f in (base, other)]
    assert np.abs(pixels[0] - pixels[1]).max() > 5


def test_noise_is_addressed_by_prompt_and_image():
    key, shape = jax.random.key(3), (2, 2, 1)
    whole = noise_of(key, jnp.repeat(jnp.arange(4), 3), jnp.tile(jnp.arange(3), 4), shape)
    assert len(np.unique(np.asarray(whole))) == whole.size
    part = noise_of(key, jnp.array([3, 1]), jnp.array([0, 2]), shape)
    np.testing.assert_array_equal(part, whole[np.array([9, 5])])
    np.testing.assert_array_equal(whole[10], flow.initial_noise(key, 1, jnp.array([3]), shape)[0])


def test_an_image_that_is_not_finite_is_masked(tmp_path, monkeypatch):
    good = policy.toy

    def broken(config, mesh):
        p = good(config, mesh)
        return p._replace(decode=lambda params, x: jnp.where(jnp.arange(len(x))[:, None, None, None] == 1, jnp.nan, p.decode(params, x)))

    monkeypatch.setattr(policy, "toy", broken)
    items = metrics.read(run(tmp_path / "out", count=1, batch_size=2) / "items.jsonl")
    assert [r["valid"]["toy_spot"] for r in items] == [True, False]
    assert items[1]["scores"]["toy_spot"] is None


# ------------------------------------------------------------------------------------------------------ what can be evaluated


def test_run_weights_and_checkpoints(toy_run, base, tuned, tmp_path):
    of_base = run(tmp_path / "base", toy_run, weights="base")
    assert content(of_base) == content(base)
    assert content(tuned) != content(base)
    early = run(tmp_path / "early", toy_run, checkpoint=1, weights="last", count=1)
    manifest = json.loads((early / "manifest.json").read_text())
    assert manifest["adapter"]["training_steps"] == 1
    assert manifest["adapter"]["sha256"] == evaluate.manifest.hash_tree(checkpoint.trained(toy_run, "last", 1).tree)
    with pytest.raises(ValueError, match="no checkpoint of step 7; it keeps 1, 2"):
        run(tmp_path / "none", toy_run, checkpoint=7)


def test_prompts_and_rewards_come_from_run_or_task(toy_run, tmp_path):
    out = run(tmp_path / "run", toy_run, prompts=None, rewards=(), images=1)
    arguments = json.loads((out / "manifest.json").read_text())["arguments"]
    assert arguments["prompts"] == "toy" and arguments["rewards"] == ["toy_spot"]
    command = ["eval", "toy", "--task", "toy", "--count", "2", "--steps", "4", "--out", str(tmp_path / "task")]
    assert cli.main(command) == 0
    assert len(metrics.read(tmp_path / "task" / "items.jsonl")) == 2
    assert cli.main(["eval", "--repeat", str(tmp_path / "task"), "--out", str(tmp_path / "again")]) == 0
    assert content(tmp_path / "task") == content(tmp_path / "again")


def test_adapter_steps(toy_run, base, tuned, tmp_path):
    none, some, every = (run(tmp_path / str(m), toy_run, adapter_steps=m) for m in (0, 2, 4))
    images = [{name: data for name, data in content(f).items() if name.endswith("png")} for f in (none, some, every, base, tuned)]
    assert images[0] == images[3] and images[2] == images[4]
    assert images[1] not in (images[0], images[2])
    with pytest.raises(ValueError, match="adapter_steps = 5: must be from 0 to 4"):
        run(tmp_path / "five", toy_run, adapter_steps=5)
    with pytest.raises(ValueError, match="adapter_steps: the base model has no adapter"):
        run(tmp_path / "base", adapter_steps=1)


def test_the_shipped_model_and_an_adapter_of_it(tmp_path, capsys):
    command = ["--prompts", "scenes/heldout", "--count", "2", "--rewards", "scenes_compose_strict", "scenes_preference", "--steps", "2"]
    assert cli.main(["eval", "tiny", *command, "--out", str(tmp_path / "base")]) == 0
    assert "scenes_compose_strict" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "base" / "manifest.json").read_text())
    assert manifest["model"]["max_sequence_length"] == 16 and manifest["sampling"]["guidance_scale"] == 1.0
    assert manifest["rewards"]["scenes_compose_strict"]["sha256"] is None and len(manifest["rewards"]["scenes_preference"]["sha256"]) == 64

    configs = pipeline.read_configs(policy.TINY)
    lora = loras.init(jax.random.key(0), pipeline.abstract_params(configs, "transformer"), rank=2)
    write_adapter(
        tmp_path / "adapter", Adapter(jax.tree.map(lambda leaf: leaf + 0.1, lora), 4.0), pipeline.name_table(configs, "transformer"), "peft"
    )
    adapted = ["eval", str(tmp_path / "adapter"), *command, "--out", str(tmp_path / "adapted")]
    assert cli.main(adapted) == 2
    assert "of an adapter, name the --base" in capsys.readouterr().err
    assert cli.main([*adapted, "--base", "tiny"]) == 0
    assert json.loads((tmp_path / "adapted" / "manifest.json").read_text())["adapter"]["rank"] == 2
    assert cli.main(["eval", "--compare", str(tmp_path / "base"), str(tmp_path / "adapted")]) == 0
    numbers = json.loads((tmp_path / "adapted" / "against_base.json").read_text())
    assert set(numbers["difference"]["rewards"]["scenes_preference"]["tags"]) == {"position", "two_object"}
    assert any(line.startswith("adapter") for line in numbers["settings"])


# --------------------------------------------------------------------------------------------------------------------- numbers


def test_bootstrap_is_clustered():
    """Its spread is the standard error clustered by prompt: sqrt(sum of squared sums of residuals) / N."""
    rng, sizes = np.random.default_rng(0), np.tile([1, 3, 4], 20)
    prompt = np.repeat(np.arange(60), sizes)
    value = rng.normal(size=60)[prompt] + 0.3 * rng.normal(size=len(prompt))
    residual = value - value.mean()
    error = np.sqrt((np.bincount(prompt, residual) ** 2).sum()) / len(value)
    apart = np.sqrt((residual**2).sum()) / len(value)
    draws = bootstrap(value, prompt, 0)
    assert draws.mean() == pytest.approx(value.mean(), abs=0.1 * error)
    assert draws.std() == pytest.approx(error, rel=0.08)
    assert bootstrap(value, np.arange(len(value)), 0).std() == pytest.approx(apart, rel=0.08) and apart < 0.7 * error
    np.testing.assert_array_equal(draws, bootstrap(value, prompt, 0))
    assert (draws != bootstrap(value, prompt, 1)).any()


def test_estimate_by_tag_and_missing():
    value = np.array([1.0, 0.0, 1.0, 1.0, np.nan, 0.5])
    found = estimate(value, np.array([0, 0, 1, 1, 2, 2]), ["a", "a", "b", "b", "b", "b"])
    assert found["mean"] == pytest.approx(0.7) and (found["images"], found["missing"], found["prompts"]) == (5, 1, 3)
    assert found["tags"]["a"]["mean"] == 0.5 and np.isnan(found["tags"]["a"]["low"])  # one prompt gives no interval
    assert found["tags"]["b"]["mean"] == pytest.approx(2.5 / 3) and found["tags"]["b"]["low"] == 0.5
    assert found["overall"]["mean"] == pytest.approx((0.5 + 2.5 / 3) / 2)
    assert "tags" not in estimate(value, np.arange(6), [None] * 6)
    nothing = estimate(np.array([np.nan, np.nan]), np.array([0, 1]), [None, None])
    assert np.isnan(nothing["mean"]) and nothing["missing"] == 2


# ------------------------------------------------------------------------------------------------------------------ comparison


def test_comparison_is_paired(base, tuned, tmp_path):
    path, numbers = compare(base, tuned, tmp_path / "page.html")
    a, b = ([r["scores"]["toy_spot"] for r in metrics.read(f / "items.jsonl")] for f in (base, tuned))
    spot = numbers["difference"]["rewards"]["toy_spot"]
    assert spot["mean"] == pytest.approx(np.mean(np.subtract(b, a))) and spot["low"] < spot["mean"] < spot["high"]
    alone = json.loads((tuned / "summary.json").read_text())["rewards"]["toy_spot"]
    assert spot["high"] - spot["low"] < alone["high"] - alone["low"]  # what both share is gone
    assert numbers["difference"]["rewards"]["brightness"]["missing"] == 2
    assert json.loads(path.with_suffix(".json").read_text())["pairs"] == 18
    text = path.read_text()
    assert text.count("data:image/png;base64") == 36 and 'src="http' not in text


def test_comparison_takes_what_both_have(base, toy_run, tmp_path):
    few = run(tmp_path / "few", toy_run, count=3, images=3, rewards=("toy_spot",))
    _, numbers = compare(base, few, shown=2)
    assert (numbers["pairs"], numbers["unpaired"]) == (6, [12, 3])
    assert list(numbers["difference"]["rewards"]) == ["toy_spot"]
    assert (few / "against_base.html").read_text().count("data:image") == 4


def test_comparison_refuses_what_is_not_paired(base, tmp_path):
    with pytest.raises(ValueError, match="not the folder of an evaluation"):
        compare(base, tmp_path)
    with pytest.raises(ValueError, match="seeds 0 and 1"):
        compare(base, run(tmp_path / "seed", seed=1, count=2))
    with pytest.raises(ValueError, match="no reward is in both"):
        compare(run(tmp_path / "spot", rewards=("toy_spot",), count=2), run(tmp_path / "bright", rewards=("brightness",), count=2))
    (tmp_path / "lines.txt").write_text("a spot at the centre\n")
    with pytest.raises(ValueError, match=r"prompt 0 is 'a spot at the top left' in .* and 'a spot at the centre'"):
        compare(base, run(tmp_path / "text", prompts=str(tmp_path / "lines.txt")))
    unfinished = shutil.copytree(base, tmp_path / "unfinished")
    (unfinished / "summary.json").unlink()
    with pytest.raises(ValueError, match="not finished"):
        compare(unfinished, base)
    manifest = json.loads((base / "manifest.json").read_text())
    manifest["rewards"]["toy_spot"]["sha256"] = "another"
    other = shutil.copytree(base, tmp_path / "scorer")
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="reward 'toy_spot' had other weights"):
        compare(base, other)


def test_page_escapes_prompts(base, tmp_path):
    folders = [shutil.copytree(base, tmp_path / name) for name in ("a", "b<i>")]
    for folder in folders:
        items = (folder / "items.jsonl").read_text()
        (folder / "items.jsonl").write_text(items.replace("a spot at the centre", "<script>alert(1)</script> & more"))
    path, _ = compare(*folders, out=tmp_path / "page.html")
    text = path.read_text()
    assert "<script" not in text and "<i>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text


# -------------------------------------------------------------------------------------------------------------------- refusals


def test_another_evaluation_in_the_folder_is_refused(base, toy_run, tmp_path):
    out = shutil.copytree(base, tmp_path / "out")
    before = content(out)
    with pytest.raises(ValueError, match=r"holds another evaluation \(.*sampling\.steps: 4 -> 5"):
        run(out, steps=5)
    with pytest.raises(ValueError, match=r"adapter.*sha256"):
        run(out, toy_run)
    with pytest.raises(ValueError, match=r"prompts\.count: 9 -> 3"):
        run(out, count=3)
    with pytest.raises(ValueError, match=r"rewards\.brightness"):
        run(out, rewards=("toy_spot",))
    assert content(out) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not empty, and not the folder of an evaluation"):
        run(tmp_path / "mine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 10}, "count = 10: toy has 9 prompts; none is drawn twice"),
        ({"rewards": ("toy_spot", "toy_spot")}, "name each once"),
        ({"rewards": ("no_such",)}, "unknown reward 'no_such'"),
        ({"rewards": ()}, "say which --prompts and --rewards"),
        ({"weights": "ema"}, "weights = ema: toy is not the work folder of a run"),
        ({"base": "tiny"}, "base = tiny: only an adapter takes one, and toy is a model"),
        ({"height": 8}, "give both or neither"),
        ({"model": "nowhere"}, "neither a folder that exists"),
    ],
)
def test_what_does_not_work_is_said_first(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_settings_are_checked(tmp_path):
    for field, value in (("images", 0), ("steps", 1001), ("guidance", 0.5), ("seed", -1), ("batch_size", 0)):
        with pytest.raises(ValueError, match=f"{field} = .*must be from"):
            run(tmp_path / "out", **{field: value})
    with pytest.raises(ValueError, match="give one of"):
        Evaluate(out=tmp_path)
    with pytest.raises(ValueError, match="out: name the folder"):
        Evaluate("toy")


def test_hashes_see_what_matters(tmp_path):
    tree = {"a": {"x": np.arange(4.0)}, "b": np.ones(2, np.float32)}
    same = {"b": np.ones(2, np.float32), "a": {"x": np.arange(4.0)}}
    assert evaluate.manifest.hash_tree(tree) == evaluate.manifest.hash_tree(same)
    for other in ({**tree, "b": np.ones(2)}, {**tree, "b": np.ones((2, 1), np.float32)}, {**tree, "c": tree["b"]}):
        assert evaluate.manifest.hash_tree(tree) != evaluate.manifest.hash_tree(other)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    before = evaluate.manifest.hash_files(tmp_path)
    (tmp_path / "model.fp16.safetensors").write_bytes(b"half")  # another variant, which is not read
    (tmp_path / "notes.md").touch()
    assert evaluate.manifest.hash_files(tmp_path) == before != evaluate.manifest.hash_files(tmp_path, "fp16")
    (tmp_path / "model.safetensors").write_bytes(b"weight5")
    assert evaluate.manifest.hash_files(tmp_path) != before
