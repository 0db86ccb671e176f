"""Before a user's code runs, one printed line names its file, and mistakes in the code are reported in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running import run_fork

from paceline.cli.app import run
from paceline.commands.new import new

SHORT = ("--images", "64", "--set", "width=2", "--out", "run")


def announced(output: str) -> list[str]:
    return [
        line.removeprefix("running the code in ") for line in output.splitlines() if line.startswith("running the code")
    ]


def test_the_name_of_a_user_file_is_printed_before_its_code_runs(tmp_path: Path) -> None:
    new("recipe", "mine", tmp_path)
    new("source", "shapes", tmp_path)
    (tmp_path / "settings.toml").write_text('data = "./shapes.py"\n')
    trained = run_fork(tmp_path, "train", "./mine.py", "--config", "settings.toml", "--trust", *SHORT)
    assert trained.wait() == 0, trained.stderr
    assert announced(trained.stdout) == ["mine.py", "shapes.py"]
    evaluated = run_fork(tmp_path, "evaluate", "run", "--trust")
    assert evaluated.wait() == 0, evaluated.stderr
    assert announced(evaluated.stdout) == ["mine.py", "shapes.py"]
    assert evaluated.stdout.startswith("running the code in ")


def test_worker_processes_print_no_file_names_and_receive_all_settings(tmp_path: Path) -> None:
    new("recipe", "mine", tmp_path)
    new("source", "shapes", tmp_path)
    own = ("--data", "./shapes.py", "--set", "noise=7", "--devices", "2", "--accelerator", "cpu")
    trained = run_fork(tmp_path, "train", "./mine.py", *own, *SHORT)
    assert trained.wait() == 0, trained.stderr
    assert announced(trained.stdout) == ["mine.py", "shapes.py"]
    kept = (tmp_path / "run" / "config.toml").read_text()
    assert "noise = 7.0" in kept and "width = 2" in kept


@pytest.mark.slow
def test_files_in_the_current_folder_do_not_replace_modules_in_the_processes_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemError('imported')")
    run = ["classification", *SHORT, "--strategies", "ddp", "--devices", "2", "--accelerator", "cpu"]
    # The installed `paceline` command does not import modules from the current folder, and neither does -P.
    command = [sys.executable, "-P", "-m", "paceline", "compare", *run, "--no-verify", "--no-step-ladder"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


PREDICT = 'return {"logits": self.classifier(batch["image"])}'
PREVIEW = "    def preview(self, batch):\n        return batch['image']\n\n    def predict("
EVALUATION = 'Evaluation("accuracy", best="validation/top1", mode="max")'
MISTAKES_IN_RECIPE = [
    ("return Loss(", "return dict(", "phase 'classifier': the loss is a dict: return paceline.Loss("),
    ("label_smoothing=self", "reduction='none', label_smoothing=self", "has the shape [64]: return its mean over"),
    ('return Loss({"', 'return Loss({"a": 0.5, "', "phase 'classifier': loss term 'a' is of type float: return"),
    ("cross_entropy(logits,", "cross_entropy(logits.detach(),", "phase 'classifier': no loss term depends on"),
    ("@dataclass(frozen=True)\n", "", "recipe './mine.py': its Settings must be a frozen @dataclass; decorate"),
    ("(logits, batch", "(logits, bach", "mine.py:67: NameError: name 'bach' is not defined; correct it"),
    ("classifier_loss(self, batch", "classifier_loss(self, a, batch", "classifier_loss(self, batch): has different"),
    (EVALUATION, '"accuracy"', "evaluation = accuracy: expected Evaluation(…); correct"),
    ('(Phase("classifier", network="classifier"),)', '("classifier",)', "phases = ('classifier',): expected only"),
    ('ema = ("classifier",)', 'ema = "classifier"', "ema = classifier: expected a tuple; correct the declaration"),
    ('batch["label"], l', 'batch["labels"], l', "mine.py:67: KeyError: 'labels'; correct it"),
    ("Loss({", "Loss(shared=batch['image'], terms={", "shared value '' is of type Tensor: return a tensor in a dict"),
    ("Loss({", "Loss(signals={'a': 1.0}, terms={", "signal 'a' is of type float: return a tensor in a dict"),
    ("super().__init__(settings, spec)", "pass", "mine.py:"),
    ("super().__init__(settings, spec)", "super().__init__()", "mine.py:"),
    ('mode="max"', 'mode="maximum"', "evaluation has the mode 'maximum'; use 'min' or 'max'"),
    ("    def predict(", PREVIEW, ".preview: returned no images: return {caption: [n, c, h, w]}"),
    (PREDICT, PREDICT.replace("logits", "logitz"), "evaluator 'accuracy': update fails"),
    (PREDICT, PREDICT.replace("classifier", "clasifier"), "): AttributeError"),
    (PREDICT, 'return self.classifier(batch["image"])', "MineRecipe.predict fails: TypeError: returned a Tensor"),
    (PREDICT, PREDICT.replace('["image"]', '["image"][:, :, ::2]'), "): RuntimeError"),
]
PIXELS = ".astype(np.uint8)[..., None]"
MISTAKES_IN_SAMPLES = [
    (PIXELS, "[..., None]", "'image' is a float64 array of shape [16, 16, 1]: return"),
    (PIXELS, ".astype(np.uint8)", "'image' is a uint8 array of shape [16, 16]: return a"),
    ("label.astype(np.int64)", "label.astype(np.float32)", "'label' is a float32 array of shape []: return"),
    ("channels=1", "channels=3", "return a uint8 array of shape [height, width, 3]"),
    (PIXELS, ".astype(np.uint8)[:, None]", "of shape [1, 16, 16]: return a uint8 array of shape [height, width, 1]"),
    ("label.astype(np.int64)", "(label + 1).astype(np.int64)", "a label is 2, but spec.num_classes is 2"),
]


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "message"),
    [*(("recipe", *row) for row in MISTAKES_IN_RECIPE), *(("source", *row) for row in MISTAKES_IN_SAMPLES)],
)
def test_a_mistake_in_a_recipe_or_in_samples_is_reported_in_one_line_before_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rejected: Callable[..., str],
    kind: str,
    right: str,
    wrong: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    new("recipe", "mine", tmp_path)
    changed = tmp_path / "mine.py" if kind == "recipe" else new("source", "shapes", tmp_path)
    text = changed.read_text()
    assert text.count(right) == 1
    changed.write_text(text.replace(right, wrong))
    line = rejected("train", "./mine.py", *SHORT, *(["--data", "./shapes.py"] if kind == "source" else []))
    assert message in line and (kind == "recipe" or ("--data ./shapes.py: " in line and "split 'train': " in line))
    assert not list(tmp_path.glob("run/checkpoints/0*"))


SOURCE = """
import numpy as np
from paceline import DataSpec, Source

