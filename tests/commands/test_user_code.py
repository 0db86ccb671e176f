"""Before code from a user's file runs, one printed line names the file."""

from __future__ import annotations

from pathlib import Path

from running import run_fork, start_command

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


def test_the_name_of_a_user_file_is_printed_even_if_its_code_fails(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("raise SystemError('no')")
    rejected = run_fork(tmp_path, "train", "classification", "--data", "./failing.py")
    assert rejected.wait() == 2 and announced(rejected.stdout) == ["failing.py"]


def test_worker_processes_print_no_file_names_and_receive_all_settings(tmp_path: Path) -> None:
    new("recipe", "mine", tmp_path)
    new("source", "shapes", tmp_path)
    own = ("--data", "./shapes.py", "--set", "noise=7", "--devices", "2", "--accelerator", "cpu")
    trained = start_command(tmp_path, "train", "./mine.py", *own, *SHORT)
    assert trained.wait() == 0, trained.stderr
    assert announced(trained.stdout) == ["mine.py", "shapes.py"]
    kept = (tmp_path / "run" / "config.toml").read_text()
    assert "noise = 7.0" in kept and "width = 2" in kept


def test_a_loss_function_that_returns_a_wrong_type_is_reported_in_one_line(tmp_path: Path) -> None:
    new("recipe", "mine", tmp_path)
    own = tmp_path / "mine.py"
    text = own.read_text()
    assert text.count("return Loss(") == 1
    own.write_text(text.replace("return Loss(", "return dict("))
    rejected = run_fork(tmp_path, "train", "./mine.py", *SHORT)
    assert rejected.wait() == 2 and len(rejected.stderr.splitlines()) == 1, rejected.stderr
    assert "the loss is a dict: return paceline.Loss(" in rejected.stderr
