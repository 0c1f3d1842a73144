"""Checkpoints: whole or not at all, and what happens to a run directory that is damaged."""

import io
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from data.tokenizer import CharTokenizer
from tests.tiny import finish, start, tiny_config, tiny_flags
from train import main, train
from training.checkpoint import load_for_resume, load_run, move_aside, save_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the text and the run: best.pt and last.pt of step 6, previous.pt of step 3."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny_config(folder, max_steps=6, eval_interval=3, checkpoint_interval=3))
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy to damage."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def resume(folder: Path):
    characters = "".join(sorted(set((folder / "text.txt").read_text())))
    config = tiny_config(folder, vocab_size=18, max_steps=6)
    return load_for_resume(folder / "run", config, CharTokenizer(characters))


# Ways to damage a file: each takes the path and what was in it.


def flip(path, content):
    middle = len(content) // 2  # within a tensor
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def truncate(path, content):
    path.write_bytes(content[: len(content) // 2])


def empty(path, _):
    path.write_bytes(b"")


def garbage(path, _):
    path.write_bytes(b"this is no checkpoint\n" * 100)


def another_list(path, _):
    torch.save([1, 2, 3], path)


def another_dict(path, _):
    torch.save({"model": {"weight": torch.ones(2)}}, path)


def another_format(path, content):
    torch.save(torch.load(io.BytesIO(content), weights_only=True) | {"format": 999}, path)


def lacks_a_part(path, content):
    whole = torch.load(io.BytesIO(content), weights_only=True)
    del whole["tokenizer"]
    torch.save(whole, path)


def a_folder(path, _):
    path.unlink()
    path.mkdir()


class _Bomb:
    """Pickled, it calls open() when it is unpickled without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def hostile_pickle(path, _):
    path.write_bytes(pickle.dumps(_Bomb(path.parent / "ran")))


def hostile_archive(path, content):
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            is_pickle = name.endswith("data.pkl")
            new.writestr(name, pickle.dumps(_Bomb(path.parent / "ran"), protocol=2) if is_pickle else old.read(name))


DAMAGE = [flip, truncate, empty, garbage, another_list, another_dict, another_format, lacks_a_part, a_folder]
DAMAGE += [hostile_pickle, hostile_archive]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(damage, folder, capsys):
    last, previous = folder / "run" / "last.pt", folder / "run" / "previous.pt"
    damage(last, last.read_bytes())
    assert resume(folder)["step"] == 3
    notice = capsys.readouterr().err
    assert notice.startswith(f"{last} is damaged (")
    assert notice.endswith("taking previous.pt of step 3\n")
    assert notice.count("\n") == 1
    # The next save makes last.pt the previous one: the damaged file must not take the place of the good one.
    assert not last.exists()
    assert (folder / "run" / "damaged.pt").exists()
    assert load_run(folder / "run", "last").step == 3

    whole = previous.read_bytes()
    last.write_bytes(whole)
    for file in (last, previous):
        damage(file, whole)
    assert main(tiny_flags(folder, max_steps=6)) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert f"{last} is damaged (" in err
    assert f"{previous} is damaged (" in err
    assert "resuming" not in out
    assert not (folder / "run" / "ran").exists()


def test_the_bomb_of_these_tests_would_go_off(tmp_path):
    hostile_pickle(tmp_path / "last.pt", b"")
    with (tmp_path / "last.pt").open("rb") as file:
        pickle.load(file).close()
    assert (tmp_path / "ran").exists()


def test_a_damaged_best_checkpoint_falls_back_to_the_newest(folder, capsys):
    truncate(folder / "run" / "best.pt", (folder / "run" / "best.pt").read_bytes())
    run = load_run(folder / "run", "best")
    assert (run.step, run.checkpoint_path.name) == (6, "last.pt")
    assert "best.pt is damaged" in capsys.readouterr().err


def test_no_flipped_bit_goes_unnoticed(folder):
    last = folder / "run" / "last.pt"
    (folder / "run" / "previous.pt").unlink()
    content, whole = last.read_bytes(), resume(folder)
    generator, n_caught = np.random.default_rng(0), 0
    for at in generator.integers(0, len(content), 60):
        last.write_bytes(content[:at] + bytes([content[at] ^ 1 << generator.integers(8)]) + content[at + 1 :])
        try:
            got = resume(folder)
        except ValueError as error:
            assert "last.pt is damaged" in str(error)  # noqa: PT017
            n_caught += 1
        else:  # it fell on padding
            assert got["step"] == whole["step"]
            assert all(torch.equal(p, whole["model"][name]) for name, p in got["model"].items())
            assert all(
                torch.equal(moments["exp_avg"], whole["training"]["optimizer"]["state"][i]["exp_avg"])
                for i, moments in got["training"]["optimizer"]["state"].items()
            )
    assert n_caught > 40


# Runs in a process of its own: a child for each moment at which a save can be killed.
_KILLED_SAVES = """
import io, os, signal, sys
from pathlib import Path
import torch
from training.checkpoint import load_run, save_checkpoint

directory = Path(sys.argv[1])
content = torch.load(directory / "last.pt", weights_only=True)
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

def half_written(content, file, save=torch.save):
    whole = io.BytesIO()
    save(content, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()
    die()

def die_at_replace(n):
    replace, calls = os.replace, iter(range(3))
    def replace_or_die(*paths):
        if next(calls) == n:
            die()
        replace(*paths)
    return replace_or_die

moments = {
    "half written": (torch, "save", half_written),
    "before fsync": (os, "fsync", die),
    "before any rename": (os, "replace", die_at_replace(0)),
    "between the renames": (os, "replace", die_at_replace(1)),
    "after both": (os, "replace", die_at_replace(2)),
}
for i, (moment, (module, name, deadly)) in enumerate(moments.items()):
    if not (child := os.fork()):
        setattr(module, name, deadly)
        save_checkpoint(directory, "last.pt", content | {"step": 100 + i})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(moment, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, load_run(directory, "last").step, sep=",")
"""


def test_a_kill_at_any_moment_of_saving_leaves_a_checkpoint(folder):
    code, out, err = finish(start("-c", _KILLED_SAVES, str(folder / "run")))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "half written,9,6",
        "before fsync,9,6",
        "before any rename,9,6",
        "between the renames,9,6",  # from previous.pt
        "after both,0,104",
    ]
    assert not list((folder / "run").glob("*.tmp"))


_FULL_DISK = """
import resource, sys
from train import main

_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # a checkpoint has 300,000 bytes
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_is_full_leaves_the_old_checkpoint(folder):
    before = {path.name: path.read_bytes() for path in (folder / "run").glob("*.pt")}
    assert min(map(len, before.values())) > 50_000
    code, _, err = finish(start("-c", _FULL_DISK, *tiny_flags(folder, max_steps=9, eval_interval=9)))
    assert code == 2
    assert err.count("\n") == 1
    assert "could not save" in err
    assert "the checkpoint before it stays" in err
    assert {path.name: path.read_bytes() for path in (folder / "run").glob("*.pt")} == before
    assert not list((folder / "run").glob("*.tmp"))
    assert load_run(folder / "run", "last").step == 6


def test_saving_keeps_the_one_before(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, "last.pt", {"step": step})
        save_checkpoint(tmp_path, "best.pt", {"step": step})
    steps = {path.name: torch.load(path, weights_only=True)["step"] for path in tmp_path.iterdir()}
    assert steps == {"last.pt": 3, "previous.pt": 2, "best.pt": 3}


def test_a_run_is_read_from_its_directory_alone(folder, monkeypatch):
    moved = folder / "elsewhere"
    (folder / "run").rename(moved)
    (folder / "text.txt").unlink()
    shutil.rmtree(folder / "cache")
    monkeypatch.chdir(folder)
    run = load_run("elsewhere", "last")
    content = torch.load(moved / "last.pt", weights_only=True)
    assert (run.step, run.dtype, run.checkpoint_path) == (6, "float32", Path("elsewhere/last.pt"))
    assert not run.model.training
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert all(torch.equal(p, content["model"][name]) for name, p in run.model.state_dict().items())
    assert run.tokenizer.decode(run.tokenizer.encode("3 times 4")) == "3 times 4"
    assert run.config.to_dict() == content["config"]
    assert len(run.checkpoint_hash) == 64


def test_a_directory_that_is_no_run_is_refused_with_those_that_are(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"no run directory rum; runs here: run$"):
        load_run("rum")
    Path("void").mkdir()
    with pytest.raises(ValueError, match=r"void holds no checkpoint; train one with: python train\.py --run\.dir void"):
        load_run("void")
    with pytest.raises(ValueError, match="choose best or last"):
        load_run("run", "first")


def test_parameters_that_do_not_fit_their_configuration_are_refused(folder):
    content = torch.load(folder / "run" / "best.pt", weights_only=True)
    content["config"]["model"]["n_embd"] = 64
    save_checkpoint(folder / "run", "best.pt", content)
    with pytest.raises(ValueError, match=r"the parameters in .*best\.pt do not fit its configuration"):
        load_run(folder / "run")


def test_moving_aside_never_overwrites(tmp_path):
    for n in (1, 2, 3):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "mark").write_text(str(n))
        assert move_aside(tmp_path / "run") == tmp_path / f"run.old-{n}"
    assert [(tmp_path / f"run.old-{n}" / "mark").read_text() for n in (1, 2, 3)] == ["1", "2", "3"]
