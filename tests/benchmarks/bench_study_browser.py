"""People at once in a real Chromium on a drawn study, from the first page to the results.

python tests/benchmarks/bench_study_browser.py STUDY [--people 8] [--shots DIR]

STUDY is a folder that ``auditor study new`` wrote. Every person has a window of their own (laptops, phones, light and
dark); all of them are in the study at the same time, step by step, by keys, mouse and taps. They group as the agents of
study_agents do, by what their page was sent: pixels, the image through its heatmap, or the numbers; every fourth at
random. Then ``auditor study
results`` reads what was stored, and it is compared with what the pages showed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from auditor.study.answers import AnswerStore
from auditor.study.folder import read_study
from tests.benchmarks.study_agents import Agent
from tests.plugins.study_site import in_browser as at

WAYS = (at.by_mouse, at.by_key, at.by_tap, at.by_tap)  # dragging fingers: tests/plugins/study_site/test_browser.py
SIZES = ((1280, 1000, False), (1024, 768, False), (360, 740, True), (390, 844, True))


class Person(Agent):
    """An agent before a page of its own, whose pictures are those that this page may load."""

    def __init__(self, page, address, seed, seen):
        super().__init__(address, seed, is_random=seed % 4 == 3, seen=seen)
        self.page, self.state = page, at.begin(page, f"{address}/open")
        self.client = self

    def get(self, path):
        """Return a picture by the page's own session."""
        reply = self.page.request.get(self.page.url.split("/open")[0] + path)
        return type("Reply", (), {"content": reply.body()})

    def place(self, way):
        """Answer the step that is shown; groups are the agent's."""
        step = self.state["step"]
        groups = self.group(step) if step["kind"] in ("practice", "group") else None
        at.answer(self.page, way, groups)

    def go_on(self):
        self.state = at.go_on(self.page)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--shots", type=Path, help="folder for a picture of every step of the first two people")
    args = parser.parse_args()
    study, _, digest = read_study(args.study)
    with tempfile.TemporaryDirectory() as temporary, at.chromium() as browser:
        answers = Path(temporary) / "answers.db"
        with at.served(args.study, answers) as (address, _):
            began, shown, codes = time.perf_counter(), [{} for _ in range(args.people)], []
            pages, people, seen = [], [], {}
            for i in range(args.people):
                width, height, touch = SIZES[i % 4]
                scheme = "dark" if i % 2 else "light"
                pages.append(at.window(browser, width, height, color_scheme=scheme, has_touch=touch))
                people.append(Person(pages[i], address, i, seen))
            while any(at.kind(page) != "end" for page in pages):
                for i, page in enumerate(pages):
                    what = at.kind(page)
                    if what == "end":
                        continue
                    way = WAYS[i % 4] if what == "practice" else at.by_key
                    people[i].place(way)
                    if what in ("practice", "group"):
                        shown[i][at.step(page)] = at.placed(page)
                    assert not at.overflows(page), f"person {i}, step {at.step(page)}"
                    if args.shots and i < 4:
                        page.screenshot(path=args.shots / f"{i}-{at.step(page)}-{what}.png", full_page=True)
                    people[i].go_on()
            codes = [page.inner_text("p.code") for page in pages]
            complaints = [c for page in pages for c in page.complaints]
            seconds = time.perf_counter() - began
        store = AnswerStore(answers, study, digest, create=False)
        everybody = {person.code: person for person in store.everybody()}
        store.close()
        wrong = 0
        for code, of in zip(codes, shown, strict=True):
            stored = {str(given.step): given.body.get("groups") for given in everybody[code].given}
            wrong += sum(stored[index] != groups for index, groups in of.items())
        program = [sys.executable, "-c", "from auditor.cli import main; main()", "study", "results", str(args.study)]
        said = subprocess.run(
            [*program, "--answers", str(answers), "--json"], check=True, capture_output=True, text=True
        )
    found = json.loads(said.stdout)
    print(f"{len(codes)} people, {found['participants']}, {sum(map(len, shown))} batches in {seconds:.0f} s")
    print(f"batches stored otherwise than shown: {wrong}; complaints of the pages: {complaints}")
    for name, m in found["metrics"].items():
        print(f"{name:40}{m['value']:8.3f}  chance {m['null'] if m['null'] is None else round(m['null'], 3)}")


if __name__ == "__main__":
    main()
