"""Files, flags, refusals, and the way back from a configuration to its file."""

import dataclasses
import json
import math
import resource
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import REPOSITORY, finish, start
from training.config import Config, LogConfig, OptimizerConfig, RunConfig, TrainConfig, parse_arguments


def parse(*arguments: str) -> Config:
    return parse_arguments(arguments, "train.py")


def refusal(*arguments: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def toml(tmp_path):
    def write(text: str, name: str = "mine.toml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_later_files_win_over_earlier_ones_and_flags_over_files(toml):
    first = toml("[train]\nmax_steps = 11\nbatch_size = 12\nlog_interval = 13\n[model]\nbias = true\n", "first.toml")
    second = toml("[train]\nbatch_size = 22\nlog_interval = 23\n", "second.toml")
    config = parse(first, second, "--train.log_interval", "33", "--model.n_layer", "3")
    assert (config.train.max_steps, config.train.batch_size, config.train.log_interval) == (11, 22, 33)
    assert config.model.bias is True
    assert config.model.n_layer == 3
    assert config.train.eval_interval == TrainConfig().eval_interval


def test_no_arguments_give_the_defaults():
    assert parse() == Config()


@pytest.mark.parametrize("name", sorted(path.name for path in (REPOSITORY / "configs").glob("*.toml")))
def test_presets_hold_what_they_say(name):
    file = REPOSITORY / "configs" / name
    got = parse(str(file)).to_dict()
    for section, values in tomllib.loads(file.read_text(encoding="utf-8")).items():
        assert values.items() <= got[section].items()


@pytest.mark.parametrize(
    ("setting", "fragments"),
    [
        ("train.max_step = 3", ["--train.max_step", "--train.max_steps"]),
        ("trian.max_steps = 3", ["--trian.max_steps", "--train.max_steps"]),
        ("optimizer.lerning_rate = 3", ["--optimizer.lerning_rate", "--optimizer.learning_rate"]),
        ("train.max_steps = 1.5", ["--train.max_steps", "1.5"]),
        ("train.max_steps = 'many'", ["--train.max_steps", "many"]),
        ("model.bias = 'maybe'", ["--model.bias", "maybe", "True", "False"]),
        ("optimizer.learning_rate = 'fast'", ["--optimizer.learning_rate", "fast"]),
        ("run.dtype = 'float8'", ["--run.dtype", "float8", "float32", "bfloat16"]),
        ("run.device = 'gpu'", ["run.device", "gpu", "cuda"]),
        ("model.attention = 'flsh'", ["model.attention", "flsh", "flash", "reference"]),
        ("model.n_head = 3", ["model.n_head 3", "n_embd 128", "1, 2, 4, 8"]),
        ("model.causal = false", ["model.causal", "bidirectional"]),
        ("data.val_fraction = 1.0", ["data.val_fraction", "between 0 and 1"]),
        ("train.max_steps = 0", ["train.max_steps is 0", "at least 1"]),
        ("run.dir = ''", ["run.dir is empty"]),
    ],
)
def test_a_wrong_setting_is_refused_alike_in_a_file_and_as_a_flag(setting, fragments, toml):
    name, value = setting.split(" = ")
    section, key = name.split(".")
    flag_value = value.strip("'").replace("false", "False")
    from_flag = refusal(f"--{name}", flag_value)
    file = toml(f"[{section}]\n{key} = {value}\n", "wrong.toml")
    from_file = refusal(file)
    for fragment in fragments:
        assert fragment in from_flag
        assert fragment in from_file
    assert from_file.startswith(file)
    assert file not in from_flag


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("[train]\nmax_steps = ", "no valid TOML"),
        ("x = " + "[" * 5000, "no valid TOML"),
        ("max_steps = 3", "outside a section"),
        ("[train]\nmax_steps = [1, 2]", "train.max_steps"),
        ("[train.max_steps]\nn = 2", "train.max_steps"),
        ('[run]\n"dir=runs/a" = "b"', "run.dir=runs/a"),
        ("[[train]]\nmax_steps = 2", "outside a section"),
    ],
)
def test_a_file_of_another_shape_is_refused(text, fragment, toml):
    file = toml(text)
    message = refusal(file)
    assert message.startswith(file)
    assert fragment in message


def test_a_wrong_file_is_named_among_right_ones(toml):
    good, bad = toml("[train]\nmax_steps = 3", "good.toml"), toml("[train]\nmax_step = 3", "bad.toml")
    message = refusal(good, bad, "--train.batch_size", "4")
    assert "bad.toml" in message
    assert "good.toml" not in message


