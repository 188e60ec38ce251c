"""The HTML report in a real browser: keyboard, pointer, dark mode, phone width, print, and hostile text."""

from __future__ import annotations

import base64
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from report_support import HOSTILE, NAMES, synthetic, traced
from safe_llm.report import render_html
from safe_llm.trace import Trace
from test_cli_support import run

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver import ActionChains, Keys  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.allow_hosts(["127.0.0.1", "::1"]),  # the driver listens on the loopback interface
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs Debian's packages chromium and chromium-driver"
    ),
]
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """A Chromium that is looked at like a person would."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def cdp(self, command: str, **params: object) -> dict:
        return self.driver.execute_cdp_cmd(command, params)

    def show(self, html: str | Path, tmp_path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light"):
        """Open a page at some size and colour scheme, with an empty console."""
        path = html if isinstance(html, Path) else tmp_path / "page.html"
        if isinstance(html, str):
            path.write_text(html, encoding="utf-8")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        self.cdp("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get("about:blank")
        self.console()
        self.driver.get(path.as_uri())

    def js(self, code: str, *args: object) -> object:
        return self.driver.execute_script(code, *args)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def focused(self) -> str | None:
        """The number of the token that has the focus."""
        return self.js("return document.activeElement.dataset.token")

    def panel(self, number: int = 0) -> str:
        return self.driver.find_elements(By.CSS_SELECTOR, ".panel")[number].get_attribute("textContent")

    def screenshot(self, path: Path) -> bytes:
        data = base64.b64decode(self.cdp("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    return traced(tmp_path_factory.mktemp("traces") / "t.jsonl", include_prompt=True)


@pytest.fixture(scope="module")
def html(trace) -> str:
    return render_html([("first.jsonl", trace), ("second.jsonl", trace)])


def assert_shows_something(png: bytes) -> None:
    """A blank page has a handful of byte values, a real one has many."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, raw = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        raw += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    assert len(set(zlib.decompress(raw))) > 100


CONTRASTS = """
const number = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].reduce((sum, c, i) => {
  const v = c / 255;
  return sum + [0.2126, 0.7152, 0.0722][i] * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
}, 0);
const ground = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = number(getComputedStyle(e).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const found = [];
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  if (!node.data.trim() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName)) continue;
  const style = getComputedStyle(element);
  const ink = element.closest("svg") ? style.fill : style.color;
  const [a, b] = [light(number(ink)), light(ground(element))].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), element.className.baseVal ?? element.className, node.data.slice(0, 20)]);
}
return found.sort((x, y) => x[0] - y[0]);
"""


# ---------------------------------------------------------------------- looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable_in_both_colour_schemes(browser, html, tmp_path, scheme):
    browser.show(html, tmp_path, scheme=scheme)
    browser.js("document.querySelectorAll('details').forEach((item) => (item.open = true))")
    contrasts = browser.js(CONTRASTS)
    assert {"tok replaced", "tok skipped", "tok unrepresentable"} <= {name for _, name, _ in contrasts}
    assert contrasts[0][0] >= 4.5, contrasts[:3]
    paper = browser.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert all(value < 64 for value in paper) if scheme == "dark" else all(value > 191 for value in paper)
    assert_shows_something(browser.screenshot(tmp_path / f"{scheme}.png"))
    assert browser.console() == []


def test_nothing_is_shown_by_colour_alone(browser, html, tmp_path):
    browser.show(html, tmp_path)
    styles = browser.js(
        """return Object.fromEntries([...document.querySelectorAll(".legend .tok")].map((e) => {
          const s = getComputedStyle(e);
          return [e.className, [s.textDecorationLine, s.textDecorationStyle, s.fontWeight].join(" ")];
        }))"""
    )
    assert len(set(styles.values())) == len(styles) >= 4


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_page_never_scrolls_sideways(browser, html, tmp_path, width):
    browser.show(html, tmp_path, width=width, height=780)
    browser.js("document.querySelectorAll('details').forEach((item) => (item.open = true))")
    browser.js("document.querySelector('.text .replaced').focus()")
    assert NAMES[0] in browser.panel()
    assert browser.js("return [document.documentElement.scrollWidth <= innerWidth, innerWidth]") == [True, width]
    assert_shows_something(browser.screenshot(tmp_path / f"{width}.png"))


