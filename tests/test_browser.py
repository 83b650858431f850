"""Reports and the viewer in a real browser: clicked through, quiet, at both widths and colours, accessible."""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from draftgauge.acceptance import Policy
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.recording import MANIFEST
from draftgauge.report.page import page
from draftgauge.runs import open_run
from draftgauge.viewer.serving import bind
from tests import tiny
from tests.browser import (
    SCHEMES,
    WIDTHS,
    browser,
    complaints,
    inaccessible,
    missing,
    overflowing,
    requests,
    shape,
)
from tests.shelf import HOSTILE, put_run, put_series, put_training, served, serving, watch_row
from tests.test_runs import change

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing()), reason=missing())]

PAGES = (
    "/",
    "/?text=draft",
    "/series",
    "/series/results/watch",
    "/recordings",
    "/recording/recordings/tiny",
    "/nowhere",
)
TRICK = HOSTILE.replace("/", "_")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two measured runs on a recording with hostile prompts, a training's runs, and what a watch has seen."""
    root = tmp_path_factory.mktemp("viewed")
    kept = tiny.copied_recording(root / "recordings" / "tiny").path
    items = json.loads((kept / MANIFEST).read_text())["items"]
    items[0] |= {"id": HOSTILE, "category": HOSTILE, "text": HOSTILE * 3000}
    change(kept / MANIFEST, items=items)
    policies = (
        Policy("chain"),
        Policy("chain", 4),
        Policy("ddtree", 4),
        Policy("ddtree", 16),
        Policy("coverage", 4),
    )
    for name, drafter in (("early", "draftA8"), (TRICK, "draftA8")):
        options = Options(policies=policies, dtype="float32", num_prompts=None if name == "early" else 4)
        place = tiny.drafter_dir(root / "drafters" / name / "step_4", drafter)
        evaluate_checkpoint(place, kept, options, root=root / "runs", name=name)
    put_training(root / "synthetic", {250: 1.25, 500: 1.5, 1000: 1.75}, place=f"/train/{'long' * 30}")
    put_run(root / "synthetic" / "odd", tau=None, trusted=False, checkpoint=HOSTILE * 20, step=None)
    put_series(
        root / "results", watch_row(250, 1.25, run="runs/early"), watch_row(500, None, reason=HOSTILE * 20)
    )
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx2.Client]:
    with served(folder, report=page) as made:
        yield made


def address(client: httpx2.Client, path: str) -> str:
    return str(client.base_url).rstrip("/") + path


def opened(driver: webdriver.Chrome, url: str) -> None:
    """Opens a page; what was said and asked for before is forgotten."""
    driver.get("about:blank")
    complaints(driver)
    requests(driver)
    driver.get(url)


def require_quiet(driver: webdriver.Chrome, *, own: str) -> None:
    """Nothing in the console, and nothing was asked of anybody else."""
    assert [line for line in complaints(driver) if "404 (Not Found)" not in line] == []
    foreign = [url for url in requests(driver) if urlsplit(url).netloc != own]
    assert foreign == []


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_sound_at_both_widths_and_in_both_colours(
    driver: webdriver.Chrome, client: httpx2.Client, path: str
) -> None:
    opened(driver, address(client, path))
    for width in WIDTHS:
        for scheme in SCHEMES:
            shape(driver, width=width, scheme=scheme)
            assert overflowing(driver) == [], f"{width} px"
            assert inaccessible(driver) == [], f"{width} px, {scheme}"
    require_quiet(driver, own=urlsplit(address(client, "")).netloc)


@pytest.mark.parametrize("which", ["run", "compare"])
def test_reports_are_sound_under_the_bar(driver: webdriver.Chrome, client: httpx2.Client, which: str) -> None:
    runs = [f"runs/{name}" for name in ("early", TRICK)]
    query = str(httpx2.QueryParams([("run", key) for key in runs]))
    prompts = str(httpx2.QueryParams([("prompt", HOSTILE)]))
    path = f"/run/runs/early?{prompts}" if which == "run" else f"/compare?{query}"
    opened(driver, address(client, path))
    for opener in driver.find_elements(By.CSS_SELECTOR, ".viewer-bar summary"):
        opener.click()
    for width in WIDTHS:
        for scheme in SCHEMES:
            shape(driver, width=width, scheme=scheme)
            assert overflowing(driver) == [], f"{width} px"
            assert inaccessible(driver) == [], f"{width} px, {scheme}"
    require_quiet(driver, own=urlsplit(address(client, "")).netloc)


