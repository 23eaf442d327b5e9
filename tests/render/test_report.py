"""The page, as a browser sees it: whole, quiet, quick, operable by keyboard, and deaf to what strangers wrote."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from opcapture import captured
from pages import pair, step_rows
from synthetic import COUNTS, NUMBERS, row, site, write_run
from torch import nn

from introspect_cli.records import Layout, ModuleInfo, SiteInfo
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.run_writer import StoreWriter

HOSTILE = "Net.</script><script>window.owned=1</script><img src=x onerror=window.owned=1>\x1b[31m\u202e"


def made(introspect, *args):
    done = introspect("report", *args, "-o", "page.html", "--force")
    assert done.returncode == 0, done.stderr
    return done


def visit(browser, path, *, dark=False, wait=30):
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get(path.as_uri())
    until = time.monotonic() + wait
    while not browser.execute_script("return document.documentElement.dataset.ready"):
        assert time.monotonic() < until, browser.get_log("browser")
        time.sleep(0.02)
    return browser.execute_script("return performance.now()") / 1000


def complaints(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def text(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((own) => own.textContent)", selector
    )


@pytest.fixture
def page(introspect, tmp_path, browser):
    """Makes the page of some runs, by default of a pair that parts at step 5, and opens it: nothing complains."""

    def opened(*runs, **how):
        if not (tmp_path / "a").exists():
            pair(tmp_path)
        made(introspect, *(runs or ("a", "b")))
        visit(browser, tmp_path / "page.html", **how)
        assert complaints(browser) == []
        return browser

    return opened


@pytest.mark.parametrize("losses", [(123_000.0, 123_250.0, 123_700.0), (2.0, 2.0, 2.0)])
def test_no_axis_says_the_same_twice(page, tmp_path, losses):
    write_run(tmp_path / "a", [[row("loss", "loss", "loss", np.array(each, np.float64))] for each in losses])
    said = texts(page("a"), "#loss-plot text[text-anchor=end]")
    assert len(set(said)) == len(said) > 2


def test_the_page_opens_quietly_says_where_they_part_and_can_be_walked(page, browser):
    js, keys = page().execute_script, pytest.importorskip("selenium.webdriver").Keys
    for place, said in (
        (".verdict", "step 5"), ("#map-cell", "step 5"), ("#map-cell", "Net.layer"),
        ("#map-records", "output Net.layer"), ("#settings", "--lr"),
    ):  # fmt: skip
        assert said in text(browser, place)
    assert js("return performance.getEntriesByType('resource').length") == 0
    assert js("return document.querySelectorAll('.plot svg').length") >= 4
    box, before = browser.find_element("id", "map-box"), text(browser, "#map-cell")
    box.send_keys(keys.ARROW_LEFT)
    assert "step 4: equal" in text(browser, "#map-cell")
    box.send_keys(keys.HOME)
    assert text(browser, "#map-cell") == before
    for _ in range(40):
        box.send_keys(keys.ARROW_RIGHT)
    assert "step 11" in text(browser, "#map-cell")  # the edge holds
    actions = pytest.importorskip("selenium.webdriver").ActionChains
    js("arguments[0].scrollIntoView({block: 'center'})", box)
    actions(browser).move_to_element(box).perform()
    hovered = box.get_attribute("title")
    assert re.search(r", step \d+: ", hovered)
    actions(browser).move_to_element(box).click().perform()
    assert text(browser, "#map-cell") == hovered


def test_of_one_step_dots_and_numbers_are_shown(page, tmp_path, browser):
    """A curve of one point is no line; an operator's name stands apart from its module's."""
    for name, shift in (("a", 0.0), ("b", 0.01)):
        relu = row("forward", "op_output", "Net.layer", np.array([1.0, shift], np.float32), path="aten.relu.default")
        write_run(tmp_path / name, [[*step_rows(0, shift=shift), relu]])
    page()
    assert len(texts(browser, "#loss-plot circle")) == 2
    assert text(browser, "#loss-read").startswith("step 0: a 3, b 3.01")
    assert texts(browser, "#distances-plot circle")
    assert "step 0: op_output Net.layer aten.relu.default" in text(browser, "#map-records")


def test_numbers_are_reported_in_as_few_digits_as_read_back_as_the_same_float32(page, tmp_path, browser):
    rates, losses = (0.001, 0.0011, 0.3), (0.1, 16777216.0, 0.30000001192092896)
    steps = [
        [
            row("loss", "loss", "loss", np.array(loss, np.float32)),
            row("optimizer", "hyperparameter", "SGD", rate, path="[0]['lr']"),
        ]
        for rate, loss in zip(rates, losses, strict=True)
    ]
    write_run(tmp_path / "a", steps)
    page("a")
    keys = pytest.importorskip("selenium.webdriver").Keys
    for box, read, said in (
        ("#curves .plot", "#curves .read", "step 0: 0.001"),
        ("#loss-plot", "#loss-read", "step 0: 0.1"),
        ("#history-plot", "#history-read", "step 0: 0.1"),
    ):
        browser.find_element("css selector", box).send_keys(keys.HOME)
        assert text(browser, read) == said
    browser.execute_script("document.getElementById('history-values').open = true")
    browser.find_element("id", "search").send_keys("lr")
    until = time.monotonic() + 300
    while texts(browser, "#history-table td") != ["0.001", "0.0011", "0.3"]:
        assert time.monotonic() < until, texts(browser, "#history-table td")
        time.sleep(0.02)


LONG = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default[1] of a name that is as long as names get"


@pytest.mark.parametrize("width", [1280, 400])
def test_no_text_of_the_tables_runs_into_another_column(page, tmp_path, browser, width):
    for name, shift in (("a", 0.0), ("b", 0.01)):
        op = row("forward", "op_output", "Net.stack.attention", np.array([1, shift], np.float32), path=LONG)
        steps = [[*step_rows(number, shift=shift, name="Net.stack.attention"), op] for number in range(2)]
        write_run(tmp_path / name, steps)
    js = page().execute_script
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    over = "[...document.querySelectorAll('#map-records :is(th, td)')].filter((e) => e.scrollWidth > e.clientWidth)"
    shown = js(f"return {over}.length"), js("return document.documentElement.scrollWidth <= innerWidth")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert LONG in text(browser, "#map-records")
    assert shown == (0, True)


@pytest.mark.parametrize("at", [0, 5])
def test_the_mark_of_the_map_covers_no_number(page, tmp_path, at):
    """What the axis says is written down as it is drawn, with where it begins and ends."""
    pair(tmp_path, at=at)
    drawn = page().execute_script("""
        const pen = CanvasRenderingContext2D.prototype, own = pen.fillText, drawn = [];
        pen.fillText = function (text, x, y) {
          const wide = this.measureText(text).width;
          if (this.textAlign === "center") drawn.push([String(text), x - wide / 2, x + wide / 2]);
          own.call(this, text, x, y);
        };
        document.getElementById("theme").click();
        pen.fillText = own;
        return drawn.sort((one, two) => one[1] - two[1]);
    """)
    said = [name for name, *_ in drawn]
    assert f"\u25bc{at}" in said
    assert len(said) > 3
    assert all(before[2] < after[1] for before, after in pairwise(drawn)), drawn


def test_sites_are_found_and_drawn_on_either_scale(page, browser):
    js = page().execute_script
    browser.find_element("id", "search").send_keys("loss")
    assert text(browser, "#found").startswith("1 of 7 sites")
    assert "mean of loss" in text(browser, "#history-name")
    drawn = "return document.querySelector('#history-plot svg').innerHTML"
    linear = js(drawn)
    js("document.getElementById('log').click()")
    assert js(drawn) != linear
    js("const s = document.getElementById('stat'); s.value = 'absmax'; s.dispatchEvent(new Event('change'))")
    assert "largest absolute value of loss" in text(browser, "#history-name")
    js("document.getElementById('history-values').open = true")
    time.sleep(0.1)
    assert texts(browser, "#history-table tr")[1] == "033equal"  # step 0, 3 in a and b


def test_dark_is_dark_and_can_be_left(page, browser):
    js = page(dark=True).execute_script
    back = "return getComputedStyle(document.body).backgroundColor"
    assert sum(map(int, re.findall(r"\d+", js(back))[:3])) < 120
    browser.find_element("id", "theme").click()
    assert js(back) == "rgb(255, 255, 255)"


def test_on_paper_the_map_is_whole_and_light(page, tmp_path, browser):
    wide_run(tmp_path / "a", 200, 10, offset=10**9)
    wide_run(tmp_path / "b", 200, 10, offset=4)
    js = page(dark=True).execute_script
    tall = "return document.getElementById('map-canvas').getBoundingClientRect().height"
    on_screen, rows = js(tall), len(json.loads(text(browser, "#data"))["map"]["names"])
    assert on_screen < 17 * rows <= js(f"dispatchEvent(new Event('beforeprint')); {tall}")
    assert js("return document.documentElement.dataset.theme") == "light"
    js("dispatchEvent(new Event('afterprint'))")
    assert (js(tall), js("return document.documentElement.dataset.theme")) == (on_screen, "dark")


def test_a_screen_reader_hears_a_name_for_all_it_can_reach(page):
    nodes = page().execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    reached = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if any(each["name"] == "focusable" and each["value"]["value"] for each in node.get("properties", ()))
    ]
    assert [role for role, name in reached if not name and role != "RootWebArea"] == []


def test_what_strangers_wrote_is_text_and_the_policy_stops_what_would_get_in(page, tmp_path, browser):
    pair(tmp_path, name=HOSTILE)
    page()
    written = (tmp_path / "page.html").read_text()
    assert "<script>window.owned" not in written
    assert "\x1b" not in written
    assert "\u202e" not in written.partition("<script>")[0]
    assert browser.execute_script("return window.owned") is None
    assert "</script><script>window.owned=1" in text(browser, "#map-cell")
    bad = '<script>window.owned=1</script><img src=x onerror="owned=1"><main'
    (tmp_path / "page.html").write_text(written.replace("<main", bad))
    visit(browser, tmp_path / "page.html")
    assert browser.execute_script("return window.owned") is None


def test_a_single_run_has_a_page_too(page, browser):
    page("a")
    assert "1 warning (12 rules over 12 steps of a)" in text(browser, "#answer")
    shown = [browser.find_element("id", name).is_displayed() for name in ("loss-plot", "map", "history-plot")]
    assert shown == [True, False, True]


def test_noise_runs_are_a_band(page, tmp_path):
    pair(tmp_path)
    write_run(tmp_path / "a2", [step_rows(number, shift=1e-4) for number in range(12)])
    assert texts(page("a", "b", "--noise", "a2"), "#distances-plot path title") == ["noise runs"]


@pytest.mark.parametrize("steps", [0, 1])
def test_runs_with_next_to_nothing_in_them(page, tmp_path, steps):
    write_run(tmp_path / "a", [step_rows(0)] * steps)
    page("a", "a")


def wide_run(path, sites, steps, offset):
    """Many sites by many steps, written in whole columns."""
    with StoreWriter.create(path) as store:
        store.write_manifest({"status": "complete", "exit_code": 0})
        writer = store.rank(0)
        numbers = [
            writer.site(site(*words, f"Net.blocks.{place // 4}.layer{place % 4}"), SiteInfo("Linear"))
            for place in range(sites // 2)
            for words in (("forward", "output"), ("backward", "grad_output"))
        ]
        layout = writer.layout(Layout((64, 64), "float32", "cpu", "contiguous"))
        count = len(numbers)
        for step in range(steps):
            rng = np.random.default_rng(step)
            differs = step >= offset
            mean = rng.standard_normal(count) + 1e-3 * differs
            writer.append(
                step,
                StepBatch(
                    site=np.array(numbers, np.uint32),
                    sequence=np.arange(count, dtype=np.uint32),
                    layout=np.full(count, layout, np.uint32),
                    status=np.zeros(count, np.uint8),
                    checksum=rng.integers(1, 2**62, count).astype(np.uint64) + np.uint64(differs),
                    counts={name: np.zeros(count, np.int64) for name in COUNTS},
                    floats={name: np.abs(mean) if name == "var" else mean for name in NUMBERS},
                    sketch=rng.standard_normal((count, 16)).astype(np.float32) * np.float32(1 + 1e-3 * differs),
                ),
            )


def test_five_hundred_steps_of_as_many_sites_open_at_once(page, tmp_path, browser):
    wide_run(tmp_path / "a", 500, 500, offset=10**9)
    wide_run(tmp_path / "b", 500, 500, offset=200)
    page()
    assert (tmp_path / "page.html").stat().st_size < 5_000_000
    # About 0.5 s on two quiet cores; the bound is for a page that hangs, not for a busy machine.
    assert visit(browser, tmp_path / "page.html") < 30
    assert "step" in text(browser, "#map-cell")


def test_ten_thousand_sites_stay_small_and_say_what_was_left_out(introspect, tmp_path):
    wide_run(tmp_path / "a", 10_000, 60, offset=99)
    made(introspect, "a")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    kept, left = re.search(r"In this page: ([\d,]+) sites with .* ([\d,]+) sites found no room", page).groups()
    assert int(kept.replace(",", "")) + int(left.replace(",", "")) == 10_000
    assert len(page) < 8_000_000


def test_the_map_does_not_call_equal_what_the_answer_says_diverges(introspect, page, tmp_path, browser):
    """A parameter differs after the first step, its module's outputs from the next step on."""
    for name, offset in (("a", 0.0), ("b", 1.0)):
        weight = row("optimizer", "param", "Net.layer.weight", np.array([2.0 + offset], np.float32))
        outputs = [np.array([1.0 + offset * (number > 0)], np.float32) for number in range(4)]
        write_run(tmp_path / name, [[row("forward", "output", "Net.layer", out), weight] for out in outputs])
    text_of = introspect("diff", "a", "b", "--map", env={**os.environ, "PYTHONIOENCODING": "utf-8"}).stdout
    assert re.search(r"Net\.layer +0 ", text_of), text_of
    page()
    assert text(browser, "#map-cell").endswith("step 0: forward pass equal, tensors or gradients differ")
    shown = texts(browser, "#map-records tr")
    (output,) = (line for line in shown if line.startswith("output Net.layer"))
    assert output == "output Net.layer0equal11001" + "1"
    assert any("param Net.layer.weight" in line and "differs" in line for line in shown)


