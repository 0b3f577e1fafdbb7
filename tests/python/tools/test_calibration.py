"""``mrrope calibrate``: the search finds planted optima, held-out documents decide, and killed runs resume."""

import contextlib
import json
import math
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_llama import byte_tokenizer, random_words, save_byte_llama
from command_line import MRROPE, as_arguments
from planted_tables import SMOLLM2, distance, sigmoid_table
from scripted_models import OutOfMemory, RepeatsLastToken
from tiny_models import tiny_model, tokens
from transformers import LlamaForCausalLM

import mrrope
from mrrope.calibration import document_sets, report, spaces
from mrrope.calibration.calibrate import FIXED_METHODS, Calibration
from mrrope.calibration.command import row_of_truncation, trained_with
from mrrope.calibration.journal import Journal
from mrrope.calibration.objective import Readings, Rung, figures_at
from mrrope.calibration.pass_keys import KEYS_A_LENGTH, NAMED_A_LENGTH, NAMED_KEYS, with_keys
from mrrope.calibration.search import MIN_IMPROVEMENT, BudgetSpentError, descend, successive_halving
from mrrope.cli import main
from mrrope.evaluation import model_loading
from mrrope.evaluation.documents import Document
from mrrope.evaluation.perplexity import next_token_losses
from mrrope.evaluation.truncated import TruncatedReader
from mrrope.hf.patch import is_patched
from mrrope.tables import shipped
from mrrope.tables.frequency_table import METHODS
from mrrope.tables.lookup import NativeRope, load_tables

FLOAT32_EPS = torch.finfo(torch.float32).eps

# The search, on functions with a known minimum


@dataclass
class Box:
    """A search space: all points of a cube around zero."""

    start: tuple[float, ...]
    steps: tuple[float, ...]
    halvings: int = 4
    size: float = 10.0

    def nearest(self, point):
        return tuple(min(max(value, -self.size), self.size) for value in point)


