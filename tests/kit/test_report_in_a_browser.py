"""The report in Chromium: it fits the window, and its filters hide what they say."""

import html as escapes
import re
import shutil
import subprocess

import pytest
from kit_toy import ToyWorld, failing, run
from moeref_conformance.contract.findings import Finding
from moeref_conformance.report import html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH")

#: The report in frames of these widths, in pixels; each writes what `measured` gives for it into the page.
FRAME = """<iframe width={width} height=900 srcdoc="{page}" onload="
  const page = this.contentDocument; {act}
  const said = document.createElement('pre'); said.textContent = '{width}=' + ({measured}); document.body.append(said)
"></iframe>"""
WIDTHS = (390, 768, 1280)
SHOWN = "[...new Set([...page.querySelectorAll('td[class*=r-]')].filter(e => e.offsetWidth).map(e => e.className))]"


@pytest.fixture
def page(tmp_path):
    long = "model.layers.3.mlp.experts.5.up_proj.weight differs from " + "x" * 200
    return html.render(run(tmp_path, ToyWorld(), EXP_002=failing(Finding(stage="export", message=long, rank=1))))


def measured(tmp_path, page, expression, act="", widths=(1280,)):
    """Width of the frame -> what the JavaScript `expression` gives after `act`."""
    frames = [FRAME.format(width=w, page=escapes.escape(page), act=act, measured=expression) for w in widths]
    (tmp_path / "frames.html").write_text("<body>" + "".join(frames), encoding="utf-8")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(CHROMIUM), *quiet, "--virtual-time-budget=20000", "--dump-dom", (tmp_path / "frames.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return {int(width): value for width, value in re.findall(r"<pre>(\d+)=(.*?)</pre>", dom)}


def test_no_page_is_wider_than_its_window(tmp_path, page):
    widths = measured(tmp_path, page, "page.documentElement.scrollWidth", widths=WIDTHS)
    assert set(widths) == set(WIDTHS)
    assert {width: int(found) <= width for width, found in widths.items()} == dict.fromkeys(WIDTHS, True)


def test_the_overview_and_the_profiles_end_within_the_window(tmp_path, page):
    """Though what is wider could be scrolled: a column out of sight is not seen."""
    cells = "[...page.querySelectorAll('.overview td, .overview th, .profiles td')]"
    ends = measured(tmp_path, page, f"Math.max(...{cells}.map(e => e.getBoundingClientRect().right))", widths=WIDTHS)
    assert {width: 0 < float(found) <= width for width, found in ends.items()} == dict.fromkeys(WIDTHS, True)
    shown = (
        "page.querySelectorAll('.overview thead th').length + ' ' + page.querySelector('.overview thead').offsetHeight"
    )
    columns, height = measured(tmp_path, page, shown)[1280].split()
    assert int(columns) > 10
    assert int(height) > 0


@pytest.mark.parametrize("choice", ["", "EXP", "EXP-002"])
def test_the_choice_of_rules_hides_all_other_columns(tmp_path, page, choice):
    act = f"page.querySelector('option[value={choice}]').selected = true;" if choice else ""
    (shown,) = measured(tmp_path, page, SHOWN, act).values()
    found = set(re.findall(r"r-([A-Z]+-\d+)", shown))
    assert found == {rule for rule in found if rule.startswith(choice)} != set()
    assert ("LOD-001" in found) == (not choice)


def test_a_link_to_a_cell_shows_it_though_the_filters_hide_it(tmp_path, page):
    hide = "page.querySelector('#only-open').click();"
    rows = "[...page.querySelectorAll('tr.good')].filter(e => e.offsetHeight).length"
    count = int(measured(tmp_path, page, rows)[1280])
    assert count > 0
    assert measured(tmp_path, page, rows, hide)[1280] == "0"
    follow = "page.defaultView.location.hash = page.querySelector('tr.good').id;"
    assert measured(tmp_path, page, rows, hide + follow)[1280] == "1"