def test_a_run_that_went_wrong_says_so_before_its_curves(page, tmp_path, browser):
    steps = [[row("loss", "loss", "loss", np.array(1.0 if number < 3 else np.nan, np.float32))] for number in range(6)]
    write_run(tmp_path / "a", steps)
    page("a")
    assert text(browser, "#history-sick") == "not finite at 3 of 6 steps, from step 3 on"
    assert "not finite from step 3" in text(browser, "#loss-plot")
    assert "2 errors" in text(browser, "#answer")
    order = browser.execute_script("return [...document.querySelectorAll('main > section')].map((own) => own.id)")
    assert order.index("answer") < order.index("findings") < order.index("history")
    assert "error" in text(browser, "#findings")


def first_screen(introspect, tmp_path):
    made(introspect, "a", "b")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_first_screen_says_where_how_much_and_why(introspect, tmp_path):
    tree = [ModuleInfo("Net", "Net", "train.py:3"), ModuleInfo("Net.layer", "Linear", "model.py:41")]
    for name, at in (("a", 99), ("b", 5)):
        steps = [step_rows(number, shift=0.01 * (number >= at)) for number in range(12)]
        write_run(tmp_path / name, steps, modules=tree, settings={"command": {"argv": ["--lr", name]}})
    screen = first_screen(introspect, tmp_path)
    assert screen.index("<h3>Where</h3>") < screen.index("<h3>How much</h3>") < screen.index("<h3>Why</h3>")
    assert "First divergence at step 5: the output of Net.layer" in screen
    assert "model.py:41" in screen
    assert "float32 rounding units" in screen
    assert "Compared steps before that agree entirely: 5." in screen
    assert "no cause is on record" in screen
    assert "its code, train/eval mode" in screen
    assert "--lr a -&gt; b" in screen


