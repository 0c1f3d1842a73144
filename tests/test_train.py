"""train.main from end to end, and what the loop does in a step."""

import copy
import dataclasses
import importlib
import math
import tomllib

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from data.loader import BatchLoader
from data.prepare import prepare
from model import GPT
from tests.tiny import TEXT, tiny_config, tiny_flags
from train import NonFiniteLoss, main, train
from training.checkpoint import load_run
from training.config import Config
from training.evaluate import evaluate
from training.metrics import read_metrics
from training.runtime import Runtime

CPU = Runtime(torch.device("cpu"), torch.float32)


def parameters(folder) -> dict[str, torch.Tensor]:
    return torch.load(folder / "last.pt", weights_only=True)["model"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, b[name]) for name, p in a.items())


def test_20_steps_from_the_command_line(tmp_path, capsys):
    flags = tiny_flags(tmp_path, sample_tokens=30, sample_prompt="3 times", text="7 times 3 is 21.", max_tokens=12)
    assert main(flags) == 0
    out, err = capsys.readouterr()
    assert err == ""
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    pictures = {"loss.png", "attention.png"}
    assert names == pictures | {
        "page.html",
        "best.pt",
        "last.pt",
        "previous.pt",
        "config.toml",
        "tokenizer.json",
        "metrics.jsonl",
    }
    assert all(str(run / name) in out for name in names)
    for name in pictures:
        with Image.open(run / name) as picture:
            picture.load()
    assert out.endswith(f"walk through its attention in a browser: {run / 'page.html'}\n")
    content = torch.load(run / "last.pt", weights_only=True)
    assert (content["step"], content["n_tokens"]) == (20, 20 * 4 * 16)
    rows = read_metrics(run)
    assert f"validation loss after step 20: {rows[-1]['val_loss']:.4f} nats per token" in out
    assert f"{rows[-1]['val_bits_per_byte']:.4f} bits per byte" in out
    n_train = len(TEXT) * 9 // 10
    assert f"{n_train:,} tokens to train on, {len(TEXT) - n_train:,} to validate on" in out
    sample = out.split("sample:\n")[1].split("validation loss")[0]
    assert len(sample) == 30 + 1
    assert set(sample) <= set(TEXT)
    assert rows[-1]["val_loss"] < math.log(18) - 0.3  # 18 characters; it has learnt something
    saved = tomllib.loads((run / "config.toml").read_text())
    assert saved == content["config"]
    assert saved["model"]["vocab_size"] == 18  # resolved


