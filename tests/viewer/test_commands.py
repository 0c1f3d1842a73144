"""probe.py page and serve through its main, on a run that is trained here and keeps records."""

import json
import re
import socket

import pytest

from probe import main
from probes.record import AttentionRecord
from tests.tiny import tiny_config
from train import train

TEXT = "12 times 3"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    train(tiny_config(folder, interval=5))
    return folder / "run"


def probe(capsys, *arguments):
    """(exit code, stdout, stderr) of probe.py."""
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def content_of(path):
    return json.loads(re.search('id="content">(.*?)</script>', path.read_text(encoding="utf-8"))[1])


def test_a_page_of_a_text_says_its_size_first(run, tmp_path, capsys):
    code, out, err = probe(capsys, "page", run, "--text", TEXT, "-o", tmp_path / "a.html")
    assert (code, err) == (0, "")
    size, wrote = out.splitlines()
    assert re.fullmatch(r"10 tokens: a page of about [\d.]+ kB", size)
    assert wrote.startswith(f"wrote {tmp_path / 'a.html'}, ")
    content = content_of(tmp_path / "a.html")
    assert content["tokens"]["texts"] == list(TEXT)
    assert (content["title"], content["steps"], content["ablation"]) == (str(run), [content["step"]], None)
    assert len(content["predictions"]) == 10

    chosen = ("--layers", 1, "--checkpoint", "last", "--json", "-o", tmp_path / "b.html")
    code, out, _ = probe(capsys, "page", run, "--text", TEXT, *chosen)
    about = json.loads(out)
    assert (code, about["layers"], about["steps"], about["tokens"]) == (0, [1], [20], 10)
    assert about["bytes"] == (tmp_path / "b.html").stat().st_size == pytest.approx(about["estimated_bytes"], rel=0.1)


def test_without_a_text_it_shows_the_steps_that_training_kept(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = probe(capsys, "page", run, "--checkpoint", "last")
    assert code == 0
    assert out.startswith("16 tokens, 4 steps of training: a page of about ")
    content = content_of(tmp_path / "page.html")
    assert (content["step"], content["steps"], content["text"]) == (20, [5, 10, 15, 20], "random tokens, twice")
    assert content["tokens"]["ids"] == list(
        AttentionRecord.load(run / "records" / "step-000020.safetensors").info.token_ids
    )
    assert len(content["predictions"]) == 16


def test_a_run_without_records_shows_its_own_text(tmp_path, capsys):
    train(tiny_config(tmp_path, max_steps=5, max_tokens=7, text="7 times 3 is 21."))
    capsys.readouterr()
    assert json.loads(probe(capsys, "page", tmp_path / "run", "--json", "-o", tmp_path / "a.html")[1])["tokens"] == 16
    assert "".join(content_of(tmp_path / "a.html")["tokens"]["texts"]) == "7 times 3 is 21."
    own = content_of(tmp_path / "run" / "page.html")  # what training left
    assert "".join(own["tokens"]["texts"]) == "7 times"
    assert (own["step"], own["steps"], own["title"]) == (5, [5], str(tmp_path / "run"))


def test_a_page_of_a_record(run, tmp_path, capsys):
    record = tmp_path / "a.safetensors"
    assert probe(capsys, "capture", run, "--text", TEXT, "-o", record)[0] == 0
    code, out, _ = probe(capsys, "page", record, "-o", tmp_path / "a.html")
    assert (code, len(out.splitlines())) == (0, 2)
    content = content_of(tmp_path / "a.html")
    assert (content["tokens"]["texts"], content["predictions"]) == (list(TEXT), None)


def test_ablation_of_every_head_is_kept_for_the_page(run, tmp_path, capsys):
    kept = run / "ablation.json"
    for other in (("--heads", "0.1"), ("--repeated",), ("--text", TEXT), ("--keep-patterns",)):
        assert probe(capsys, "ablate", run, *other)[0] == 0
        assert not kept.exists()
    code, out, _ = probe(capsys, "ablate", run, "--json")
    assert (code, json.loads(kept.read_text())) == (0, json.loads(out))
    probe(capsys, "page", run, "--text", TEXT, "-o", tmp_path / "a.html")
    rows = {row["head"]: row["change"] for row in json.loads(out)["rows"] if row["head"] != "together"}
    assert content_of(tmp_path / "a.html")["ablation"]["change"] == rows
    kept.unlink()
    kept.mkdir()  # a place that cannot be written
    code, out, err = probe(capsys, "ablate", run)
    assert (code, "together" in out) == (0, True)
    assert re.fullmatch(r"cannot write .*ablation\.json: Is a directory\n", err)
    kept.rmdir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["page"], "which run?"),
        (["page", "nowhere"], "no run directory nowhere"),
        (["page", "RUN", "-o", "a.pdf"], r"ends in \.html, not 'a\.pdf'"),
        (["page", "RUN", "-o", "no/such/a.html"], "no folder no/such"),
        (
            ["page", "RUN", "--text", "1", "--layers", "0,7", "-o", "FOLDER/a.html"],
            r"layer 7 does not exist; choose 0\.\.1",
        ),
        (["page", "RUN", "--layers", "7", "-o", "FOLDER/a.html"], r"layer 7 is not in this record; it has 0\.\.1"),
        (["page", "RUN", "--text", "€", "-o", "FOLDER/a.html"], "never seen '€'"),
        (["page", "RECORD", "--text", "1", "-o", "FOLDER/a.html"], "is a record and has its text"),
        (["page", "RUN", "--text", "1", "-o", "FOLDER/folder.html"], "cannot write .*: Is a directory"),
        (["serve", "RUN", "--port", "70000"], "--port is 70000; it must be 0 to 65535"),
        (["serve", "RUN", "--port", "TAKEN"], "cannot listen on .*choose another --port or --host"),
        (["serve", "RUN", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["serve", "nowhere"], "no run directory nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(run, tmp_path, capsys, arguments, message):
    (tmp_path / "folder.html").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        record = str(run / "records" / "step-000005.safetensors")
        names = {"RUN": str(run), "RECORD": record, "TAKEN": str(taken.getsockname()[1])}
        arguments = [names.get(word, word.replace("FOLDER", str(tmp_path))) for word in arguments]
        code, _, err = probe(capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(message, err)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_a_page_too_large_is_refused_before_the_model_runs(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("viewer.page.MOST_BYTES", 1000)
    monkeypatch.setattr("viewer.content.capture_text", lambda *_, **__: pytest.fail("ran"))
    code, out, err = probe(capsys, "page", run, "--text", TEXT, "-o", tmp_path / "a.html")
    assert (code, out) == (2, "")
    assert re.search(r"would have .* kB, more than 1 kB; choose .* or look at all of it with: probe\.py serve", err)
    assert list(tmp_path.iterdir()) == []
