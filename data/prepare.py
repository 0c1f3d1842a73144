"""From a source to memory-mapped tokens, once: what was prepared before is found in the cache."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.config import DataConfig
from data.pieces import SEPARATOR, Piece, cut_pieces, encode_pieces, join_documents, text_n_bytes
from data.source import Source
from data.sources import open_source
from data.tokenizer import Array, Tokenizer, train_tokenizer

FORMAT = 2  # of the cache entries: tokens.bin, tokenizer.json, header.json
VERIFIED_BYTES = 1 << 27  # larger token files are checked by their size only, or every start would read them whole
STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Split:
    """The two parts of a corpus, as views."""

    train: Array
    val: Array
    val_n_bytes: int
    """Bytes of text behind `val`, for bits per byte."""


@dataclass(frozen=True)
class Corpus:
    """A text as tokens."""

    tokens: Array
    """(n_tokens,) uint16, or uint32 from 65,536 ids on; a read-only memory map."""
    tokenizer: Tokenizer
    source: str
    fingerprint: str

    def split(self, val_fraction: float, block_size: int) -> Split:
        """Training tokens, then validation tokens, by position.

        ValueError when either part is shorter than block_size + 1, the shortest that holds one input and its targets.
        """
        # Exact arithmetic: in floating point, 1 - 0.9 times 10 tokens would be none.
        n_train = int(len(self.tokens) * (1 - Fraction(str(val_fraction))))
        train, val = self.tokens[:n_train], self.tokens[n_train:]
        if (largest := min(len(train), len(val)) - 1) < block_size:
            fits = f"the largest that fits both is {largest}" if largest > 0 else "no block_size fits both"
            raise ValueError(
                f"the corpus is too short for block_size {block_size}: {len(train)} tokens for training and {len(val)} "
                f"for validation, {block_size + 1} needed in each; {fits}"
            )
        return Split(train, val, self.tokenizer.n_bytes(val))


def prepare(config: DataConfig, *, show_progress: bool = True) -> Corpus:
    """The tokens of the text that `config` names, from the cache or made now; notices and progress go to stderr.

    Documents (files, rows) are joined by the tokenizer's end-of-text token, or by a blank line where it has none.
    Processes that prepare the same text at once do not disturb each other: an entry appears complete or not at all.
    ValueError says in one line what is wrong with the source, the tokenizer or the cache folder.
    """
    source = open_source(config)
    fingerprint = source.fingerprint()
    key = [FORMAT, fingerprint, config.tokenizer, config.bpe_vocab_size if config.tokenizer == "bpe" else None]
    folder = cache_folder(config) / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    header, tokens, tokenizer = _cached(folder) or _build(config, source, folder, show_progress)
    if header["single_character"]:
        print(f"warning: {source.name} holds a single distinct character; there is nothing to learn", file=sys.stderr)
    return Corpus(tokens, tokenizer, source.name, fingerprint)


def cache_folder(config: DataConfig) -> Path:
    """Where prepared tokens are kept."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "glassgpt"
    folder = os.path.expanduser(config.cache_dir or os.environ.get("GLASSGPT_CACHE") or user_cache)
    if folder.startswith("~"):
        raise ValueError(f"no home directory is known for {folder}; name a folder with --data.cache_dir")
    return Path(folder)


Entry = tuple[dict[str, Any], Array, Tokenizer]


def _cached(folder: Path) -> Entry | None:
    if not folder.exists():
        return None
    try:
        return _read_entry(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"prepared tokens in {folder} are damaged ({error}); making them again", file=sys.stderr)
        return None