class Own(Source):
    def __init__(self, split, settings):
        self.spec = DataSpec(1, 8, 8, num_classes=2)

    def __len__(self):
        return 50

    def read(self, index):
        return {"image": np.zeros((8, 8, 1), np.uint8), "label": np.int64(index % 2)}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("(self, split, settings)", "(self, split)", "__init__(self, split, settings): has different parameters"),
        ("DataSpec(1, 8, 8, num_classes=2)", "{'channels': 1}", "self.spec is not a DataSpec; set it in __init__"),
        ("self.spec =", "spec =", "self.spec is not a DataSpec"),
        ("return 50", "return -50", "__len__ returns -50; return the number of samples"),
        ("return 50", "return 5.5", "__len__ returns 5.5; return"),
        ("def read", "def reed", "Own has no method read; define it"),
        ('return {"image"', 'return [1] or {"image"', "sample 0 of split 'train': is of type list: return a dict"),
        ("index % 2", "index % self.two", "own.py:13: AttributeError: 'Own' object has no attribute 'two'; correct it"),
        ("return 50", "raise SystemExit(0)", "own.py:10: SystemExit: 0; correct it"),
        ("class Own", "raise GeneratorExit\nclass Own", "own.py': cannot be imported: GeneratorExit"),
    ],
)
def test_a_mistake_in_a_source_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected: Callable[..., str], right: str, wrong: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert SOURCE.count(right) == 1
    (tmp_path / "own.py").write_text(SOURCE.replace(right, wrong))
    assert message in rejected("train", "classification", "--data", "./own.py", "--out", "run")


@pytest.mark.parametrize("command", ["train", "verify", pytest.param("plan", marks=pytest.mark.slow)])
def test_every_command_reports_an_exception_in_a_recipe_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected: Callable[..., str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own = new("recipe", "mine", tmp_path)
    own.write_text(own.read_text().replace("width = settings.width", "width = settings.widht"))
    line = rejected(command, "./mine.py", "--accelerator", "cpu")
    assert "mine.py:50: AttributeError" in line and line.endswith("; correct it")


def test_an_exception_in_code_of_paceline_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("paceline.commands.configure.resolve_config", fail)
    assert run(["train", "classification"]) == 1
    assert "Traceback" in capsys.readouterr().err


EVALUATOR = """
import torch
from paceline import Evaluator

class Own(Evaluator):
    def __init__(self, case, spec, device, settings):
        super().__init__(case, spec, device, settings)
        self.count = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, prediction, batch):
        self.count[1 if "logits" in prediction else 0] += len(batch["label"])

    def sums(self):
        return self.count.clone()

    def results(self, sums):
        return {RESULTS}
"""


def one_line_before_training(folder: Path, *words: str) -> str:
    rejected = run_fork(folder, "train", "./mine.py", *SHORT, *words)
    assert rejected.wait() == 2 and len(rejected.stderr.splitlines()) == 1, rejected.stderr
    assert not list(folder.glob("run/checkpoints/0*"))
    return rejected.stderr


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ("{'share': sums[1].item() / sums.sum().item()}", ""),
        ("{'share': 1 / sums[0].item()}", ""),  # a correct evaluator may need more samples than the rehearsal uses
        ("{'share': sums}", "results fails: TypeError: expected a dict {name: number}"),
        ("{'share': sums.nothing}", "results fails ("),
    ],
)
def test_a_mistake_in_an_evaluator_is_reported_before_training(tmp_path: Path, results: str, message: str) -> None:
    new("recipe", "mine", tmp_path)
    (tmp_path / "own.py").write_text(EVALUATOR.replace("{RESULTS}", results))
    own = tmp_path / "mine.py"
    own.write_text(own.read_text().replace('"accuracy"', '"./own.py"').replace("validation/top1", "validation/share"))
    if message:
        assert f"evaluator './own.py': {message}" in one_line_before_training(tmp_path)
    else:
        trained = run_fork(tmp_path, "train", "./mine.py", *SHORT)
        assert list(tmp_path.glob("run/checkpoints/0*")) or "ZeroDivisionError" in trained.stderr


def test_a_strategy_that_does_not_declare_its_devices_can_use_only_one(tmp_path: Path) -> None:
    new("recipe", "mine", tmp_path)
    (tmp_path / "plain.py").write_text("from paceline import Strategy\n\nclass Plain(Strategy):\n    pass\n")
    line = one_line_before_training(tmp_path, "--strategy", "./plain.py", "--devices", "2", "--accelerator", "cpu")
    assert "--strategy ./plain.py: uses only 1 of 2 devices" in line
