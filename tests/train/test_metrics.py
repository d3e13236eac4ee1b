import json
import math

import numpy as np
import pytest

from densegrpo_jax.train import metrics, report


def test_records_come_back_with_what_is_not_finite_as_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics.append(path, {"step": 0, "a": np.float32(1.5), "b": np.array([1.0, np.nan]), "c": {"d": math.inf}, "e": np.int64(3)})
    assert metrics.read(path) == [{"step": 0, "a": 1.5, "b": [1.0, None], "c": {"d": None}, "e": 3}]


def test_a_torn_last_line_is_left_out_and_a_broken_one_inside_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [r["step"] for r in metrics.read(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        metrics.read(path)


def test_rewind_drops_what_will_be_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(5):
        metrics.append(path, {"step": step})
    kept = metrics.rewind(path, 3)
    assert [r["step"] for r in kept] == [0, 1, 2] == [r["step"] for r in metrics.read(path)]


def test_bars():
    assert metrics.bars([0.0, 0.5, 1.0, None, float("nan"), 7.0]) == " ▄█··█"


def test_paired_difference_is_clustered_by_prompt():
    rng = np.random.default_rng(0)
    effect = np.repeat(rng.normal(0.3, 0.2, 64), 4)  # members of a prompt move together
    base = rng.normal(size=256)
    before = {"prompt": np.repeat(np.arange(64), 4).tolist(), "total": base.tolist(), "rewards": {"r": base.tolist()}}
    after = {"total": (base + effect).tolist(), "rewards": {"r": [None, *(base + effect)[1:].tolist()]}}
    mean, error = report.paired_difference(before, after)
    assert mean == pytest.approx(effect.mean())
    assert error == pytest.approx(effect[::4].std(ddof=1) / 8, rel=1e-6)
    assert error > 1.9 * effect.std() / 16  # what counting the 256 as independent would claim
    mean, _ = report.paired_difference(before, after, "r")
    assert mean == pytest.approx(effect[1:].mean())


def test_metrics_are_json_for_any_reader(tmp_path):
    metrics.append(tmp_path / "m", {"step": 0, "x": float("nan")})
    json.loads((tmp_path / "m").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_tensorboard_files_hold_each_number_of_a_step(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with metrics.boards(tmp_path, wandb=False, start=3) as (write,):
        write({"step": 3, "reward": 0.5, "gains": {"std": [1.0, None]}, "name": "x"})
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, at, events = path.read_bytes(), 0, []
    while at < len(data):  # length, its checksum, the event, its checksum
        size = int.from_bytes(data[at : at + 8], "little")
        events.append(Event.FromString(data[at + 12 : at + 12 + size]))
        at += 16 + size
    assert [e.step for e in events] == [0, 3, 3] and events[1].session_log.status == events[1].session_log.START  # forget step 3 and later
    assert {v.tag: v.simple_value for v in events[2].summary.value} == {"reward": 0.5, "gains/std/0": 1.0}
