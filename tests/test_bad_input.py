"""Bad input at every door: exit code 2, one line that names field, value and what is valid, no traceback, nothing written, and no model
loaded but where only its values are bad.

Every entry is an argument list with what the reason must say. `{bad}` stands for a folder of bad files, `{new}` for one that is empty.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import densegrpo_jax
from densegrpo_jax import cli, pipeline
from densegrpo_jax.scenes import toy
from densegrpo_jax.train import lock

TINY = Path(densegrpo_jax.__file__).parent / "scenes" / "tiny_sd3"
LONGEST = 400  # characters of a reason, without the folder of the bad files
LONGEST_LIST = 1000  # where it names tensors, a dozen of a kind
BOX = 18  # lines of what tyro says of a wrong type
LISTS = ("there are:\n", "bad line(s)\n")  # ends of first lines that a list follows


def linked(folder: Path) -> Path:
    """The tiny model as links to its files, to be spoilt one file at a time."""
    shutil.copytree(TINY, folder, copy_function=os.symlink)
    return folder


def spoil(folder: Path, name: str, content: bytes) -> None:
    path = linked(folder) / name
    path.unlink()
    path.write_bytes(content)


def changed(values: dict, **changes) -> bytes:
    return json.dumps({k: v for k, v in (values | changes).items() if v is not None}).encode()


@pytest.fixture(scope="session")
def bad(tmp_path_factory):
    """Bad files of every kind, made once."""
    root = tmp_path_factory.mktemp("bad")
    weights, config = "transformer/diffusion_pytorch_model.safetensors", "transformer/config.json"
    whole = (TINY / weights).read_bytes()
    tensors = load_file(TINY / weights)
    first = sorted(tensors)[0]

    def model(name, file, content):
        spoil(root / name, file, content)

    def stored(name, values):
        (linked(root / name) / weights).unlink()
        save_file(values, root / name / weights)

    (root / "empty").mkdir()
    model("no_tensors", weights, b"")
    model("cut_header", weights, whole[:100])
    model("cut_data", weights, whole[: len(whole) // 2])
    model("long", weights, whole + b"\0" * 64)
    model("huge_header", weights, (2**62).to_bytes(8, "little") + whole[8:])
    model("text_as_weights", weights, b"<html>404 not found</html>" * 9)
    stored("nan_weights", {k: np.full_like(v, np.nan) if k == first else v for k, v in tensors.items()})
    stored("infinite_weights", {k: np.full_like(v, np.inf) if k == first else v for k, v in tensors.items()})
    stored("int_weights", {k: v.astype(np.int32) if k == first else v for k, v in tensors.items()})
    stored("missing_tensor", {k: v for k, v in tensors.items() if k != first})
    stored("extra_tensor", tensors | {"another.weight": np.zeros(3, np.float16)})
    stored("wrong_shape", {k: np.zeros((3, 5), np.float16) if k == first else v for k, v in tensors.items()})
    model("of_the_vae", weights, (TINY / "vae/diffusion_pytorch_model.safetensors").read_bytes())
    (linked(root / "no_weights") / weights).unlink()
    (linked(root / "pickled") / weights).rename(root / "pickled/transformer/diffusion_pytorch_model.bin")
    (linked(root / "no_scheduler") / "scheduler/scheduler_config.json").unlink()
    shutil.rmtree(linked(root / "no_vae") / "vae")
    shutil.rmtree(linked(root / "no_tokenizer") / "tokenizer")
    (linked(root / "no_index") / "model_index.json").unlink()
    index = json.loads((TINY / "model_index.json").read_text())
    model("other_family", "model_index.json", changed(index, _class_name="StableDiffusionXLPipeline"))
    model("no_family", "model_index.json", b"{}")
    model("index_is_list", "model_index.json", b"[1]")
    model("index_is_text", "model_index.json", b"not json")
    model("index_is_deep", "model_index.json", b"[" * 100_000)
    values = json.loads((TINY / config).read_text())
    model("unknown_option", config, changed(values, rotary=True))
    model("negative_heads", config, changed(values, num_attention_heads=-1))
    model("other_width", config, changed(values, joint_attention_dim=7))
    model("empty_config", config, b"")
    schedule = json.loads((TINY / "scheduler/scheduler_config.json").read_text())
    model("bad_shift", "scheduler/scheduler_config.json", changed(schedule, shift=-1.0))
    model("karras", "scheduler/scheduler_config.json", changed(schedule, use_karras_sigmas=True))
    model("bad_tokenizer", "tokenizer/tokenizer.json", b"{")
    escaping = linked(root / "escaping")
    (escaping / weights).unlink()
    (escaping / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}')

    (root / "file").write_text("a file")
    (root / "model.safetensors").write_bytes(whole)
    save_file({"blocks.0.lora_A.weight": np.zeros((4, 8), np.float32), "blocks.0.lora_B.weight": np.zeros((8, 4), np.float32)},
              root / "lora_other.safetensors")  # fmt: skip
    layer = "transformer.transformer_blocks.0.attn.to_q.lora_"
    width = tensors["transformer_blocks.0.attn.to_q.weight"].shape[1]
    halves = {f"{layer}A.weight": np.zeros((4, width), np.float32), f"{layer}B.weight": np.zeros((width, 4), np.float32)}
    save_file(halves, root / "lora_rank.safetensors")
    save_file(halves | {f"{layer}A.weight": np.zeros((4, width + 8), np.float32)}, root / "lora_width.safetensors")
    save_file({f"{layer}A.weight": halves[f"{layer}A.weight"]}, root / "lora_half.safetensors")
    save_file(halves | {f"{layer}magnitude_vector": np.zeros(width, np.float32)}, root / "lora_dora.safetensors")
    save_file(halves, root / "lora_alpha.safetensors", {"lora_adapter_metadata": '{"transformer.r": 4, "transformer.lora_alpha": "much"}'})
    save_file({}, root / "lora_empty.safetensors")
    save_file({"transformer.x.lora_A.weight": np.full((4, 8), np.nan, np.float32)}, root / "lora_nan.safetensors")
    save_file({"text_encoder.x.lora_A.weight": np.zeros((4, 8), np.float32)}, root / "lora_text.safetensors")
    (root / "lora_cut.safetensors").write_bytes((root / "lora_nan.safetensors").read_bytes()[:40])

    lines = {
        "blank.txt": b"\n \n\n",
        "nothing.txt": b"",
        "nul.txt": b"a cat\n\0\0\0\n",
        "utf16.txt": "a cat\na dog\n".encode("utf-16"),
        "latin.txt": b"a caf\xe9\n",
        "long.txt": b"cat " * 25_000 + b"\n",
        "bom_nul.txt": b"\xef\xbb\xbfa\0b\n",
        "plain.txt": b"a cat\na dog\na cat\n",
        "list.jsonl": b"[1, 2]\n",
        "no_prompt.jsonl": b'{"text": "a cat"}\n',
        "number.jsonl": b'{"prompt": 3}\n',
        "empty_prompt.jsonl": b'{"prompt": " "}\n',
        "cut.jsonl": b'{"prompt": "a cat"\n',
        "deep.jsonl": b'{"prompt": "a", "x": ' + b"[" * 15_000 + b"\n",
        "include.jsonl": b'{"prompt": "a cat", "include": "cat"}\n',
        "count.jsonl": b'{"prompt": "a cat", "tag": "counting", "include": [{"class": "cat", "count": -1}]}\n',
    }
    for name, content in lines.items():
        (root / name).write_bytes(content)
    (root / "both").mkdir()
    (root / "both" / "train.txt").write_text("a cat\n")

    grid = np.linspace(1.0, 0.0, 11)
    half = np.full(10, 0.5)
    good = {"sigmas": grid.tolist(), "psi": half.tolist(), "multiplier": half.tolist(), "calibrated": [True] * 10}
    for name, content in {
        "psi_text.json": "no",
        "psi_list.json": "[]",
        "psi_missing.json": json.dumps({k: v for k, v in good.items() if k != "psi"}),
        "psi_short.json": json.dumps(good | {"psi": [0.5]}),
        "psi_edited.json": json.dumps(good | {"psi": [0.1] * 10}),
        "psi_nan.json": json.dumps(good | {"psi": [float("nan")] * 10}),
        "psi_negative.json": json.dumps(good | {"psi": [-0.5] * 10, "multiplier": [-0.5] * 10}),
    }.items():
        (root / name).write_text(content)

    (root / "no_function.py").write_text("x = 1\n")
    (root / "raises.py").write_text("def get_config():\n    raise ValueError('run.steps = 0: this config is not ready')\n")
    (root / "wrong_return.py").write_text("def get_config():\n    return 3\n")
    (root / "syntax.py").write_text("def get_config(:\n")
    (root / "imports.py").write_text("import no_such_package_of_ours\n")
    (root / "wrong_field.py").write_text(
        "from densegrpo_jax.config import Config, Run\n\n\ndef get_config():\n    return Config(run=Run(stepz=3))\n"
    )
    (root / "reward.py").write_text("x = 1\n")
    (root / "run_of_nothing" / "checkpoints").mkdir(parents=True)
    return root


def entry(name, argv, *said):
    return pytest.param(argv.split() if isinstance(argv, str) else argv, said, id=name)


def override(field, value, *said):
    """A field of the toy's config; the reason names it, and the value."""
    return entry(f"{field}={value}", ["train", "toy", f"--{field.replace('_', '-')}", *str(value).split()], f"{field} = {value}", *said)


