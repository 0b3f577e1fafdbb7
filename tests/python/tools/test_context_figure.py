"""README's picture and its table take what the stored studies hold; pictures with other words are out of date."""

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import context_figure
import evaluation_tables
from context_figure import NATIVE, PICTURE, SCALES, TRUNCATED

from mrrope.demo import report


@pytest.fixture
def with_truncated(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Let the study at scale 16 have a row of the truncated stock model; return its perplexities."""
    values = {length: 3.0 + number / 8 for number, length in enumerate([NATIVE, *SCALES])}
    stored = context_figure.result

    def result(name: str) -> dict[str, Any]:
        found = copy.deepcopy(stored(name))
        if name == context_figure.table_sets_file(16):
            found["results"]["perplexity"][TRUNCATED] = {
                length: {"second_half_perplexity": value} for length, value in values.items()
            }
            found["results"]["passkey"][TRUNCATED] = {"131072": {"trials": [{"score": 1.0}, {"score": 0.0}]}}
        return found

    monkeypatch.setattr(context_figure, "result", result)
    return values


def test_text_says_what_is_missing() -> None:
    is_missing = TRUNCATED not in context_figure.rows()
    assert ("Truncation is not drawn yet" in " ".join(context_figure.context())) == is_missing


def test_truncated_row_is_taken(with_truncated: dict[str, float], tmp_path: Path) -> None:
    row = context_figure.rows()[TRUNCATED]
    past_native = {length: row.perplexity[length] for length in SCALES}
    assert past_native == {length: with_truncated[length] for length in SCALES}
    assert row.keys == {"131072": (1, 2)}
    text = "\n".join(context_figure.context())
    assert "Truncation is not drawn yet" not in text
    assert "3.125" in text
    assert "1 of 2" in text

    assert not PICTURE.is_current()
    PICTURE.draw(tmp_path / "context.png")
    assert PICTURE.is_current(tmp_path / "context.png")


def test_lengths_have_the_smallest_scale_that_covers_them() -> None:
    row = context_figure.rows()["mrrope_uni"]
    for length, scale in SCALES.items():
        by_length = context_figure.measured(scale, "mrrope_uni", "perplexity")
        assert row.perplexity[length] == by_length[length]["second_half_perplexity"]
        assert int(length) == int(NATIVE) * scale


def test_picture_with_other_words_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluation_tables.DEMO.is_current()
    monkeypatch.setattr(report, "short", str)
    assert not evaluation_tables.DEMO.is_current()
