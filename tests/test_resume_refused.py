"""A training state that was not written by us: one line, and the run directory stays as it was."""

import pytest
import torch

from tests.tiny import tiny_flags
from train import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    assert main(tiny_flags(folder, max_steps=2)) == 0
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c["training"].pop("optimizer"), "KeyError: 'optimizer'"),
        (lambda c: c["training"].update(optimizer=None), "TypeError"),
        (lambda c: c["training"].update(loader={}), "KeyError: 'position'"),
        (lambda c: c["training"]["loader"].update(position=10**9), "outside the"),
        (lambda c: c["training"].update(rng=[{"cpu": torch.zeros(3)}]), "ByteTensor"),
        (lambda c: c["model"].popitem(), "Missing key"),
        (lambda c: c.update(n_tokens="many"), "ValueError: invalid literal"),
        (lambda c: c.update(best_val_loss=None), "TypeError"),
        (lambda c: c.pop("seconds"), "KeyError: 'seconds'"),
        (lambda c: c.update(step="\x1b[2J"), "last.pt is damaged (its step or its loss is no number)"),
        (lambda c: c["config"]["model"].update(n_layer=2.0), "model.n_layer is 2.0"),
    ],
)
def test_a_state_that_cannot_be_resumed_is_one_line_and_stays(change, reason, folder, capsys):
    run = folder / "run"
    good = (run / "last.pt").read_bytes()
    content = torch.load(run / "last.pt", weights_only=True)
    change(content)
    torch.save(content, run / "last.pt")
    (run / "previous.pt").unlink(missing_ok=True)
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert main(tiny_flags(folder, max_steps=2)) == 2
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert reason in err
    (run / "last.pt").write_bytes(good)
