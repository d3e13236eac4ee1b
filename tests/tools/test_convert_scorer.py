"""The converter of public scorers: what torch.save writes is read as torch reads it, anything else is refused unread, and each scorer's
folder scores as the network its checkpoint was saved from, here with random weights under the public names."""

import ast
import dataclasses
import hashlib
import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densegrpo_jax import rewards
from densegrpo_jax.models import blip
from densegrpo_jax.models import clip as towers
from densegrpo_jax.models.score_head import WIDTHS
from densegrpo_jax.models.weights import open_weights
from densegrpo_jax.rewards import clip, imagereward
from densegrpo_jax.scenes import tokenizers
from tests.rewards.test_clip import random_images

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
nn = torch.nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import convert_scorer  # noqa: E402

from tests.models import test_blip, test_clip  # noqa: E402

SIDE, PATCH = 20, 5
PROMPTS = ["a red circle", "a blue star with a ring", 'sign "HI"']


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def values(found):
    """What was read, with arrays in the place of tensors."""
    if isinstance(found, convert_scorer.Tensor):
        return found.read()
    if isinstance(found, dict):
        return {key: values(value) for key, value in found.items()}
    return [values(value) for value in found] if isinstance(found, list | tuple) else found


def test_tensors_are_read_as_torch_reads_them(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "whole": base,
        "row": base[2],
        "transposed": base.T,
        "strided": base[1::2, ::3],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": base.half(),
        "integers": torch.arange(-3, 3),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "ids": torch.arange(7).expand(1, -1),
        "parameterless": nn.Linear(2, 3).state_dict(),  # an ordered dict with torch's notes on it
        "others": [1, 2.5, "text", None, (True, 10**30)],
    }
    torch.save(tensors, tmp_path / "checkpoint.pt")
    found = convert_scorer.open_checkpoint(tmp_path / "checkpoint.pt")
    assert found.keys() == tensors.keys() and values(found)["others"] == [1, 2.5, "text", None, [True, 10**30]]
    for name, array in {**values(found), **values(found)["parameterless"]}.items():
        if name in ("parameterless", "others"):
            continue
        expected = (tensors | tensors["parameterless"])[name].numpy()
        assert array.dtype == expected.dtype and array.shape == expected.shape
        np.testing.assert_array_equal(array, expected)
    torch.save({"brain": base.bfloat16()}, tmp_path / "brain.pt")
    brain = values(convert_scorer.open_checkpoint(tmp_path / "brain.pt"))["brain"]
    assert brain.dtype.name == "bfloat16" and (brain.astype(np.float32) == base.numpy()).all()
    np.testing.assert_array_equal(found["whole"].transposed().read(), base.T)
    np.testing.assert_array_equal(found["transposed"].third(1).read(), base.T[2:4])