NUMBERS = [  # field, values out of its range, what the range is called
    ("prompts.per_step", (0, -4), "1 to"),
    ("prompts.group_size", (1, 0, -24), "from 2 to .*compare the members of a group"),
    ("sampling.num_steps", (0, -1, 100000), "from 1 to 1000"),
    ("sampling.guidance_scale", ("nan", "inf", -1.0, 0.0), "from 1 to 1000"),
    ("sampling.chunk", (0, -8), "from 1 to"),
    ("sampling.decode_chunk", (0, -1), "from 1 to"),
    ("sampling.shift", (0.0, -3.0, "nan"), "a finite number above 0"),
    ("exploration.noise_level", (-0.7, "nan", "inf", 1000.0), "from 0 to 100"),
    ("exploration.window_size", (0, -1), "from 1 to"),
    ("exploration.window_start", (-1,), "from 0 to"),
    ("exploration.window_every", (0,), "from 1 to"),
    ("completion.tile", (0, -1), "from 1 to"),
    ("credit.eps", (-1.0, "nan"), "at least 0"),
    ("credit.clip", (0.0, -5.0, "inf"), "above 0"),
    ("credit.gamma", (-0.1, 1.5, "nan"), "from 0 to 1"),
    ("objective.clip_range", (0.0, -0.001, "nan"), "above 0"),
    ("objective.beta", (-0.01, "nan", "inf"), "at least 0"),
    ("adapter.rank", (-1,), "from 0 to"),
    ("adapter.alpha", (0.0, -1.0, "nan"), "above 0"),
    ("optimizer.learning_rate", (0.0, -0.001, "nan", "inf"), "above 0"),
    ("optimizer.b1", (1.0, -0.1, "nan"), "from 0 to 0.999"),
    ("optimizer.b2", (1.0, 2.0), "from 0 to 0.999"),
    ("optimizer.eps", (-1e-8, "nan"), "at least 0"),
    ("optimizer.weight_decay", (-1.0, "inf"), "at least 0"),
    ("optimizer.max_grad_norm", (0.0, -1.0, "nan"), "above 0"),
    ("optimizer.updates", (0, -2), "from 1 to"),
    ("optimizer.micro_batch", (0, -32), "from 1 to"),
    ("optimizer.ema_decay", (1.0, -0.5, "nan"), "from 0 to 0.999"),
    ("parallel.devices", (0, -8), "from 1 to"),
    ("parallel.fsdp", (0,), "from 1 to"),
    ("parallel.tensor", (0, -2), "from 1 to"),
    ("evaluation.every", (-1,), "from 0 to"),
    ("evaluation.num_steps", (0, 5000), "from 1 to 1000"),
    ("evaluation.images_per_prompt", (0,), "from 1 to"),
    ("evaluation.prompts", (-1,), "from 0 to"),
    ("evaluation.collapse_contrast", (-0.1, "nan"), "at least 0"),
    ("reward_server.timeout", (0.0, -1.0, "inf"), "above 0"),
    ("reward_server.attempts", (0,), "from 1 to"),
    ("reward_server.batch", (0,), "from 1 to"),
    ("model.max_sequence_length", (0, 513), "from 1 to 512"),
    ("model.scan_unroll", (0,), "from 1 to"),
    ("run.steps", (0, -1), "from 1 to"),
    ("run.seed", (-1, 2**40), "from 0 to"),
    ("run.save_every", (0,), "from 1 to"),
    ("run.keep", (0,), "from 1 to"),
    ("run.max_nonfinite", (-1,), "from 0 to"),
    ("run.report_every", (-5,), "from 0 to"),
    ("run.profile", (-1,), "from 0 to"),
]  # fmt: skip

