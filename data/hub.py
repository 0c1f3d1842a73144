"""Text columns read by Hugging Face `datasets`: from the hub, or from local json, csv and parquet."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.source import Source, clean

# name on the command line: id, configuration, revision
PRESETS = {
    "shakespeare": ("karpathy/tiny_shakespeare", "", "refs/convert/parquet"),
    "tinystories": ("roneneldan/TinyStories", "", None),
    "openwebtext": ("Skylion007/openwebtext", "", None),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", None),
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PROBE_SECONDS = 10


class TableSource(Source):
    """One text column of a data set, one document a row; empty rows are left out."""

    def __init__(self, name: str, dataset: Any, config: DataConfig) -> None:
        if config.column not in dataset.column_names:
            choices = ", ".join(dataset.column_names)
            raise ValueError(f"{name} has no column {config.column!r}; choose --data.column from {choices}")
        if (dtype := getattr(dataset.features[config.column], "dtype", "nested")) not in ("string", "large_string"):
            raise ValueError(
                f"column {config.column!r} of {name} holds {dtype}, not text; choose another --data.column"
            )
        self.name = name
        self._column = config.column
        self._key = f"table {config.split} {config.column} {dataset._fingerprint}"
        self._dataset = dataset.select_columns(config.column)
        self.n_bytes = self._dataset.data.nbytes

    def fingerprint(self) -> str:
        return hashlib.sha256(self._key.encode()).hexdigest()

    def documents(self) -> Iterator[Iterable[str]]:
        for batch in self._dataset.iter(batch_size=64):
            for text in batch[self._column]:
                if text:
                    yield (clean(text),)


def open_hub(config: DataConfig) -> TableSource:
    """A data set of the hub, or its copy in the library's cache while the hub is out of reach."""
    hub_id, subset, revision = PRESETS.get(config.source, (config.source, "", None))
    name = f"Hugging Face data set {hub_id}"
    with _offline_unless_reachable(hub_id) as reachable:
        try:
            dataset = _load(hub_id, name=config.subset or subset or None, revision=revision, split=config.split)
        except Exception as error:
            way_out = "" if reachable else "; without network, give a local file or folder as --data.source"
            raise ValueError(f"cannot load {name}: {_one_line(error)}{way_out}") from None
    return TableSource(name, dataset, config)


def open_tables(config: DataConfig, kind: str, where: Path | list[Path]) -> TableSource:
    """Local files of one kind (json, csv, parquet), or a folder of them, where names such as test.csv make splits."""
    data_files = None if isinstance(where, Path) else [str(path.resolve()) for path in where]
    try:
        dataset = _load(
            kind if data_files else str(where), name=config.subset or None, data_files=data_files, split=config.split
        )
    except Exception as error:
        raise ValueError(f"cannot read {config.source} as {kind}: {_one_line(error)}") from None
    return TableSource(config.source, dataset, config)


def _load(path: str, **options: Any) -> Any:
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its log repeats the error that is raised
    try:
        return datasets.load_dataset(path, **options)
    finally:
        datasets.logging.set_verbosity(level)


@contextmanager
def _offline_unless_reachable(hub_id: str) -> Iterator[bool]:
    """Ask the hub once. If it cannot be reached, switch the library to its cache: else it retries for 23 seconds."""
    import datasets.config
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(hub_id, timeout=PROBE_SECONDS)
        reachable = True
    except HfHubHTTPError:  # it answered; loading will say what is wrong
        reachable = True
    except Exception:
        reachable = False
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reachable
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _one_line(error: BaseException) -> str:
    """The error and its cause, shortened to one line."""
    text = " ".join(f"{error}{f' ({error.__cause__})' if error.__cause__ else ''}".split())
    return text if len(text) <= 300 else f"{text[:300]}…"
