"""What every test gets: one thread, fixed seeds, and a run that ends by listing what it skipped."""

import os
import random
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]

# One thread each: xdist already uses the cores, and sums come out in one order. The variable is for child processes.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Derandomised, so that a red run is red again; no deadline, because a shared machine's clock proves nothing.
settings.register_profile("glassgpt", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("glassgpt")


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder beside a developer's checkout with data that the repository does not carry."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder 'shared' beside the checkout")
    return folder


@pytest.fixture
def tiktoken_cache(shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets tiktoken find its encodings without a network, in a copy that a test may write to."""
    if not (shared_folder / "tiktoken-cache").is_dir():
        pytest.skip("no 'tiktoken-cache' in the folder 'shared'")
    folder = tmp_path / "tiktoken-cache"
    shutil.copytree(shared_folder / "tiktoken-cache", folder)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    return folder


def pytest_terminal_summary(terminalreporter) -> None:
    tests = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        tests[reason.removeprefix("Skipped: ")].append(report.nodeid)
    terminalreporter.section("skipped, and why")
    for reason, names in sorted(tests.items()):
        terminalreporter.line(f"{len(names)} skipped: {reason}")
        for name in sorted(names):
            terminalreporter.line(f"    {name}")
    if not tests:
        terminalreporter.line("nothing was skipped")
    # pytest's own list (-ra) has the reasons but not the names of the tests, and would say it all a second time.
    terminalreporter.reportchars = terminalreporter.reportchars.replace("s", "")
