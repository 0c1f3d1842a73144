"""Looking at the heads during training changes nothing of the run."""

import json

import pytest
import torch

from model import GPT, ModelConfig
from probes.record import AttentionRecord
from probes.scores import HeadName, score_record
from probes.timeline import timeline_table
from tests.tiny import tiny_config
from train import train
from training.metrics import MetricsLog, read_metrics
from training.parallel import on_this_process

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Without looks, with looks, and with looks and an interruption."""
    folder = tmp_path_factory.mktemp("probed")
    options = {"max_steps": 12, "dropout": 0.1}
    train(tiny_config(folder, "plain", **options))
    train(tiny_config(folder, "probed", interval=3, **options))
    train(tiny_config(folder, "resumed", interval=3, stop_at=7, **options))
    resumed = folder / "resumed"
    rows = (resumed / "probes.jsonl").read_text()
    (resumed / "probes.jsonl").write_text(rows + '{"step": 9, "scores": {}}\n{"step": 12, "sco')
    train(tiny_config(folder, "resumed", interval=3, **options))
    return folder


@pytest.mark.parametrize("name", ["probed", "resumed"])
def test_a_probed_run_is_bit_for_bit_the_run_without(runs, name):
    there, here = (torch.load(runs / run / "last.pt", weights_only=True) for run in ("plain", name))
    assert all(torch.equal(here["model"][key], there["model"][key]) for key in there["model"])
    assert torch.equal(here["training"]["rng"][0]["cpu"], there["training"]["rng"][0]["cpu"])
    rows, probed_rows = (read_metrics(runs / run) for run in ("plain", name))
    assert [row["train_loss"] for row in probed_rows] == [row["train_loss"] for row in rows]
    assert probed_rows[-1]["val_loss"] == rows[-1]["val_loss"]
    assert len(rows) == 12


def test_rows_are_written_once_and_are_those_of_the_kept_records(runs):
    assert not (runs / "plain" / "probes.jsonl").exists()
    assert not (runs / "plain" / "records").exists()
    rows = read_metrics(runs / "probed", "probes.jsonl")
    assert [row["step"] for row in rows] == [3, 6, 9, 12]
    assert rows == read_metrics(runs / "resumed", "probes.jsonl")
    records = sorted((runs / "probed" / "records").iterdir())
    assert [path.name for path in records] == [f"step-{step:06d}.safetensors" for step in (3, 6, 9, 12)]
    record = AttentionRecord.load(records[1])
    assert record.info.step == 6
    assert b"".join(record.info.token_bytes[:8]) == b"".join(record.info.token_bytes[8:])
    found = score_record(record)[HeadName(1, 0)]
    written = rows[1]["scores"]["1.0"]
    assert set(written) - set(found) == {"copying", "q_composition", "k_composition", "v_composition"}
    del found["prefix"]  # that of training is of four copies
    assert {key: written[key] for key in found} == pytest.approx(found, abs=1e-6)


def test_what_goes_wrong_is_said_and_stops_nothing(tmp_path, monkeypatch, capsys):
    def refuse(*_args, **_kwargs):
        raise ValueError("no room")

    monkeypatch.setattr("probes.timeline.score_heads", refuse)
    assert train(tiny_config(tmp_path, interval=2, max_steps=2)).step == 2
    assert "no look at the heads after step 2: no room" in capsys.readouterr().err
    assert read_metrics(tmp_path / "run", "probes.jsonl") == []
    with pytest.raises(ValueError, match=r"block_size of at least 8, not 4"):
        tiny_config(tmp_path, interval=2, block_size=4)


def test_a_ring_waits_for_no_other_process_while_it_is_looked_at():
    model = GPT(ModelConfig(n_layer=2, n_embd=32, block_size=16, vocab_size=5, attention="ring,flash"))
    ring = model.blocks[0].attn.path
    with on_this_process(model):
        assert [block.attn.path.name for block in model.blocks] == ["tiled", "flash"]
    assert model.blocks[0].attn.path is ring


def test_the_timeline_says_from_which_step_on_a_head_has_a_role():
    def row(step, first, second):
        return {"step": step, "scores": {"0.0": {"induction": first}, "1.0": {"induction": second}}}

    rows = [row(10, 0.5, 0.0), row(20, 0.1, 0.3), row(30, 0.6, 0.9), row(40, 0.7, 0.8)]
    table = timeline_table([json.loads(json.dumps(one)) for one in rows])
    found = [line for line in table.rows if line[0] == "induction"]
    assert found == [("induction", "1.0", 30, 0.9, 30, 0.8), ("induction", "0.0", 30, 0.7, 40, 0.7)]
    assert [line for line in timeline_table(rows[1:2]).rows if line[0] == "induction"] == [
        ("induction", "1.0", None, 0.3, 20, 0.3)
    ]
    with pytest.raises(ValueError, match=r"train with --probe\.interval"):
        timeline_table([])


def test_scores_go_to_wandb_one_name_a_number(tmp_path):
    class Recorder:
        rows = []

        def log(self, row, step):
            self.rows.append((step, row))

        def finish(self):
            pass

    with MetricsLog(tmp_path, tiny_config(tmp_path, interval=5), resumed_step=0) as log:
        log._wandb = Recorder()
        log.write_scores(5, {"0.1": {"induction": 0.5}})
        log.write_scores(10, {})
    assert Recorder.rows == [(5, {"step": 5, "heads/induction/0.1": 0.5})]
    assert read_metrics(tmp_path, "probes.jsonl") == [{"step": 5, "scores": {"0.1": {"induction": 0.5}}}]