class Counted:
    """An objective that records its calls."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.asked: list[tuple] = []

    def __call__(self, point, rung):
        self.asked.append((point, rung))
        return self.function(point, rung)


def test_the_better_half_climbs() -> None:
    objective = Counted(lambda candidate, rung: abs(candidate - 3.1) if rung < 2 else candidate)
    assert successive_halving(range(8), objective, range(3)) == [3, 4]
    by_rung = [[candidate for candidate, rung in objective.asked if rung == one] for one in range(3)]
    assert by_rung == [[0, 1, 2, 3, 4, 5, 6, 7], [3, 4, 2, 5], [3, 4]]


def bowl(point, lowest) -> float:
    """Return a quadratic with minimum 0 at ``lowest`` whose neighbouring coordinates are correlated."""
    away = [value - low for value, low in zip(point, lowest, strict=True)]
    leaning = sum(a * b for a, b in pairwise(away))
    return sum(value**2 for value in away) + 0.8 * leaning


@pytest.mark.parametrize("rungs", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_planted_optimum_is_found(rungs: int, seed: int) -> None:
    rng = random.Random(seed)
    lowest = tuple(rng.uniform(-3, 3) for _ in range(4))
    nearby = [tuple(value + rng.uniform(-0.3, 0.3) for value in lowest) for _ in range(rungs - 1)]
    # Cheap rungs have their minima elsewhere.
    found = descend(Box((0.0,) * 4, (1.0,) * 4), lambda point, rung: bowl(point, [*nearby, lowest][rung]), rungs)
    # The last steps are 1/16; without misleading rungs the error is at most a few of them.
    tolerance = 0.1 if rungs == 1 else 0.5
    assert max(abs(value - low) for value, low in zip(found, lowest, strict=True)) < tolerance


def test_the_search_tells_of_every_improvement_and_moves_only_for_what_is_worthwhile() -> None:
    improvements: list[tuple] = []
    found = descend(
        Box((4.0, 0.0), (1.0, 1.0)), lambda point, _: bowl(point, (0, 1)), 2, lambda *one: improvements.append(one)
    )
    losses = [loss for _, loss in improvements]
    assert improvements[0] == ((4.0, 0.0), bowl((4, 0), (0, 1)))
    assert improvements[-1] == (found, bowl(found, (0, 1)))
    assert all(after < before - MIN_IMPROVEMENT for before, after in pairwise(losses))
    flat = descend(Box((0.0,), (1.0,)), lambda point, _: -MIN_IMPROVEMENT / 20 * point[0], 1)
    assert flat == (0.0,)


def test_a_point_that_is_worse_on_the_last_rung_is_not_taken() -> None:
    """The first rung decreases with the point, the last increases."""
    found = descend(Box((0.0,), (1.0,)), lambda point, rung: point[0] if rung else -point[0], 2)
    assert found == (0.0,)


def test_the_best_so_far_is_kept_when_the_budget_is_spent() -> None:
    def limited(point, rung):
        if len(objective.asked) > 30:
            raise BudgetSpentError
        return bowl(point, (3, 3, 3))

    objective = Counted(limited)
    found = descend(Box((0.0,) * 3, (1.0,) * 3), objective, 2)
    assert len(objective.asked) == 31
    assert bowl(found, (3, 3, 3)) < bowl((0, 0, 0), (3, 3, 3))


# Search spaces of tables


@pytest.mark.parametrize(
    ("power", "bounds", "factor"), [(0.0, (6, 20), 1.17), (2.0, (3, 25), 1.4), (-1.0, (12, 17), 1)]
)
def test_a_planted_power_with_its_bounds_and_temperature_is_found(power, bounds, factor) -> None:
    planted = mrrope.frequency_table("mrrope_pow", power=power, bounds=bounds, attention_factor=factor, **SMOLLM2)
    space = spaces.PowerSpace(mrrope.frequency_table("mrrope_uni", **SMOLLM2), 0.0)
    assert distance(space.table(space.start), mrrope.frequency_table("mrrope_uni", **SMOLLM2)) == pytest.approx(0)
    found = space.table(descend(space, lambda point, _: distance(space.table(point), planted), 3))
    assert distance(found, planted) < min(0.02, distance(space.origin, planted) / 10)


def test_planted_radix_factors_are_found() -> None:
    planted = sigmoid_table()
    table = mrrope.frequency_table("mrrope_uni", **SMOLLM2)
    distances = [distance(table, planted)]
    for knots in (4, 8):
        space = spaces.KnotSpace(table, knots)
        point = descend(space, lambda point, _, space=space: distance(space.table(point), planted), 2)
        table = space.table(point)
        distances.append(distance(table, planted))
        assert (table.radix_factors >= 1).all()
    assert distances[2] < distances[1] < distances[0] / 5
    assert distances[2] < 5e-3


@pytest.mark.parametrize("method", FIXED_METHODS)
@pytest.mark.parametrize("knots", [1, 4, 8])
def test_knots_start_from_the_very_table(method: str, knots: int) -> None:
    table = mrrope.frequency_table(method, **SMOLLM2)
    space = spaces.KnotSpace(table, knots)
    start = space.table(space.start)
    torch.testing.assert_close(start.cumulative_scale, table.cumulative_scale, rtol=1e-14, atol=0)
    assert start.attention_factor == pytest.approx(table.attention_factor, rel=1e-8)
    assert (start.scale, start.method) == (16.0, "longrope")


def test_what_a_knot_does() -> None:
    """With bounds 10 and 20 the fixed knot is at 6 2/3 and the last of three at 23 1/3."""
    table = mrrope.frequency_table("mrrope_uni", bounds=(10, 20), **SMOLLM2)
    space = spaces.KnotSpace(table, 3)
    first, step = 10 - 10 / 3, (20 + 10 / 3 - (10 - 10 / 3)) / 3
    for knot in range(3):
        point = [0.0, 0.0, 0.0, 0.06]
        point[knot] = 0.1
        moved = space.table(tuple(point)).cumulative_scale.log() - table.cumulative_scale.log()
        for pair in range(32):
            away = abs((pair - first) / step - (knot + 1))
            beyond = knot == 2 and pair > first + 3 * step
            expected = 0.1 if beyond else 0.1 * max(0.0, 1 - away)
            # A raised knot must not make the scale decrease after it: the scale is raised there, too.
            assert moved[pair].item() == pytest.approx(expected, abs=1e-9) or (knot < 2 and moved[pair] > expected)
    assert space.table((0, 0, 0, 0.06)).attention_factor == pytest.approx(1 + 0.06 * math.log(16))
    steep = space.table((-3.0, 5.0, -9.0, 0.0))
    assert (steep.radix_factors >= 1).all()
    assert steep.cumulative_scale.max() <= 32 * (1 + 1e-12)


# The decision, on losses by a formula


class FormulaReadings:
    """Losses by a formula of table, document and length; a token takes one second."""

    def __init__(self, formula: Callable) -> None:
        self.formula = formula
        self.lengths = [64, 128, 256]
        self.limit = math.inf
        self.spent = 0.0
        self.longest_took = 256.0
        self.known: dict = {}

    def loss(self, table, rung) -> float:
        for document in rung.documents:
            if self.known.get((table, document), 0) < rung.length:
                if self.spent >= self.limit:
                    raise BudgetSpentError
                self.spent += rung.length
                self.known[table, document] = rung.length
        return sum(self.formula(table, document, rung.length) for document in rung.documents) / len(rung.documents)

    def parts(self, table, rung) -> tuple[float, float]:
        return self.loss(table, rung), 0.0


SETS = document_sets.DocumentSets(("s1", "s2"), ("d1", "d2"), ("h1",))


def calibration_of(formula: Callable, seconds: float = 1e9, **more) -> Calibration:
    return Calibration(FormulaReadings(formula), NativeRope(64, 1e5, 8192), 16.0, SETS, seconds, **more)


def test_a_calibration_finds_what_was_planted() -> None:
    planted = sigmoid_table()
    calibration = calibration_of(lambda table, _, length: distance(table, planted) + length / 1e6)
    chosen = calibration.run()
    assert chosen == "8 knots"
    assert distance(calibration.finalists[chosen].table, planted) < 5e-3
    # Every stage improves on the one before.
    losses = [finalist.search_loss for finalist in calibration.finalists.values()]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


def test_an_overfitted_table_is_not_chosen() -> None:
    """The search documents prefer their own radix factors, all others a fixed method."""
    overfitted, fixed = sigmoid_table(), mrrope.frequency_table("yarn_ratio", **SMOLLM2)
    calibration = calibration_of(
        lambda table, document, _: distance(table, overfitted if document[0] == "s" else fixed)
    )
    chosen = calibration.run()
    best = min(calibration.finalists, key=lambda part: calibration.finalists[part].search_loss)
    assert best == "8 knots"
    assert chosen == "yarn_ratio"
    assert calibration.finalists[chosen].table == fixed


@pytest.mark.parametrize("minutes", [200, 400, 1000])
def test_the_budget_is_kept_with_the_decision_in_it(minutes: float) -> None:
    improvements = []
    planted = sigmoid_table()
    calibration = calibration_of(
        lambda table, *_: distance(table, planted), 60 * minutes, improved=lambda *one: improvements.append(one)
    )
    chosen = calibration.run()
    # The last reading may end after the budget.
    assert calibration.readings.spent <= 60 * minutes + 256
    assert calibration.finalists[chosen].table == improvements[-1][1]
    assert [loss for *_, loss in improvements] == sorted((loss for *_, loss in improvements), reverse=True)


def test_a_budget_that_is_too_small_for_the_fixed_methods_is_said_to_be() -> None:
    with pytest.raises(BudgetSpentError):
        calibration_of(lambda *_: 1.0, 300).run()


def test_losses_that_are_no_numbers_count_as_the_worst() -> None:
    rope = mrrope.frequency_table("rope", **SMOLLM2)
    planted = mrrope.frequency_table("mrrope_pro", **SMOLLM2)
    calibration = calibration_of(lambda table, *_: math.inf if table == rope else distance(table, planted))
    assert calibration.run() == "mrrope_pro"


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
        sets = document_sets.document_sets(tmp_path / "text", tokenizer, 40, **sizes, **options)
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
            texts, tokenizer, 40, count=count, held_out_count=2, held_out=held_out, join=join
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


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random model, a text to search and a held-out one."""
    folder = tmp_path_factory.mktemp("calibration")
    save_byte_llama(folder / "model", 32, heads=2, initializer_range=0.5)
    (folder / "text.txt").write_text("\0".join(random_words(24, seed) for seed in range(6)))
    (folder / "other.txt").write_text("\0".join(random_words(24, seed) for seed in (7, 8)))
    return folder


