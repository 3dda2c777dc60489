"""The page of a study in a real Chromium: every way to move an image, lost connections, two tabs, axe, 360 pixels."""

import pytest

from auditor.study.answers import AnswerStore
from auditor.study.folder import write_study
from tests.auditor.study.drawn import small_study
from tests.plugins.study_site import in_browser as at

pytest.importorskip("playwright", reason="of the extra dev")
pytest.importorskip("axe_playwright_python", reason="of the extra dev")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    with at.chromium() as browser:
        yield browser


@pytest.fixture
def study(tmp_path):
    """A served study; gives its address, the process, the folder and how to read its answers."""
    drawn, pictures = small_study(questions=({"key": "cs", "text": "Courses?", "choices": ("none", "some")},))
    digest = write_study(tmp_path / "s", drawn, pictures)

    def everybody():
        store = AnswerStore(tmp_path / "a.db", drawn, digest, create=False)
        try:
            return store.everybody()
        finally:
            store.close()

    with at.served(tmp_path / "s", tmp_path / "a.db", "--links", "3") as (address, process):
        yield address, process, tmp_path, everybody


@pytest.mark.parametrize(
    ("width", "scheme", "touch"),
    [(1280, "light", False), (360, "dark", True), (360, "light", True), (820, "dark", False)],
)
def test_no_stage_breaks_a_rule_of_axe_or_the_width_of_the_window(browser, study, width, scheme, touch):
    address, _, _, everybody = study
    page = at.window(browser, width, 740, color_scheme=scheme, has_touch=touch, bypass_csp=True)  # for axe's script
    page.goto(f"{address}/open")
    page.wait_for_selector("#agree")
    problems = {"begin": at.violations(page)}
    wide = [at.overflows(page)]
    page.fill("input#code", "open-code")
    page.check("#agree")
    page.click("#next")
    page.wait_for_selector("fieldset")
    while at.kind(page) != "end":
        name = f"{at.step(page)} {at.kind(page)}"
        if at.kind(page) in ("practice", "group"):
            for selector in ("#all", "[data-slot='0']"):
                if page.query_selector(selector):
                    page.click(selector)
            for pick in page.query_selector_all(".zone[data-group='0'] .pick")[:2]:
                pick.click()
        problems[name], wide = at.violations(page), [*wide, at.overflows(page)]
        at.answer(page)
        problems[f"{name}, answered"] = at.violations(page)
        at.go_on(page)
    problems["end"] = at.violations(page)
    assert {k: v for k, v in problems.items() if v} == {}
    assert not any(wide)
    assert page.complaints == []
    assert page.inner_text("p.code") == everybody()[0].code
    assert everybody()[0].is_finished
    page.context.close()


def test_owner_and_home_pages_keep_the_rules(browser, study):
    address, _, _, _ = study
    page = at.window(browser, 360, 740, bypass_csp=True)
    for path in ("/", "/owner"):
        page.goto(address + path)
        assert at.violations(page) == []
    page.fill("#key", at.KEY)
    page.click("#login button")
    page.wait_for_selector("#inside:not([hidden])")
    page.click("#make button")
    page.wait_for_selector("#links li")
    assert at.violations(page) == []
    assert not at.overflows(page)
    page.context.close()


@pytest.mark.parametrize("way", ["key", "mouse", "touch", "tap"])
def test_every_way_moves_images_and_saves_them(browser, study, way):
    address, _, _, everybody = study
    page = at.window(browser, 900, 1000, has_touch=way in ("touch", "tap"))
    begin_open(page, address)
    place = {"key": at.by_key, "mouse": at.by_mouse, "touch": at.by_touch, "tap": at.by_tap}[way]
    at.answer(page, place)
    wanted = at.placed(page)
    assert sorted(set(wanted.values())) == [1, 2, 3, 4]
    at.go_on(page)
    given = next(g for g in everybody()[0].given if "groups" in g.body)
    assert given.body["groups"] == wanted
    assert given.seconds > 0
    page.context.close()


def test_a_reload_and_a_lost_connection_lose_nothing(browser, study):
    address, _, _, everybody = study
    page = at.window(browser)
    begin_open(page, address)
    keys = at.ungrouped(page)
    at.by_key(page, keys[0], 2)
    page.wait_for_timeout(600)
    page.reload()
    page.wait_for_selector(".card")
    assert at.placed(page)[keys[0]] == 2
    page.context.set_offline(True)
    for key in keys[1:]:
        at.by_key(page, key, 3)
    page.click("#next")
    at.until(page, "document.getElementById('connection').textContent.startsWith('No connection')")
    page.context.set_offline(False)
    at.until(page, "document.getElementById('main').dataset.kind === 'group'")
    given = next(g for g in everybody()[0].given if "groups" in g.body)
    assert given.body["groups"] == {keys[0]: 2} | dict.fromkeys(keys[1:], 3)
    page.context.close()


