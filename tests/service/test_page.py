"""The page in a real Chromium against the real server: by mouse, by keyboard, on a phone, in light and dark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import live_server as ls
from tests.browser import Browser, chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
KEY = "a key for tests"


@pytest.fixture(scope="module")
def store(tmp_path_factory, trained, concepts):
    """A store with the digits and two explainers."""
    from auditor import fit, open_data
    from auditor.plugins import attach, log_subject

    folder = tmp_path_factory.mktemp("page")
    heads = fit("xnn", trained[0], open_data("sklearn:digits?split=train"), max_epochs=15)
    with ls.current_registry(f"sqlite:///{folder}/unused.db"):
        address = ls.use_store(folder / "store")
        uri = log_subject(trained[0], "digits", experiment="bench")
        attach(concepts, uri, "concepts", subject=trained[0])
        attach(heads, uri, "heads", subject=trained[0], attach_anyway=True)
    return folder, address


@pytest.fixture(scope="module")
def live(store):
    folder, address = store
    with ls.serve("models:/digits/1", address, folder / "serve", sample_images="sklearn:digits") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, live) -> Browser:
    """The page, freshly opened, with its samples there."""
    browser.look(1400, 1000)
    browser.open("about:blank")
    browser.open(f"{live.address}/ui")
    browser.wait("document.querySelectorAll('#samples button').length > 3")
    browser.messages()
    return browser


def take_samples(page: Browser, *numbers: int) -> None:
    """Press sample buttons and wait for each answer."""
    for number in numbers:
        before = page.script("return document.querySelectorAll('#seen li').length")
        page.click(f"#samples button:nth-child({number})")
        page.wait("document.querySelectorAll('#seen li').length > arguments[0]", before)


def picture_of(page: Browser, selector: str) -> str:
    return str(page.script("return document.querySelector(arguments[0]).toDataURL()", selector))


def test_a_sample_is_explained_and_the_bars_add_up(page, live):
    assert "digits version 1" in page.text("#model")
    take_samples(page, 1)
    label = page.text(".verdict strong")
    assert label in [str(i) for i in range(10)]
    tables = page.script(
        "return [...document.querySelectorAll('.contributions')].map(t => [...t.querySelectorAll('td.number')]"
        ".map(td => td.innerText))"
    )
    assert len(tables) == 2
    for column in tables:
        numbers = [float(text.replace("\u2212", "-")) for text in column]
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.005 * len(numbers) + 0.01)  # each is rounded
    assert page.text("tfoot .ok").startswith("✓ equals")
    assert not page.script("return document.querySelector('tfoot .bad')")
    assert float(page.text(".gauge strong")) <= 1
    assert page.text("#status").startswith(page.text(".picture h3"))
    assert page.messages() == []


def test_heat_is_switched_per_concept_and_has_an_opacity(page):
    take_samples(page, 2)
    boxes = page.script("return document.querySelectorAll('.heat input').length")
    assert boxes >= 6
    first = picture_of(page, ".viewer")
    page.click(".heat input:not(:checked)")
    assert picture_of(page, ".viewer") != first
    page.script("[...document.querySelectorAll('.switches button')].find(b => b.innerText == 'All off').click()")
    plain = picture_of(page, ".viewer")
    assert plain != first
    assert page.script("return document.querySelectorAll('.heat input:checked').length") == 0
    page.script("[...document.querySelectorAll('.switches button')].find(b => b.innerText == 'All heat on').click()")
    assert page.script("return document.querySelectorAll('.heat input:checked').length") == boxes
    assert picture_of(page, ".viewer") != plain
    slide = "const o = document.querySelector('#opacity'); o.value = 0; o.dispatchEvent(new Event('input'))"
    page.script(slide)
    assert picture_of(page, ".viewer") == plain


def test_images_stand_side_by_side_with_a_concept_per_column(page):
    take_samples(page, 1, 2, 3)
    page.click("#tab-compare")
    rows = page.script(
        "return [...document.querySelectorAll('.compare tbody tr')].map(r => r.querySelectorAll('td').length)"
    )
    heads = page.script("return [...document.querySelectorAll('.compare thead .toggle')].map(b => b.innerText)")
    assert rows == [len(heads)] * 3
    cell = ".compare tbody tr:first-child td:nth-child(2) canvas"
    on = picture_of(page, cell)
    page.click(".compare thead .toggle")
    assert page.script("return document.querySelector('.compare .toggle').getAttribute('aria-pressed')") == "false"
    off = picture_of(page, cell)
    assert off != on
    assert off == picture_of(page, ".compare tbody tr:first-child th canvas")
    page.click(".compare thead .toggle")
    page.click("#seen li:first-child .pick input")
    assert page.script("return document.querySelectorAll('.compare tbody tr').length") == 2
    page.script(
        "const s = document.querySelector('#compare select'); s.value = 'heads'; s.dispatchEvent(new Event('change'))"
    )
    assert "x-feature" in page.text(".compare thead")


def test_another_class_is_explained_beside_the_first(page):
    take_samples(page, 1)
    page.script("const t = document.querySelector('#target'); t.value = '3'; t.dispatchEvent(new Event('change'))")
    page.wait("document.querySelectorAll('#seen li').length == 2")
    assert "class “3”" in page.text(".verdicts")
    page.script("const t = document.querySelector('#stability'); t.value = 'off'; t.dispatchEvent(new Event('change'))")
    page.wait("document.querySelector('.verdicts').innerText.includes('switched off')")
    assert page.script("return document.querySelectorAll('#seen li').length") == 2, "the same question again"


def test_concepts_have_a_gallery(page):
    take_samples(page, 1)
    name = page.text("#explanation button.link")
    page.click("#explanation button.link")
    page.wait("document.querySelectorAll('.concept img').length")
    assert page.script("return document.activeElement.querySelector('h3').innerText") == name
    assert page.script("return [...document.querySelectorAll('.concept img')].every(i => i.complete && i.naturalWidth)")
    assert page.messages() == []


@pytest.mark.parametrize("way", ["choose", "drop", "paste"])
def test_files_come_in_three_ways(page, way, tmp_path):
    file = tmp_path / "a <b> name.png"
    file.write_bytes(ls.digit_files()[5])
    if way == "choose":
        page.choose_file("#file", file)
    else:
        page.script(
            "const data = new DataTransfer();"
            "data.items.add(new File([new Uint8Array(arguments[0])], arguments[1], {type: 'image/png'}));"
            "document.dispatchEvent(arguments[2] == 'drop'"
            " ? new DragEvent('drop', {dataTransfer: data, cancelable: true})"
            " : new ClipboardEvent('paste', {clipboardData: data}))",
            list(file.read_bytes()), file.name, way,
        )  # fmt: skip
    page.wait("document.querySelector('.picture h3')")
    assert page.text(".picture h3") == file.name, "names are text, never markup"


HOLD = """
const real = window.fetch;
let letGo;
const held = new Promise((resolve) => { letGo = resolve; });
window.letGo = letGo;
window.fetch = async (url, ...rest) => { if (String(url).endsWith("model")) await held; return real(url, ...rest); };
"""
CHOSEN_EARLY = """
new MutationObserver((_, observer) => {
  const input = document.querySelector("#file");
  if (!input) return;
  observer.disconnect();
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(BYTES)], "early.png", {type: "image/png"}));
  input.files = data.files;
}).observe(document, {childList: true, subtree: true});
"""


@pytest.mark.parametrize("when", ["before the script", "before the model is known"])
def test_a_file_chosen_too_early_is_explained_all_the_same(page, live, when, tmp_path):
    file = tmp_path / "early.png"
    file.write_bytes(ls.digit_files()[5])
    early = CHOSEN_EARLY.replace("BYTES", str(list(file.read_bytes()))) if when == "before the script" else ""
    made = page.devtools("Page.addScriptToEvaluateOnNewDocument", source=HOLD + early)
    try:
        page.open("about:blank")
        page.open(f"{live.address}/ui")
    finally:
        page.devtools("Page.removeScriptToEvaluateOnNewDocument", identifier=made["identifier"])
    if not early:
        page.choose_file("#file", file)
    page.wait("document.querySelector('#status').innerText.includes('early.png waits for the server')")
    page.script("window.letGo()")
    page.wait("document.querySelector('.picture h3')")
    assert page.text(".picture h3") == "early.png"
    assert page.script("return document.querySelector('#error').hidden")


def test_errors_are_the_servers_sentence(page, tmp_path):
    file = tmp_path / "junk.png"
    file.write_bytes(b"no image")
    page.choose_file("#file", file)
    page.wait("!document.querySelector('#error').hidden")
    assert "the image cannot be read" in page.text("#error")
    assert page.script("return document.querySelector('#error').getAttribute('role')") == "alert"
    take_samples(page, 1)
    assert page.script("return document.querySelector('#error').hidden"), "the next good answer clears it"


def test_no_mouse_is_needed(page):
    calls = []
    for _ in range(12):
        page.press("Tab")
        calls.append(page.focused())
    assert calls[0].startswith("a#")  # skip link
    assert any(s.startswith("input#file") for s in calls)
    outline = page.script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "the focus is seen"
    page.script("document.querySelector('#samples button').focus()")
    page.press("Enter")
    page.wait("document.querySelectorAll('#seen li').length")
    page.script("document.querySelector('#tab-explanation').focus()")
    page.press("ArrowRight")
    assert page.focused().startswith("button#tab-compare")
    assert not page.script("return document.querySelector('#compare').hidden")
    page.press("ArrowLeft")
    page.script("document.querySelector('.heat input').focus()")
    before = picture_of(page, ".viewer")
    page.press("Space")
    assert picture_of(page, ".viewer") != before
    names = page.script(
        "return [...document.querySelectorAll('button, input, select, [role=img], [role=meter]')].filter(e =>"
        "!(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.innerText"
        " && !e.querySelector('img[alt]')"
        " && !e.closest('[aria-hidden=true]') && e.checkVisibility()).map(e => e.outerHTML)"
    )
    assert names == [], "everything has a name for those who hear the page"


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_scrolls_down_only(page, dark, tmp_path):
    take_samples(page, 1, 2)
    page.look(375, 740, dark=dark)
    for tab in ("explanation", "compare", "gallery"):
        page.click(f"#tab-{tab}")
        assert page.script("return document.documentElement.scrollWidth") <= 375, tab
    ground = page.script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark
    assert page.picture(tmp_path / "phone.png").stat().st_size > 10_000


def test_a_key_is_asked_for_when_the_server_wants_one(browser, store):
    folder, address = store
    keys: Path = folder / "keys.txt"
    keys.write_text(f"# for the page\n{KEY}\n")
    with ls.serve(
        "models:/digits/1", address, folder / "keyed", sample_images="sklearn:digits", api_keys=keys
    ) as server:
        browser.look(1400, 1000)
        browser.open(f"{server.address}/ui")
        browser.wait("!document.querySelector('#key-form').hidden")
        assert browser.focused().startswith("input#key")
        browser.type("#key", "wrong")
        browser.press("Enter")
        browser.wait("document.querySelector('#error').innerText.includes('API key')")
        browser.script("document.querySelector('#key').value = ''")
        browser.type("#key", KEY)
        browser.press("Enter")
        browser.wait("document.querySelectorAll('#samples button').length")
        assert browser.script("return document.querySelector('#key-form').hidden")
        take_samples(browser, 1)


def test_the_page_loads_nothing_from_elsewhere(page, live):
    take_samples(page, 1)
    loaded = page.script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded
    assert all(name.startswith((live.address, "data:", "blob:")) for name in loaded), json.dumps(loaded)
    with ls.OPENER.open(f"{live.address}/ui/", timeout=60) as answer:
        policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_axe_finds_nothing_in_any_state(page, live):
    """Light and dark, wide and a phone: before an image, explained, compared, the gallery, an error, the key's form."""
    states = {
        "empty": "",
        "explained": "#samples button:nth-child(1)",
        "compared": "#tab-compare",
        "gallery": "#tab-gallery",
    }
    for name, selector in states.items():
        if name == "explained":
            take_samples(page, 1, 2)
        elif selector:
            page.click(selector)
        for dark in (False, True):
            for width in (1280, 360):
                page.look(width, 900, dark=dark)
                assert page.violations() == [], (name, dark, width)
        page.look(1280, 900)
    page.messages()