WRONG_TYPES = [
    ("run.steps", "many"), ("run.steps", "1.5"), ("run.seed", "x"), ("optimizer.learning_rate", "fast"), ("prompts.per_step", ""),
    ("model.dtype", "float8"), ("model.attention", "flash"), ("model.resolution", "512"), ("model.resolution", "512x512"),
    ("model.resolution", "8 8 8"), ("model.resolution", "a b"), ("sampling.grid", "karras"), ("exploration.sampler", "ode"),
    ("exploration.window", "none"), ("completion.solver", "rk4"), ("credit.method", "ppo"), ("objective.ratio", "none"),
    ("optimizer.minibatch", "tokens"), ("reward_server.on_failure", "ignore"), ("run.keep", "None"), ("nosuch.field", "1"),
    ("run.stepz", "3"),
]  # fmt: skip

TOGETHER = [
    entry("updates_do_not_divide", "train toy --optimizer.updates 7", r"optimizer.updates = 7", "choose one of"),
    entry("chunk_does_not_divide", "train toy --sampling.chunk 7", "sampling.chunk = 7", "choose one of"),
    entry("more_devices", "train toy --parallel.devices 3", "parallel.devices = 3: there are 1"),
    entry("fsdp_does_not_divide", "train toy --parallel.fsdp 2", "parallel.fsdp = 2 does not divide the 1 devices", "choose one of"),
    entry("tensor_does_not_divide", "train toy --parallel.tensor 2", "parallel.tensor = 2 does not divide the 1 devices", "choose one of"),
    entry("tensor_and_heads", "train scenes_preference --parallel.tensor 3", "parallel.tensor = 3 does not divide", "choose one of"),
    entry("no_noise", "train toy --exploration.noise-level 0", "exploration.noise_level", "exploration.window"),
    *(entry(f"{sampler}_above_one", ["train", "toy", "--exploration.sampler", sampler, "--exploration.noise-level", "1.5"],
            "exploration.noise_level = 1.5", "from 0 to 1") for sampler in ("cps", "ddim_sde")),
    entry("window_ends_outside", "train toy --exploration.window fixed --exploration.window-start 9", "window_start = 9", "num_steps = 10"),
    entry("window_too_large", "train toy --exploration.window sliding --exploration.window-size 11", "window_size = 11", "num_steps = 10"),
    entry("random_outside", "train toy --exploration.window random --exploration.window-start 8", "window_start = 8", "num_steps = 10"),
    entry("one_step_all_but_last", "train toy --sampling.num-steps 1", "sampling.num_steps = 1", "exploration.window", "'all'"),
    entry("shift_of_the_model", "train toy --sampling.shift 2", "sampling.shift = 2", "no effect"),
    entry("tail_of_respaced", "train toy --completion.tail skip_node", "completion.tail"),
    *(entry(f"completion_{value}", ["train", "toy", "--completion.steps", value], r"completion.steps = ", "choose 'all'")
      for value in ("half", "0", "-1", "k/0", "k/-2", "respaced", "respaced 0", "respaced x", "1.5", "", "9" * 400)),
    entry("toy_guidance", "train toy --sampling.guidance-scale 3", "sampling.guidance_scale = 3", "use 1"),
    entry("adapter_target", "train toy --adapter.targets nosuch", "adapter.targets", "nosuch", "the layers are"),
    entry("no_rewards", ["train", "toy", "--rewards"], "rewards"),
    entry("unknown_reward", "train toy --rewards nothing", "unknown reward 'nothing'", "known:"),
    entry("reward_weight_text", "train toy --rewards toy_spot=much", "toy_spot=much", "finite weight"),
    entry("reward_weight_nan", "train toy --rewards toy_spot=nan", "toy_spot=nan", "finite weight"),
    entry("reward_twice", "train toy --rewards toy_spot toy_spot=2", "each once"),
    entry("reward_without_name", ["train", "toy", "--rewards", "=1"], "rewards"),
    entry("reward_model_of_toy", "train toy --rewards toy_spot:folder", "toy_spot:folder", "colon"),
    entry("reward_in_server_only", "train toy --rewards geneval", "serve-rewards"),
    entry("reward_bad_url", "train toy --rewards ocr@http://", "ocr", "HOST:PORT"),
    entry("reward_bad_port", "train toy --rewards ocr@http://a:99999", "ocr", "HOST:PORT"),
    entry("reward_password_in_url", "train toy --rewards ocr@http://u:p@a:80", "ocr", "HOST:PORT"),
    entry("witness_unknown", "train toy --evaluation.witnesses nothing", "unknown reward 'nothing'"),
    entry("ocr_without_quotes", ["train", "scenes_words", "--rewards", "words", "--prompts.train", "{bad}/plain.txt"],
          "prompts.train", "quoted"),
    entry("scenes_without_metadata", ["train", "scenes_compose", "--prompts.train", "{bad}/plain.txt"], "prompts.train", "GenEval"),
    entry("toy_prompts", ["train", "toy", "--prompts.train", "{bad}/plain.txt"], "prompts.train", "a cat", "it knows"),
]  # fmt: skip