def write_archive(path: Path, program: bytes, compression=zipfile.ZIP_STORED, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x/data.pkl", program)
        for name, content in entries.items():
            archive.writestr(f"x/{name}", content)
    return path


class Call:
    """Pickles into a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.system, ("touch {mark}",), r"(posix|nt)\.system"),
        (eval, ("open({mark!r}, 'w')",), r"(builtins|__builtin__)\.eval"),
        (open, ("{mark}", "w"), r"i?o?\.?open"),
        (getattr, ("text", "upper"), r"getattr"),
        (torch.load, ("{mark}",), r"torch\.serialization\.load"),
        (np.load, ("{mark}",), r"numpy.*load"),
        (torch.nn.Linear, (2, 2), r"torch\.nn\.modules\.linear\.Linear"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_asks_for_more_is_refused_by_name_and_not_run(tmp_path, function, arguments, named, protocol):
    mark = tmp_path / "mark"
    arguments = tuple(a.format(mark=str(mark)) if isinstance(a, str) else a for a in arguments)
    program = pickle.dumps({"state_dict": {"weight": Call(function, *arguments)}}, protocol)
    path = write_archive(tmp_path / "checkpoint.pt", program)
    with pytest.raises(ValueError, match=rf"checkpoint\.pt: refused, it asks for .*{named}, and only tensors in dicts are read"):
        convert_scorer.open_checkpoint(path)
    assert not mark.exists()


def test_a_pickle_cannot_change_what_it_was_given(tmp_path):
    for target in (b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"ctorch\nFloatStorage\n"):
        program = b"\x80\x02" + target + b"N}X\x04\x00\x00\x00nameK\x01s\x86b."  # BUILD with (None, {"name": 1})
        with pytest.raises(ValueError, match="refused"):
            convert_scorer.open_checkpoint(write_archive(tmp_path / "x.pt", program))


def tensor_program(key="0", count=4, offset=0, shape=(2, 2), stride=(2, 1), kind=torch.FloatStorage, tag="storage"):
    """A pickled {"weight": tensor} as torch writes it, with any of its parts replaced."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return (tag, kind, key, "cpu", count) if isinstance(value, Storage) else None

    file = io.BytesIO()
    Pickler(file, 2).dump({"weight": Call(torch._utils._rebuild_tensor_v2, Storage(), offset, shape, stride, False, OrderedDict())})
    return file.getvalue()


NUMBERS = np.arange(4, dtype=np.float32).tobytes()


def test_the_handmade_archive_is_a_good_one(tmp_path):
    path = write_archive(tmp_path / "x.pt", tensor_program(), **{"data/0": NUMBERS, "byteorder": b"little"})
    np.testing.assert_array_equal(values(convert_scorer.open_checkpoint(path))["weight"], [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (2, 3), "stride": (2, 1)},
        {"offset": 1},
        {"offset": -1},
        {"stride": (-2, 1)},
        {"stride": (2,)},
        {"shape": (10**12,), "stride": (0,)},
        {"count": 5},
        {"key": "1"},
        {"key": "../secret"},
        {"tag": "file"},
        {"kind": "FloatTensor"},
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_their_storage_are_refused(tmp_path, change):
    path = write_archive(tmp_path / "x.pt", tensor_program(**change), **{"data/0": NUMBERS, "secret": NUMBERS})
    with pytest.raises((ValueError, KeyError)):
        values(convert_scorer.open_checkpoint(path))


def test_files_of_another_kind_are_refused_with_what_they_are(tmp_path):
    legacy = tmp_path / "legacy.pth"
    torch.save({"weight": torch.zeros(2)}, legacy, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"before 1\.6.*weights_only=True"):
        convert_scorer.open_checkpoint(legacy)
    big = write_archive(tmp_path / "big.pt", tensor_program(), **{"data/0": NUMBERS, "byteorder": b"big"})
    deflated = write_archive(tmp_path / "deflated.pt", tensor_program(), zipfile.ZIP_DEFLATED)
    (tmp_path / "text.pt").write_text("not a checkpoint")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("readme", "text")
    for path, message in (
        (big, "little-endian"),
        (deflated, "compressed"),
        (tmp_path / "text.pt", "not a zip file"),
        (tmp_path / "other.pt", "no data.pkl"),
        (tmp_path / "absent.pt", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_scorer.open_checkpoint(path)


@given(st.data())
def test_broken_pickles_are_refused_in_one_way(tmp_path_factory, data):
    program = bytearray(tensor_program())
    for _ in range(data.draw(st.integers(1, 4))):
        program[data.draw(st.integers(0, len(program) - 1))] = data.draw(st.integers(0, 255))
    path = write_archive(tmp_path_factory.mktemp("fuzz") / "x.pt", bytes(program), **{"data/0": NUMBERS})
    try:
        convert_scorer.open_checkpoint(path)
    except ValueError as error:
        assert "x.pt: refused, " in str(error)


def test_this_program_is_the_only_one_that_unpickles():
    def imported(path):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""

    folders = ("densegrpo_jax", "configs", "benchmarks", "tools", "examples", "launch")
    unsafe = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
    found = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py") if unsafe & set(imported(path))}
    assert found == {"convert_scorer.py"}


# ---------------------------------------------------------------------------------------------------------------------
# HPSv2.1


class Tower(nn.Module):
    """OpenCLIP's transformer."""

    def __init__(self, width, layers, heads, causal):
        super().__init__()
        self.resblocks, self.causal = nn.ModuleList(), causal
        for _ in range(layers):
            block = nn.Module()
            block.ln_1, block.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            block.attn = nn.MultiheadAttention(width, heads, batch_first=True)
            block.mlp = nn.Sequential(OrderedDict(c_fc=nn.Linear(width, 4 * width), gelu=nn.GELU(), c_proj=nn.Linear(4 * width, width)))
            self.resblocks.append(block)

    def forward(self, x):
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1) if self.causal else None
        for block in self.resblocks:
            y = block.ln_1(x)
            x = x + block.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
            x = x + block.mlp(block.ln_2(x))
        return x


class OpenCLIP(nn.Module):
    """A ViT under OpenCLIP's names; HPSv2's way with images and its score."""

    def __init__(self, vocabulary, length, width=32, layers=2, text_width=16, text_layers=3, shared=12, side=SIDE, patch=PATCH):
        super().__init__()
        self.visual = nn.Module()
        self.visual.class_embedding = nn.Parameter(torch.zeros(width))
        self.visual.positional_embedding = nn.Parameter(torch.zeros(1 + (side // patch) ** 2, width))
        self.visual.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.visual.transformer = Tower(width, layers, 16, causal=False)
        self.visual.proj = nn.Parameter(torch.zeros(width, shared))
        self.token_embedding = nn.Embedding(vocabulary, text_width)
        self.positional_embedding = nn.Parameter(torch.zeros(length, text_width))
        self.transformer = Tower(text_width, text_layers, 16, causal=True)
        self.ln_final = nn.LayerNorm(text_width)
        self.text_projection = nn.Parameter(torch.zeros(text_width, shared))
        self.logit_scale = nn.Parameter(torch.tensor(3.0))

    def score(self, images, ids):
        x = torch.from_numpy(images).movedim(-1, 1) / 255
        scale = SIDE / max(x.shape[2:])
        x = nn.functional.interpolate(x, [round(n * scale) for n in x.shape[2:]], mode="bicubic", antialias=True)
        height, width = SIDE - x.shape[2], SIDE - x.shape[3]
        x = nn.functional.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        mean, std = (torch.tensor(values)[:, None, None] for values in (clip.ImageProcessing.image_mean, clip.ImageProcessing.image_std))
        v = self.visual
        x = v.conv1((x - mean) / std).flatten(2).mT
        x = torch.cat([v.class_embedding.expand(len(x), 1, -1), x], 1) + v.positional_embedding
        seen = v.ln_post(v.transformer(v.ln_pre(x))[:, 0]) @ v.proj
        x = self.ln_final(self.transformer(self.token_embedding(ids) + self.positional_embedding[: ids.shape[1]]))
        read = x[torch.arange(len(ids)), ids.argmax(-1)] @ self.text_projection
        return nn.functional.cosine_similarity(seen, read)


def randomized(module, scale=0.2):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return module.eval()


@pytest.fixture(scope="module")
def hpsv2(tmp_path_factory):
    """(torch model, checkpoint, tokenizer's folder)."""
    folder = tmp_path_factory.mktemp("hpsv2")
    tokenizers.write_clip_tokenizer(folder)
    model = randomized(OpenCLIP(len(tokenizers.clip_vocabulary()[0]), tokenizers.MAX_LENGTH))
    torch.save({"epoch": 3, "name": "tiny", "state_dict": model.state_dict()}, folder / "hps.pt")
    return model, folder / "hps.pt", folder


@pytest.mark.parity
def test_hpsv2_scores_as_the_model_its_checkpoint_was_saved_from(hpsv2, tmp_path):
    model, checkpoint, folder = hpsv2
    convert_scorer.main(["hpsv2", str(checkpoint), "--tokenizer", str(folder), "--out", str(tmp_path / "out")])
    reward = rewards.load(f"hpsv2:{tmp_path / 'out'}")
    ids = transformers.CLIPTokenizer.from_pretrained(folder)(PROMPTS, padding="max_length", max_length=tokenizers.MAX_LENGTH).input_ids
    ids = torch.tensor(ids)
    ids = torch.where((ids == ids.max()).cumsum(1) > 1, 0, ids)  # OpenCLIP pads with zeros
    for height, width in ((SIDE, SIDE), (48, 30)):
        images = random_images(3, height, width)
        expected = model.score(images, ids).detach().numpy()
        assert expected.std() > 0.01
        np.testing.assert_allclose(reward(images, PROMPTS, [{}] * 3), expected, atol=2e-6)


def test_the_source_is_noted_and_a_folder_with_weights_is_left_alone(hpsv2, tmp_path, capsys):
    _, checkpoint, folder = hpsv2
    arguments = ["hpsv2", str(checkpoint), "--tokenizer", str(folder), "--out", str(tmp_path / "out")]
    convert_scorer.main(arguments)
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    assert digest in capsys.readouterr().out
    header = (tmp_path / "out" / "model.safetensors").read_bytes()[8:400].decode(errors="replace")
    assert '"source": "hps.pt"' in header and digest in header
    with pytest.raises(SystemExit, match=r"out: has a model\.safetensors; name another folder"):
        convert_scorer.main(arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("visual.proj"), r"has no tensor visual\.proj"),
        (lambda state: state.pop("transformer.resblocks.1.attn.in_proj_bias"), r"no tensor transformer\.resblocks\.1\.attn\.in_proj_bias"),
        (lambda state: state.update({"head.weight": torch.zeros(2)}), r"1 tensors have no place in this scorer, such as head\.weight"),
        (lambda state: state.update({"ln_final.bias": torch.zeros(3)}), r"of the wrong shape: text_model\.final_layer_norm\.bias"),
        (lambda state: state.update({"ln_final.bias": 3}), "holds no dict of tensors"),
    ],
)
def test_a_checkpoint_that_is_not_the_scorers_is_refused(hpsv2, tmp_path, change, message):
    model, _, folder = hpsv2
    state = model.state_dict()
    change(state)
    torch.save({"state_dict": state}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=message):
        convert_scorer.convert("hpsv2", tmp_path / "other.pt", tmp_path / "out", str(folder))


# ---------------------------------------------------------------------------------------------------------------------
# LAION's aesthetic predictor and ImageReward


class Head(nn.Module):
    """The five layers as both programs save them, with the dropouts between."""

    def __init__(self, width):
        super().__init__()
        a, b, c, d, e = (nn.Linear(*pair) for pair in zip((width, *WIDTHS[:-1]), WIDTHS))
        self.layers = nn.Sequential(a, nn.Dropout(0.2), b, nn.Dropout(0.2), c, nn.Dropout(0.1), d, e)

    def forward(self, x):
        return self.layers(x)[:, 0]


def preprocessed(images):
    """Resized, cropped and normalised by transformers' processor, with channels first."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return torch.from_numpy(np.stack(processor(list(images)).pixel_values))


@pytest.mark.parity
def test_the_aesthetic_predictor_scores_as_the_model_its_checkpoint_was_saved_from(tmp_path):
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 40, "max_position_embeddings": 8}
    config = transformers.CLIPConfig(projection_dim=12, text_config=text, vision_config={**tower, "image_size": SIDE, "patch_size": PATCH})
    model, head = randomized(transformers.CLIPModel(config)), randomized(Head(12), 0.1)
    model.save_pretrained(tmp_path / "clip")
    torch.save(head.state_dict(), tmp_path / "head.pth")
    out = tmp_path / "out"
    convert_scorer.main(["aesthetic", str(tmp_path / "head.pth"), "--clip", str(tmp_path / "clip"), "--out", str(out)])
    assert not any(name.startswith("text") for name in open_weights(out))
    images = random_images(3, 48, 30)
    vector = model.get_image_features(preprocessed(images)).pooler_output
    expected = head(vector / vector.norm(dim=-1, keepdim=True)).detach().numpy()
    assert expected.std() > 0.01
    np.testing.assert_allclose(rewards.load(f"aesthetic:{out}")(images, PROMPTS, [{}] * 3), expected, rtol=2e-5, atol=2e-5)


class Block(nn.Module):
    """timm's: attention and MLP after norms."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.attn, self.mlp, self.heads = nn.Module(), nn.Module(), heads
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.attn.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.attn.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x))))


