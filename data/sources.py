"""Where text comes from: Python's documentation, files of any kind, or a Hugging Face data set.

Newline policy, for every source: CR LF and a lone CR become a newline, and a leading byte-order mark is removed.
"""

import codecs
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from glob import glob
from pathlib import Path

from data.config import DataConfig
from data.hub import HUB_ID, PRESETS, open_hub, open_tables
from data.pydocs import pydocs_fingerprint, read_pydocs
from data.repeats import RepeatsSource
from data.source import Source

READ_BYTES = 1 << 20
TABLE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
TEXT_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".srt", ".py"}
NOTES = {"readme", "license", "licence", "notice", "citation", "dataset_card"}


class PydocsSource(Source):
    """The documentation that every CPython carries."""

    name = "pydocs"
    n_bytes = 2_200_000

    def fingerprint(self) -> str:
        return pydocs_fingerprint()

    def documents(self) -> Iterator[Iterable[str]]:
        return ((text,) for text in read_pydocs())


class FileSource(Source):
    """Text files, one document each."""

    def __init__(self, name: str, paths: list[Path], encoding: str) -> None:
        self.name, self.paths, self.encoding = name, paths, encoding
        self.n_bytes = sum(path.stat().st_size for path in paths)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"files {codecs.lookup(self.encoding).name}".encode())
        for path in self.paths:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def documents(self) -> Iterator[Iterable[str]]:
        return (read_text(path, self.encoding) for path in self.paths)


def open_source(config: DataConfig) -> Source:
    """The text that `config` names. ValueError says in one line why there is none."""
    try:
        return _open_source(config)
    except OSError as error:
        raise ValueError(f"cannot read --data.source {config.source}: {error}") from None


def _open_source(config: DataConfig) -> Source:
    source, path = config.source, Path(os.path.expanduser(config.source))
    if source == "pydocs":
        return PydocsSource()
    if source == "repeats":
        return RepeatsSource()
    if source in PRESETS:
        return open_hub(config)
    if path.is_dir():
        files = _files_of_folder(path)
    elif path.exists():
        files = [path]
    elif any(wildcard in source for wildcard in "*?["):
        files = [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]
        if not files:
            raise ValueError(f"no file matches --data.source {source!r}")
    elif HUB_ID.fullmatch(source) and path.suffix not in TEXT_SUFFIXES | set(TABLE_KINDS):
        return open_hub(config)
    else:
        raise ValueError(
            f"--data.source {source!r}: no such file or folder; other choices are pydocs, repeats, "
            f"{', '.join(PRESETS)}, a glob, or a Hugging Face id owner/name"
        )
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is no regular file; text is read more than once, so save it to one first")
        file.open("rb").close()  # one that cannot be read is refused before work begins
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"{files[0]} is empty" if len(files) == 1 else f"all {len(files)} files of {source} are empty")
    kinds = {TABLE_KINDS.get(file.suffix.lower()) for file in files}
    if kinds == {None}:
        _check_split(config)
        _check_encoding(config.encoding)
        return FileSource(source, files, config.encoding)
    if None in kinds or len(kinds) > 1:
        raise ValueError(f"{source} mixes kinds of files; pick one kind with a glob, as in '{path.parent / '*.txt'}'")
    return open_tables(config, next(iter(kinds)) or "", path if path.is_dir() else files)


def read_text(path: Path, encoding: str) -> Iterator[str]:
    """The text of a file in parts of about a megabyte. ValueError gives the offset of a byte that does not decode."""
    decoder = codecs.getincrementaldecoder(encoding)()
    newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
    position, at_start = 0, True
    with path.open("rb") as file:
        while True:
            chunk = file.read(READ_BYTES)
            position += len(chunk)
            try:
                text = newlines.decode(chunk, final=not chunk)
            except UnicodeError as error:
                offset = (
                    position - len(error.object) + error.start if isinstance(error, UnicodeDecodeError) else position
                )
                raise ValueError(
                    f"{path} is not {encoding}: the byte at offset {offset} does not decode; name the encoding with "
                    "--data.encoding, such as latin-1 or utf-16"
                ) from None
            if text:
                yield text.removeprefix("\ufeff") if at_start else text
                at_start = False
            if not chunk:
                return


def _files_of_folder(folder: Path) -> list[Path]:
    """All files of text, or else of tables, below a folder, in sorted order; hidden ones aside."""
    known = TEXT_SUFFIXES | set(TABLE_KINDS)
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in known
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    content = [path for path in files if path.stem.lower() not in NOTES] or files
    if not content:
        raise ValueError(f"folder {folder} holds no text; looked for {' '.join(sorted(known))}")
    if all(path.suffix.lower() in TEXT_SUFFIXES for path in content):
        return files
    return content


def _check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        raise ValueError(
            f"--data.encoding {encoding!r} is unknown; examples are utf-8, utf-16, latin-1, gb18030"
        ) from None


def _check_split(config: DataConfig) -> None:
    if config.split != "train":
        raise ValueError(f"--data.split {config.split!r}: text files have only train, the rest is --data.val_fraction")
