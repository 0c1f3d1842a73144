"""The plan of the house, held: who imports whom, how large things may grow, which names are public."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from model.attention import available
from model.attention.path import AttentionPath

REPOSITORY = Path(__file__).resolve().parents[1]

# folder: the other folders of ours that it may import
MAY_IMPORT = {
    "model": set(),
    "data": set(),
    "probes": {"model"},
    "viewer": {"probes"},
    "training": {"model", "data"},
    "benchmarks": {"model", "data", "probes", "training", "viewer"},
}
# What a file of model/attention/ may import of the model: besides these, the files there that begin with an underscore,
# which paths share. The registry words a refusal, with the names of the paths that can.
PATH_MAY_IMPORT = {"model.attention", "model.attention.mask", "model.attention.path"}
SCRIPTS = ("train", "sample", "probe")
OURS = {*MAY_IMPORT, *SCRIPTS, "tests"}

MAX_FILE_LINES, MAX_PATH_LINES, MAX_TRAIN_LINES = 300, 150, 250
MAX_FUNCTION_LINES, MAX_LOOP_LINES = 50, 120
MAX_MODULES, MAX_NESTING = 10, 2

# Where clarity wins over a limit: place -> (what is allowed instead, the reason).
EXCEPTIONS: dict[str, tuple[int, str]] = {
    "model": (11, "a file for each thing with parameters, and for what is done with the whole"),
    "model/attention": (13, "the folder is the registry: a file for each path, and for what paths share"),
    "model/attention/_triton.py": (260, "three kernels walk over the same tiles, and read best beside each other"),
    "training": (11, "what the loop calls, a file for each concern"),
    "tests/training": (11, "a file for each, as in the folder that it mirrors"),
    "tests/model/attention": (15, "a file for each path, as in the folder that it mirrors"),
    "tests/model/attention/test_contract.py": (
        570,
        "the contract's checks and the broken paths that each must catch are read side by side",
    ),
    "tests": (14, "beside the rooms stand the tests of the scripts, and of what goes through several rooms"),
    "tests/data/test_prepare.py": (320, "what two processes, kills and damage do to one cache is read together"),
    "train.py::train": (90, "the sections of a run stand in their order, with nothing hidden between them"),
    "tests/test_claims.py": (450, "one file for the chapter's claims, in the chapter's order"),
    "train.py::run_steps": (MAX_LOOP_LINES, "the loop is read from top to bottom in one place"),
}


def sources(*folders):
    """Python files of the rooms given, of all rooms by default, as paths relative to the repository."""
    rooms = folders or (*MAY_IMPORT, "tests")
    files = [file for room in rooms for file in (REPOSITORY / room).rglob("*.py")]
    if not folders:
        files += [REPOSITORY / f"{script}.py" for script in SCRIPTS]
    return sorted(file.relative_to(REPOSITORY) for file in files)


def tree_of(file):
    return ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))


def imported(tree):
    """Dotted names of all modules that are imported, also inside functions and for type checking."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def forbidden_imports(file, tree):
    """The imports of `file` that the house's table does not allow."""
    room = file.parts[0]
    is_path = file.parts[:2] == ("model", "attention") and file.stem != "__init__"
    path_may_import = PATH_MAY_IMPORT if file.stem != "mask" else set()
    for name in imported(tree):
        top = name.split(".")[0]
        is_script = top in SCRIPTS and room != "tests"
        is_upstairs = room in MAY_IMPORT and top in OURS - {room} - MAY_IMPORT[room]
        is_relative = name.startswith(".")  # one way to name a module
        is_shared = name.startswith("model.attention._")
        is_other_path = is_path and top == "model" and name not in path_may_import and not is_shared
        if is_script or is_upstairs or is_relative or is_other_path:
            yield name


