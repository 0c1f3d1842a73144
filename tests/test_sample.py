"""sample.main: text from a run directory."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from model import GPT
from sample import main
from tests.tiny import TEXT, tiny_config
from train import train
from training.checkpoint import load_run, save_checkpoint
from training.metrics import read_metrics

PROMPT = "3 times"


def new_run(folder: Path, **changes) -> Path:
    train(tiny_config(folder, **changes))
    # Sampling may look at the run directory alone.
    (folder / "text.txt").unlink()
    shutil.rmtree(folder / "cache")
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of characters, block_size 16, without the data that it was trained on."""
    return new_run(tmp_path_factory.mktemp("chars"), max_steps=60, eval_interval=20, learning_rate=2e-2)


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory):
    """A run of single bytes of Chinese text, hardly trained: its samples break characters everywhere."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "text.txt").write_text("苹果发布了新产品，他吃了一个苹果。" * 40, encoding="utf-8")
    return new_run(folder, tokenizer="byte", max_steps=30, position="rope")


@pytest.fixture
def sample(capsys):
    def call(run, *flags) -> str:
        capsys.readouterr()  # what came before is not the sample's
        assert main([str(run), *map(str, flags)]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return call


@pytest.fixture
def sample_json(sample):
    return lambda run, *flags: json.loads(sample(run, *flags, "--json"))


def test_greedy_is_the_argmax_of_each_step(run, sample, sample_json):
    loaded = load_run(run)
    tokens = loaded.tokenizer.encode(PROMPT)
    n_prompt = len(tokens)
    while len(tokens) < 16:
        tokens.append(max(range(18), key=loaded.model(torch.tensor([tokens]))[0, -1].tolist().__getitem__))
    expected = loaded.tokenizer.decode(tokens)
    flags = ("--prompt", PROMPT, "--max-new-tokens", 16 - n_prompt, "--temperature", 0)
    assert sample(run, *flags) == expected + "\n"
    (made,) = sample_json(run, *flags)["samples"]
    assert made["tokens"] == tokens[n_prompt:]
    assert len(set(made["tokens"])) > 2  # not one character over and over, which an error might give too


@pytest.mark.parametrize("cache", ["--cache", "--no-cache"])
def test_bfloat16_draws_what_the_rounded_model_does(cache, run, sample_json):
    """Token by token, the highest logit under autocast, or one that lies below it by no more than its rounding."""
    loaded = load_run(run)
    flags = ("--prompt", PROMPT, "--max-new-tokens", 9, "--temperature", 0, "--dtype", "bfloat16", cache)
    made = sample_json(run, *flags)["samples"][0]["tokens"]
    tokens = torch.tensor([loaded.tokenizer.encode(PROMPT) + made])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = loaded.model(tokens[:, :-1])[0, -9:, :18]
    drawn = logits[range(9), made]
    assert (logits.amax(-1) - drawn).max() < 2**-6 * logits.abs().max()
    assert len(set(made)) > 2


def test_json_holds_all_there_is_to_know(run, sample):
    flags = ("--prompt", PROMPT, "--max-new-tokens", 12, "--n-samples", 2)
    out = sample(run, *flags, "--json")
    assert out.count("\n") == 1
    got = json.loads(out)
    assert set(got) == {"run", "checkpoint", "step", "prompt", "prompt_tokens", "samples"}
    losses = {row["step"]: row["val_loss"] for row in read_metrics(run) if "val_loss" in row}
    assert (got["run"], got["checkpoint"], got["prompt"]) == (str(run), "best.pt", PROMPT)
    assert got["step"] == min(losses, key=losses.get)
    tokenizer = load_run(run).tokenizer
    assert got["prompt_tokens"] == tokenizer.encode(PROMPT)
    assert len(got["samples"]) == 2
    for made in got["samples"]:
        assert set(made) == {"text", "tokens", "finish"}
        assert made["finish"] == "length"
        assert len(made["tokens"]) == 12
        assert made["text"] == tokenizer.decode(made["tokens"])


def test_the_newest_checkpoint_on_request(run, sample_json):
    got = sample_json(run, "--checkpoint", "last", "--max-new-tokens", 1)
    assert (got["checkpoint"], got["step"]) == ("last.pt", 60)


def test_a_seed_decides_the_samples(run, sample_json):
    def texts(seed):
        flags = ("--prompt", PROMPT, "--seed", seed, "--n-samples", 3, "--temperature", 1.5)
        return [made["text"] for made in sample_json(run, *flags)["samples"]]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(set(texts(1))) == 3  # the rows of a batch draw their own


def test_several_samples_come_under_their_numbers(run, sample, sample_json):
    flags = ("--prompt", PROMPT, "--n-samples", 2, "--max-new-tokens", 15)
    made = [one["text"] for one in sample_json(run, *flags)["samples"]]
    assert sample(run, *flags) == f"--- 1 of 2\n{PROMPT}{made[0]}\n--- 2 of 2\n{PROMPT}{made[1]}\n"


def test_what_is_streamed_is_the_text_of_the_json(run, sample, sample_json):
    flags = ("--prompt", PROMPT, "--max-new-tokens", 40)
    assert sample(run, *flags) == PROMPT + sample_json(run, *flags)["samples"][0]["text"] + "\n"


@pytest.mark.parametrize("flags", [("--temperature", 0), ("--temperature", 1, "--top-k", 5), ("--top-p", 0.9)])
@pytest.mark.parametrize("which", ["run", "byte_run"])
def test_with_and_without_cache_the_same_text_also_past_block_size(which, flags, request, sample_json):
    flags = ("--max-new-tokens", 50, "--n-samples", 2, *flags)  # block_size is 16
    cached, uncached = (sample_json(request.getfixturevalue(which), *flags, *more) for more in ((), ("--no-cache",)))
    assert cached == uncached
    assert all(len(made["tokens"]) == 50 for made in cached["samples"])


@pytest.mark.parametrize(("flags", "is_used"), [((), True), (("--no-cache",), False)])
def test_the_cache_is_used_unless_told_not_to(flags, is_used, run, sample, monkeypatch):
    made, honest = [], GPT.new_cache
    monkeypatch.setattr(GPT, "new_cache", lambda model: made.append(1) or honest(model))
    sample(run, "--max-new-tokens", 3, *flags)
    assert bool(made) is is_used


def test_a_stop_ends_the_sample_before_it_though_it_spans_tokens(run, sample, sample_json):
    flags = ("--prompt", PROMPT, "--max-new-tokens", 60, "--temperature", 0)
    (whole,) = sample_json(run, *flags)["samples"]
    stop = whole["text"][8:11]  # three tokens
    assert len(set(stop)) > 1
    before = whole["text"][: whole["text"].index(stop)]
    (cut,) = sample_json(run, *flags, "--stop", stop)["samples"]
    assert (cut["text"], cut["finish"]) == (before, "stop")
    assert cut["tokens"] == whole["tokens"][: len(before) + 3]
    assert sample(run, *flags, "--stop", stop) == PROMPT + before + "\n"
    (never,) = sample_json(run, *flags, "--stop", "苹")["samples"]
    assert never == whole


def test_each_of_several_samples_stops_by_itself(run, sample_json):
    flags = ("--prompt", PROMPT, "--max-new-tokens", 60, "--n-samples", 4)
    whole, cut = (sample_json(run, *flags, *more)["samples"] for more in ((), ("--stop", ".")))
    assert len({len(made["text"]) for made in cut}) > 1
    for one, other in zip(cut, whole, strict=True):
        assert one["text"] == other["text"].split(".")[0]
        assert one["finish"] == ("stop" if "." in other["text"] else "length")


def test_a_character_is_streamed_whole_or_not_at_all(byte_run, capsys, monkeypatch):
    flags = [str(byte_run), "--prompt", "苹", "--max-new-tokens", "60", "--temperature", "0.3"]
    printed = []
    monkeypatch.setattr("builtins.print", lambda *parts, **_: printed.append("".join(parts)))
    assert main(flags) == 0
    monkeypatch.undo()
    capsys.readouterr()
    assert main([*flags, "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["samples"]
    assert printed[0] == "苹"
    assert "".join(printed[1:]) == made["text"] == bytes(made["tokens"]).decode("utf-8", "replace")
    assert "" in printed[1:]  # bytes that only began a character showed nothing
    assert sum(piece.encode().decode() == piece and len(piece) > 0 for piece in printed[1:]) > 3


def test_unseen_characters_are_refused_by_name_or_skipped(run, capsys, sample_json):
    assert main([str(run), "--prompt", "3 times é苹"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("sample.py: ")
    assert err.count("\n") == 1
    assert "'é', '苹'" in err
    assert "--unknown skip" in err
    skipped = sample_json(run, "--prompt", "3 times é苹", "--unknown", "skip")
    assert skipped["samples"] == sample_json(run, "--prompt", "3 times ")["samples"]
    nothing_left = sample_json(run, "--prompt", "é", "--unknown", "skip")
    assert nothing_left["samples"] == sample_json(run)["samples"]


def test_an_empty_prompt_begins_with_a_newline(run, sample_json):
    newline = load_run(run).tokenizer.encode("\n")
    assert sample_json(run, "--max-new-tokens", 3)["prompt_tokens"] == newline


def test_a_prompt_may_be_longer_than_block_size(run, sample_json):
    prompt = TEXT[:200]
    got = sample_json(run, "--prompt", prompt, "--max-new-tokens", 5, "--temperature", 0)
    assert len(got["prompt_tokens"]) == 200
    # The context of the first token is cut by half a block at a time, until it fits: tokens 184 … 199.
    loaded = load_run(run)
    first = loaded.model(torch.tensor([got["prompt_tokens"][184:]]))[0, -1].argmax().item()
    assert got["samples"][0]["tokens"][0] == first


def test_a_prompt_from_a_file(run, tmp_path, sample, capsys):
    file = tmp_path / "prompt.txt"
    for text in (PROMPT, "\ufeff" + PROMPT):  # without and with a byte-order mark
        file.write_text(text, encoding="utf-8")
        assert sample(run, "--prompt-file", file) == sample(run, "--prompt", PROMPT)
    file.write_bytes(b"3 t\xffmes")
    for flags, fragment in (
        (["--prompt-file", str(file)], "prompt.txt is not UTF-8 at byte 3"),
        (["--prompt-file", str(tmp_path / "none.txt")], "none.txt: No such file or directory"),
        (["--prompt-file", str(tmp_path)], "Is a directory"),
        (["--prompt-file", str(file), "--prompt", "x"], "not both"),
    ):
        assert main([str(run), *flags]) == 2
        err = capsys.readouterr().err
        assert fragment in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [("--temperature", 0), ("--temperature", 5), ("--no-cache",), ("--top-k", 3)])
def test_rows_that_pad_the_vocabulary_are_never_sampled(flags, tmp_path, sample_json):
    train(tiny_config(tmp_path, max_steps=2, vocab_size=64, tied_head="False"))
    run = tmp_path / "run"
    content = torch.load(run / "best.pt", weights_only=True)
    head = content["model"]["lm_head.weight"]
    assert head.shape == (64, 32)
    head[18:] = 100 * torch.randn(46, 32)  # the padding would now win every draw
    save_checkpoint(run, "best.pt", content)
    loaded = load_run(run)
    assert loaded.model(torch.tensor([loaded.tokenizer.encode(PROMPT)]))[0, -1].argmax() >= 18
    made = sample_json(run, "--prompt", PROMPT, "--n-samples", 4, "--max-new-tokens", 30, *flags)["samples"]
    assert all(max(one["tokens"]) < 18 for one in made)
    assert all(len(one["text"]) == 30 for one in made)


def test_sampling_leaves_the_run_directory_as_it_was(run, sample):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    sample(run, "--prompt", PROMPT)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