PROMPTS = [
    (name, said)
    for name, said in {
        "blank.txt": "no prompts", "nothing.txt": "no prompts", "nul.txt": "line 2: holds a NUL", "utf16.txt": "line 1",
        "latin.txt": "line 1: not UTF-8", "long.txt": "at most 20000", "bom_nul.txt": "NUL", "list.jsonl": "line 1: not an object",
        "no_prompt.jsonl": "line 1", "number.jsonl": "line 1", "empty_prompt.jsonl": "line 1", "cut.jsonl": "line 1: not JSON",
        "deep.jsonl": "line 1: ", "include.jsonl": "line 1", "count.jsonl": "line 1", "nowhere.txt": "no such file", "both": "which part",
        "both/test": "neither",
    }.items()
]  # fmt: skip

FOLDERS = {
    "nowhere": "neither a folder", "file": "is a file", "empty": "model_index.json",
    "no_tensors": "safetensors", "cut_header": "safetensors",
    "cut_data": "safetensors", "long": "safetensors", "huge_header": "safetensors", "text_as_weights": "safetensors",
    "int_weights": "type that is not read", "missing_tensor": "missing", "extra_tensor": "unexpected: another.weight",
    "wrong_shape": "wrong shape", "of_the_vae": "not the weights of this model",
    "no_weights": "has no", "pickled": "pickled", "no_scheduler": "scheduler_config.json",
    "no_vae": "vae", "no_index": "model_index.json", "other_family": "StableDiffusionXLPipeline", "no_family": "not supported",
    "index_is_list": "list", "index_is_text": "JSON", "index_is_deep": "JSON", "unknown_option": "rotary",
    "negative_heads": "num_attention_heads", "other_width": "joint_attention_dim", "empty_config": "JSON",
    "bad_shift": "shift = -1.0", "karras": "use_karras_sigmas", "escaping": "not the name of a safetensors file",
    "model.safetensors": "is a file",
}  # fmt: skip
VALUES = {"nan_weights": "not finite", "infinite_weights": "not finite", "no_tokenizer": "tokenizer", "bad_tokenizer": "tokenizer"}

