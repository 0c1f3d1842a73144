"""probe.py through its main, on a run that was trained in this file: what it prints, writes and refuses."""

import csv
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from probe import main
from probes.record import AttentionRecord
from tests.tiny import REPOSITORY, tiny_config
from train import train
from training.checkpoint import load_run

SENTENCES = ("苹果发布了新产品", "他吃了一个苹果")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "text.txt").write_text("\n".join(SENTENCES * 60) + "\nto be, or not\tto be", encoding="utf-8")
    train(tiny_config(folder, n_kv_head=1, position="rope", max_steps=5))
    return str(folder / "run")


def probe(capsys, *arguments):
    """(exit code, stdout, stderr) of probe.py."""
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_capture_and_map_of_a_record(run, tmp_path, capsys):
    record = tmp_path / "a.safetensors"
    code, out, err = probe(capsys, "capture", run, "--text", SENTENCES[0], "-o", record, "--values")
    assert (code, err) == (0, "")
    size, wrote = out.splitlines()
    assert re.fullmatch(r"8 tokens: a record of about [\d.]+ kB, in about [\d.e-]+ s", size)
    assert wrote.startswith(f"wrote {record}, ")

    loaded, trained = AttentionRecord.load(record), load_run(run)
    assert loaded.info.token_texts == tuple(SENTENCES[0])
    assert (loaded.info.step, loaded.info.checkpoint_hash) == (trained.step, trained.checkpoint_hash)
    assert loaded.tensor(1, "v").shape == (1, 8, 16)

    code, out, err = probe(capsys, "map", record, "--layer", 1, "--head", 0)
    assert (code, err) == (0, "")
    assert "head 1.0 · path flash · kernel cpu flash_attention" in out
    assert SENTENCES[0] in out

    code, out, _ = probe(capsys, "map", record, "--layer", 1, "--head", 0, "--json")
    shown = json.loads(out)
    assert (code, shown["tokens"]) == (0, list(SENTENCES[0]))
    torch.testing.assert_close(torch.tensor(shown["weights"]), loaded.weights(1, 0), atol=1e-6, rtol=0)


