"""metrics.jsonl, the loss curve, wandb, and the arithmetic of hardware use."""

import json
import os
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
from PIL import Image

from model import GPT, ModelConfig
from tests.tiny import finish, start, tiny_config, tiny_flags
from train import main, train
from training.config import Config
from training.metrics import MetricsLog, attention_kernel, flops_per_token, peak_flops, plot_losses, read_metrics
from training.runtime import Runtime

CPU = torch.device("cpu")


def test_rows_hold_the_promised_keys_at_the_promised_steps(tmp_path):
    train(tiny_config(tmp_path, max_steps=7, log_interval=2, eval_interval=3))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    always = {"step", "tokens", "seconds"}
    logged = {"train_loss", "learning_rate", "tokens_per_second", "grad_norm"}
    evaluated = {"val_loss", "val_bits_per_byte"}
    assert [(row["step"], set(row) - always) for row in rows] == [
        (2, logged),
        (3, evaluated),
        (4, logged),
        (6, logged | evaluated),
        (7, logged | evaluated),  # the last step, whatever the intervals
    ]
    assert all(always <= set(row) for row in rows)
    assert [row["tokens"] for row in rows] == [row["step"] * 4 * 16 for row in rows]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    speeds = {row["step"]: row["tokens_per_second"] for row in rows if "train_loss" in row}
    at = {row["step"]: row["seconds"] for row in rows}
    assert speeds[4] == pytest.approx(2 * 64 / (at[4] - at[2]))
    assert speeds[7] == pytest.approx(64 / (at[7] - at[6]))


def test_a_resumed_log_drops_later_rows_and_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n\n[3]\n{"step": 3}\n{"step": 4, "tra')
    with MetricsLog(tmp_path, Config(), resumed_step=2) as log:
        log.write({"step": 3, "train_loss": 1.5, "val_loss": float("nan"), "grad_norm": float("inf")})
        assert path.read_text().endswith('{"step": 3, "train_loss": 1.5}\n')  # already, and without nan or inf
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "train_loss": 1.5}\n'
    assert not list(tmp_path.glob("*.tmp"))


def test_only_the_main_process_writes(tmp_path):
    with MetricsLog(tmp_path, Config(), resumed_step=0, enabled=False) as log:
        log.write({"step": 1})
    assert list(tmp_path.iterdir()) == []
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("text", ["", '{"step": 1, "train_loss": 2.0}\n{"step": 2, "val_loss": 1.0}\n'])
def test_the_loss_curve_is_a_picture(text, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert plot_losses(tmp_path) == tmp_path / "loss.png"
    with Image.open(tmp_path / "loss.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.size == (1050, 600)
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    # matplotlib's first two colours, of the curves, are there when there is something to draw
    assert ((0xFF, 0x7F, 0x0E) in colours) is bool(text)


def test_flops_of_a_token_by_hand():
    """A matrix product of (m, k) and (k,) takes 2mk; back through both of its factors twice that: 6 a parameter."""
    config = ModelConfig(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=10, position="none", norm="rmsnorm")
    n_block = 4 * 8 * 8 + 2 * 8 * 32 + 2 * 8  # q k v o, both MLP matrices, two norms
    n_parameters = 10 * 8 + 2 * n_block + 8
    assert GPT(config).n_parameters() == n_parameters
    # scores: T·C multiplications a query, weighted sum as many; times 2 operations, times 3 with the way back
    attention = 2 * (16 * 8 + 16 * 8) * 2 * 3
    assert flops_per_token(config, n_parameters) == 6 * n_parameters + attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_a_cpu_is_measured_and_says_so(dtype):
    peak, source = peak_flops(Runtime(CPU, dtype))
    assert 1e8 < peak < 1e15
    assert source == f"measured, {str(dtype).removeprefix('torch.')} 1024³ matrix product"


@pytest.mark.parametrize(
    ("name", "peak", "sheet"),
    [
        ("NVIDIA H200", 989e12, "H200"),
        ("NVIDIA H100 PCIe", 756e12, "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", 989e12, "H100"),
        ("NVIDIA A100-SXM4-40GB", 312e12, "A100"),
    ],
)
def test_the_peak_of_a_known_device_comes_from_its_data_sheet(name, peak, sheet, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(Runtime(torch.device("cuda"), torch.bfloat16)) == (peak, f"data sheet of {sheet}")


def fake_wandb(monkeypatch, **functions):
    module = types.ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "wandb", module)


def _fails(*_, **__):
    raise RuntimeError("the service is down")


def test_wandb_gets_the_configuration_and_every_row(tmp_path, monkeypatch):
    calls = []

    def init(**options):
        calls.append(options)
        return types.SimpleNamespace(
            log=lambda row, step: calls.append((step, row)), finish=lambda: calls.append("finished")
        )

    fake_wandb(monkeypatch, init=init)
    config = tiny_config(tmp_path, max_steps=2, wandb="offline", wandb_project="mine")
    train(config)
    options, *rows, end = calls
    assert (options["mode"], options["project"], options["dir"]) == ("offline", "mine", str(tmp_path / "run"))
    assert options["config"]["train"] == config.to_dict()["train"]
    assert rows == [(row["step"], row) for row in read_metrics(tmp_path / "run")]
    assert [step for step, _ in rows] == [1, 2]
    assert end == "finished"


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_failing_wandb_does_not_stop_training(broken, tmp_path, monkeypatch, capsys):
    quiet = {"log": lambda *_, **__: None, "finish": lambda: None} | {broken: _fails}
    run = types.SimpleNamespace(log=quiet["log"], finish=quiet["finish"])
    fake_wandb(monkeypatch, init=_fails if broken == "init" else lambda **_: run)
    assert train(tiny_config(tmp_path, max_steps=2, wandb="online")).step == 2
    assert "wandb: the service is down; the run goes on\n" in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_missing_wandb_is_refused_with_the_way_out_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(tiny_flags(tmp_path, wandb="offline")) == 2
    assert capsys.readouterr().err == "train.py: log.wandb offline needs wandb: pip install -e '.[wandb]'\n"
    assert not (tmp_path / "run").exists()


def test_the_real_wandb_offline(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    quiet = {"WANDB_SILENT": "true", "HOME": str(tmp_path / "home")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    os.makedirs(quiet["HOME"])
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(clean):
            patch.delenv(name)
        code, _, err = finish(start("train.py", *tiny_flags(tmp_path, max_steps=3, wandb="offline"), **quiet))
    assert (code, err) == (0, "")
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    rows = read_metrics(tmp_path / "run")
    for text in ("train_loss", "val_loss", "glassgpt", "learning_rate", repr(rows[-1]["train_loss"])):
        assert text.encode() in content


def test_the_kernels_of_all_layers_are_named():
    sizes = {"n_layer": 4, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 5}
    runtime = Runtime(CPU, torch.float32)
    one, mixed = ModelConfig(**sizes), ModelConfig(**sizes, attention="window", full_attention_every=2)
    assert attention_kernel(GPT(one), runtime) == "cpu flash_attention"
    assert attention_kernel(GPT(mixed), runtime) == "window, cpu flash_attention"
    with pytest.raises(ValueError, match="cudnn attention kernel does not run here"):
        attention_kernel(GPT(ModelConfig(**sizes, flash_kernel="cudnn")), runtime)
