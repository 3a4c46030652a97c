"""``python -m initlib probe``: what it prints, what it returns, and how it refuses."""

import json
import os
import subprocess
import sys

import pytest
import torch

from initlib import __main__ as command

MODELS = """
import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self, classes=3):
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, classes))


def deep():
    return nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(32, 32), nn.ReLU())])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, words, scale):
        return self.head(self.table(words) * scale)


class Family:
    net = Net


built = Net()
number = 3


def fails():
    raise RuntimeError("first line\\nsecond line")


def gives_text():
    return "text"


def needs(argument):
    return Net(argument)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with models, which is the current one."""
    (tmp_path / "models_of_test.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models_of_test", raising=False)
    state = torch.get_rng_state()
    yield tmp_path
    torch.set_rng_state(state)
    sys.modules.pop("models_of_test", None)


def run(*arguments):
    return command.main(["probe", *arguments])


@pytest.mark.parametrize("name", ["Net", "built", "Family.net"])
def test_class_and_instance_are_probed(here, capsys, name):
    assert run(f"models_of_test:{name}", "--input", "64,8") == 0
    shown = capsys.readouterr()
    assert "torch default" in shown.out
    assert shown.out.rstrip().endswith("Nothing found.")
    assert shown.err == ""


def test_findings_are_printed_and_the_status_is_one(here, capsys):
    assert run("models_of_test:deep", "--input", "64,32") == 1
    assert "! Torch's default." in capsys.readouterr().out


def test_json_has_all_columns_and_no_undefined_numbers(here, capsys):
    assert run("models_of_test:deep", "--input", "64,32", "--json") == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["names"][:2] == ["0", "2"]
    assert len(found["forward"]) == 12
    assert found["saturated"] == [None] * 12
    assert found["findings"][0]["kind"] == "torch's default"


def test_several_inputs_and_integers(here, capsys):
    arguments = ("models_of_test:Words", "--input", "16,5", "--input", "16,5,1", "--integers", "20")
    assert run(*arguments) == 0
    assert "head" in capsys.readouterr().out


def test_integers_are_hinted_at_where_a_model_looks_up(here, capsys):
    assert run("models_of_test:Words", "--input", "16,5", "--input", "16,5,1") == 2
    assert "--integers HIGH" in capsys.readouterr().err
    run("models_of_test:Net", "--input", "64,9")
    assert "--integers" not in capsys.readouterr().err


def test_precision_layers_and_device(here, capsys):
    assert run("models_of_test:Net", "--input", "64,8", "--dtype", "bfloat16", "--device", "cpu", "--layers", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:5] if line.split()] == ["0"]


def test_seed_decides_everything(here, capsys):
    shown = []
    for seed in ("1", "1", "2"):
        run("models_of_test:Net", "--input", "64,8", "--seed", seed)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models_of_test:Net"], "required: --input"),
        (["models_of_test", "--input", "2"], "named as package.module:name"),
        (["models_of_test:", "--input", "2"], "named as package.module:name"),
        (["no_such_module:Net", "--input", "2"], "cannot import 'no_such_module'"),
        (["models_of_test:Nothing", "--input", "2"], "has no 'Nothing'"),
        (["models_of_test:number", "--input", "2"], "neither a torch.nn.Module nor builds one, but int"),
        (["models_of_test:gives_text", "--input", "2"], "must build a torch.nn.Module, got str"),
        (["models_of_test:fails", "--input", "2"], "cannot be built: RuntimeError: first line"),
        (["models_of_test:needs", "--input", "2"], "cannot be built: TypeError"),
        (["models_of_test:Net", "--input", "a,b"], "--input must be positive sizes"),
        (["models_of_test:Net", "--input", "0,8"], "--input must be positive sizes"),
        (["models_of_test:Net", "--input", "64,9"], "cannot probe models_of_test:Net: RuntimeError"),
        (["models_of_test:Net", "--input", "64,8", "--integers", "2"], "cannot probe models_of_test:Net"),
        (["models_of_test:Net", "--input", "64,8", "--integers", "2", "--integers", "2"], "2 times for 1 inputs"),
        (["models_of_test:Net", "--input", "64,8", "--integers", "0"], "--integers must be positive, got 0"),
        (["models_of_test:Net", "--input", "64,8", "--dtype", "int64"], "--dtype must name a floating-point type"),
        (["models_of_test:Net", "--input", "64,8", "--device", "nowhere"], "--device 'nowhere' is not there"),
        (["models_of_test:Net", "--input", "64,8", "--seed", "-1"], "--seed: the seed n must not be negative"),
        (["models_of_test:Net", "--input", "64,8", "--layers", "x"], "'x' fits no layer"),
        (["models_of_test:Net", "--input", "64,8", "--sead", "1"], "unrecognized arguments"),
    ],
)
def test_bad_usage_is_one_line_and_status_two(here, capsys, arguments, message):
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("initlib: error: ")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_help_exits_with_status_zero(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["probe", "--help"])
    assert stopped.value.code == 0
    assert "Exit status" in capsys.readouterr().out


def test_command_runs_as_a_module_in_the_current_folder(here):
    arguments = [sys.executable, "-W", "error", "-m", "initlib", "probe", "models_of_test:deep", "--input", "64,32"]
    ran = subprocess.run(arguments, capture_output=True, text=True, cwd=here, env=os.environ | {"MPLBACKEND": "agg"})
    assert ran.returncode == 1
    assert "! Torch's default." in ran.stdout
    assert ran.stderr == ""


@pytest.mark.parametrize("source", ["import sys\nsys.exit(0)", "import sys\n\n\ndef net():\n    sys.exit(0)"])
def test_a_model_that_ends_the_process_is_an_error(here, capsys, source):
    (here / "leaves_of_test.py").write_text(source, encoding="utf-8")
    sys.modules.pop("leaves_of_test", None)
    assert run("leaves_of_test:net", "--input", "2,3") == 2
    assert "SystemExit" in capsys.readouterr().err


def test_a_model_sees_no_arguments_of_the_command_and_its_prints_are_no_result(here, capsys):
    source = "import sys\nfrom torch import nn\n\n\ndef net():\n    print(sys.argv[1:])\n    return nn.Linear(3, 2)\n"
    (here / "prints_of_test.py").write_text(source, encoding="utf-8")
    arguments = list(sys.argv)
    assert run("prints_of_test:net", "--input", "32,3", "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["names"] == [""]
    assert "[]" in shown.err
    assert sys.argv == arguments


def test_an_empty_size_is_refused(here, capsys):
    assert run("models_of_test:Net", "--input", "64,,8") == 2
    assert "--input must be positive sizes" in capsys.readouterr().err