def test_imports_go_one_way():
    found = {str(file): list(forbidden_imports(file, tree_of(file))) for file in sources()}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("model/gpt.py", "from data.loader import Loader"),
        ("model/gpt.py", "def f():\n    from probes import record"),
        ("data/loader.py", "import model.config"),
        ("probes/record.py", "from training.checkpoint import load"),
        ("training/state.py", "import train"),
        ("training/state.py", "from probes.record import AttentionRecord"),
        ("viewer/tiles.py", "from model import GPT"),
        ("benchmarks/speed.py", "from train import train"),
        ("sample.py", "from train import train"),
        ("model/attention/tiled.py", "from model.attention.flash import FlashAttention"),
        ("model/attention/tiled.py", "from model.cache import LayerCache"),
        ("model/attention/mask.py", "from model.attention.path import AttentionPath"),
        ("model/block.py", "from .norm import build_norm"),
    ],
)
def test_a_forbidden_import_is_found(file, statement):
    assert len(list(forbidden_imports(Path(file), ast.parse(statement)))) == 1


def test_model_is_not_imported_under_its_own_name():
    """`import model` would take the name that every function wants for its variable."""
    for file in sources():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Import):
                taken = [alias.name for alias in node.names if alias.asname is None]
                assert "model" not in {name.split(".")[0] for name in taken}, file


def n_lines(file):
    return len((REPOSITORY / file).read_text(encoding="utf-8").splitlines())


def sizes():
    """(place, kind, size, usual limit) of every file, function and folder."""
    folders = {}
    for file in sources():
        usual = MAX_PATH_LINES if file.parts[:2] == ("model", "attention") else MAX_FILE_LINES
        yield file.as_posix(), "lines", n_lines(file), MAX_TRAIN_LINES if str(file) == "train.py" else usual
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                yield f"{file.as_posix()}::{node.name}", "lines", length, MAX_FUNCTION_LINES
        if file.stem != "__init__":
            folders.setdefault(file.parent.as_posix(), []).append(file.stem)
    for folder, modules in folders.items():
        if folder != ".":
            yield folder, "modules", len(modules), MAX_MODULES


def test_files_functions_and_folders_stay_small():
    too_large = []
    for place, kind, size, usual in sizes():
        limit, _ = EXCEPTIONS.get(place, (usual, ""))
        if size > limit:
            too_large.append(f"{place}: {size} {kind}, at most {limit}")
    assert not too_large, "\n".join(too_large)


def test_every_exception_is_needed_and_says_why():
    larger = {place for place, _, size, usual in sizes() if size > usual}
    for place, (_, reason) in EXCEPTIONS.items():
        assert len(reason) > 20, place
        assert place in larger, f"{place} keeps the usual limit: it needs no exception"


def test_folders_stay_shallow():
    assert [str(file) for file in sources() if len(file.parent.parts) > 1 + MAX_NESTING] == []


def test_tests_are_no_package():
    """An __init__.py in tests/model makes pytest take tests/model for `model`."""
    assert list((REPOSITORY / "tests").rglob("__init__.py")) == []


def test_public_names():
    import model as package

    assert package.__all__ == ["GPT", "ModelConfig"]
    assert all(getattr(package, name).__name__ == name for name in package.__all__)
    public = {name for name in vars(AttentionPath) if not name.startswith("_")}
    assert public == {
        "supports",
        "name",
        "option_names",
        "option_words",
        "rule_for",
        "forward",
        "weights",
        "log_sum_exp",
        "kind",
        "factors",
        "scores",
        "scale_for",
        "kernel",
        "decode",
    }


def test_the_folder_is_the_registry():
    stems = {file.stem for file in sources("model") if file.parts[:2] == ("model", "attention")}
    assert set(available()) == {stem for stem in stems if not stem.startswith("_")} - {"path", "mask"}
    assert set(available()) == {"reference", "flash", "tiled", "window", "flex", "linear", "ring", "dense"}


def test_nothing_runs_at_import():
    """At the top of a file stand definitions: no bare call, no loop, no `with`, no branch but two usual ones."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for file in sources(*MAY_IMPORT) + [Path(f"{script}.py") for script in SCRIPTS]:
        for node in tree_of(file).body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_guard = isinstance(node, ast.If) and ast.unparse(node.test) in {
                "TYPE_CHECKING",
                "__name__ == '__main__'",
            }
            assert isinstance(node, allowed) or is_docstring or is_guard, f"{file}:{node.lineno}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_silently_and_without_torch(script, tmp_path):
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {script}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