def test_a_file_that_cannot_be_read_is_named_with_the_presets(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    message = refusal("nowhere.toml")
    assert "nowhere.toml" in message
    assert str(Path("configs/small.toml")) in message
    assert "configs" in refusal("configs")  # a folder
    Path("latin.toml").write_bytes(b"[run]\ndir = '\xe9'\n")
    assert "latin.toml: no valid TOML" in refusal("latin.toml")


_OUT_OF_RANGE = {
    RunConfig: {"dir": ["", "  "], "seed": [-1, 2**63], "device": ["gpu", "cuda:x", "cpu:0", ""]},
    OptimizerConfig: {
        "learning_rate": [0.0, -1.0, math.nan, math.inf],
        "warmup_steps": [-1],
        "decay_fraction": [0.0, 1.01, math.nan],
        "final_fraction": [-0.1, 1.1],
        "beta1": [-0.1, 1.0],
        "beta2": [-0.1, 1.0, math.nan],
        "weight_decay": [-1.0, math.inf],
        "grad_clip": [-1.0, math.nan],
    },
    TrainConfig: {
        **{n: [0, -1] for n in ("max_steps", "log_interval", "eval_interval", "checkpoint_interval")},
        "batch_size": [0, -1, 2**31],
        **{n: [-1] for n in ("stop_at", "micro_batch_size", "eval_tokens")},
    },
    LogConfig: {"sample_tokens": [-1]},
}


@pytest.mark.parametrize(
    ("form", "name", "value"),
    [(form, name, value) for form, fields in _OUT_OF_RANGE.items() for name, some in fields.items() for value in some],
)
def test_values_out_of_range_are_refused_by_name(form, name, value):
    section = form.__name__.removesuffix("Config").lower()
    with pytest.raises(ValueError, match=rf"^{section}\.{name} is "):
        form(**{name: value})


def test_values_at_the_edge_of_their_range_are_taken():
    RunConfig(seed=0)
    RunConfig(seed=2**63 - 1, device="cuda:3")
    OptimizerConfig(warmup_steps=0, decay_fraction=1.0, final_fraction=1.0, beta1=0.0, weight_decay=0.0, grad_clip=0.0)
    TrainConfig(max_steps=1, batch_size=1, log_interval=1, eval_interval=1, checkpoint_interval=1)


def test_the_last_step_is_the_earlier_of_stop_at_and_max_steps():
    assert TrainConfig(max_steps=9).last_step == 9
    assert TrainConfig(max_steps=9, stop_at=4).last_step == 4
    assert TrainConfig(max_steps=9, stop_at=40).last_step == 9


@given(
    name=st.text(min_size=1).filter(str.strip),
    prompt=st.text(),
    text=st.sampled_from(["--help", "-", '"""', "'\\", "\n\r\t\x00\x7f\x85\u2028", "a=b", "\U0001f600", "#", "{}", ""]),
    rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**63 - 1),
    bias=st.booleans(),
)
def test_to_toml_is_a_file_that_gives_the_configuration_again(tmp_path_factory, name, prompt, text, rate, seed, bias):
    default = Config()
    config = dataclasses.replace(
        default,
        run=dataclasses.replace(default.run, dir=name, seed=seed),
        model=dataclasses.replace(default.model, bias=bias),
        log=dataclasses.replace(default.log, sample_prompt=prompt),
        probe=dataclasses.replace(default.probe, text=text),
        optimizer=dataclasses.replace(default.optimizer, learning_rate=rate),
    )
    written = config.to_toml()
    assert tomllib.loads(written) == config.to_dict()
    file = tmp_path_factory.getbasetemp() / "round_trip.toml"
    file.write_text(written, encoding="utf-8")
    assert parse(str(file)) == config


def test_from_dict_is_the_inverse_of_to_dict_also_through_json():
    config = parse("--run.dir", "é\n", "--model.bias", "True", "--optimizer.learning_rate", "3e-4")
    values = config.to_dict()
    assert Config.from_dict(values) == config
    assert Config.from_dict(json.loads(json.dumps(values))) == config


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda values: values.pop("train"), "train"),
        (lambda values: values.update(extra={}), "extra"),
        (lambda values: values["train"].update(n_epochs=3), "n_epochs"),
        (lambda values: values["train"].update(max_steps="many"), "train.max_steps is 'many'"),
        (lambda values: values["train"].update(max_steps=0), "train.max_steps is 0"),
        (lambda values: values.update(train=None), "train"),
        (lambda values: values["model"].update(n_layer=2.0), "model.n_layer is 2.0"),
        (lambda values: values["model"].update(bias=1), "model.bias is 1"),
        (lambda values: values["model"].update(attention=None), "model.attention is None"),
    ],
)
def test_from_dict_refuses_what_this_version_does_not_know(change, fragment):
    values = Config().to_dict()
    change(values)
    with pytest.raises(ValueError, match=fragment):
        Config.from_dict(values)


def test_help_shows_the_values_of_the_files_before_it(toml, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(toml("[run]\ndir = 'runs/zebra'\n[train]\nmax_steps = 4321"), "--help")
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "zebra" in shown
    assert "4321" in shown
    names = [f"--{section}.{key}" for section, values in Config().to_dict().items() for key in values]
    assert [name for name in names if name not in shown] == []


_WATCHED = """
import sys, {script} as script
try:
    code = script.main(sys.argv[1:])
except SystemExit as exit_:
    code = exit_.code
loaded = {{name.partition(".")[0] for name in sys.modules}}
heavy = loaded & {{"torch", "datasets", "wandb", "matplotlib", "transformers", "numpy"}}
print("\\nheavy:", *sorted(heavy))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("script", "arguments", "code", "shown"),
    [
        ("train", ["configs/quick.toml", "--help"], 0, "runs/quick"),
        ("train", ["--train.max_step", "3"], 2, "train.py: Unrecognized options: --train.max_step"),
        ("train", ["nowhere.toml"], 2, "train.py: nowhere.toml: cannot be read"),
        ("train", ["--train.max_steps", "0"], 2, "train.py: train.max_steps is 0"),
        ("sample", ["--help"], 0, "--max-new-tokens"),
        ("sample", ["runs/a", "--n-sample", "3"], 2, "sample.py: Unrecognized options: --n-sample"),
        ("sample", ["runs/a", "--top-p", "2"], 2, "top-p is 2"),
        ("sample", [], 2, "sample.py: "),
    ],
)
def test_help_and_mistakes_answer_without_heavy_imports(script, arguments, code, shown):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    got, out, err = finish(start("-c", _WATCHED.format(script=script), *arguments))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert got == code
    assert out.endswith("\nheavy:\n")
    if code:
        assert shown in err
        assert err.count("\n") == 1  # one line
    else:
        assert shown in out
        assert err == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5  # of the processor, not the clock