def _read_entry(folder: Path) -> Entry:
    """What `_build` wrote, or an error that says what does not fit."""
    header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
    path, dtype = folder / "tokens.bin", np.dtype(header["dtype"])
    if (size := path.stat().st_size) != header["n_tokens"] * dtype.itemsize:
        raise ValueError(f"tokens.bin has {size} bytes, {header['n_tokens'] * dtype.itemsize} expected")
    if size <= VERIFIED_BYTES:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != header["sha256"]:
                raise ValueError("tokens.bin does not have the hash that header.json gives")
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    if tokenizer.hash != header["tokenizer_hash"]:
        raise ValueError("tokenizer.json does not have the hash that header.json gives")
    header["single_character"] = bool(header["single_character"])
    return header, np.memmap(path, dtype=dtype, mode="r"), tokenizer


def _build(config: DataConfig, source: Source, folder: Path, show_progress: bool) -> Entry:
    """Make a cache entry beside its place, then move it there."""
    beside = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        _write_entry(config, source, beside, show_progress)
        entry = _read_entry(beside)  # opened before the move: whatever others do to the folder, this map stays whole
        _publish(beside, folder)
        return entry
    except OSError as error:
        raise ValueError(f"cannot prepare tokens in {folder.parent} (--data.cache_dir): {error}") from None
    finally:
        if beside:
            shutil.rmtree(beside, ignore_errors=True)


def _write_entry(config: DataConfig, source: Source, folder: Path, show_progress: bool) -> None:
    distinct: set[str] = set()

    def texts() -> Iterator[str]:
        pieces = cut_pieces(join_documents(source.documents(), SEPARATOR), Tokenizer.cut)
        with _progress("reading", source, show_progress) as bar:
            for piece in filter(None, pieces):
                yield piece
                bar.update(text_n_bytes(piece))

    def watched(pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if len(distinct) < 2:
                distinct.update(piece or "")
            yield piece

    tokenizer = train_tokenizer(config, texts)
    if config.tokenizer == "bpe" and tokenizer.vocab_size < config.bpe_vocab_size:
        print(f"bpe: {source.name} yields {tokenizer.vocab_size} tokens of {config.bpe_vocab_size}", file=sys.stderr)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size < 1 << 16 else np.uint32)
    digest, n_tokens = hashlib.sha256(), 0
    parts = join_documents(source.documents(), SEPARATOR if tokenizer.end_of_text is None else None)
    pieces = watched(cut_pieces(parts, tokenizer.cut))
    with (folder / "tokens.bin").open("wb") as file, _progress("encoding", source, show_progress) as bar:
        for tokens, n_bytes in encode_pieces(pieces, tokenizer):
            data = tokens.astype(dtype).tobytes()
            file.write(data)
            digest.update(data)
            n_tokens += len(tokens)
            bar.update(n_bytes)
    if not n_tokens:
        raise ValueError(f"{source.name} holds no text")
    tokenizer.save(folder / "tokenizer.json")
    header = {
        "format": FORMAT,
        "source": source.name,
        "dtype": dtype.name,
        "n_tokens": n_tokens,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_hash": tokenizer.hash,
        "sha256": digest.hexdigest(),
        "single_character": len(distinct) == 1,
    }
    (folder / "header.json").write_text(json.dumps(header, indent=1), encoding="utf-8")


def _progress(what: str, source: Source, shown: bool) -> "tqdm[Any]":
    return tqdm(total=source.n_bytes, unit="B", unit_scale=True, desc=what, disable=not shown, leave=False)


def _publish(beside: Path, folder: Path) -> None:
    """Move a finished entry to its place, unless another process has put a good one there meanwhile."""
    try:
        os.rename(beside, folder)
        return
    except OSError:
        if not folder.exists():
            raise
    try:
        _read_entry(folder)
    except (OSError, ValueError, KeyError, TypeError):
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as away:
            os.rename(folder, Path(away) / "damaged")
            os.rename(beside, folder)


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left half-made for this entry, once nothing in it has changed for a day."""
    for left in folder.parent.glob(f".{folder.name}-*"):
        newest = max((path.stat().st_mtime for path in [left, *left.glob("*")]), default=0.0)
        if time.time() - newest > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