def test_runs_that_agree_have_a_verdict_and_no_cards(introspect, tmp_path):
    pair(tmp_path, at=99)
    screen = first_screen(introspect, tmp_path)
    assert "The runs are the same" in screen
    assert 'class="card"' not in screen


def test_a_file_that_is_there_stays(introspect, tmp_path):
    pair(tmp_path)
    (tmp_path / "page.html").write_text("mine")
    done = introspect("report", "a", "-o", "page.html")
    assert done.returncode == 2
    assert (tmp_path / "page.html").read_text() == "mine"
    assert introspect("report", "a", "-o", "no/such/place.html").returncode == 2


def test_operators_are_drawn_where_they_were_captured(introspect, tmp_path):
    def steps(value):
        info = SiteInfo("Net", "aten.mul.Tensor", "train.py:7")
        op = (site("forward", "op_output", "Net", 0, "aten.mul.Tensor"), info, np.full(2, value, np.float32))
        return [[row("forward", "input", "Net", np.ones(2, np.float32), path="[0]"), op]]

    write_run(tmp_path / "a", steps(1.0))
    write_run(tmp_path / "b", steps(2.0))
    made(introspect, "a", "b")
    page = (tmp_path / "page.html").read_text()
    assert '<section id="ops" aria-labelledby="ops-title" >' in page
    assert '<svg xmlns="http://www.w3.org/2000/svg" class="ops"' in page
    assert "fill:var(--front" in page  # the graph follows the theme
    made(introspect, "a")
    assert "results of operators at step 0" in (tmp_path / "page.html").read_text()


