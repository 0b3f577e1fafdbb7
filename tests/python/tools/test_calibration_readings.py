"""What calibration measures: the objective and its journal, pass keys, and which documents serve for what."""

import contextlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from byte_llama import byte_tokenizer, random_words
from scripted_models import RepeatsLastToken

import mrrope
from mrrope.calibration import document_sets, spaces
from mrrope.calibration.journal import Journal
from mrrope.calibration.objective import Readings, Rung, figures_at
from mrrope.calibration.pass_keys import KEYS_A_LENGTH, NAMED_A_LENGTH, NAMED_KEYS, with_keys
from mrrope.calibration.search import BudgetSpentError
from mrrope.evaluation.documents import Document

FLOAT32_EPS = torch.finfo(torch.float32).eps


# The objective and its journal


def llama_table(scale: float = 2.0) -> mrrope.FrequencyTable:
    return mrrope.frequency_table("mrrope_uni", rotary_dim=32, base=1e4, original_max_position=64, scale=scale)


def readings_of(path: Path, **options) -> Readings:
    return Readings(RepeatsLastToken(vocabulary=5), [4, 8], Journal(path, {"run": 1}), chunk=100, **options)


@pytest.fixture
def unpatchable(monkeypatch) -> None:
    """Replace patched() for models without RoPE."""
    monkeypatch.setattr("mrrope.calibration.objective.patched", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.usefixtures("unpatchable")
def test_a_reading_is_made_once_and_serves_all_shorter_lengths(tmp_path: Path) -> None:
    ln2, ln8 = math.log(2), math.log(8)
    document, table = Document("one", [0, 0, 0, 1, 2, 2, 3, 4]), llama_table()
    readings = readings_of(tmp_path / "journal")
    # Second halves: tokens 2 and 3, one of them repeated; tokens 4 to 7, one of them repeated.
    halves = {4: (ln2 + ln8) / 2, 8: (3 * ln8 + ln2) / 4}
    assert readings.loss(table, Rung([document], 8)) == pytest.approx(sum(halves.values()) / 2, rel=4 * FLOAT32_EPS)
    assert readings.loss(table, Rung([document], 4)) == pytest.approx(halves[4], rel=4 * FLOAT32_EPS)
    assert readings.model.lengths_of_calls == [7]
    assert readings.count == 1
    readings.journal.close()
    again = readings_of(tmp_path / "journal")
    assert again.loss(table, Rung([document], 8)) == readings.loss(table, Rung([document], 8))
    assert again.model.lengths_of_calls == []
    assert again.spent == readings.spent > 0
    # Another table, document or length is read again.
    again.loss(llama_table(4.0), Rung([document], 8))
    again.loss(table, Rung([Document("one", [0] * 8)], 4))
    assert again.model.lengths_of_calls == [7, 3]


@pytest.mark.usefixtures("unpatchable")
def test_tables_that_differ_in_their_formula_alone_are_read_once(tmp_path: Path) -> None:
    readings, rung = readings_of(tmp_path / "journal"), Rung([Document("one", [0] * 8)], 8)
    table = llama_table()
    space = spaces.KnotSpace(table, 4)
    readings.loss(table, rung)
    readings.loss(space.table(space.start), rung)
    assert readings.count == 1
    readings.loss(space.table((0, 0, 1e-6, 0, space.start[-1])), rung)
    readings.loss(space.table((0, 0, 0, 0, space.start[-1] + 1e-6)), rung)
    assert readings.count == 3


@pytest.mark.usefixtures("unpatchable")
def test_a_run_that_goes_on_gets_the_same_answers_in_the_same_order(tmp_path: Path) -> None:
    """A short reading made before a long one is used again, not the prefix of the long one."""
    path, document, table = tmp_path / "journal", Document("one", [0, 1] * 4), llama_table()
    readings = readings_of(path)
    readings.loss(table, Rung([document], 4))
    readings.loss(table, Rung([document], 8))
    readings.journal.close()
    lines = path.read_text().splitlines()
    short = json.loads(lines[1])
    short["figures"][0]["second_half"] = 5.0  # as if rounded differently
    path.write_text("\n".join([lines[0], json.dumps(short), lines[2]]) + "\n")
    again = readings_of(path)
    assert again.loss(table, Rung([document], 4)) == 5.0
    assert again.loss(table, Rung([document], 8)) == readings.loss(table, Rung([document], 8))


@pytest.mark.usefixtures("unpatchable")
def test_nothing_is_read_once_the_limit_is_reached(tmp_path: Path) -> None:
    readings = readings_of(tmp_path / "journal")
    readings.loss(llama_table(), Rung([Document("one", [0] * 8)], 8))
    readings.limit = readings.spent
    readings.loss(llama_table(), Rung([Document("one", [0] * 8)], 8))  # known
    with pytest.raises(BudgetSpentError):
        readings.loss(llama_table(4.0), Rung([Document("one", [0] * 8)], 8))
    assert readings.model.lengths_of_calls == [7]


def test_a_line_that_was_cut_off_is_all_that_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, {"run": 1})
    journal.put("a", {"seconds": 1})
    journal.put("b", {"seconds": 2})
    journal.close()
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n")):
        path.write_bytes(whole[:cut])  # cut within the first line
        again = Journal(path, {"run": 1})
        assert len(again) == 0
        again.close()
        assert path.read_bytes() == whole[: whole.index(b"\n") + 1]
    for cut in range(whole.rindex(b"\n", 0, -1) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        again = Journal(path, {"run": 1})
        assert again.get("a") == {"key": "a", "seconds": 1}
        assert again.get("b") is None
        again.put("b", {"seconds": 2})
        again.close()
        assert path.read_bytes() == whole


def test_the_journal_of_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", {"scale": 4.0, "model": "a"}).close()
    with pytest.raises(ValueError, match=r"--output must be .*, and .*journal is of a run with another scale$"):
        Journal(tmp_path / "journal", {"scale": 8.0, "model": "a"})


def test_two_runs_do_not_share_a_journal(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = Journal(tmp_path / "journal", {})
    first.put("a", {"seconds": 1})
    content = (tmp_path / "journal").read_bytes()
    with pytest.raises(ValueError, match=r"--output must be another one: the journal .* is in use by another run"):
        Journal(tmp_path / "journal", {})
    assert (tmp_path / "journal").read_bytes() == content
    first.close()
    again = Journal(tmp_path / "journal", {})
    assert len(again) == 1
    again.close()


@pytest.mark.parametrize("content", [b"notes", b"notes\n", b'{"format": "other"}\n'])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(ValueError, match=r"--output must be a new one: .*journal is there already, and is no journal"):
        Journal(tmp_path / "journal", {})
    assert (tmp_path / "journal").read_bytes() == content


def test_a_journal_that_was_damaged_is_said_to_be(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", {}).close()
    content = (tmp_path / "journal").read_bytes() + b"{broken\n"
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(ValueError, match=r"--output must be a new one: the journal .* is damaged: "):
        Journal(tmp_path / "journal", {})
    assert (tmp_path / "journal").read_bytes() == content


# Pass keys in the text


def test_keys_are_hidden_before_they_are_asked_for() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    text = random_words(12_000)
    document = Document("one", tokenizer(text).input_ids[: 2**16])
    keyed = with_keys(document, tokenizer, [64, 2**14, 2**15, 2**16])
    assert len(keyed.tokens) == 2**16
    assert keyed.tokens[0] == tokenizer.bos_token_id
    read = tokenizer.decode(keyed.tokens[1:])
    asked = re.findall(r"\nWhat is the (.*)\? The \1 is (\d{5})", read)
    assert len(asked) == 3 * KEYS_A_LENGTH  # 64 tokens are too short for keys
    assert len(dict(asked)) == len(asked)
    assert [name in NAMED_KEYS for name, _ in asked] == 3 * [
        *NAMED_A_LENGTH * [True],
        *(KEYS_A_LENGTH - NAMED_A_LENGTH) * [False],
    ]
    for name, key in asked:
        hidden = read.index(f"\nThe {name} is {key}. Remember it.\n")
        assert hidden < read.index(f"What is the {name}?")
    answers = tokenizer.decode([keyed.tokens[place] for place in keyed.answers])
    assert answers == "".join(f" {key}" for _, key in asked)
    # The questions end at each length.
    for i, length in enumerate((2**14, 2**15, 2**16), 1):
        assert keyed.answers[i * 6 * KEYS_A_LENGTH - 1] == length - 1
    # Without the keys, the text is unchanged up to its end.
    rest = re.sub(r"\n(What|The) [^\n]*?(Remember it\.\n|\? The .*? is \d{5})", "", read)
    assert text.startswith(rest)
    assert with_keys(document, tokenizer, [64, 2**14, 2**15, 2**16]) == keyed


def test_a_short_length_has_as_many_keys_as_fit() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    document = Document("one", tokenizer(random_words(3_000)).input_ids[: 2**13])
    keyed = with_keys(document, tokenizer, [2**12, 2**13])
    asked = re.findall(r"\nWhat is the (.*)\? The \1 is \d{5}", tokenizer.decode(keyed.tokens[1:]))
    inserted = [f"\nThe {name} is 12345. Remember it.\n\nWhat is the {name}? The {name} is 12345" for name in asked]
    assert 2 <= len(asked) < 2 * KEYS_A_LENGTH
    assert sum(map(len, inserted)) <= (2**12 + 2**13) / 16
    assert len(keyed.tokens) == 2**13


def test_what_is_forgotten_is_counted_up_to_each_length() -> None:
    document = with_keys(Document("one", []), byte_tokenizer(adds_bos=False), [])
    keyed = type(document)("one", [0] * 8, answers=(2, 5, 6))
    losses = torch.tensor([9.0, math.log(2), 9.0, 9.0, math.log(4), 0.0, 9.0])  # of tokens 1 to 7
    assert [figures_at(length, losses, keyed).forgotten for length in (2, 4, 8)] == pytest.approx(
        [0, 1 / 2, (1 / 2 + 3 / 4 + 0) / 3], rel=8 * FLOAT32_EPS
    )
    assert figures_at(8, losses, Document("one", [0] * 8)).forgotten == 0


def test_forgetting_weighs_what_was_asked(tmp_path: Path, unpatchable: None) -> None:
    keyed = type(with_keys(Document("one", []), byte_tokenizer(adds_bos=False), []))("one", [0] * 8, (3, 7))
    plain, weighed = (readings_of(tmp_path / f"{weight}", retrieval=weight) for weight in (0.0, 0.5))
    rung = Rung([keyed], 8)
    # Repeated tokens have probability 1/2, so the forgotten share is 1/2.
    assert weighed.loss(llama_table(), rung) - plain.loss(llama_table(), rung) == pytest.approx(
        0.25, rel=16 * FLOAT32_EPS
    )


# Documents


def test_documents_are_dealt_out_in_turn(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(adds_bos=False)
    (tmp_path / "text").write_text("\0".join(f"{i}" * 50 for i in range(9)))
    (tmp_path / "other").write_text("x" * 60)

    def dealt(count: int, held_out_count: int, **options) -> list[list[str]]:
        sizes = {"count": count, "held_out_count": held_out_count}
        sets = document_sets.document_sets([tmp_path / "text"], tokenizer, 40, **sizes, **options)
        return [[document.name[-2:] for document in one] for one in (sets.search, sets.decide, sets.held_out)]

    assert dealt(6, 3) == [["#1", "#4", "#7"], ["#2", "#5", "#8"], ["#3", "#6", "#9"]]
    assert dealt(5, 1) == [["#1", "#4", "#6"], ["#2", "#5"], ["#3"]]
    assert dealt(20, 20) == [["#1", "#4", "#7"], ["#2", "#5", "#8"], ["#3", "#6", "#9"]]
    assert dealt(4, 20, held_out=tmp_path / "other") == [["#1", "#3"], ["#2", "#4"], ["er"]]


@pytest.mark.parametrize("join", [False, True])
def test_what_was_searched_is_not_held_out(tmp_path: Path, join: bool) -> None:
    tokenizer = byte_tokenizer(adds_bos=False)
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "abcd":
        (texts / name).write_text(name * 50)
    (texts / "b2").write_text("b" * 50)

    def names(held_out: Path | None, count: int) -> list[list[str]]:
        sets = document_sets.document_sets(
            [texts], tokenizer, 40, count=count, held_out_count=2, held_out=held_out, join=join
        )
        return [[document.name for document in one] for one in (sets.search, sets.decide, sets.held_out)]

    with pytest.warns(UserWarning, match=r"left out of .*, for beginning as others that are used: b2$"):
        assert names(None, 2) == [["a"], ["b"], ["c", "d"]]
    with pytest.warns(UserWarning, match=r"left out of .*: a, b, b2$"):
        assert names(texts, 2) == [["a"], ["b"], ["c", "d"]]
    for same in (texts, texts / "c"):
        with (
            pytest.warns(UserWarning, match="left out"),
            pytest.raises(ValueError, match=r"held_out must hold documents that text does not, and .* has none left"),
        ):
            names(same, 4)


def test_short_documents_are_joined_where_asked(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    (tmp_path / "text").write_text("\0".join(letter * 20 for letter in "abcdefg"))
    found = document_sets.joined_documents(tmp_path / "text", tokenizer, 31)
    assert [(document.name, tokenizer.decode(document.tokens[1:])) for document in found] == [
        ("text#1 + text#2", "a" * 20 + "b" * 10),
        ("text#3 + text#4", "c" * 20 + "d" * 10),
        ("text#5 + text#6", "e" * 20 + "f" * 10),
    ]
    with pytest.raises(ValueError, match=r"text must hold 1000 tokens in all, and .* has 141"):
        document_sets.joined_documents(tmp_path / "text", tokenizer, 1000)


def test_lengths_double_up_to_the_scale() -> None:
    assert document_sets.lengths_up_to(8192, 16) == [8192, 16384, 32768, 65536, 131072]
    assert document_sets.lengths_up_to(1000, 3) == [1000, 2000, 3000]
    assert document_sets.lengths_up_to(64, 1.5) == [64, 96]