def test_a_killed_server_loses_nothing_and_the_page_goes_on_by_itself(browser, study):
    address, process, folder, everybody = study
    page = at.window(browser)
    begin_open(page, address)
    keys = at.ungrouped(page)
    at.by_key(page, keys[0], 2)
    page.wait_for_timeout(600)
    process.kill()
    process.wait(30)
    for key in keys[1:]:
        at.by_key(page, key, 3)
    page.click("#next")
    at.until(page, "document.getElementById('connection').textContent.startsWith('No connection')")
    with at.served(folder / "s", folder / "a.db", port=int(address.rsplit(":", 1)[1])):
        at.until(page, "document.getElementById('main').dataset.kind === 'group'")
        given = next(g for g in everybody()[0].given if "groups" in g.body)
        assert given.body["groups"] == {keys[0]: 2} | dict.fromkeys(keys[1:], 3)
        page.reload()
        page.wait_for_selector(".card")
        assert at.kind(page) == "group"
    page.context.close()


def test_a_reply_to_begin_that_is_lost_does_not_use_up_the_link(browser, study):
    _, process, _, everybody = study
    link = process.stdout.readline().strip()
    page = at.window(browser)
    page.goto(link)
    page.wait_for_selector("#agree")
    page.check("#agree")

    def lose(route):
        route.fetch()  # the server hears it, the page does not hear the server
        route.abort()

    page.route("**/api/begin", lose, times=1)
    page.click("#next")
    page.wait_for_selector("fieldset")
    page.context.close()
    assert len(everybody()) == 1


def test_who_stops_sees_the_code_and_can_go_on_or_let_the_next_person_begin(browser, study):
    address, _, _, everybody = study
    page = at.window(browser, 360, 740, bypass_csp=True)
    begin_open(page, address)
    key = at.ungrouped(page)[0]
    at.by_key(page, key, 2)
    page.click("#stop")
    page.wait_for_selector("#stopped-code")
    assert page.inner_text("#stopped-code") == everybody()[0].code
    assert at.violations(page) == []
    page.click("#next")
    page.wait_for_selector(".card")
    assert at.placed(page)[key] == 2
    page.click("#stop")
    page.click("#leave")
    page.wait_for_selector("#agree")
    assert page.is_hidden("#stop")
    assert page.complaints == []
    page.context.close()


def test_a_second_tab_takes_over_and_the_first_says_so(browser, study):
    address, _, _, _ = study
    page = at.window(browser)
    begin_open(page, address)
    other = page.context.new_page()
    other.goto(f"{address}/open")
    other.wait_for_selector(".card")
    at.by_key(page, at.ungrouped(page)[0], 1)
    page.wait_for_selector("p.problem[role=alert]")
    assert "opened in another tab" in page.inner_text("main")
    at.answer(other)
    at.go_on(other)
    page.click("button.primary")
    page.wait_for_selector(".card")
    assert at.step(page) == at.step(other)
    page.context.close()


def test_a_link_works_once_and_the_page_says_why(browser, study):
    address, process, _, _ = study
    link = process.stdout.readline().strip()
    page, stranger = at.window(browser), at.window(browser)
    page.goto(link)
    page.wait_for_selector("#agree")
    stranger.goto(link)
    stranger.wait_for_selector("#agree")
    page.check("#agree")
    page.click("#next")
    page.wait_for_selector("fieldset")
    stranger.check("#agree")
    stranger.click("#next")
    at.until(stranger, "document.getElementById('problem').textContent.includes('used already')")
    stranger.goto(f"{address}/p/wrong")
    at.until(stranger, "document.body.innerText.includes('not known here')")
    page.context.close()
    stranger.context.close()


def test_concepts_are_toggled_for_all_and_chosen_images_compared(browser, study):
    address, _, _, _ = study
    page = at.window(browser)
    begin_open(page, address)
    while not page.query_selector("[data-slot='0']"):
        at.answer(page)
        at.go_on(page)
    page.click("[data-slot='1']")
    at.until(page, "document.querySelectorAll('.zones .pic.on .heat').length === 10")
    assert set(page.evaluate("[...document.querySelectorAll('.zones .value')].map(v => v.textContent)")) == {
        "\u22120.20"
    }
    assert page.evaluate("document.querySelector('.zones .value').className") == "value neg"
    for pick in page.query_selector_all(".zone[data-group='0'] .pick")[:3]:
        pick.click()
    assert len(page.query_selector_all(".compare tbody tr")) == 3
    assert len(page.query_selector_all(".compare tbody tr:first-child td")) == 3
    assert len(page.query_selector_all(".compare .pic.on .heat")) == 6  # the third concept has no heatmap
    page.click(".compare thead button >> nth=0")
    assert len(page.query_selector_all(".compare .pic.on .heat")) == 3
    page.context.close()


def begin_open(page, address):
    """Begin by the open link and answer the question about the person."""
    page.goto(f"{address}/open#open-code")
    page.wait_for_selector("#agree")
    page.check("#agree")
    page.click("#next")
    page.wait_for_selector("fieldset")
    at.go_on(page)
    page.wait_for_selector(".card")