def test_validation_is_the_whole_split_or_the_part_asked_for(tmp_path):
    corpus = prepare(tiny_config(tmp_path).data, show_progress=False)
    val = corpus.tokens[len(TEXT) * 9 // 10 :]
    for name, eval_tokens, tokens in (("all", 0, val), ("part", 50, val[:51])):
        train(tiny_config(tmp_path, name, max_steps=2, eval_tokens=eval_tokens))
        expected = evaluate(
            load_run(tmp_path / name, "last").model, tokens, block_size=16, n_bytes=len(tokens) - 1, runtime=CPU
        )
        row = read_metrics(tmp_path / name)[-1]
        assert row["val_loss"] == pytest.approx(expected.loss, rel=1e-6)
        assert row["val_bits_per_byte"] == pytest.approx(expected.loss / math.log(2), rel=1e-6)  # one byte a token


def test_best_is_the_checkpoint_of_the_lowest_validation_loss(tmp_path):
    # A rate that rises far too high: the loss falls at first and then climbs.
    train(
        tiny_config(tmp_path, learning_rate=3.0, warmup_steps=20, schedule="constant", grad_clip=0.0, eval_interval=1)
    )
    losses = {row["step"]: row["val_loss"] for row in read_metrics(tmp_path / "run")}
    lowest = min(losses, key=losses.get)
    assert lowest < 20
    run = load_run(tmp_path / "run", "best")
    assert (run.step, run.val_loss) == (lowest, losses[lowest])
    assert load_run(tmp_path / "run", "last").step == 20


def test_a_seed_decides_every_bit(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny_config(tmp_path, name, max_steps=5, seed=seed, dropout=0.1))
    a, b, c = (parameters(tmp_path / name) for name in "abc")
    assert same(a, b)
    assert not same(a, c)
    first = [read_metrics(tmp_path / name)[0]["train_loss"] for name in "abc"]
    assert first[0] == first[1] != first[2]


def test_validation_and_logging_do_not_change_training(tmp_path):
    train(tiny_config(tmp_path, "often", max_steps=6, dropout=0.1, eval_interval=1, log_interval=1))
    train(tiny_config(tmp_path, "seldom", max_steps=6, dropout=0.1, eval_interval=6, log_interval=6))
    assert same(parameters(tmp_path / "often"), parameters(tmp_path / "seldom"))


def first_gradient(config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the first step's whole batch at once, in float64."""
    corpus = prepare(config.data, show_progress=False)
    config = config.with_vocabulary(corpus.tokenizer.vocab_size)
    torch.manual_seed(config.run.seed)
    model = copy.deepcopy(GPT(config.model)).double()
    split = corpus.split(config.data.val_fraction, config.model.block_size)
    loader = BatchLoader(
        split.train,
        block_size=config.model.block_size,
        batch_size=config.train.batch_size,
        order=config.data.order,
        seed=config.run.seed,
    )
    inputs, targets = loader.next_batch()
    loss = F.cross_entropy(model(inputs).reshape(-1, config.model.vocab_size), targets.reshape(-1))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batch_size", [0, 1, 2, 3])
@pytest.mark.parametrize("grad_clip", [0.0, 0.01])
def test_a_step_takes_the_gradient_of_the_whole_batch_clipped(micro_batch_size, grad_clip, tmp_path):
    config = tiny_config(tmp_path, batch_size=6, micro_batch_size=micro_batch_size, grad_clip=grad_clip, max_steps=1)
    loss, gradients = first_gradient(config)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    state = train(config)
    (row,) = read_metrics(tmp_path / "run")
    assert row["train_loss"] == pytest.approx(loss, rel=1e-5)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)  # before clipping
    assert row["learning_rate"] == pytest.approx(1e-2 / 4)  # the first of four steps of warm-up
    assert norm > 0.01
    shrunk = 0.01 / norm if grad_clip else 1.0
    for name, p in state.model.named_parameters():
        mean = state.optimizer.state[p]["exp_avg"].double()  # (1 - beta1) · gradient, after one step
        torch.testing.assert_close(mean / 0.1, gradients[name] * shrunk, rtol=1e-3, atol=2e-6 * shrunk)


def test_batches_that_do_not_divide_show_the_arithmetic():
    def config(batch_size, micro_batch_size=0):
        changed = dataclasses.replace(Config().train, batch_size=batch_size, micro_batch_size=micro_batch_size)
        return dataclasses.replace(Config(), train=changed)

    assert config(12).micro_batch_size(1) == 12
    assert config(12).micro_batch_size(3) == 4
    assert config(12, 2).micro_batch_size(3) == 2
    with pytest.raises(ValueError, match=r"train\.batch_size 12 / 5 processes = 2\.4: not whole; try 10"):
        config(12).micro_batch_size(5)
    with pytest.raises(ValueError, match=r"train\.batch_size 3 / 4 processes = 0\.75: not whole; try 4"):
        config(3).micro_batch_size(4)
    with pytest.raises(ValueError, match=r"12 / 2 process.* / train\.micro_batch_size 4 = 1\.5 .* 1, 2, 3, 6$"):
        config(12, 4).micro_batch_size(2)


def test_the_vocabulary_comes_from_the_tokenizer_or_is_padded():
    def config(vocab_size):
        return dataclasses.replace(Config(), model=dataclasses.replace(Config().model, vocab_size=vocab_size))

    assert config(0).with_vocabulary(18).model.vocab_size == 18
    assert config(64).with_vocabulary(18).model.vocab_size == 64
    with pytest.raises(ValueError, match=r"model\.vocab_size 17 is less than the tokenizer's 18"):
        config(17).with_vocabulary(18)


def test_a_single_character_trains_with_a_warning_and_without_nan(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a" * 2000)
    assert main(tiny_flags(tmp_path, max_steps=5, eval_interval=1, sample_tokens=5, max_tokens=4)) == 0
    out, err = capsys.readouterr()
    assert "a single distinct character" in err
    assert err.count("\n") == 1
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 5
    assert all(row["train_loss"] == row["val_loss"] == 0.0 for row in rows)  # one choice: no surprise
    assert all(torch.isfinite(p).all() for p in parameters(tmp_path / "run").values())
    assert "aaaaa" in out


@pytest.mark.parametrize(
    ("text", "changes", "fragments"),
    [
        (b"abc def " * 20, {"block_size": 16}, ["too short for block_size 16", "largest that fits both is 15"]),
        (b"ab", {}, ["too short", "no block_size fits both"]),
        (b"", {}, ["text.txt"]),
        (b"ok \xff\xfe" * 200, {}, ["text.txt", "--data.encoding"]),
        (b"abc " * 500, {"device": "mps"}, ["mps", "auto"]),
        (b"abc " * 500, {"dtype": "float16"}, ["float16", "bfloat16"]),
        (b"abc " * 500, {"micro_batch_size": 3}, ["micro-steps", "1, 2, 4"]),
        (b"abc " * 500, {"vocab_size": 2}, ["vocab_size 2", "tokenizer's 4"]),
        (b"abc " * 500, {"n_head": 5}, ["n_head 5"]),
        (b"abc " * 500, {"resume": "must"}, ["no checkpoint"]),
        (b"abc " * 500, {"source": "nowhere.txt"}, ["nowhere.txt"]),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(text, changes, fragments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    (tmp_path / "text.txt").write_bytes(text)
    assert main(tiny_flags(tmp_path, **changes)) == 2
    err = capsys.readouterr().err
    assert err.startswith("train.py: ")
    assert err.count("\n") == 1
    assert all(fragment in err for fragment in fragments)
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "run").write_text("mine")
    assert main(tiny_flags(tmp_path)) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "run").read_text() == "mine"


def test_an_absurd_learning_rate_stops_before_the_bad_update(tmp_path, capsys):
    flags = tiny_flags(tmp_path, learning_rate=1e30, warmup_steps=0, checkpoint_interval=1)
    assert main(flags) == 1
    err = capsys.readouterr().err
    assert err.startswith("train.py: loss ")
    assert err.count("\n") == 1
    assert "--optimizer.learning_rate than 1e+30" in err
    content = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert f"at step {content['step'] + 1}: stopped before the update" in err
    assert all(torch.isfinite(p).all() for p in content["model"].values())


def test_an_update_that_overflows_is_not_saved(tmp_path, capsys):
    train(tiny_config(tmp_path, max_steps=2))
    before = (tmp_path / "run" / "last.pt").read_bytes()
    assert main(tiny_flags(tmp_path, learning_rate=1e39, warmup_steps=0, checkpoint_interval=1)) == 1
    err = capsys.readouterr().err
    assert "no longer finite after step 3: not saved" in err
    assert err.count("\n") == 1
    assert (tmp_path / "run" / "last.pt").read_bytes() == before


def poison(monkeypatch, step, spoil):
    """The loss of `step` comes out spoilt, in the second of its micro-batches."""
    module, calls = importlib.import_module("model.gpt"), 0
    honest = module.next_token_loss

    def next_token_loss(logits, targets):
        nonlocal calls
        calls += 1
        loss = honest(logits, targets)
        return spoil(loss) if calls == 2 * step else loss

    monkeypatch.setattr(module, "next_token_loss", next_token_loss)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda loss: loss * math.nan,
        lambda loss: loss * math.inf,
        lambda loss: loss + torch.sqrt(loss - loss.detach()),  # the loss is finite, its gradient is not
    ],
    ids=["nan", "inf", "gradient"],
)
def test_a_loss_that_is_not_finite_changes_nothing(spoil, tmp_path, monkeypatch):
    changes = {"micro_batch_size": 2, "eval_interval": 100, "checkpoint_interval": 3, "dropout": 0.1}
    with monkeypatch.context() as patch:
        poison(patch, 6, spoil)
        with pytest.raises(NonFiniteLoss, match="at step 6: stopped before the update; checkpoints up to step 5"):
            train(tiny_config(tmp_path, **changes))
    content = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert content["step"] == 3
    assert all(torch.isfinite(p).all() for p in content["model"].values())
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    # From there it goes on as if nothing had been.
    train(tiny_config(tmp_path, max_steps=20, **changes))
    train(tiny_config(tmp_path, "whole", max_steps=20, **changes))
    assert same(parameters(tmp_path / "run"), parameters(tmp_path / "whole"))