def test_a_graph_without_the_origin_opens_where_its_first_operator_is(page, tmp_path):
    class Fan(nn.Module):
        def forward(self, x):
            y = x * 2
            return torch.cat([y + number for number in range(20)])

    captured(tmp_path / "a", lambda: Fan()(torch.ones(4)), level="op")
    js = page("a").execute_script
    left, right, own = js("""
        const box = document.getElementById("graph").getBoundingClientRect();
        return [box.left, box.right, document.querySelector("#graph g.n").getBoundingClientRect().left];
    """)
    assert js("return document.getElementById('graph').scrollLeft") > 0
    assert left < own < right


def test_the_page_has_one_script_no_source_elsewhere_and_a_policy(introspect, tmp_path):
    pair(tmp_path)
    made(introspect, "a", "b")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script>") == 1
    assert not re.search(r"""(src|href)=["'](?!#)""", page)
    assert "default-src 'none'" in page
    assert "url(" not in page
    assert len(page) < 200_000


def colours_of(browser, selector):
    """Every colour of an element, with the number of its pixels, as a screen shows it."""
    image = pytest.importorskip("PIL.Image")
    shot = browser.find_element("css selector", selector).screenshot_as_png
    pixels = image.open(io.BytesIO(shot)).convert("RGB")
    return {colour: count for count, colour in pixels.getcolors(maxcolors=1 << 24)}