def test_on_a_phone_the_panel_waits_until_it_is_asked(browser, html, tmp_path):
    browser.show(html, tmp_path, width=360, height=780)
    assert NAMES[0] not in browser.panel()
    token = browser.driver.find_element(By.CSS_SELECTOR, ".text .replaced")
    token.click()
    assert "ensembled, drafted token replaced" in browser.panel()
    box = browser.js("return document.querySelector('.panel').getBoundingClientRect().toJSON()")
    assert box["bottom"] <= 780
    assert box["height"] <= 780 * 0.5
    assert browser.js("return arguments[0].getBoundingClientRect().bottom", token) <= box["top"]


def test_print_has_the_text_and_the_points_but_no_panel(browser, html, tmp_path):
    browser.show(html, tmp_path)
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    shown = browser.js("return ['.panel', '.text', '.points'].map((s) => document.querySelector(s).checkVisibility())")
    assert shown == [False, True, False]
    browser.js("dispatchEvent(new Event('beforeprint'))")
    assert browser.js("return document.querySelector('.points').checkVisibility()")


def test_page_loads_nothing(browser, html, tmp_path):
    browser.show(html, tmp_path)
    assert browser.js("return performance.getEntriesByType('resource').length") == 0


# ---------------------------------------------------------------------- keyboard and pointer


def test_tab_reaches_the_text_once_and_then_the_panel(browser, html, tmp_path):
    browser.show(html, tmp_path)
    stops = []
    for _ in range(8):
        browser.press(Keys.TAB)
        stops.append(browser.js("const e = document.activeElement; return e.dataset.token ? 'token' : e.className"))
    assert stops.count("token") == 1
    assert stops[stops.index("token") + 1] == "panel"


def test_arrow_keys_move_through_the_tokens_and_the_panel_follows(browser, html, tmp_path):
    browser.show(html, tmp_path)
    browser.js("document.querySelector('.text .tok[tabindex=\"0\"]').focus()")
    start = int(browser.focused())
    seen = [browser.panel()]
    for key, expected in ((Keys.ARROW_RIGHT, start + 1), (Keys.ARROW_RIGHT, start + 2), (Keys.ARROW_LEFT, start + 1)):
        browser.press(key)
        assert browser.focused() == str(expected)
        seen.append(browser.panel())
    assert len(set(seen)) == 3
    assert seen[1] == seen[3]
    browser.press(Keys.HOME, Keys.ARROW_LEFT)
    assert browser.focused() == "0"
    browser.press(Keys.END, Keys.ARROW_RIGHT)
    assert browser.focused() == browser.js("return document.querySelector('.text .end').dataset.token")
    assert browser.js("return document.querySelectorAll('.text:first-child .tok[tabindex=\"0\"]').length") == 2


def test_up_and_down_change_the_line(browser, html, tmp_path):
    browser.show(html, tmp_path)
    line = "return document.activeElement.getClientRects()[0].top"
    browser.js("document.querySelector('.text .tok').focus()")
    first = browser.js(line)
    browser.press(Keys.ARROW_DOWN)
    second = browser.js(line)
    assert second > first
    browser.press(Keys.ARROW_UP)
    assert browser.js(line) == first
    assert browser.focused() == "0"


def test_n_and_p_and_the_buttons_go_from_point_to_point(browser, html, tmp_path, trace):
    browser.show(html, tmp_path)
    points = browser.js(
        "return [...document.querySelector('.text').querySelectorAll('.replaced, .confirmed')]"
        ".map((e) => e.dataset.token)"
    )
    assert len(points) == len(trace.requests[0].points)
    browser.js("document.querySelector('.text .tok').focus()")
    visited = []
    for _ in range(len(points) + 1):
        browser.press("n")
        visited.append(browser.focused())
    assert visited == [*points, points[0]]
    browser.press("p")
    assert browser.focused() == points[-1]
    back, on = browser.driver.find_elements(By.CSS_SELECTOR, ".panel button")[:2]
    back.click()
    assert browser.focused() == points[-2]
    on = browser.driver.find_elements(By.CSS_SELECTOR, ".panel button")[1]
    on.click()
    assert browser.focused() == points[-1]


def test_pointing_shows_a_token_for_as_long_as_it_is_pointed_at(browser, html, tmp_path):
    browser.show(html, tmp_path)
    before = browser.panel()
    other = browser.driver.find_element(By.CSS_SELECTOR, ".text .unrepresentable")
    ActionChains(browser.driver).move_to_element(other).perform()
    assert "skipped, not representable" in browser.panel()
    ActionChains(browser.driver).move_to_element(browser.driver.find_element(By.TAG_NAME, "h1")).perform()
    assert browser.panel() == before


