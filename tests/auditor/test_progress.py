"""Progress: a callback as it is, bars where asked, nothing otherwise."""

from auditor.progress import Bars, as_callback, silent


def test_bars_are_drawn_stage_by_stage_and_end(capsys):
    bars = as_callback(True)
    assert isinstance(bars, Bars)
    for done in (1, 2):
        bars("reading", done, 2)
    bars("counting", 3, None)
    bars("writing", 1, 4)
    bars.close()
    text = capsys.readouterr().err
    assert [text.index(stage) for stage in ("reading", "counting", "writing")] == sorted(
        text.index(stage) for stage in ("reading", "counting", "writing")
    )
    assert "2/2" in text
    assert "1/4" in text
    assert bars._bar is None


def test_a_callback_stands_for_itself_and_no_means_silence(capsys):
    calls = []

    def report(stage, done, total):
        calls.append(stage)

    assert as_callback(report) is report
    assert as_callback(False) is silent
    as_callback(False)("x", 1, 2)
    assert (calls, capsys.readouterr().err) == ([], "")