@pytest.mark.parametrize(
    ("dark", "equal", "one_run"), [(False, (233, 237, 241), (0, 131, 143)), (True, (38, 45, 52), (77, 208, 225))]
)
def test_the_map_is_painted_in_the_shades_of_its_legend(page, tmp_path, browser, dark, equal, one_run):
    pair(tmp_path)
    rows = [step_rows(number, shift=0.01 * (number >= 5)) for number in range(12)]
    extra = row("forward", "output", "Net.extra", np.ones(3, np.float32))
    write_run(tmp_path / "c", [[*each, extra] for each in rows])
    page("a", "c", dark=dark)
    time.sleep(0.3)  # the canvas is painted on the next frame
    colours = colours_of(browser, "#map-box")
    assert colours.get(equal, 0) > 5_000
    assert colours.get(one_run, 0) > 5_000
    shades = [count for colour, count in colours.items() if colour not in (equal, one_run)]
    assert sum(count > 1_000 for count in shades) >= 2  # the background, and what diverges


def test_a_page_that_does_not_fit_leaves_none(tmp_path):
    pair(tmp_path)
    command = f"ulimit -f 4; exec {sys.executable} -B -m introspect_cli report a -o page.html"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("cannot write page.html: File too large")) == (2, 1)
    assert not (tmp_path / "page.html").exists()