def test_panel_says_what_was_decided_and_by_whom(browser, html, tmp_path, trace):
    browser.show(html, tmp_path)
    point = trace.requests[0].points[0]
    shown = browser.panel()
    for part in ("instead of", "is not over the threshold 0.5", *NAMES, "Ensembled candidates", "a token begins here"):
        assert part in shown, part
    assert f"{100 * point.probabilities[NAMES[0]]:.0f} %" in shown
    rows = browser.js("return [...document.querySelectorAll('.panel .pieces')].map((e) => e.children.length)")
    assert len(rows[:3]) == 3
    assert min(rows[:3]) >= 3
    attributes = browser.js("const p = document.querySelector('.panel'); return [p.ariaLive, p.role, p.tabIndex]")
    assert attributes == ["polite", "region", 0]


def test_each_answer_has_its_own_panel_and_a_link(browser, html, tmp_path):
    browser.show(html, tmp_path)
    links = browser.driver.find_elements(By.CSS_SELECTOR, "nav a")
    assert [link.text.splitlines()[0] for link in links] == ["first.jsonl", "second.jsonl"]
    first = browser.panel(0)
    browser.js("document.querySelectorAll('.text')[1].querySelector('.skipped').focus()")
    assert "skipped" in browser.panel(1)
    assert browser.panel(0) == first
    links[1].click()
    assert browser.js("return location.hash") == "#answer-2"
    assert browser.js("return scrollY") > 0


# ---------------------------------------------------------------------- hostile text


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_inert(browser, tmp_path, text):
    trace = synthetic(text)
    browser.show(render_html([(text, trace)]), tmp_path, width=360, height=780)
    tokens = browser.driver.find_elements(By.CSS_SELECTOR, ".text .tok")
    assert len(tokens) == len(trace.requests[0].rounds)
    for number in range(len(tokens)):  # each token's panel is built from the data
        browser.js("document.querySelectorAll('.text .tok')[arguments[0]].focus()", number)
    assert browser.js("return [window.__xss === undefined, document.title]") == [
        True,
        "Where the ensemble acted: 1 answer",
    ]
    allowed = {"H3", "H4", "P", "DIV", "SPAN", "CODE", "I", "BUTTON"}
    assert set(browser.js("return [...document.querySelectorAll('.panel *')].map((e) => e.tagName)")) <= allowed
    assert browser.js("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.console() == []


def test_policy_stops_what_would_get_in_all_the_same(browser, html, tmp_path):
    browser.show(html, tmp_path)
    browser.js(
        """document.body.insertAdjacentHTML("beforeend", '<img src="data:," onerror="window.__xss = 1">');
        const script = document.createElement("script");
        script.textContent = "window.__xss = 2";
        document.body.append(script);
        const far = document.createElement("img");
        far.src = "http://127.0.0.1:9/x.png";
        document.body.append(far);"""
    )
    messages = "\n".join(browser.console())
    assert browser.js("return window.__xss === undefined")
    assert "Content Security Policy" in messages
    assert "x.png" in messages


# ---------------------------------------------------------------------- the real thing


@pytest.mark.demo
def test_report_of_a_real_answer_of_preset_demo3(browser, tmp_path):
    trace, page = tmp_path / "demo3.jsonl", tmp_path / "demo3.html"
    question = "Leo has 12 apples and gives 7 to Mia. How many are left? Think step by step."
    answer = run("generate", "--preset", "demo3", "--max-tokens", "48", "--quiet", "--trace", str(trace), question)
    assert answer.code == 0, answer.stderr
    assert run("report", str(trace)).code == 0
    assert run("report", str(trace), "--html", str(page)).code == 0
    for name, width, scheme in (("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 360, "light")):
        browser.show(page, tmp_path, width=width, scheme=scheme)
        shown = "".join(e.text for e in browser.driver.find_elements(By.CSS_SELECTOR, ".text"))
        assert " ".join(answer.stdout.decode().split())[:20] in " ".join(shown.replace("⏎", "").split())
        browser.js("document.querySelector('.text .tok').focus()")
        assert "gemma-3-270m" in browser.panel()
        assert browser.js("return document.documentElement.scrollWidth <= innerWidth")
        assert browser.js(CONTRASTS)[0][0] >= 4.5
        assert_shows_something(browser.screenshot(tmp_path / f"demo3-{name}.png"))
    assert browser.console() == []
