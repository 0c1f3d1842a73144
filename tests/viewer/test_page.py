"""The page as a file: it says what the record says, no text can leave its place, and its size is known before."""

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from probes.capture import capture
from probes.metadata import from_json, to_json
from probes.record import AttentionRecord
from tests.probes.small import tiny, tokens
from viewer import show
from viewer.content import View, kept_records
from viewer.page import MOST_BYTES, PageSize, answer, build_page, write_page

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--",
    "{{scripts}}",
    "\"'&",
    "\u202etxt",
    "👩‍👩‍👧",
    "\n",
    "\t",
    "\0",
    "\u2028",
    "]]>",
)


class Elements(HTMLParser):
    """Every script, style and meta element as a browser's parser finds it: (tag, attributes, text)."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.tags, self.is_inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found.append([tag, dict(attrs), ""])
        self.is_inside = True

    def handle_endtag(self, _):
        self.is_inside = False

    def handle_data(self, data):
        if self.is_inside:
            self.found[-1][2] += data

    def scripts(self, kind=None):
        return [(attrs, text) for tag, attrs, text in self.found if tag == "script" and attrs.get("type") == kind]


def record_of(texts, **options):
    """A record whose tokens are these texts."""
    model = tiny(**options)
    parts = [text.encode("utf-8") for text in texts]
    return capture(model, tokens(len(texts)), token_bytes=parts, step=7, checkpoint_hash="ab" * 32)


def content_of(page):
    ((attrs, text),) = [one for one in Elements(page).scripts("application/json") if one[0].get("id") == "content"]
    assert attrs == {"type": "application/json", "id": "content"}
    return json.loads(text)


def tensor_of(attrs, text):
    body = base64.b64decode(text, validate=True)
    shape = [int(size) for size in attrs["data-shape"].split(",")]
    if attrs["data-dtype"] == "bfloat16":
        return torch.from_numpy(np.frombuffer(body, "<i2").copy()).view(torch.bfloat16).reshape(shape)
    assert attrs["data-dtype"] == "float32"
    return torch.from_numpy(np.frombuffer(body, "<f4").copy()).reshape(shape)


def test_the_tensors_of_a_page_are_the_records():
    for options in ({}, {"n_kv_head": 2, "position": "rope"}, {"attention": "linear"}):
        record = capture(tiny(**options), tokens(33))
        page = build_page(View.of(record, layers=[1]))
        found = {attrs["data-key"]: tensor_of(attrs, text) for attrs, text in Elements(page).scripts("text/plain")}
        assert set(found) == {f"0/1/{name}" for name in ("q", "k", "lse")}
        for key, tensor in found.items():
            assert torch.equal(tensor, record.tensor(1, key.split("/")[-1]))


def test_bfloat16_stays_and_float16_is_widened():
    for dtype, expected in (("bfloat16", torch.bfloat16), ("float16", torch.float32)):
        record = capture(tiny(), tokens(9), dtype=dtype)
        found = [tensor_of(*one) for one in Elements(build_page(View.of(record))).scripts("text/plain")]
        assert [part.dtype for part in found] == [expected, expected, torch.float32] * 2
        assert torch.equal(found[0].float(), record.tensor(0, "q").float())


def test_hostile_tokens_stay_text():
    record = record_of(HOSTILE)
    title = '</title><script>alert("t")</script>{{data}}'
    plain = build_page(View.of(record_of(["a"] * len(HOSTILE)), title="a"))
    page = build_page(View.of(record, title=title))
    assert content_of(page)["tokens"]["texts"] == list(HOSTILE)
    assert content_of(page)["title"] == title
    assert Elements(page).tags == Elements(plain).tags  # no element more
    data = [text for kind in ("application/json", "text/plain") for _, text in Elements(page).scripts(kind)]
    assert not re.search("[<>&\0\u2028\u202e]", "".join(data))


def test_a_lone_surrogate_and_an_empty_token_can_be_shown():
    record = record_of(["a", "b", "c"])
    fields = json.loads(to_json(record.info))
    fields |= {"token_texts": ["\ud800", "", "c"], "token_bytes": ["ed a0 80", "", "63"]}
    info = from_json(json.dumps(fields))
    tensors = {f"layers.{layer}.{name}": record.tensor(layer, name) for layer in (0, 1) for name in ("q", "k", "lse")}
    found = content_of(build_page(View.of(AttentionRecord(info, tensors))))["tokens"]
    assert found["texts"] == ["\ud800", "", "c"]
    assert found["labels"] == ["<ED A0 80>", f"#{record.info.token_ids[1]}", "c"]


def test_only_our_own_scripts_may_run_and_nothing_may_be_fetched():
    page = build_page(View.of(record_of(["a", "b"])))
    elements = Elements(page)
    ((_, attrs, _),) = [one for one in elements.found if one[1].get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in attrs["content"].split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    assert "unsafe" not in attrs["content"]
    for name, texts in (
        ("script-src", [text for _, text in elements.scripts()]),
        ("style-src", [text for tag, _, text in elements.found if tag == "style"]),
    ):
        hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts}
        assert set(rules[name].split()) == hashes
    assert not [attrs for _, attrs, _ in elements.found if {"src", "style"} & set(attrs)]
    assert all(attrs.get("href", "#")[:6] in ("data:,", "#", "#map") for _, attrs, _ in elements.found)
    assert page.encode().index(b'charset="utf-8"') < 1024  # further on no browser looks for it
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)


@pytest.mark.parametrize(("n", "options"), [(1, {}), (64, {}), (400, {"n_kv_head": 1}), (300, {"n_layer": 6})])
def test_the_size_is_foretold(n, options):
    view = View.of(record_of([" word"] * n, **options))
    page = build_page(view)
    assert PageSize.of(view).n_bytes == pytest.approx(len(page.encode()), rel=0.12)
    config = tiny(**options).config
    assert PageSize.of_model(config, n, None) == replace(PageSize.of(view), n_predicted=1)


def test_512_tokens_of_72_heads_fit_and_more_is_refused_with_a_choice():
    assert PageSize(n_tokens=512, n_layers=12, n_head=6, n_kv_head=6, head_dim=64).check() < MOST_BYTES
    large = PageSize(n_tokens=2048, n_layers=12, n_head=6, n_kv_head=6, head_dim=64)
    with pytest.raises(ValueError, match=r"would have .*more than 30 MB; .*--layers (\S+), or .*serve") as refusal:
        large.check()
    n_layers = len(re.search(r"--layers (\S+),", str(refusal.value))[1].split(","))
    sizes = [PageSize(2048, n, 6, 6, 64).n_bytes for n in (n_layers, n_layers + 1)]
    assert sizes[0] <= MOST_BYTES < sizes[1]
    with pytest.raises(ValueError, match=r"one layer and at most ([0-9,]+) tokens") as refusal:
        PageSize(n_tokens=100_000, n_layers=12, n_head=16, n_kv_head=16, head_dim=128).check()
    n_tokens = int(re.search("at most ([0-9,]+)", str(refusal.value))[1].replace(",", ""))
    assert 0.9 * MOST_BYTES < PageSize(n_tokens, 1, 16, 16, 128).n_bytes < MOST_BYTES


def test_steps_of_training_are_in_one_page_the_last_first(tmp_path):
    (tmp_path / "records").mkdir()
    for step in (5, 10, 15):
        record = capture(tiny(seed=step), tokens(20), step=step)
        record.save(tmp_path / "records" / f"step-{step:06d}.safetensors")
    other = capture(tiny(), tokens(21), step=3)
    other.save(tmp_path / "records" / "step-000003.safetensors")

    view = View(kept_records(tmp_path), known={15: {"predictions": [[("a", 0.5)]] * 20}})
    page = build_page(view)
    assert (content_of(page)["step"], content_of(page)["steps"]) == (15, [5, 10, 15])
    assert content_of(page)["predictions"] == [[["a", 0.5]]] * 20
    others = {attrs["data-key"]: json.loads(text) for attrs, text in Elements(page).scripts("application/json")[1:]}
    assert {key: (one["step"], one["predictions"]) for key, one in others.items()} == {
        "10/content": (10, None),
        "5/content": (5, None),
    }
    keys = [attrs["data-key"] for attrs, _ in Elements(page).scripts("text/plain")]
    assert sorted(keys) == sorted(
        f"{step}/{layer}/{name}" for step in (5, 10, 15) for layer in (0, 1) for name in ("q", "k", "lse")
    )
    assert sorted(view.thinned(2).records) == [5, 15] or sorted(view.thinned(2).records) == [10, 15]
    assert sorted(view.thinned(1).records) == [15]


def test_only_as_many_steps_as_fit(tmp_path, capsys, monkeypatch):
    records = {step: capture(tiny(seed=step), tokens(200), step=step) for step in (1, 2, 3, 4)}
    view = View(records)
    two = PageSize.of(View({step: records[step] for step in (1, 2)})).n_bytes
    monkeypatch.setattr("viewer.page.MOST_BYTES", two)
    answer(view, str(tmp_path / "a.html"), as_json=True)
    assert json.loads(capsys.readouterr().out)["steps"] == [2, 4]


def test_a_notebook_gets_the_page_in_a_frame_of_its_own():
    record = record_of(HOSTILE)
    shown = show(record, title='a"b')._repr_html_()
    (frame,) = Elements(shown).found
    assert frame[0] == "iframe"
    assert frame[1]["sandbox"] == "allow-scripts"
    assert frame[1]["srcdoc"] == build_page(View.of(record, title='a"b'))
    assert html.unescape(shown).count("<iframe") == 1


def test_a_page_that_cannot_be_written_is_said_and_a_wrong_layer_named(tmp_path):
    record = record_of(["a", "b"])
    (tmp_path / "a.html").mkdir()
    with pytest.raises(ValueError, match=r"cannot write .*a\.html: Is a directory"):
        write_page(View.of(record), tmp_path / "a.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    with pytest.raises(ValueError, match=r"layer 5 is not in this record; it has 0\.\.1"):
        View.of(record, layers=[0, 5])