AFTER_LOADING = {"train_nan_weights", "train_infinite_weights"}  # what only the values show

TINY_TRAIN = ["train", "scenes_preference", "--run.workdir", "{new}/run"]
SAMPLE = ["sample", str(TINY), "--prompt", "a cat", "--out", "{new}/x.png"]
EVAL = ["eval", "tiny", "--out", "{new}/e", "--prompts", "scenes/heldout", "--rewards", "scenes_preference"]

MODELS = [
    *(entry(f"train_{name}", [*TINY_TRAIN, "--model.path", f"{{bad}}/{name}"], said) for name, said in (FOLDERS | VALUES).items()),
    *(entry(f"train_psi_{name}", ["train", "toy", "--exploration.psi", f"{{bad}}/psi_{name}.json"], "psi")
      for name in ("text", "list", "missing", "short", "edited", "nan", "negative", "nowhere")),
    entry("psi_of_another_sampler", "train toy --exploration.psi toy --exploration.sampler cps", "exploration.psi", "flow_sde"),
    entry("psi_of_another_length", "train toy --exploration.psi toy --sampling.num-steps 5", "exploration.psi", "num_steps is 5"),
    *(entry(f"train_lora_{name}", [*TINY_TRAIN, "--adapter.start", f"{{bad}}/{file}"], "adapter", said)
      for name, file, said in (
          ("other", "lora_other.safetensors", "lora_other"), ("empty", "lora_empty.safetensors", "no tensors"),
          ("rank", "lora_rank.safetensors", "rank = .*has rank 4"), ("width", "lora_width.safetensors", r"this model needs \[r, "),
          ("half", "lora_half.safetensors", "only lora_A"), ("dora", "lora_dora.safetensors", "magnitude"),
          ("alpha", "lora_alpha.safetensors", "alpha"),
          ("nan", "lora_nan.safetensors", "not finite"), ("text", "lora_text.safetensors", "text encoders"),
          ("cut", "lora_cut.safetensors", "safetensors"), ("nowhere", "nowhere", "nowhere"), ("folder", "empty", "expected"))),
    *(entry(f"resolution_{h}x{w}", [*TINY_TRAIN, "--model.resolution", str(h), str(w)], "model.resolution|height|width", str(bad))
      for h, w, bad in ((0, 64, 0), (-64, 64, -64), (63, 64, 63), (32, 33, 33), (1_000_000, 64, 1_000_000))),
]  # fmt: skip