def test_map_of_a_run_writes_pictures_and_tables(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\ufeff" + SENTENCES[1], encoding="utf-8")
    for name, choice in (
        ("one.png", ("--layer", 0, "--head", 1)),
        ("one.svg", ("--layer", 0, "--head", 1)),
        ("all.png", ("--layer", "all")),
        ("row.svg", ("--layer", 1)),
        ("two.PNG", ("--head", "0,1")),
    ):
        code, out, err = probe(capsys, "map", run, "--file", text, *choice, "-o", tmp_path / name)
        assert (code, out, err) == (0, f"wrote {tmp_path / name}\n", "")
        assert (tmp_path / name).read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    probe(capsys, "map", run, "--file", text, "--layer", 0, "--head", 1, "-o", tmp_path / "one.csv")
    with (tmp_path / "one.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header[1:] == list(SENTENCES[1])
    assert [sum(map(float, row[1:])) for row in rows] == pytest.approx([1] * 7, abs=1e-5)
    code, out, _ = probe(capsys, "map", run, "--file", text)
    assert code == 0
    assert all(f"{layer}.{head}" in out for layer in (0, 1) for head in (0, 1))


def test_unknown_characters_can_be_skipped(run, capsys):
    code, out, err = probe(capsys, "map", run, "--text", "x苹x", "--unknown", "skip", "--layer", "0", "--head", "0")
    assert (code, err) == (0, "")
    assert "1 token\n" in out


def test_check_passes_and_prints_a_number_a_line(run, capsys):
    code, out, err = probe(capsys, "check", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len([line for line in lines if line.startswith("ok ")]) == 10
    assert "path flash, 16 random tokens" in lines[0]
    code, out, _ = probe(capsys, "check", run, "--json")
    checks = json.loads(out)["checks"]
    assert (code, len(checks)) == (0, 10)
    assert set(checks[0]) == {"name", "passed", "measured", "limit", "detail"}


def test_check_fails_with_code_1_and_says_where(run, capsys, monkeypatch):
    def planted(*arguments):
        loaded = load_run(*arguments)
        loaded.model.blocks[1].attn.rule = type(loaded.model.blocks[1].attn.rule)(causal=False)
        return loaded

    monkeypatch.setattr("training.checkpoint.load_run", planted)
    code, out, _ = probe(capsys, "check", run)
    assert code == 1
    assert re.search(r"^FAIL  wrong pairs .*: layer 1 sees forbidden keys at offset \+1, \+2, ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["map", "RUN", "--text", "x"], "never seen 'x'.*--unknown skip"),
        (["map", "RUN", "--text", "x", "--unknown", "skip"], "no token is left"),
        (["map", "RUN", "--text", ""], "--text is empty"),
        (["heads", "RUN", "--text="], "--text is empty"),
        (["ablate", "RUN", "--file", ""], "--file is empty"),
        (["map", "RUN"], "give --text or --file"),
        (["map", "RUN", "--text", "a\udcff"], "--text is not UTF-8 at 1"),
        (["map", "RUN", "--text", "一" * 17], "17 tokens; this model reads at most 16"),
        (["map", "RUN", "--text", "一", "--file", "b"], "not both|b"),
        (["map", "RUN", "--file", "nowhere.txt"], "cannot read --file nowhere.txt: No such file"),
        (["map", "RUN", "--file", "FOLDER/latin.txt"], "latin.txt is not UTF-8 at 2"),
        (["map", "RUN", "--file", "FOLDER/empty.txt"], "the text is empty"),
        (["map", "RUN", "--text", "一", "--layer", "99"], r"layer 99 does not exist; choose 0\.\.1"),
        (["map", "RUN", "--text", "一", "--head", "2"], r"head 2 does not exist; choose 0\.\.1"),
        (["map", "RUN", "--text", "一", "--layer", "-1"], "--layer"),
        (["map", "RUN", "--text", "一", "--layer", "one"], "--layer one is no number"),
        (["map", "RUN", "--text", "一", "-o", "a.gif"], r"ends in \.png or \.svg or \.csv, not 'a\.gif'"),
        (["map", "RUN", "--text", "一", "-o", "-"], r"ends in \.png or \.svg or \.csv, not '-'"),
        (["map", "RUN", "--text", "一", "-o", "no/such/a.png"], "no folder no/such"),
        (["map", "RUN", "--text", "一", "-o", "FOLDER/folder.png"], "cannot write .*: Is a directory"),
        (["map", "RUN", "--text", "一", "-o", "FOLDER/a.csv"], "a table holds one head"),
        (["map", "RUN", "--text", "一", "--json"], "a table holds one head"),
        (["map", "FOLDER/latin.txt"], "no attention record"),
        (["map", "FOLDER/latin.txt", "--text", "一"], "is a record and has its text"),
        (["map", "FOLDER", "--text", "一"], "no checkpoint"),
        (["map", "nowhere"], "nowhere is neither a record nor a run directory"),
        (["map", "--lyer", "3", "RUN"], "--lyer.*perhaps you meant --layer"),
        (["map"], "which run?"),
        (["chek", "RUN"], "capture, map, page, serve, check"),
        ([], "capture, map, page, serve, check"),
        (["capture", "RUN", "--text", "一", "-o", "FOLDER/x.pt"], r"ends in \.safetensors"),
        (["capture", "RUN", "--text", "一"], r"ends in \.safetensors"),
        (["capture", "RUN", "--text", "一", "-o", "FOLDER/x.safetensors", "--layers", "0,9"], "layer 9 .*choose 0"),
        (["check", "nowhere"], "no run directory nowhere"),
        (["check", "RUN", "--checkpoint", "first"], "best.*last"),
        (["check", "RUN", "--device", "abacus"], "abacus"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(run, tmp_path, capsys, arguments, message):
    (tmp_path / "latin.txt").write_bytes("caé".encode("latin-1") + b" !")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    arguments = [argument.replace("RUN", run).replace("FOLDER", str(tmp_path)) for argument in arguments]
    code, out, err = probe(capsys, *arguments)
    assert code == 2
    assert re.search(message, err)
    assert err.startswith("probe.py: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
    assert "wrote" not in out


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["map", "--help"], 0), (["map", "a", "--lyer"], 2)])
def test_help_and_mistakes_answer_at_once(arguments, code):
    program = (
        "import sys, probe\n"
        "try:\n    code = probe.main(sys.argv[1:])\n"
        "except SystemExit as error:\n    code = error.code\n"
        "heavy = {'torch', 'matplotlib', 'datasets', 'safetensors', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code, done.stderr
    # Of the processor, not the clock, which a busy machine doubles.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_the_program_runs_as_a_script(run):
    done = subprocess.run(
        [sys.executable, str(Path(REPOSITORY) / "probe.py"), "map", run, "--text", SENTENCES[0], "--layer", "0"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.1" in done.stdout
    assert done.stdout.isascii()