class ImageReward(nn.Module):
    """Under its authors' names; the text encoder is called there as in transformers."""

    def __init__(self, vocabulary, width=32, layers=2, text_width=24, text_layers=2, length=50, side=SIDE, patch=PATCH):
        super().__init__()
        self.blip, self.mlp = nn.Module(), Head(text_width)
        seen = self.blip.visual_encoder = nn.Module()
        seen.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        seen.pos_embed = nn.Parameter(torch.zeros(1, 1 + (side // patch) ** 2, width))
        seen.patch_embed = nn.Module()
        seen.patch_embed.proj = nn.Conv2d(3, width, patch, patch)
        seen.blocks = nn.ModuleList(Block(width, 16) for _ in range(layers))
        seen.norm = nn.LayerNorm(width, 1e-6)
        values = {"hidden_size": text_width, "intermediate_size": 4 * text_width, "num_hidden_layers": text_layers}
        values |= {"num_attention_heads": 12, "encoder_hidden_size": width, "vocab_size": vocabulary, "max_position_embeddings": length}
        config = transformers.BlipTextConfig(**values)
        self.blip.text_encoder = transformers.BlipTextModel(config, add_pooling_layer=False)
        self.blip.text_encoder.embeddings.register_buffer("position_ids", torch.arange(length).expand(1, -1))  # saved by older versions
        self.blip.vision_proj, self.blip.text_proj = nn.Linear(width, 8), nn.Linear(text_width, 8)

    def score(self, images, text):
        seen = self.blip.visual_encoder
        x = seen.patch_embed.proj(preprocessed(images)).flatten(2).mT
        x = torch.cat([seen.cls_token.expand(len(x), -1, -1), x], 1) + seen.pos_embed
        for block in seen.blocks:
            x = block(x)
        hidden = self.blip.text_encoder(text.input_ids, text.attention_mask, encoder_hidden_states=seen.norm(x)).last_hidden_state
        return (self.mlp(hidden[:, 0]) - imagereward.MEAN) / imagereward.STD


WORDS = '[PAD] [UNK] [CLS] [SEP] [MASK] a red circle blue star with ring sign hi ##s "'.split()


@pytest.mark.parity
def test_imagereward_scores_as_the_model_its_checkpoint_was_saved_from(tmp_path, capsys):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    model = randomized(ImageReward(len(WORDS) + imagereward.EXTRA_TOKENS), 0.1)
    torch.save(model.state_dict(), tmp_path / "ImageReward.pt")
    out = tmp_path / "out"
    convert_scorer.main(["imagereward", str(tmp_path / "ImageReward.pt"), "--tokenizer", str(tmp_path), "--out", str(out)])
    printed = capsys.readouterr().out
    assert "not needed: blip.text_encoder.embeddings.position_ids, blip.text_proj.bias" in printed
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    prompts = [PROMPTS[0], "red " * 50, PROMPTS[1]]
    text = tokenizer(prompts, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
    images = random_images(3, 48, 30)
    expected = model.score(images, text).detach().numpy()
    assert expected.std() > 0.01
    np.testing.assert_allclose(rewards.load(f"imagereward:{out}")(images, prompts, [{}] * 3), expected, rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------------------------------------------------------------
# The published sizes


def described(value):
    if isinstance(value, dict):
        return {name: described(part) for name, part in value.items()}
    return convert_scorer.Tensor(None, 0, tuple(value.shape), tuple(value.stride()))


def shapes(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parity
def test_at_its_published_size_hpsv2_is_clip_vit_h(monkeypatch):
    with torch.device("meta"):
        checkpoint = {"state_dict": described(OpenCLIP(49408, 77, 1280, 32, 1024, 24, 1024, 224, 14).state_dict())}
        theirs = transformers.CLIPModel(transformers.CLIPConfig(**test_clip.VIT_H)).state_dict()
    monkeypatch.setattr(convert_scorer, "open_checkpoint", lambda path: checkpoint)
    config, tensors = convert_scorer.hpsv2(Path("HPS.pt"))
    assert shapes(tensors) == shapes(theirs)
    ours, published = towers.CLIPConfig.from_json(config), towers.CLIPConfig.from_json(test_clip.VIT_H)
    assert ours.vision == published.vision and ours.text == dataclasses.replace(published.text, eos_token_id=49407)


@pytest.mark.parity
def test_at_its_published_size_imagereward_is_blip_large(monkeypatch):
    with torch.device("meta"):
        checkpoint = described(ImageReward(30524, 1024, 24, 768, 12, 512, 224, 16).state_dict())
        theirs = test_blip.Theirs(test_blip.LARGE).state_dict()
    monkeypatch.setattr(convert_scorer, "open_checkpoint", lambda path: checkpoint)
    config, tensors = convert_scorer.image_reward(Path("ImageReward.pt"))
    assert shapes(tensors) == shapes(theirs)
    published = blip.BLIPConfig.from_json(test_blip.LARGE)
    assert blip.BLIPConfig.from_json(config) == dataclasses.replace(
        published, vision=dataclasses.replace(published.vision, layer_norm_eps=1e-6)
    )