PLACES = [
    entry("workdir_below_a_file", ["train", "toy", "--run.workdir", "{bad}/file/run"], "run.workdir", "is a file"),
    entry("workdir_is_a_file", ["train", "toy", "--run.workdir", "{bad}/file"], "run.workdir", "is a file"),
    entry("calibrate_below_a_file", ["calibrate", "toy", "--run.workdir", "{bad}/file/run"], "run.workdir"),
    entry("sample_into_nowhere", [*SAMPLE[:-1], "{new}/no/x.png"], "out", "does not exist"),
    entry("sample_below_a_file", [*SAMPLE[:-1], "{bad}/file/x.png"], "out"),
    entry("sample_not_png", [*SAMPLE[:-1], "{new}/x.jpg"], "out", "png"),
    entry("eval_below_a_file", [*EVAL[:2], "--out", "{bad}/file/e", *EVAL[4:]], "out"),
    entry("prompts_below_a_file", ["prompts", "ocr", "--out", "{bad}/file/p", "--train", "2", "--test", "1"], "file"),
    entry("prompts_there_already", ["prompts", "ocr", "--out", "{bad}/both", "--train", "2", "--test", "1"], "is there already"),
]

COMMANDS = [
    entry("no_such_command", "trian toy", "trian", "there are"),
    *(entry(f"{command}_no_config", [command, "nowhere"], "no config 'nowhere'", "there are")
      for command in ("train", "calibrate", "doctor", "plan")),
    *(entry(f"config_{name}", ["train", f"{{bad}}/{name}.py"], name, *said) for name, said in {
        "no_function": ("get_config",), "wrong_return": ("Config",), "syntax": ("syntax",), "imports": ("no_such_package",),
        "wrong_field": ("stepz",)}.items()),
    entry("config_raises", ["train", "{bad}/raises.py"], "run.steps = 0"),
    entry("config_is_a_folder", ["train", "{bad}/empty"], "no config"),
    entry("config_is_text", ["train", "{bad}/plain.txt"], "no config"),
    entry("variant_unknown", "train toy:nosuch", "no variant 'nosuch'", "there are"),
    entry("doctor_type", "doctor toy --run.steps many", "run.steps"),
    entry("doctor_option", "doctor toy --dry-runs", "dry-runs"),
    entry("doctor_field", "doctor toy --prompts.group-size 1", "prompts.group_size = 1", "from 2"),
    *(entry(f"calibrate_{field}_{value}", ["calibrate", "toy", f"--calibration.{field}", value], f"calibration.{field} = ", said)
      for field, value, said in (
          ("iterations", "-1", "at least 0"), ("average", "0", "at least 1"), ("excess", "0.5", "at least 1"),
          ("excess", "nan", "at least 1"),
          ("eps1", "-1", "at least 0"), ("eps1", "nan", "at least 0"), ("eps2", "nan", "at least 0"), ("eps2", "-0.1", "at least 0"),
          ("rest", "-1", "at least 0"), ("low", "-1", "at least 0"), ("low", "2", "smaller"), ("high", "nan", "smaller"),
          ("decided", "2", "between 0 and 1"), ("trajectories", "1", "below"), ("trajectories", "-3", "below"))),
    *(entry(f"calibrate_model_{name}", ["calibrate", "scenes_preference", "--model.path", f"{{bad}}/{name}"], FOLDERS[name])
      for name in ("nowhere", "cut_data", "missing_tensor", "other_family")),
    entry("calibrate_reward", "calibrate toy --rewards nothing", "unknown reward 'nothing'"),
    entry("calibrate_sampler", "calibrate toy --exploration.sampler cps", "exploration.sampler", "psi"),
    entry("calibrate_tensor", "calibrate toy --parallel.tensor 2", "parallel.tensor = 2 does not divide the 1 devices"),
    entry("calibrate_processes", "calibrate toy --parallel.processes 2", "parallel.processes = 2", "parallel.coordinator"),
    entry("calibrate_group", "calibrate toy --prompts.group-size 0", "prompts.group_size = 0", "from 2"),
    *(entry(f"sample_{field}_{value}", [*SAMPLE, f"--{field.replace('_', '-')}", value], field, value)
      for field, value in (
          ("images", "0"), ("images", "-1"), ("steps", "0"), ("steps", "1001"), ("guidance", "0.5"), ("guidance", "nan"), ("seed", "-1"),
          ("max_sequence_length", "0"), ("max_sequence_length", "513"), ("batch_size", "0"), ("height", "63"), ("width", "-8"),
          ("height", "100000"), ("height", "0"), ("dtype", "float16"), ("variant", "fp16"))),
    entry("sample_no_prompt", ["sample", str(TINY), "--out", "{new}/x.png"], "prompt"),
    *(entry(f"sample_{name}", ["sample", f"{{bad}}/{name}", "--prompt", "a", "--out", "{new}/x.png"], FOLDERS[name])
      for name in ("nowhere", "file", "empty", "other_family", "cut_data")),
    *(entry(f"sample_lora_{name}", [*SAMPLE, "--lora", f"{{bad}}/lora_{name}.safetensors"], "lora")
      for name in ("other", "cut", "nan", "nowhere")),
    *(entry(f"eval_{field}_{value}", [*EVAL, f"--{field.replace('_', '-')}", value], field, value)
      for field, value in (
          ("images", "0"), ("steps", "0"), ("guidance", "0.1"), ("guidance", "nan"), ("seed", "-1"), ("count", "0"), ("count", "100000"),
          ("batch_size", "0"), ("checkpoint", "3"), ("base", "tiny"), ("weights", "ema"), ("height", "64"), ("adapter_steps", "99"),
          ("variant", "bf16"), ("devices", "0"), ("devices", "3"), ("devices", "2"), ("fsdp", "0"), ("fsdp", "2"))),
    entry("eval_nothing", "eval", "give one of"),
    entry("eval_no_out", "eval tiny", "out"),
    entry("eval_unknown_reward", [*EVAL[:-1], "nothing"], "unknown reward 'nothing'"),
    entry("eval_no_prompts", [*EVAL[:4], "--rewards", "scenes_preference"], "--prompts"),
    entry("eval_prompts_nowhere", [*EVAL[:5], "{bad}/nowhere.txt", *EVAL[6:]], "no such file"),
    entry("eval_run_of_nothing", ["eval", "{bad}/run_of_nothing", "--out", "{new}/e"], "run_of_nothing"),
    entry("eval_adapter_alone", ["eval", "{bad}/lora_other.safetensors", "--out", "{new}/e"], "--base"),
    entry("eval_compare_nothing", ["eval", "--compare", "{bad}/empty", "{bad}/both"], "not the folder of an evaluation"),
    entry("eval_repeat_nothing", ["eval", "--repeat", "{bad}/empty", "--out", "{new}/e"], "not the folder of an evaluation"),
    entry("export_nowhere", "export {bad}/nowhere --out {new}/x", "nowhere"),
    entry("export_run_of_nothing", "export {bad}/run_of_nothing --out {new}/x", "run_of_nothing"),
    entry("export_of_a_file", "export {bad}/file --out {new}/x", "file"),
    entry("export_format", "export {bad}/run_of_nothing --out {new}/x --format onnx", "format", "onnx"),
    entry("export_dtype", "export {bad}/run_of_nothing --out {new}/x --dtype int8", "dtype", "int8"),
    entry("export_no_out", "export {bad}/run_of_nothing", "out"),
    *(entry(f"prompts_check_{name}", ["prompts", "check", f"{{bad}}/{name}"], said) for name, said in PROMPTS),
    *(entry(f"train_prompts_{name}", ["train", "scenes_preference", "--prompts.train", f"{{bad}}/{name}"], "prompts.train", said)
      for name, said in PROMPTS[:6]),
    *(entry(f"calibrate_prompts_{name}", ["calibrate", "toy", "--prompts.train", f"{{bad}}/{name}"], "prompts.train", said)
      for name, said in PROMPTS[:3]),
    entry("prompts_hub_form", "prompts check hf:", "hf:OWNER/NAME:SPLIT"),
    entry("prompts_geneval_negative", "prompts geneval --out {new}/p --train -1", "train = -1", "negative"),
    entry("prompts_ocr_negative", "prompts ocr --out {new}/p --train -1", "-1"),
    entry("prompts_seed_negative", "prompts ocr --out {new}/p --train 1 --test 1 --seed -1", "seed = -1"),
    entry("prompts_exclude_plain", "prompts geneval --out {new}/p --train 1 --exclude {bad}/plain.txt", "metadata"),
    *(entry(f"serve_{field}_{value}", ["serve-rewards", "--reward", "toy_spot", f"--{field.replace('_', '-')}", value], field, value)
      for field, value in (
          ("queue", "0"), ("max_images", "0"), ("max_megabytes", "-1"), ("port", "-1"), ("port", "70000"),
          ("grace", "nan"), ("grace", "-1"),
          ("host", "no host"), ("host", "0.0.0.0"))),
    entry("serve_unknown", "serve-rewards --reward nothing --port 0", "unknown reward 'nothing'"),
    entry("serve_of_another", "serve-rewards --reward ocr@http://a:1 --port 0", "ocr@http://a:1"),
    entry("serve_no_file", "serve-rewards --reward {bad}/nowhere.py:f --port 0", "nowhere.py"),
    entry("serve_no_function", "serve-rewards --reward {bad}/reward.py:f --port 0", "reward.py", "'f'"),
    entry("serve_no_reward", "serve-rewards", "reward"),
    entry("plan_topology", "plan scenes_preference --topology abacus:4", "abacus"),
    entry("plan_efficiency", "plan scenes_preference --efficiency 2", "efficiency = 2"),
    entry("plan_toy", "plan toy", "toy"),
]  # fmt: skip

