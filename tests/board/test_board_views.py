"""The page in headless Chromium: table, filter, zoom, links, downloads, samples, search, phone width and keyboard."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from compared_runs import NUM_LINES, RATES, make_compared_runs
from PIL import Image
from serving import TIMEOUT_SECONDS, Served, serve

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(not find_chromium(), reason="Chromium is not installed (Debian: chromium)"),
]
LOSS = "document.querySelector('#wall [data-name=\"net/loss\"]')"
DRAWN = f"{LOSS}?.dataset.values == '{{}}'"
ALL = DRAWN.format(4 * NUM_LINES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_compared_runs(tmp_path_factory.mktemp("views") / "runs")


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with serve(runs) as board:
        yield board


@pytest.fixture(scope="module")
def shared() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(shared: Browser, served: Served) -> Iterator[Browser]:
    """The page with nothing remembered from earlier tests; the test fails if the page logs an error."""
    shared.errors.clear()
    shared.resize(1280)
    open_page(shared, served)
    yield shared
    assert not shared.errors, shared.errors


def open_page(browser: Browser, board: Served, link: str = "", *, forget: bool = True) -> None:
    """Open the page in a state given by a link."""
    browser.open("about:blank")
    browser.open(f"{board.url}{link}")
    browser.wait_for("document.querySelectorAll('#list .run').length")
    if forget:
        browser.evaluate("localStorage.clear()")
        open_page(browser, board, link, forget=False)


def click(browser: Browser, selector: str) -> None:
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def open_table(browser: Browser) -> None:
    click(browser, "[data-view=table]")
    browser.wait_for("document.querySelectorAll('table.board tbody tr').length == 4")


def fill(browser: Browser, selector: str, text: str) -> None:
    browser.evaluate(
        f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(text)};"
        "field.dispatchEvent(new Event('input')); })()"
    )


def names(browser: Browser, selector: str) -> list[str]:
    return browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent.trim())"
    )


def box(browser: Browser, expression: str) -> dict[str, float]:
    return browser.evaluate(
        f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({expression}.getBoundingClientRect())"
    )


def zoom(browser: Browser) -> None:
    """Drag across the chart of the loss."""
    canvas = box(browser, f"{LOSS}.querySelector('canvas')")
    y = canvas["y"] + canvas["height"] / 2
    browser.drag((canvas["x"] + canvas["width"] * 0.4, y), (canvas["x"] + canvas["width"] * 0.7, y))
    browser.wait_for("!document.querySelector('#unzoom').hidden")


def test_the_table_sorts_runs_by_a_metric_and_lists_the_settings_that_differ(page: Browser) -> None:
    open_table(page)
    heads = names(page, "table.board thead .link")
    assert "generator.lr" in heads and not {"seed", "recipe", "constructor"} & set(heads)
    assert {"test/top1", "validation/top1best", "validation/top1last", "images", "time"} <= set(heads)
    assert names(page, "table.board td.best") == ["63", "65"]  # the speed is the same in all runs
    hidden = {"test/checkpoint_images", "host/cpu_percent", "net/loss", "time/step_seconds", "seed", "host"}
    assert not hidden & set(heads)
    order = "table.board tbody .name"
    column = heads.index("test/top1")
    sort = f"document.querySelectorAll('table.board thead .link')[{column}].click()"
    page.evaluate(sort)
    assert names(page, order) == ["wild", "high", "middle", "low"]
    page.evaluate(sort)
    assert names(page, order) == ["low", "middle", "high", "wild"]
    assert page.evaluate(f"document.querySelectorAll('table.board thead th')[{column}].ariaSort") == "ascending"
    click(page, "table.board thead .tool")  # lower values are now better
    assert page.evaluate("document.querySelector('table.board tbody td.best').textContent") == "60"


def test_columns_are_shown_and_hidden_with_the_menu_and_kept_in_the_link(page: Browser, served: Served) -> None:
    open_table(page)
    click(page, ".menu summary")
    page.wait_for("document.querySelectorAll('.menu [data-column]').length > 10")
    for column in ("test/checkpoint_images last", "images", "setting seed"):
        click(page, f".menu [data-column='{column}']")
    heads = set(names(page, "table.board thead .link"))
    assert {"test/checkpoint_images", "seed"} <= heads and "images" not in heads
    assert names(page, "table.board tbody tr:first-child td").count("12,000") == 1
    link = page.evaluate("location.hash")
    open_page(page, served, link)
    page.wait_for("document.querySelectorAll('table.board tbody tr').length == 4")
    assert set(names(page, "table.board thead .link")) == heads
    click(page, ".menu summary")
    fill(page, ".menu input[type=search]", "no such column")
    page.wait_for("document.querySelector('.menu .list').textContent == 'No column matches the search.'")
    fill(page, ".menu input[type=search]", "")
    click(page, ".menu .link")  # restores the defaults
    page.wait_for("!location.hash.includes('columns')")
    assert "seed" not in names(page, "table.board thead .link")
    page.press("Escape")


def test_a_filter_compares_settings_metrics_and_states(page: Browser) -> None:
    shown = "#list .name"
    for text, expected in (
        ("lr>0.005 lr<0.5", {"middle", "high"}),
        ("generator.lr=1", {"wild"}),
        ("constructor=odd", {"wild"}),
        ("test/top1>=62", {"high", "wild"}),
        ("lr!=1 state:finished", {"low", "middle", "high"}),
        ("iddl", {"middle"}),
        ('recipe="dcgan" low', {"low"}),
        ("recipe=srgan", set()),
    ):
        fill(page, "#filter", text)
        if expected:
            page.wait_for(f"document.querySelectorAll('{shown}').length == {len(expected)}")
            assert set(names(page, shown)) == expected, text
        else:
            page.wait_for("document.querySelector('#list').textContent.includes('No run matches the filter')")
    fill(page, "#filter", "lr>0.005")
    page.wait_for(DRAWN.format(3 * NUM_LINES))  # the filter applies to the charts too


def test_tags_and_a_note_are_edited_on_the_page_and_saved_with_the_run(page: Browser, runs: Path) -> None:
    click(page, "[data-view=table]")
    edit = "[aria-label='tags and note of middle']"
    page.wait_for(f'document.querySelector("{edit}") !== null')
    click(page, edit)
    page.wait_for("document.querySelector('dialog.notes').open")
    page.evaluate("document.querySelector('dialog.notes input').value = 'baseline, good'")
    page.evaluate("document.querySelector('dialog.notes textarea').value = 'compare <b>with</b> this'")
    click(page, "dialog.notes .primary")
    page.wait_for("!document.querySelector('dialog.notes').open")
    assert json.loads((runs / "middle" / "notes.json").read_text()) == {
        "tags": ["baseline", "good"],
        "note": "compare <b>with</b> this",
    }
    page.wait_for("document.querySelectorAll('#list .tag').length == 2")
    fill(page, "#filter", "tag:good")
    page.wait_for("document.querySelectorAll('#list .run').length == 1")
    (runs / "middle" / "notes.json").unlink()


def test_a_link_keeps_the_zoom_the_selection_and_the_options(page: Browser, served: Served) -> None:
    page.wait_for(ALL)
    click(page, "[aria-label='show wild']")
    click(page, "input[value=log]")
    zoom(page)
    page.wait_for(DRAWN.format(3 * NUM_LINES))
    link = page.evaluate("location.hash")
    assert "zoom=" in link and "hide=" in link and "scale=log" in link and served.token not in link
    open_page(page, served, link)
    page.wait_for(DRAWN.format(3 * NUM_LINES))
    assert page.evaluate("document.querySelector('input[value=log]').checked")
    assert not page.evaluate("document.querySelector('#unzoom').hidden")
    assert page.evaluate("location.hash") == link
    click(page, "#unzoom")
    assert "zoom=" not in page.evaluate("location.hash")


def test_the_values_are_shown_beside_the_point_before_and_after_a_zoom(page: Browser) -> None:
    page.wait_for(ALL)
    for zoomed in (False, True):
        if zoomed:
            zoom(page)
        for share in (0.3, 0.9):
            canvas = box(page, f"{LOSS}.querySelector('canvas')")
            at = canvas["x"] + share * canvas["width"]
            page.mouse("mouseMoved", at, canvas["y"] + 0.6 * canvas["height"])
            tip = f"{LOSS}.querySelector('.tip')"
            page.wait_for(f"!{tip}.hidden")
            card, shown = box(page, LOSS), box(page, tip)
            gap = max(shown["x"] - at, at - shown["x"] - shown["width"])
            assert 0 < gap < 30, (zoomed, share)  # pixels between the pointer and the nearest edge of the values
            assert card["y"] <= shown["y"] and shown["y"] + shown["height"] <= card["y"] + card["height"] + 1
        before = page.evaluate(f"{tip}.textContent")
        polls = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/runs?')).length"
        page.wait_for(f"{polls} > {page.evaluate(polls)}")
        assert page.evaluate(f"{tip}.textContent") == before and not page.evaluate(f"{tip}.hidden")


def test_curves_with_fewer_than_50_values_and_zoomed_curves_keep_their_shape(page: Browser) -> None:
    last = """(async () => {{
      const {{ Plot }} = await import('/page/plot.js');
      const plot = new Plot('net/loss', {{ axis: 'images', scale: 'linear', smooth: 0.9, zoom: null }});
      const mean = Float32Array.from({{ length: {points} }}, (_, i) => i / {points});
      const series = {{ values: {values}, images: mean, mean, low: mean, high: mean }};
      plot.curves = [{{ run: {{ id: '0' }}, series }}];
      plot.prepare(300, 200);
      return plot.curves[0].y.at(-1) - mean.at(-1);
    }})()"""
    assert page.evaluate(last.format(points=49, values=49)) == 0
    assert page.evaluate(last.format(points=60, values=60)) < -0.1
    coarse, fine = (page.evaluate(last.format(points=points, values=100_000)) for points in (300, 2000))
    assert coarse == pytest.approx(fine, rel=0.4) and fine < 0


def test_a_chart_is_enlarged_with_the_keyboard_and_closed_with_escape(page: Browser, served: Served) -> None:
    page.wait_for(ALL)
    page.evaluate(f"{LOSS}.querySelector('canvas').focus()")
    page.press("ArrowRight")
    page.wait_for(f"!{LOSS}.querySelector('.tip').hidden")
    page.press("Enter", "\r")
    page.wait_for("document.querySelector('dialog.large').open")
    page.wait_for("document.querySelectorAll('dialog.large .legend span.dot').length == 4")
    assert box(page, "document.querySelector('dialog.large canvas')")["width"] > 1000
    link = page.evaluate("location.hash")
    page.press("Escape")
    page.wait_for("!document.querySelector('dialog.large').open")
    open_page(page, served, link)
    page.wait_for("document.querySelector('dialog.large').open")


def test_a_chart_and_the_table_are_downloaded(page: Browser, tmp_path: Path) -> None:
    page.save_downloads_to(tmp_path)
    page.wait_for(ALL)
    for label in ("download the values as CSV: net/loss", "download the chart as PNG: net/loss"):
        click(page, f"[aria-label='{label}']")
    open_table(page)
    page.evaluate("[...document.querySelectorAll('#table button')].find((one) => one.textContent == 'CSV').click()")
    names = ("net-loss.csv", "net-loss.png", "runs.csv")
    until = time.monotonic() + TIMEOUT_SECONDS
    while not all((tmp_path / name).exists() for name in names):
        assert time.monotonic() < until, list(tmp_path.iterdir())
        time.sleep(0.05)
    with (tmp_path / "net-loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * NUM_LINES and {row["run"] for row in rows} == RATES.keys()
    assert [row["images"] for row in rows if row["run"] == "low"][-1] == str(100 * NUM_LINES)
    with Image.open(tmp_path / "net-loss.png") as image:
        assert image.width == 2000 and len(image.convert("RGB").getcolors(1 << 24)) > 10
    with (tmp_path / "runs.csv").open() as file:
        assert {row["run"]: float(row["generator.lr"]) for row in csv.DictReader(file)} == RATES


def test_a_run_keeps_its_colour_when_runs_are_added(page: Browser, served: Served, runs: Path) -> None:
    colors = """Object.fromEntries([...document.querySelectorAll('#list .run')].map((item) =>
        [item.querySelector('.name').textContent, item.style.getPropertyValue('--run')]))"""
    before = page.evaluate(colors)
    assert len(set(before.values())) == 4
    for name in ("a new run", "zz another"):
        shutil.copytree(runs / "low", runs / name)
    try:
        page.wait_for("document.querySelectorAll('#list .run').length == 6")
        after = page.evaluate(colors)
        assert after | before == after and len(set(after.values())) == 6
        open_page(page, served, forget=False)
        page.wait_for("document.querySelectorAll('#list .run').length == 6")
        assert page.evaluate(colors) == after
    finally:
        for name in ("a new run", "zz another"):
            shutil.rmtree(runs / name)
        page.wait_for("document.querySelectorAll('#list .run').length == 4")


def test_test_metrics_are_bars_and_the_host_has_charts(page: Browser) -> None:
    bars = "document.querySelector('[data-name=\"test/top1\"]')"
    page.wait_for(f"{bars} !== null")
    assert page.evaluate(f"{bars}.querySelectorAll('canvas').length") == 0
    assert page.evaluate(f"[...{bars}.querySelectorAll('b')].map((one) => one.textContent)") == ["63", "62", "61", "60"]
    assert page.evaluate("document.querySelector('[data-name=\"host/cpu_percent\"] canvas') !== null")


def test_samples_of_all_selected_runs_follow_one_slider(page: Browser) -> None:
    click(page, "[data-view=samples]")
    page.wait_for("document.querySelectorAll('#samples img[data-images=\"12000\"]').length == 4")
    page.evaluate(
        "(() => { const slider = document.querySelector('#samples input[type=range]'); slider.value = 1;"
        "slider.dispatchEvent(new Event('input')); })()"
    )
    page.wait_for("document.querySelectorAll('#samples img[data-images=\"6000\"]').length == 4")
    click(page, "[aria-label='show low']")
    page.wait_for("document.querySelectorAll('#samples .pane').length == 3")


def test_runs_are_shown_beside_the_real_images_of_their_data(page: Browser, runs: Path) -> None:
    for name, color in (("low", 10), ("high", 10), ("wild", 200)):
        size = (16, 16) if color == 10 else (24, 16)
        Image.new("RGB", size, (color, 0, 0)).save(runs / name / "samples" / "real-000000000000.png")
        Image.new("RGB", size).save(runs / name / "samples" / "errors-000000006000.png")
    try:
        click(page, "[data-view=samples]")
        titles = "[...document.querySelectorAll('#samples .pane > div')].map((one) => one.textContent.trim())"
        page.wait_for(f"{titles}.length == 6")
        shown = page.evaluate(titles)
        groups = " ".join(shown).split("real images")
        assert shown.count("real images") == 2
        assert any({"low", "high"} <= set(group.split()) and "wild" not in group for group in groups), shown
        captions = " ".join(names(page, "#samples .pane.real figcaption"))
        assert "and 1 more run" in captions and "training data of wild" in captions
        assert names(page, "#samples select option") == ["errors", "samples"]
        page.evaluate(
            "(() => { const kind = document.querySelector('#samples select'); kind.value = 'errors';"
            "kind.dispatchEvent(new Event('change')); })()"
        )
        page.wait_for("document.querySelectorAll('#samples img[data-images=\"6000\"]').length == 3")
        assert "no images of the kind “errors”" in names(page, "#samples figcaption")
    finally:
        for file in [*runs.glob("*/samples/real-*"), *runs.glob("*/samples/errors-*")]:
            file.unlink()


def test_the_log_can_be_searched(page: Browser) -> None:
    click(page, "[data-view=logs]")
    page.wait_for("document.querySelector('pre.log').textContent.includes('training with lr')")
    fill(page, "#logs input[type=search]", "warning")
    page.wait_for("document.querySelector('pre.log mark')?.textContent == 'Warning'")
    assert names(page, "#logs .tools [role=status]") == ["1 line"]
    fill(page, "#logs input[type=search]", "no such text")
    page.wait_for("document.querySelector('pre.log').textContent.includes('No line contains this text')")


def test_every_view_fits_a_phone_and_follows_the_dark_theme(page: Browser, served: Served) -> None:
    page.resize(400, 800)
    for scheme, darkness in (("light", (200, 256)), ("dark", (0, 60))):
        page.prefer(scheme)
        for view in ("curves", "table", "samples", "settings", "logs"):
            click(page, f"[data-view={view}]")
            page.wait_for(
                f"!document.querySelector('#{view}').hidden && document.querySelector('#{view}').innerText.length"
            )
            assert page.evaluate("document.documentElement.scrollWidth") == 400, view
            overflow = "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)(document.querySelector('main'))"
            assert page.evaluate(overflow) == 0, view
        color = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
        assert darkness[0] <= color < darkness[1], scheme
    page.prefer("light")
    click(page, "#drawer")
    assert page.evaluate("getComputedStyle(document.querySelector('#runs')).display") == "flex"
    page.press("Escape")
    assert page.evaluate("getComputedStyle(document.querySelector('#runs')).display") == "none"


def test_tabs_and_the_filter_are_reached_with_the_keyboard(page: Browser) -> None:
    page.evaluate("document.querySelector('#tabs [aria-selected=true]').focus()")
    page.press("ArrowRight")
    page.wait_for("!document.querySelector('#table').hidden")
    page.press("/", "/")
    assert page.evaluate("document.activeElement.id") == "filter"
    assert page.evaluate("document.activeElement.value") == ""


def test_each_view_explains_what_to_do_if_there_is_no_run_to_show(page: Browser, tmp_path: Path) -> None:
    message = "document.querySelector('#nothing:not([hidden])')?.innerText.includes('{}')"
    click(page, "#none")
    page.wait_for(message.format("No run is selected"))
    fill(page, "#filter", "nobody")
    page.wait_for(message.format("No run matches the filter"))
    with serve(tmp_path) as board:
        page.open(board.url)
        for view in ("curves", "table", "samples", "settings", "logs"):
            click(page, f"[data-view={view}]")
            page.wait_for(message.format("paceline train"))
            assert page.evaluate(f"document.querySelector('#{view}').hidden")
