"""Caches that belong to one test, and GPT-2's vocabulary where this machine has it."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "glassgpt-cache"))


@pytest.fixture
def hf_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """The gpt2 tokenizer, from a copy: tiktoken deletes files that it finds damaged."""
    stored = Path(__file__).parents[2].parent / "shared" / "tiktoken-cache"
    if not stored.is_dir():
        pytest.skip("GPT-2's vocabulary is not on this machine")
    from data.tokenizer import Gpt2Tokenizer

    copy = tmp_path_factory.mktemp("vocabulary") / "tiktoken"
    shutil.copytree(stored, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(copy))
        yield Gpt2Tokenizer.fetch()