TABLE = [
    *(override(field, value, said)
      for field, values, said in NUMBERS for value in values),
    *(entry(f"type_{field}={value}", ["train", "toy", f"--{field}", *value.split()], field.split(".")[1].replace("_", "[-_]"))
      for field, value in WRONG_TYPES),
    *TOGETHER, *MODELS, *PLACES, *COMMANDS,
]  # fmt: skip


def snapshot(*folders: Path) -> dict:
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            status = path.lstat()
            found[path] = (status.st_size if path.is_file() else None, status.st_mtime_ns)
    return found


def run(argv: list[str]) -> int:
    try:
        return cli.main(argv)
    except SystemExit as stop:  # tyro's, for what is not of a field's type
        return stop.code


def counted(function: Callable, calls: list) -> Callable:
    """The function, which notes its calls."""

    def called(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return called


def check_length(reason: str) -> None:
    """One line, a box of tyro's, or a line with the list that it announces."""
    lines = reason.strip().splitlines()
    assert "Traceback" not in reason
    assert len(lines) == 1 or lines[0].startswith("╭") or f"{lines[0]}\n".endswith(LISTS), reason
    longest = LONGEST_LIST if "not the weights of this model" in reason else LONGEST
    assert len(lines) <= BOX and max(map(len, lines)) <= longest, reason


@pytest.mark.parametrize(("argv", "said"), TABLE)
def test_bad_input_is_refused(bad, tmp_path, monkeypatch, capfd, request, argv, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of config files
    argv = [part.replace("{bad}", str(bad)).replace("{new}", str(tmp_path)) for part in argv]
    before = snapshot(bad, tmp_path)
    loads = []
    for place, name in ((pipeline, "read_params"), (toy, "pretrained")):
        monkeypatch.setattr(place, name, counted(getattr(place, name), loads))
    code = run(argv)
    reason = capfd.readouterr().err
    assert code == 2, (code, reason)
    assert bool(loads) == (request.node.callspec.id in AFTER_LOADING)
    check_length(reason.replace(str(bad), "").replace(str(tmp_path), ""))
    flat = re.sub(r"[\s│╭╮╰╯─]+", " ", reason)
    for pattern in said:
        assert re.search(pattern, flat), (pattern, flat)
    assert snapshot(bad, tmp_path) == before


def test_the_table_is_long_enough():
    assert len(TABLE) >= 150 and len({p.id for p in TABLE}) == len(TABLE)


def test_a_second_run_in_a_folder_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(toy, "pretrained", lambda: pytest.fail("a model was loaded"))
    with lock.held(tmp_path):
        before = snapshot(tmp_path)
        assert run(["train", "toy", "--run.workdir", str(tmp_path)]) == 2
    assert str(os.getpid()) in (said := capsys.readouterr().err) and socket.gethostname() in said
    assert snapshot(tmp_path).keys() == before.keys()
