"""probe.py ablate, knockout, patch and lens through its main, on a run that is trained here."""

import json
import re

import pytest
import torch

from probe import main
from tests.tiny import TEXT, tiny_config
from train import train
from training.checkpoint import load_run

torch.set_num_threads(1)
PROMPT = "3 times 4 is "


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("causal")
    train(tiny_config(folder, n_kv_head=1, max_steps=30))
    return str(folder / "run")


def probe(capsys, *arguments):
    """(exit code, stdout, stderr) of probe.py."""
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def table_of(capsys, *arguments):
    """`about` and the rows by their first value, of --json."""
    code, out, err = probe(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    table = json.loads(out)
    return table["about"], {next(iter(row.values())): row for row in table["rows"]}, table["rows"]


def test_ablate_reads_the_runs_own_validation_text(run, capsys):
    about, rows, _ = table_of(capsys, "ablate", run)
    assert list(rows) == ["0.0", "0.1", "1.0", "1.1", "together"]
    trained = load_run(run)
    assert (about["run"], about["step"], about["how"]) == (run, trained.step, "zero")
    assert about["loss"] == pytest.approx(trained.val_loss, abs=0.02)  # evaluate also counts what is left at the end
    assert all(row["change"] == pytest.approx(row["loss"] - about["loss"]) for row in rows.values())
    given, _, _ = table_of(capsys, "ablate", run, "--text", TEXT[-about["tokens"] :])
    assert given["loss"] == about["loss"]


def test_ablate_of_second_copies(run, capsys):
    """The 18 characters of the run's text, 8 of them twice: 32 draws make 512 tokens."""
    about, rows, _ = table_of(capsys, "ablate", run, "--repeated", "--tokens", "512")
    assert about["tokens"] == 512
    assert list(rows) == ["0.0", "0.1", "1.0", "1.1", "together"]
    assert all(row["change"] == pytest.approx(row["loss"] - about["loss"]) for row in rows.values())
    assert about["first_copies"] > 1
    assert main(["ablate", str(run), "--repeated", "--text", "ab"]) == 2
    assert "--repeated draws its own tokens" in capsys.readouterr().err


def test_ablate_of_chosen_heads(run, capsys):
    full, few = (table_of(capsys, "ablate", run, "--heads", "1.1,0.0", *more)[1] for more in ([], ["--keep-patterns"]))
    assert list(full) == ["1.1", "0.0", "together"]
    assert full["1.1"] == few["1.1"]
    assert full["0.0"] != few["0.0"]
    means, resampled = (
        table_of(capsys, "ablate", run, "--how", how, "--tokens", 50)[1] for how in ("mean", "resample")
    )
    assert means != resampled
    code, out, _ = probe(capsys, "ablate", run, "--heads", "1.1")
    assert code == 0
    assert "1.1" in out
    assert "together" not in out


def test_ablate_says_when_the_runs_data_are_gone(tmp_path, capsys):
    train(tiny_config(tmp_path, max_steps=1))
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() + "#")
    code, _, err = probe(capsys, "ablate", tmp_path / "run")
    assert code == 2
    assert "another vocabulary now); give --text or --file" in err
    text.unlink()
    code, _, err = probe(capsys, "ablate", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "the run's own data cannot be used" in err


def test_knockout(run, capsys):
    about, _, rows = table_of(capsys, "knockout", run, "--text", PROMPT, "--from", "12,11", "--to", "0,8")
    assert about["edges"] == [[12, 0], [12, 8], [11, 0], [11, 8]]
    assert 0 < about["kl"] < 1
    assert about["layers"] == [0, 1]
    model, tokenizer = (trained := load_run(run)).model, trained.tokenizer
    with torch.no_grad():
        before = model(torch.tensor([tokenizer.encode(PROMPT)]))[0, -1].double().softmax(-1)
    assert [row["before"] for row in rows] == pytest.approx([float(before[row["id"]]) for row in rows])
    assert rows[0]["before"] == pytest.approx(float(before.max()), rel=0.2)
    code, out, _ = probe(capsys, "knockout", run, "--text", PROMPT, "--to", "0", "--layers", "1")
    assert code == 0
    assert "[[12, 0]]" in out


def test_rank(run, capsys):
    about, rows, _ = table_of(capsys, "knockout", run, "--text", PROMPT, "--rank", "--from", "9")
    assert list(rows) == ["0.0", "0.1", "1.0", "1.1", "all"]
    assert [row["edges"] for row in rows.values()] == [10, 10, 10, 10, 40]
    assert (about["query"], about["correlation"]) == (9, "Spearman")
    assert all(-1 <= row[what] <= 1 for row in rows.values() for what in ("output", "distribution"))


def test_patch(run, tmp_path, capsys):
    question = ("patch", run, "--clean", PROMPT, "--corrupt", "3 times 5 is ", "--answer", "1", "--other", "2")
    about, _, rows = table_of(capsys, *question, "-o", tmp_path / "patch.png")
    assert (tmp_path / "patch.png").read_bytes()[:4] == b"\x89PNG"
    assert [(row["part"], row["index"]) for row in rows] == [("position", i) for i in range(13)] + [
        ("head", 0),
        ("head", 1),
    ]
    assert [row["layer_0"] for row in rows[:13]] == pytest.approx([float(i == 8) for i in range(13)], abs=0.01)
    assert [(row["clean"], row["corrupted"]) for row in rows[8:10]] == [("4", "5"), ("␣", "␣")]
    assert about["clean_difference"] != about["corrupted_difference"]
    assert about["tokens"] == 13


def test_lens(run, capsys):
    _, _, rows = table_of(capsys, "lens", run, "--text", PROMPT)
    assert [row["after"] for row in rows[::5]] == ["embedding", "layer 0", "layer 1"]
    first = [row["probability"] for row in rows[:5]]
    assert first == sorted(first, reverse=True)
    about, parts, _ = table_of(capsys, "lens", run, "--text", PROMPT, "--target", "1", "--other", " ")
    assert (about["target"], about["other"]) == ("1", "␣")
    assert about["sum"] == pytest.approx(sum(row["logit"] for row in parts.values()))
    assert set(parts) == {"embedding", "0.0", "0.1", "1.0", "1.1", "mlp 0", "mlp 1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablate", "RUN", "--heads", "2.0"], "layer 2 does not exist; choose 0..1"),
        (["ablate", "RUN", "--heads", "0.2"], "head 2 does not exist; choose 0..1"),
        (["ablate", "RUN", "--heads", "1"], "give layer.head from 0.0 to 1.1"),
        (["ablate", "RUN", "--how", "mode"], "mode"),
        (["ablate", "RUN", "--tokens", "1"], "a loss needs at least 2"),
        (["ablate", "RUN", "--text", "3"], "at least two tokens; the text has 1"),
        (["ablate", "RUN", "--text", "3 times", "--how", "resample"], "there is one example; give a longer text"),
        (["knockout", "RUN", "--text", PROMPT], r"which key\? give --to"),
        (["knockout", "RUN", "--text", PROMPT, "--to", "13"], "position 13 does not exist; choose 0..12"),
        (["knockout", "RUN", "--text", PROMPT, "--from", "3", "--to", "5"], "query 3 does not see key 5"),
        (["knockout", "RUN", "--text", PROMPT, "--from", "0", "--to", "0"], "query 0 would see no key"),
        (["knockout", "RUN", "--text", PROMPT, "--to", "all"], "take positions, not all"),
        (["knockout", "RUN", "--text", PROMPT, "--to", "0", "--layers", "2"], "layer 2 does not exist; choose 0..1"),
        (["knockout", "RUN", "--text", PROMPT, "--to", "0", "--rank"], "--rank tries every edge of one query"),
        (["knockout", "RUN", "--text", "3", "--rank"], "query 0 sees one key"),
        (["patch", "RUN", "--clean", "3", "--answer", "1", "--other", "2"], "give --corrupt"),
        (["patch", "RUN", "--clean", "3", "--corrupt", "44", "--answer", "1", "--other", "2"], "has 1 tokens and .* 2"),
        (["patch", "RUN", "--clean", "3", "--corrupt", "4", "--answer", "12", "--other", "2"], "'12' is 2 tokens"),
        (["patch", "RUN", "--clean", "3", "--corrupt", "3", "--answer", "1", "--other", "2"], "nothing to restore"),
        (["lens", "RUN", "--text", "3", "--other", "2"], "--other is subtracted from --target"),
        (["lens", "RUN", "--text", "3", "--target", "12"], "'12' is 2 tokens of this model; give one"),
        (["lens", "RUN"], "the text is empty"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(run, capsys, arguments, message):
    code, out, err = probe(capsys, *[run if word == "RUN" else word for word in arguments])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err), err