def test_a_report_file_opens_offline(driver: webdriver.Chrome, folder: Path, tmp_path: Path) -> None:
    """The very file that is sent by mail: no server, no other request, and hostile prompts are text."""
    file = tmp_path / "report.html"
    file.write_text(page([open_run(folder / "runs" / "early")], prompts=[HOSTILE]), encoding="utf-8")
    opened(driver, file.as_uri())
    for width in WIDTHS:
        for scheme in SCHEMES:
            shape(driver, width=width, scheme=scheme)
            assert overflowing(driver) == [], f"{width} px"
            assert inaccessible(driver) == [], f"{width} px, {scheme}"
    assert driver.find_elements(By.CSS_SELECTOR, "body script, body img") == []
    assert complaints(driver) == []
    assert requests(driver) == [file.as_uri()]


def test_a_reader_clicks_from_the_list_to_a_run_a_comparison_and_back(
    driver: webdriver.Chrome, client: httpx2.Client
) -> None:
    shape(driver, width=1280, scheme="light")
    opened(driver, address(client, "/"))
    driver.find_element(By.NAME, "text").send_keys("early", Keys.ENTER)
    WebDriverWait(driver, 10).until(lambda d: "text=early" in d.current_url)
    links = driver.find_elements(By.CSS_SELECTOR, "table.runs tbody th a")
    assert [link.text for link in links] == ["early"]
    links[0].click()
    assert "early" in driver.find_element(By.TAG_NAME, "h1").text
    driver.find_element(By.CSS_SELECTOR, ".viewer-bar summary").click()
    chosen = driver.find_element(By.CSS_SELECTOR, ".viewer-bar select[name=prompt]")
    option = chosen.find_elements(By.TAG_NAME, "option")[0]
    assert option.text.startswith("<script>"), "a name of a prompt is text"
    option.click()
    driver.find_element(By.XPATH, "//button[.='Show these prompts']").click()
    WebDriverWait(driver, 10).until(lambda d: "prompt=" in d.current_url)
    tokens = driver.find_elements(By.CSS_SELECTOR, ".tokens .token[tabindex]")
    assert len(tokens) > 10, "the text of the completion, token by token"
    driver.execute_script("arguments[0].focus()", tokens[3])
    assert tokens[3].find_element(By.CSS_SELECTOR, ".tip").is_displayed()
    assert driver.find_elements(By.CSS_SELECTOR, ".tree svg"), "the draft tree of a round"
    driver.find_element(By.LINK_TEXT, "Runs").click()
    for box in driver.find_elements(By.CSS_SELECTOR, "input[value^='runs/']"):
        box.click()
    driver.find_element(By.XPATH, "//button[.='Compare the marked runs']").click()
    WebDriverWait(driver, 10).until(lambda d: "/compare" in d.current_url)
    assert "comparison of 2 runs" in driver.find_element(By.CSS_SELECTOR, ".viewer-bar").text
    require_quiet(driver, own=urlsplit(address(client, "")).netloc)


def test_a_series_grows_in_front_of_the_reader(driver: webdriver.Chrome, tmp_path: Path) -> None:
    put_series(tmp_path, watch_row(250, 1.25))
    with served(tmp_path) as client:
        opened(driver, address(client, "/series/watch"))
        assert len(driver.find_elements(By.CSS_SELECTOR, "table.watch tbody tr")) == 1
        put_series(tmp_path, watch_row(500, 1.5, reason=HOSTILE))
        WebDriverWait(driver, 20).until(
            lambda d: len(d.find_elements(By.CSS_SELECTOR, "table.watch tbody tr")) == 2
        )
        assert "1 more checkpoint" in driver.find_element(By.ID, "said").text
        assert HOSTILE.split("\u202e")[0] in driver.find_element(By.CSS_SELECTOR, "table.watch").text
        assert driver.find_elements(By.CSS_SELECTOR, "#live script, #live img") == []
        require_quiet(driver, own=urlsplit(address(client, "")).netloc)
    driver.get("about:blank")


def test_the_keyboard_is_enough(driver: webdriver.Chrome, client: httpx2.Client) -> None:
    opened(driver, address(client, "/"))
    body = driver.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    first = driver.switch_to.active_element
    assert first.text == "Skip to the content"
    WebDriverWait(driver, 5).until(lambda _: first.rect["y"] >= 0)
    first.send_keys(Keys.ENTER)
    driver.switch_to.active_element.send_keys(Keys.TAB)
    assert driver.execute_script("return document.activeElement.closest('main') !== null")
    width = driver.execute_script("return getComputedStyle(document.activeElement).outlineWidth")
    assert width == "2px", "what has the focus shows it"


def test_the_token_is_gone_from_the_address(driver: webdriver.Chrome, folder: Path) -> None:
    bound = bind("127.0.0.1", 0, token=True)
    with serving(bound, folder):
        opened(driver, bound.url)
        assert driver.current_url == bound.url.partition("?")[0]
        assert driver.find_element(By.TAG_NAME, "h1").text == "Runs"
        driver.find_element(By.LINK_TEXT, "Recordings").click()
        assert driver.find_element(By.TAG_NAME, "h1").text == "Recordings"
        require_quiet(driver, own=urlsplit(bound.url).netloc)
    driver.get("about:blank")