def arguments(folder: Path, output: Path, *options: str, **replaced: str) -> list[str]:
    given = {"--text": str(folder / "text.txt"), "--device": "cpu", "--scale": "4", "--output": str(output), **replaced}
    model = given.pop("model", str(folder / "model"))
    return ["calibrate", model, *options, *as_arguments(given)]


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> Path:
    """Return the output of an uninterrupted run with a sweep."""
    assert main(arguments(folder, folder / "whole", "--sweep", "3", **{"--held-out": str(folder / "other.txt")})) == 0
    return folder / "whole"


def readings_in(journal: Path) -> list[str]:
    lines = journal.read_bytes().splitlines(keepends=True)
    return [json.loads(line)["key"] for line in lines[1:] if line.endswith(b"\n")]


def test_the_command_finds_writes_and_reports(folder: Path, unbroken: Path, tmp_path: Path) -> None:
    data = json.loads(unbroken.with_suffix(".json").read_text())
    assert data["complete"]
    assert data["lengths"] == [32, 64, 128]
    table = mrrope.FrequencyTable.load(unbroken.with_suffix(".table.json"))
    found = data["calibration"]
    assert table == mrrope.FrequencyTable.from_dict(found["finalists"][found["chosen"]]["table"])
    assert table.scale == 4.0
    assert found["finalists"][found["chosen"]]["decide_loss"] == min(
        one["decide_loss"] for one in found["finalists"].values()
    )
    keys = readings_in(unbroken.with_suffix(".journal"))
    assert len(keys) == len(set(keys))
    assert unbroken.with_suffix(".perplexity.png").read_bytes().startswith(b"\x89PNG")
    # The held-out perplexities equal those of mrrope eval.
    held_out = {"--text": str(folder / "other.txt"), "--lengths": "32,64,128", "--scale": "4", "--device": "cpu"}
    methods = {"--methods": f"{','.join(FIXED_METHODS)},truncated,{unbroken.with_suffix('.table.json')}"}
    options = {**held_out, **methods, "--output": str(tmp_path / "eval")}
    assert main(["eval", str(folder / "model"), *as_arguments(options)]) == 0
    expected = json.loads((tmp_path / "eval.json").read_text())["results"]["perplexity"]
    expected[report.CALIBRATED] = expected.pop(str(unbroken.with_suffix(".table.json")))
    assert data["results"]["perplexity"] == expected
    halves = [expected["yarn"][length]["second_half_perplexity"] for length in ("32", "64", "128")]
    assert found["held_out_geometric_means"]["yarn"] == pytest.approx(math.prod(halves) ** (1 / 3))


