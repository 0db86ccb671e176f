"""Tests for the board page in headless Chromium while a run is training. Skipped if Chromium is not installed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from made_runs import ODD_NAMES, line, make_run
from running import Running, start_fork, wait_until
from serving import Served, serve

from paceline.board.metrics import MAX_NAMES

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(not find_chromium(), reason="Chromium is not installed (Debian: chromium)"),
]
RECIPE = Path(__file__).parents[1] / "tiny_gan.py"
VALUES = "Number(document.querySelector('[data-name=\"generator/adversarial\"]')?.dataset.values ?? 0)"
SHA256 = """fetch(%s).then((answer) => answer.arrayBuffer()).then((content) => crypto.subtle.digest('SHA-256', content))
    .then((digest) => [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, '0')).join(''))"""
INK = """(() => { const canvas = document.querySelector('[data-name="generator/adversarial"] canvas');
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let colored = 0;
    for (let i = 0; i < pixels.length; i += 4) {
      const color = [...pixels.slice(i, i + 3)];
      if (Math.max(...color) - Math.min(...color) > 25) colored++;  // axes and labels are gray
    }
    return colored; })()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A run that trains for longer than the tests take."""
    folder = tmp_path_factory.mktemp("training")
    every = ["--set", "log_every=40 steps", "--set", "sample_every=3200 images", "--set", "evaluate_every=100%"]
    settings = ["--images", "100000000", "--seed", "3", "--accelerator", "cpu", "--set", "few_images=allow", *every]
    running = start_fork(folder, "train", str(RECIPE), "--out", str(folder / "runs" / "tiny"), *settings)
    try:
        wait_until(lambda: len(list((folder / "runs" / "tiny" / "samples").glob("samples-*.png"))) > 2, running)
        yield running
    finally:
        if not running.ended:
            running.kill()


def test_a_curve_grows_without_a_reload_and_the_slider_shows_the_right_image(
    training: Running, browser: Browser
) -> None:
    run = training.folder / "runs" / "tiny"
    with serve(run.parent) as board:
        browser.open(board.url)
        first = browser.wait_for(VALUES)
        browser.evaluate("window.stays = true")
        assert browser.evaluate("location.search") == ""  # the token is removed from the address bar
        assert browser.wait_for(f"{VALUES} > {first} && {VALUES}") > first
        assert browser.evaluate("window.stays") and browser.evaluate(INK) > 100
        assert "running" in browser.evaluate("document.querySelector('#list').innerText")

        browser.evaluate("document.querySelector('[data-view=samples]').click()")
        slider = "document.querySelector('#samples input[type=range]')"
        browser.wait_for(f"Number({slider}.max) > 1")
        assert browser.evaluate("document.querySelector('#samples .pane').innerText").startswith("real images")
        for position, images in ((1, 3200), (0, 0), (2, 6400)):
            browser.evaluate(f"{slider}.value = {position}; {slider}.dispatchEvent(new Event('input'))")
            shown = f"document.querySelector('#samples img[data-images=\"{images}\"]')"
            browser.wait_for(f"{shown} && {shown}.complete && {shown}.naturalWidth > 0")
            content = (run / "samples" / f"samples-{images:012}.png").read_bytes()
            assert browser.evaluate(SHA256 % f"{shown}.src") == hashlib.sha256(content).hexdigest()
        last = int(browser.evaluate(f"{slider}.max"))
        browser.wait_for(f"Number({slider}.max) > {last}")  # new images appear without a reload
        assert browser.evaluate(f"{slider}.value") == "2"  # the slider keeps its position
        training.kill()
        browser.wait_for("document.querySelector('#list').innerText.includes('without reporting why')")
    assert not browser.errors


def test_text_from_a_run_is_never_interpreted_as_html(tmp_path: Path, browser: Browser) -> None:
    host = "</script><img src=x onerror=window.ran=1><svg onload=window.ran=1>\"'`${window.ran=1}{{ran}}\u202e\u2028"
    run = make_run(tmp_path / "runs" / "<img src=x onerror=window.ran=1>", state="failed", reason=host, host=host)
    metrics = {"images": 60, "seconds": 6.0, "time": time.time(), f"net/{host}": 1.0, f"test/{host}": 2.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")
    text = json.dumps(host, ensure_ascii=False)
    (run / "config.toml").write_text(
        f"recipe = {text}\n{text} = {text}\n\n[provenance]\ntorch = {text}\n{text} = {text}\n"
    )
    (run / "notes.json").write_text(json.dumps({"tags": [host, "<b>x</b>"], "note": host}))
    for file in ("logs/rank-0.txt", "samples/samples-000000000060.png"):
        (run / file).parent.mkdir()
        (run / file).write_text(host)
    for name in ODD_NAMES:
        (tmp_path / "runs" / name).mkdir(exist_ok=True)
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
    with serve(tmp_path / "runs") as served:
        browser.errors.clear()
        browser.open(served.url)
        browser.wait_for(f"document.querySelectorAll('#list .run').length == {len(ODD_NAMES) + 1}")
        names = browser.evaluate("[...document.querySelectorAll('#list .name')].map((name) => name.textContent)")
        assert set(ODD_NAMES) <= set(names)
        browser.wait_for("document.body.textContent.includes('onerror')")
        for view in browser.evaluate("[...document.querySelectorAll('[data-view]')].map((tab) => tab.dataset.view)"):
            browser.evaluate(f"document.querySelector('[data-view={view}]').click()")
            browser.wait_for(f"!document.querySelector('#{view}').hidden")
            found = "document.querySelectorAll('img[onerror], main script, [onload]').length"
            assert browser.evaluate(f"[typeof window.ran, {found}]") == ["undefined", 0], view
        assert "onerror" in browser.evaluate("document.querySelector('#logs').innerText")
    assert not browser.errors


def test_running_runs_are_listed_first_then_the_most_recent_ones_and_too_many_metrics_cause_a_warning(
    tmp_path: Path, browser: Browser
) -> None:
    now, host = time.time(), os.uname().nodename
    for name, age, state in (
        ("a", 900, "finished"),
        ("b", 300, "failed"),
        ("c", 600, "stopped"),
        ("z", 5000, "running"),
    ):
        run = make_run(
            tmp_path / name, lines=0, state=state, host="elsewhere" if name == "z" else host, since=now - age
        )
        (run / ".lock").touch()
    with (tmp_path / "z" / "metrics.jsonl").open("a") as file:
        file.write(line(10, **{f"net__metric{number}": 1.0 for number in range(MAX_NAMES + 1)}))
    with serve(tmp_path) as board:
        browser.open(board.url)
        browser.wait_for("document.querySelectorAll('#list .run').length == 4")
        names = browser.evaluate("[...document.querySelectorAll('#list .name')].map((name) => name.textContent)")
        counts = browser.evaluate(
            "(({ scrollWidth, clientWidth, textContent }) => [scrollWidth - clientWidth, textContent])"
            "(document.querySelector('#counts'))"
        )
        warnings = browser.evaluate("[...document.querySelectorAll('#list .warn')].map((one) => one.textContent)")
    assert warnings == [f"only {MAX_NAMES} metrics shown"]
    assert names == ["z", "b", "c", "a"]
    assert counts == [0, "1\xa0running · 1\xa0failed · 1\xa0stopped · 1\xa0finished"]  # no text is truncated


def test_chart_options_redraw_the_charts_and_are_remembered(board: Served, browser: Browser) -> None:
    browser.open(board.url)
    browser.wait_for("document.querySelectorAll('.card').length > 0")
    for choice in ("input[value=log]", "input[value=seconds]"):
        browser.evaluate(f"document.querySelector('{choice}').click()")
    kept = browser.evaluate("localStorage.getItem('paceline.curves')")
    assert '"scale":"log"' in kept and '"axis":"seconds"' in kept
    browser.open(board.url)
    browser.wait_for("document.querySelector('input[value=log]')?.checked")
    assert not browser.errors


def test_the_page_reports_that_the_board_has_stopped(root: Path, browser: Browser) -> None:
    with serve(root) as board:
        browser.open(board.url)
        browser.wait_for("document.querySelectorAll('#list .run').length > 5")
    browser.wait_for("document.querySelector('#notice').innerText.includes('no response from the board')")
