"""The real `datasets` on local files; the hub only out of reach."""

import json
import os
import subprocess
import sys

import datasets
import pytest

from data.config import DataConfig
from data.sources import open_source

ROWS = ["first text\r\nof two lines", "", '苹果 "quoted", with comma', "last"]
EXPECTED = ["first text\nof two lines", '苹果 "quoted", with comma', "last"]

pytestmark = pytest.mark.usefixtures("hf_cache")


def read(source, **options):
    return ["".join(document) for document in open_source(DataConfig(source=str(source), **options)).documents()]


def refusal(source, **options):
    with pytest.raises(ValueError) as refused:
        read(source, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def write(path, rows=ROWS, column="text"):
    path.parent.mkdir(exist_ok=True)
    table = datasets.Dataset.from_dict({column: rows, "number": list(range(len(rows)))})
    match path.suffix:
        case ".jsonl":
            table.to_json(path)
        case ".json":
            path.write_text(json.dumps([{column: text, "number": 1} for text in rows]))
        case ".csv":
            table.to_csv(path)
        case ".parquet":
            table.to_parquet(path)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet"])
def test_a_file_a_folder_and_a_glob_of_tables(tmp_path, suffix):
    write(tmp_path / "folder" / f"table.{suffix}")
    (tmp_path / "folder" / "README.md").write_text("What is in here.")
    assert read(tmp_path / "folder" / f"table.{suffix}") == EXPECTED
    assert read(tmp_path / "folder") == EXPECTED
    assert read(tmp_path / "folder" / f"*.{suffix}") == EXPECTED


def test_a_folder_of_texts_reads_as_the_library_reads_it(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("second\nfile")
    (folder / "a.txt").write_text("first\n\nfile")
    theirs = datasets.load_dataset("text", data_dir=str(folder), split="train", sample_by="document")
    assert read(folder) == list(theirs["text"])


def test_split_and_column(tmp_path):
    write(tmp_path / "set" / "train-0.parquet", ["a", "b"], column="story")
    write(tmp_path / "set" / "test-0.parquet", ["c"], column="story")
    assert read(tmp_path / "set", column="story") == ["a", "b"]
    assert read(tmp_path / "set", column="story", split="test") == ["c"]
    assert read(tmp_path / "set", column="story", split="train[:1]") == ["a"]
    assert "choose --data.column from story, number" in refusal(tmp_path / "set")
    assert "column 'number'" in refusal(tmp_path / "set", column="number")
    assert "validation" in refusal(tmp_path / "set", column="story", split="validation")
    assert "other" in refusal(tmp_path / "set", column="story", subset="other")


def test_the_fingerprint_follows_content_split_and_column(tmp_path):
    def fingerprint(**options):
        return open_source(DataConfig(source=str(tmp_path / "t.jsonl"), **options)).fingerprint()

    (tmp_path / "t.jsonl").write_text('{"text": "a", "other": "b"}\n{"text": "c", "other": "d"}\n')
    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(column="other") != first
    assert fingerprint(split="train[:1]") != first
    (tmp_path / "t.jsonl").write_text('{"text": "x", "other": "b"}\n{"text": "c", "other": "d"}\n')
    assert fingerprint() != first


def test_damaged_tables_are_refused_in_one_line(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"junk")
    (tmp_path / "b.json").write_text("{nope")
    (tmp_path / "c.jsonl").touch()
    assert "a.parquet as parquet" in refusal(tmp_path / "a.parquet")
    assert "b.json as json" in refusal(tmp_path / "b.json")
    assert "c.jsonl is empty" in refusal(tmp_path / "c.jsonl")


def test_text_with_a_lone_surrogate(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    try:
        assert read(tmp_path / "a.jsonl") == ["a\ufffdb"]
    except ValueError as error:  # the library may refuse it
        assert "a.jsonl" in str(error)  # noqa: PT017


@pytest.mark.parametrize("source", ["shakespeare", "owner/name"])
@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_network_it_fails_quickly_and_names_the_way_out(tmp_path, source, offline):
    code = f"""
from data.config import DataConfig
from data.sources import open_source
import datasets, time
start = time.monotonic()
try:
    open_source(DataConfig(source={source!r}))
except ValueError as error:
    print(error)
print(time.monotonic() - start, datasets.config.HF_HUB_OFFLINE)
"""
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
    env |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    message, outcome = ran.stdout.splitlines()
    assert "without network, give a local file or folder as --data.source" in message
    assert float(outcome.split()[0]) < 5
    assert outcome.split()[1] == str(offline == "1")  # left as it was


def test_a_reachable_hub_is_asked_and_then_loaded_with_the_presets_settings(monkeypatch):
    calls = []

    def load_dataset(path, **options):
        calls.append((path, options, datasets.config.HF_HUB_OFFLINE))
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for source in ("shakespeare", "tinystories", "openwebtext", "fineweb-edu", "owner/name"):
        assert read(source) == ["a"]
    assert [(path, options["name"], options["revision"]) for path, options, _ in calls] == [
        ("karpathy/tiny_shakespeare", None, "refs/convert/parquet"),
        ("roneneldan/TinyStories", None, None),
        ("Skylion007/openwebtext", None, None),
        ("HuggingFaceFW/fineweb-edu", "sample-10BT", None),
        ("owner/name", None, None),
    ]
    assert not any(offline for *_, offline in calls)