def test_the_sweep_is_of_the_bounds(folder: Path, unbroken: Path) -> None:
    sweep = json.loads(unbroken.with_suffix(".json").read_text())["sweep"]
    assert unbroken.with_suffix(".sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(sweep["perplexity"]) == len(sweep["d_l"])
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    read = [0, *byte_tokenizer(adds_bos=False)(random_words(24, 7)).input_ids][:128]
    for i, low in enumerate(sweep["d_l"]):
        for j, high in enumerate(sweep["d_h"]):
            if low >= high:
                assert sweep["perplexity"][i][j] is None
                continue
            factor = 1 + sweep["temperature"] * math.log(4)
            options = {"bounds": (low, high), "power": sweep["power"], "attention_factor": factor}
            with mrrope.patched(model, "mrrope_pow", scale=4.0, **options), torch.no_grad():
                logits = model(torch.tensor([read])).logits[0, :-1].double()
            losses = -logits.log_softmax(-1)[torch.arange(127), read[1:]]
            halves = [losses[length // 2 - 1 : length - 1].mean().item() for length in (32, 64, 128)]
            # Losses of about 10 in float32, summed in another order.
            assert math.log(sweep["perplexity"][i][j]) == pytest.approx(sum(halves) / 3, rel=64 * FLOAT32_EPS)


@pytest.fixture
def sigint() -> Iterator[None]:
    """Let processes get SIGINT: a shell that runs the tests in the background makes them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT], ids=lambda kill: kill.name)
def test_a_killed_run_goes_on_with_nothing_lost_and_nothing_read_twice(
    folder: Path, unbroken: Path, tmp_path: Path, kill: signal.Signals
) -> None:
    options = arguments(folder, tmp_path / "out", **{"--held-out": str(folder / "other.txt")})
    path = tmp_path / "out.journal"
    whole = readings_in(unbroken.with_suffix(".journal"))
    stderr = (tmp_path / "stderr").open("w+")
    process = subprocess.Popen([*MRROPE, *options], stderr=stderr, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < len(whole) / 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(kill)
    if kill is signal.SIGKILL:
        assert process.wait() == -signal.SIGKILL
    else:
        assert process.wait() == 130
        stderr.seek(0)
        printed = stderr.read()
        assert printed.endswith(f"mrrope calibrate: interrupted; the same command resumes from {path}\n")
        assert "Traceback" not in printed
        assert json.loads((tmp_path / "out.json").read_text())["stopped"] == "interrupted"
    assert len(readings_in(path)) < len(whole)
    assert (tmp_path / "out.table.json").exists()
    assert main(options) == 0
    # Every reading exactly once, in the same order.
    assert readings_in(path) == whole[: len(readings_in(path))]
    # The uninterrupted run ends with 9 readings of the sweep.
    assert len(whole) - 9 <= len(readings_in(path)) <= len(whole)
    found, expected = (
        mrrope.FrequencyTable.load(stem.with_suffix(".table.json")) for stem in (tmp_path / "out", unbroken)
    )
    assert found == expected


def test_a_run_whose_budget_was_spent_goes_on_with_a_larger_one(folder: Path, unbroken: Path, tmp_path: Path) -> None:
    options = {"--held-out": str(folder / "other.txt")}
    assert main(arguments(folder, tmp_path / "out", **options, **{"--budget": "1e-9"})) == 2
    assert len(readings_in(tmp_path / "out.journal")) == 1
    assert main(arguments(folder, tmp_path / "out", **options)) == 0
    keys = readings_in(tmp_path / "out.journal")
    assert keys == readings_in(unbroken.with_suffix(".journal"))[: len(keys)]


@pytest.mark.slow
def test_short_documents_will_do_where_they_are_joined(folder: Path, tmp_path: Path) -> None:
    options = {"--scale": "8", "--documents": "2", "--held-out-documents": "1", "--lengths": "64,256"}
    assert main(arguments(folder, tmp_path / "out", **options)) == 2
    assert main(arguments(folder, tmp_path / "out", "--join", **options)) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    names = {part: [name for name, _ in found] for part, found in data["documents"].items()}
    assert names["search"] == ["text.txt#1 + text.txt#2"]
    assert names["held_out"] == ["text.txt#5 + text.txt#6"]


def test_the_command_on_a_gpu(folder: Path, tmp_path: Path, cuda: str) -> None:
    assert main(arguments(folder, tmp_path / "out", **{"--device": cuda})) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["complete"]
    assert data["dtype"] == "bfloat16"
    assert mrrope.FrequencyTable.load(tmp_path / "out.table.json").rotary_dim == 16


def test_a_finished_run_reads_nothing_again(folder: Path, unbroken: Path, capsys) -> None:
    before = unbroken.with_suffix(".journal").read_bytes()
    options = ("--json", "--sweep", "3")
    assert main(arguments(folder, unbroken, *options, **{"--held-out": str(folder / "other.txt")})) == 0
    assert unbroken.with_suffix(".journal").read_bytes() == before
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(unbroken.with_suffix(".json").read_text())
    assert "resuming with" in printed.err


def test_the_found_table_goes_to_patch_and_export(folder: Path, unbroken: Path, tmp_path: Path) -> None:
    table = str(unbroken.with_suffix(".table.json"))
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    assert is_patched(mrrope.patch(model, table))
    written = str(tmp_path / "config.json")
    exported = ["export", str(folder / "model"), "--table", table, "--engine", "vllm", "--output", written]
    assert main(exported) == 0
    factors = json.loads(Path(written).read_text())["rope_parameters"]["long_factor"]
    assert factors == pytest.approx(mrrope.FrequencyTable.load(table).cumulative_scale.tolist())


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"--scale": "1"}, "--scale must be a number above 1, got 1"),
        ({"--scale": "nan"}, "--scale must be a number above 1, got nan"),
        ({"--budget": "0"}, "--budget must be a positive number of minutes, got 0"),
        ({"--budget": "1e-9"}, "--budget must be above 1e-09 minutes, which did not do for comparing fixed methods"),
        ({"--retrieval": "-1"}, "--retrieval must be a number, 0 or more, got -1"),
        ({"--documents": "1"}, "--documents must be at least 2, one to search and one to decide with, got 1"),
        ({"--held-out-documents": "0"}, "--held-out-documents must be a positive number, got 0"),
        ({"--sweep": "0"}, "--sweep must be a positive number, got 0"),
        ({"--original-max-position": "0"}, "--original-max-position must be 1 or more, got 0"),
        ({"--lengths": "many", "model": "missing.gguf"}, "--lengths must be numbers of tokens, .* got 'many'"),
        ({"--text": "two.txt"}, "text must hold at least 3 documents of 128 tokens, .* has 2; --join puts shorter"),
        ({"--scale": "16"}, "text must hold a document of at least 512 tokens, and the longest of .* 144"),
        ({"--text": "missing.txt"}, "text must be a file or a folder, and there is no missing.txt"),
        ({"--held-out": "missing.txt"}, "text must be a file or a folder, and there is no missing.txt"),
        (
            {"--text": "missing.txt", "model": "missing.gguf"},
            "text must be a file",
        ),  # checked before the model is loaded
        ({"--output": "no/such/folder/out"}, "--output must be in a folder that exists, and there is no no/such"),
        (
            {"--output": "/proc/self/out", "model": "missing.gguf"},
            "--output must be where files can be written, got /proc/self/out: ",
        ),
        ({"model": "missing.gguf"}, "model must be a file that exists, and there is no missing.gguf"),
    ],
)
def test_bad_options_are_named(
    folder: Path, tmp_path: Path, replaced: dict[str, str], message: str, monkeypatch, capsys
) -> None:
    (tmp_path / "two.txt").write_text("\0".join(random_words(24, seed) for seed in range(2)))
    monkeypatch.chdir(tmp_path)
    assert main(arguments(folder, tmp_path / "out", **replaced)) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope calibrate: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


def test_an_output_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "out.journal").mkdir()
    assert main(arguments(folder, tmp_path / "out")) == 2
    assert re.search(r"^mrrope calibrate: .*out\.journal", capsys.readouterr().err, re.MULTILINE)


def test_only_files_of_the_run_are_said_to_be_written(folder: Path, unbroken: Path, capsys) -> None:
    foreign = unbroken.with_suffix(".notes.txt")
    foreign.write_text("mine")
    options = {"--held-out": str(folder / "other.txt")}
    assert main(arguments(folder, unbroken, "--sweep", "3", **options)) == 0
    printed = capsys.readouterr()
    foreign.unlink()
    (line,) = (line for line in printed.out.splitlines() if line.startswith("written:"))
    files = [Path(name) for name in line.split()[1:]]
    assert sorted(files) == sorted(unbroken.parent.glob("whole.*"))
    # Seven fixed methods, truncation and the calibrated table on two documents.
    assert "the report is outside --budget: 18 readings" in printed.err


def test_a_table_for_another_trained_length_is_used_with_it(folder: Path, tmp_path: Path, capsys) -> None:
    stem, table = tmp_path / "out", str(tmp_path / "out.table.json")
    options = {"--original-max-position": "16", "--lengths": "64", "--budget": "0.01"}
    assert main(arguments(folder, stem, "--join", **options)) == 0
    printed = capsys.readouterr().out
    assert f"mrrope.patch(model, {table!r}, original_max_position=16)" in printed
    options = {"--text": str(folder / "text.txt"), "--lengths": "64", "--device": "cpu", "--documents": "1"}
    options |= {"--methods": f"unpatched,pi,{table}", "--scale": "4", "--output": str(tmp_path / "eval")}
    assert main(["eval", str(folder / "model"), *as_arguments(options)]) == 2
    assert "original_max_position=16" in capsys.readouterr().err
    assert main(["eval", str(folder / "model"), *as_arguments(options), "--original-max-position", "16"]) == 0
    data = json.loads((tmp_path / "eval.json").read_text())
    assert data["original_max_position"] == 16
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    mrrope.patch(model, table, original_max_position=16)
    tokens = [0, *byte_tokenizer(adds_bos=False)(random_words(24, 0)).input_ids][:64]
    with torch.no_grad():
        losses = -model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)[range(63), tokens[1:]]
    found = data["results"]["perplexity"][table]["64"]["documents"][0]["loss"]
    assert found == pytest.approx(losses.mean().item(), rel=64 * FLOAT32_EPS)


def test_a_table_that_is_worse_than_a_fixed_method_is_said_to_be() -> None:
    def summary(**means: float) -> list[str]:
        return report.summary({"calibration": {"chosen": "yarn", "held_out_geometric_means": means}}).splitlines()[-2:]

    better = summary(rope=5.0, yarn=4.0, calibrated=3.0)
    assert better == ["", "chosen: yarn, -25.0% against yarn"]
    worse = summary(rope=5.0, yarn=6.0, calibrated=5.7)
    assert worse[0] == "chosen: yarn, +14.0% against rope"
    assert worse[1].startswith("this is worse than rope: leave the model unpatched")
    assert "this is worse than yarn: patch with yarn" in summary(rope=5.0, yarn=4.0, calibrated=4.5)[1]


def test_truncation_that_is_better_is_said_to_be() -> None:
    def figures(*perplexities: float) -> dict[str, dict[str, float]]:
        return {
            length: {"second_half_perplexity": one}
            for length, one in zip(("32", "64", "128"), perplexities, strict=True)
        }

    def part(truncated: tuple[float, ...], calibrated: tuple[float, ...]) -> dict[str, Any]:
        return {"results": {"perplexity": {"truncated": figures(*truncated), "calibrated": figures(*calibrated)}}}

    def summary(held_out: dict[str, Any], others: dict[str, Any]) -> list[str]:
        def means(of: dict[str, Any]) -> dict[str, float]:
            by_method = of["results"]["perplexity"].items()
            return {"rope": 9.0} | {
                name: math.prod(one["second_half_perplexity"] for one in figures.values()) ** (1 / 3)
                for name, figures in by_method
            }

        found = {"chosen": "yarn", "held_out_geometric_means": means(held_out)}
        found["other_kinds_geometric_means"] = means(others)
        parts = {report.OTHER_KINDS: others}
        return report.summary({**held_out, "calibration": found, "parts": parts}).partition("chosen: ")[2].splitlines()

    better = part((3.0, 3.0, 3.0), (3.0, 2.0, 2.5))
    at_one_length = part((3.0, 3.0, 3.0), (3.0, 2.0, 3.5))
    worse = part((3.0, 3.0, 3.0), (3.0, 3.0, 4.0))
    assert len(summary(better, better)) == 1
    chosen, *advice = summary(at_one_length, worse)
    assert chosen == (
        "yarn, -69.3% against rope and -8.0% against truncated, "
        "-63.3% against rope and +10.1% against truncated on texts of other kinds"
    )
    assert advice == [
        "truncated is better than the calibrated tables on held-out documents at some lengths (at 128 tokens 3.000 "
        "against 3.500)",
        "truncated is better than the calibrated tables on texts of other kinds: 3.000 against 3.302 (at 128 tokens "
        "3.000 against 4.000). What reads the last native length of tokens with the unpatched model predicts these "
        "texts better",
    ]


@pytest.mark.parametrize("is_plain", [False, True])
def test_truncation_is_of_the_stock_model_or_of_plain_rope(is_plain: bool, tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = model.config.to_dict() | {"max_position_embeddings": 64}
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 4.0}
    extended = type(model)(type(model.config)(**config)).eval()
    extended.load_state_dict(model.state_dict())
    text = Document("a", tokens(1, 100)[0].tolist())
    trained = trained_with(extended, 16 if is_plain else None)
    rows = row_of_truncation(trained, [16, 100], 1, is_plain=is_plain)
    window = 16 if is_plain else 64
    assert (rows["truncated"].native_length, rows["truncated"].opening) == (window, 1)
    assert row_of_truncation(trained, [window], 1, is_plain=is_plain) == {}
    with contextlib.closing(Journal(tmp_path / "journal", {})) as journal:
        readings = Readings(extended, [100], journal, chunk=30)
        (found,) = readings.read(rows["truncated"], text, 100)
    expected_model = model if is_plain else extended
    reader = TruncatedReader(expected_model, native_length=window, opening=1)
    losses = torch.cat(list(next_token_losses(reader, text.tokens)))
    # Losses of about 5 in float32, summed in another order.
    assert found.whole == pytest.approx(losses.mean().item(), rel=64 * FLOAT32_EPS)


def test_another_run_under_the_same_name_is_refused(folder: Path, unbroken: Path, capsys) -> None:
    before = unbroken.with_suffix(".json").read_bytes()
    assert main(arguments(folder, unbroken, **{"--scale": "2"})) == 2
    message = (
        r"^mrrope calibrate: --output must be that of the same run or a new one, and .* another documents, .* scale"
    )
    assert re.search(message, capsys.readouterr().err, re.MULTILINE)
    assert unbroken.with_suffix(".json").read_bytes() == before


def test_the_journal_of_other_weights_is_refused(folder: Path, tmp_path: Path, capsys) -> None:
    options = {"model": str(tmp_path / "model"), "--budget": "1e-9"}
    shutil.copytree(folder / "model", tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    for _ in range(2):  # with the same weights it resumes
        assert main(arguments(folder, tmp_path / "out", **options)) == 2
        assert "--budget must be above" in capsys.readouterr().err
    model.model.layers[0].self_attn.o_proj.weight.data *= 1.01
    model.save_pretrained(tmp_path / "model")
    assert main(arguments(folder, tmp_path / "out", **options)) == 2
    assert "is of a run with another weights" in capsys.readouterr().err


def test_what_was_read_before_the_memory_was_full_is_kept(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    fails = OutOfMemory(room=100)
    read = model.forward
    model.forward = lambda **given: (fails if int(given["position_ids"].max()) >= 100 else read)(**given)
    monkeypatch.setattr(model_loading, "load", lambda *_, **__: (model, byte_tokenizer(adds_bos=True)))
    assert main(arguments(folder, tmp_path / "out")) == 2
    printed = capsys.readouterr().err
    assert "mrrope calibrate: out of memory; a smaller --chunk than 4096 or shorter --lengths need less" in printed
    assert f"What was read is in {tmp_path / 'out.journal'}" in printed
    assert len(readings_in(tmp_path / "out.journal")) == len(FIXED_METHODS)  # 64 tokens of one document
    data = json.loads((tmp_path / "out.json").read_text())
    assert not data["complete"]
    assert data["stopped"].startswith("out of memory")


# Tables shipped with the package


@pytest.fixture
def shipped_table(tmp_path: Path, monkeypatch) -> mrrope.FrequencyTable:
    table = mrrope.frequency_table("mrrope_uni", rotary_dim=16, base=1e4, original_max_position=32, scale=4.0)
    table.save(tmp_path / "tiny-4x.json")
    table.save(tmp_path / "another.json")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    return table


def test_a_table_that_comes_with_the_package_is_loaded_by_name(shipped_table: mrrope.FrequencyTable) -> None:
    assert mrrope.FrequencyTable.load("tiny-4x") == shipped_table
    with pytest.raises(FileNotFoundError, match=r"comes with mrrope \(another, tiny-4x\), got 'tiny-8x'"):
        mrrope.FrequencyTable.load("tiny-8x")


def test_patch_and_eval_take_the_name(shipped_table: mrrope.FrequencyTable, folder: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    assert mrrope.patch(model, "tiny-4x").model.rotary_emb.tables[None] == (shipped_table,)
    options = {"--text": str(folder / "text.txt"), "--lengths": "64", "--device": "cpu", "--methods": "rope,tiny-4x"}
    options["--output"] = str(tmp_path / "out")
    assert main(["eval", str(folder / "model"), *as_arguments(options)]) == 0


def test_patch_names_methods_and_tables_where_a_name_is_neither(shipped_table, folder: Path, monkeypatch) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    listed = rf"method must be one of {', '.join(METHODS)}, .* comes with mrrope \(another, tiny-4x\), got 'tiny-8x'"
    with pytest.raises(ValueError, match=listed):
        mrrope.patch(model, "tiny-8x")
    monkeypatch.setattr(shipped, "FOLDER", folder / "model" / "nothing")
    with pytest.raises(ValueError, match=r"comes with mrrope \(there is none yet\), got 'tiny-8x'"):
        mrrope.patch(model, ["tiny-8x"], scale="auto")


def test_a_file_of_that_name_is_meant_where_there_is_one(shipped_table, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = mrrope.frequency_table("rope", rotary_dim=16, base=1e4, original_max_position=64)
    other.save("tiny-4x")
    assert mrrope.FrequencyTable.load("tiny-4x") == other


def test_every_table_of_the_package_can_be_loaded() -> None:
    for name in shipped.names():
        tables = load_tables(name)
        assert name.endswith(f"-{tables.scale:g}x")
        # By gradient every pair of every head is free; the search keeps scales that grow with the wavelength.
        if isinstance(tables, mrrope.FrequencyTable):
            assert (tables.radix_factors >= 1 - 1e-12).all()
        else:
            assert (len(tables), tables.key_heads) == (30, 3)
    with pytest.raises(FileNotFoundError, match="the name of a table that comes with mrrope"):
        mrrope.FrequencyTable.load("no-such-table")
