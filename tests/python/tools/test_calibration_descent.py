"""Calibration by gradient: the descent, on planted tables."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_llama import byte_tokenizer
from learnable_tables import LAYERS, NATIVE, QUERY_HEADS, learnable, table, tiny_llama
from transformers import LlamaForCausalLM
from two_ranks import run_on_two_ranks

import mrrope
from mrrope.calibration import descent as descent_module
from mrrope.calibration.descent import Descent, learning_rate
from mrrope.calibration.journal import Journal
from mrrope.calibration.learnable_tables import SHARINGS
from mrrope.calibration.objective import Readings, Rung, table_numbers
from mrrope.calibration.search import BudgetSpentError
from mrrope.calibration.training_texts import TrainingTexts
from mrrope.calibration.weighted_loss import weighted_loss
from mrrope.evaluation.documents import Document
from mrrope.hf.patch import is_patched

# The descent


class Ticks:
    """A clock by which every look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def planted() -> SimpleNamespace:
    """Texts that a model wrote under planted tables, which therefore have the lowest loss."""
    model, wanted = tiny_llama(torch.float32), learnable(table("pi"), "head")
    with torch.no_grad():
        wanted.moves.uniform_(-1, 1)
    return planted_by(model, wanted.tables())


def planted_by(model: LlamaForCausalLM, tables: mrrope.TableSet) -> SimpleNamespace:
    """Texts that a new model wrote under tables."""
    rows = torch.randint(2, 258, (72, 1))
    with mrrope.patched(model, tables), torch.no_grad():
        cache = None
        for _ in range(4 * NATIVE - 1):
            output = model(rows[:, -1:], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows = torch.cat([rows, output.logits[:, -1].softmax(-1).multinomial(1)], dim=1)
    documents = [Document(f"{i}", row) for i, row in enumerate(rows.tolist())]
    return SimpleNamespace(model=model, tables=tables, search=documents[:64], decide=documents[64:])


LENGTHS = [NATIVE, 2 * NATIVE, 4 * NATIVE]


def descent_of(planted: SimpleNamespace, folder: Path, seconds: float = 60, per: str = "head", **options) -> Descent:
    """Return a descent whose steps and evaluations take one second each, or three with several looks at the clock."""
    model = planted.model
    query_heads = options.pop("query_heads", None)
    journal = Journal(folder / "journal", {})
    readings = Readings(model, LENGTHS, journal, chunk=10**6)
    texts = TrainingTexts(planted.search, byte_tokenizer(adds_bos=False), LENGTHS, 0.0)

    def validation_loss(tables) -> float:
        return readings.loss(tables, Rung(planted.decide, LENGTHS[-1]))

    return Descent(
        model,
        learnable(table("pi"), per, query_heads=query_heads),
        texts,
        options.pop("validation_loss", validation_loss),
        journal,
        folder / "state.pt",
        seconds,
        clock=Ticks(),
        **options,
    )


def test_planted_tables_are_approached(planted: SimpleNamespace, tmp_path: Path) -> None:
    losses = {}
    for per in SHARINGS:
        (tmp_path / per).mkdir()
        improvements = []
        found = descent_of(planted, tmp_path / per, 150, per, improved=lambda *one, to=improvements: to.append(one))
        best = found.run()
        assert not is_patched(planted.model)
        assert all(weight.requires_grad for weight in planted.model.parameters())
        start = found.evaluations[0]["loss"]
        losses[per] = found.best
        assert improvements[-1] == (best, found.best)
        assert [loss for _, loss in improvements] == sorted((loss for _, loss in improvements), reverse=True)
        lowest = found.validation_loss(planted.tables)
        found.journal.close()
    gap = {per: (start - loss) / (start - lowest) for per, loss in losses.items()}
    # One table cannot be all of them.
    assert gap["model"] < gap["layer"] < gap["head"]
    assert 0.3 < gap["model"] < 0.8 < gap["head"]


def test_planted_query_factors_are_approached(tmp_path: Path) -> None:
    """Of texts written under one table with factors, a search with factors learns more than one without."""
    rng = torch.Generator().manual_seed(7)
    wanted = torch.empty(LAYERS, QUERY_HEADS, dtype=torch.float64).uniform_(-1, 1, generator=rng).exp()
    tables = mrrope.TableSet([mrrope.HeadTables([table("pi")], one) for one in wanted.tolist()])
    planted = planted_by(tiny_llama(torch.float32), tables)
    losses, found = {}, {}
    for query_heads in (None, QUERY_HEADS):
        folder = tmp_path / f"{query_heads}"
        folder.mkdir()
        descent = descent_of(planted, folder, 150, query_heads=query_heads)
        found[query_heads] = descent.run()
        start, losses[query_heads] = descent.evaluations[0]["loss"], descent.best
        lowest = descent.validation_loss(planted.tables)
        descent.journal.close()
    gap = {query_heads: (start - loss) / (start - lowest) for query_heads, loss in losses.items()}
    assert gap[None] < gap[QUERY_HEADS] - 0.1
    assert gap[QUERY_HEADS] > 0.5
    assert found[None].query_heads is None
    # A query head's scores have its factor, and the attention factor of its key head twice. Those of the first layer
    # settle within this budget; the second reads what the first is still changing.
    first = found[QUERY_HEADS][0]
    gains = [
        factor * (first[head // 2].attention_factor / table("pi").attention_factor) ** 2
        for head, factor in enumerate(first.query_factors)
    ]
    moved = torch.tensor(gains, dtype=torch.float64).log()
    assert torch.nn.functional.cosine_similarity(moved, wanted[0].log(), dim=0) > 0.9
    assert all(factor != 1 for tables in found[QUERY_HEADS] for factor in tables.query_factors)
    # The file keeps them.
    found[QUERY_HEADS].save(tmp_path / "found.json")
    assert mrrope.TableSet.load(tmp_path / "found.json") == found[QUERY_HEADS]


def interrupted(planted: SimpleNamespace, folder: Path, at: int, **options) -> None:
    """Run a descent until its step, and stop it there as a kill would."""
    found = descent_of(planted, folder, **options)

    def progress(*_) -> None:
        if found.step == at:
            raise KeyboardInterrupt

    found.progress = progress
    with pytest.raises(KeyboardInterrupt):
        found.run()
    found.journal.close()


@pytest.mark.parametrize(
    ("steps", "query_heads"), [([3], None), ([14], None), ([20], None), ([5, 18, 25], None), ([5, 18], QUERY_HEADS)]
)
def test_a_stopped_run_resumes(
    planted: SimpleNamespace, tmp_path: Path, steps: list[int], query_heads: int | None, monkeypatch
) -> None:
    monkeypatch.setattr(descent_module, "SECONDS_BETWEEN_SAVES", 12.0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    options = {"query_heads": query_heads}
    expected = descent_of(planted, whole, **options)
    tables = expected.run()
    assert tables.query_heads == query_heads
    assert expected.step > 25
    for step in steps:
        interrupted(planted, parts, step, **options)
        assert not is_patched(planted.model)
    resumed = descent_of(planted, parts, **options)
    assert 0 < resumed.step <= steps[-1] or steps[-1] < 4
    assert resumed.run() == tables
    assert resumed.evaluations == expected.evaluations
    assert resumed.curve == expected.curve
    lines = [json.loads(line)["key"] for line in (parts / "journal").read_text().splitlines()[1:]]
    assert len(lines) == len(set(lines))
    # A finished run takes no further step; a larger budget goes on.
    for each in (expected, resumed):
        each.journal.close()
    again = descent_of(planted, parts, **options)
    assert again.run() == tables
    assert again.step == expected.step
    again.journal.close()
    longer = descent_of(planted, parts, 80, **options)
    longer.run()
    assert longer.step > expected.step
    longer.journal.close()


def test_the_state_of_another_run_is_not_taken_up(planted: SimpleNamespace, tmp_path: Path) -> None:
    interrupted(planted, tmp_path, 20)
    (tmp_path / "journal").unlink()
    new = descent_of(planted, tmp_path)
    assert new.step == 0
    # Killed between its first line in the journal and its first state, the new run must not find the old state either.
    new.journal.put("evaluation 0", {"seconds": 1.0, "loss": 1.0})
    new.journal.close()
    assert descent_of(planted, tmp_path).step == 0


def test_the_search_stops_when_nothing_improves(planted: SimpleNamespace, tmp_path: Path) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.1, 0.0])
    found = descent_of(planted, tmp_path, 300, validation_loss=lambda _: next(losses))
    best = found.run()
    assert [one["loss"] for one in found.evaluations] == [3.0, 2.0, 2.5, 2.1]
    assert found.spent < 0.8 * 300
    assert best == found.best_tables() != found.learnable.tables()


def test_an_evaluation_longer_than_the_next_share_is_not_repeated(planted: SimpleNamespace, tmp_path: Path) -> None:
    """Evaluations take 25 of 120 seconds, and pass one of the shares 0.4, 0.6, 0.75, 0.9 of the rest each."""
    losses = iter([3.0, 2.0, 1.0, 0.5])
    clock: list[Ticks] = []

    def slow(_) -> float:
        clock[0].now += 24.0
        return next(losses)

    found = descent_of(planted, tmp_path, 120, validation_loss=slow)
    clock.append(found.clock)
    found.run()
    steps = [one["step"] for one in found.evaluations]
    assert steps == sorted(set(steps)), "no step is evaluated twice"
    # Steps begin until 95 s: after 25 s to 0.4 of it, after 64 s to 0.75 of it; from 97 s on there is no time.
    seconds = [one["seconds"] for one in found.evaluations]
    assert seconds == pytest.approx([0, 38, 72], abs=2)
    assert found.step == len(found.curve) >= 2 * 6
    assert found.spent == sum(one["took"] for one in found.evaluations) + sum(
        json.loads(line)["seconds"] for line in (tmp_path / "journal").read_text().splitlines() if '"step' in line
    )


def test_a_start_that_is_best_is_kept(planted: SimpleNamespace, tmp_path: Path) -> None:
    losses = iter([1.0, 2.0, 3.0])
    found = descent_of(planted, tmp_path, validation_loss=lambda _: next(losses))
    assert found.run() == learnable(table("pi"), "head").tables()


def test_a_budget_too_small_for_evaluations_is_said_to_be(planted: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(BudgetSpentError):
        descent_of(planted, tmp_path, 1.0).run()


def test_the_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(0.03, step, step / 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.003, rel=1e-3)
    assert max(rates) == rates[9] < 0.03
    assert rates[50] == pytest.approx(0.015)
    assert rates[100] == 0.0
    assert learning_rate(0.03, 100, 1.5) == 0.0


def test_a_loss_that_is_no_number_moves_nothing(planted: SimpleNamespace, tmp_path: Path, monkeypatch) -> None:
    def broken(model, tokens, weights):
        loss = weighted_loss(model, tokens, weights)
        return loss * math.nan if len(tokens) == LENGTHS[1] else loss

    monkeypatch.setattr("mrrope.calibration.table_gradient.weighted_loss", broken)
    found = descent_of(planted, tmp_path)
    assert all(math.isfinite(number) for number in torch.tensor(table_numbers(found.run())).flatten().tolist())
    lost = [one["length"] for one in found.curve if one["loss"] is None]
    assert lost
    assert set(lost) == {LENGTHS[1]}


def test_layers_are_recomputed_once_memory_ran_out(planted: SimpleNamespace, tmp_path: Path, monkeypatch) -> None:
    def limited(model, tokens, weights):
        if len(tokens) == LENGTHS[2] and found.gradient.recomputation.count < LAYERS:
            raise torch.OutOfMemoryError("no memory")
        return weighted_loss(model, tokens, weights)

    monkeypatch.setattr("mrrope.calibration.table_gradient.weighted_loss", limited)
    found = descent_of(planted, tmp_path)
    found.run()
    assert found.gradient.recomputation.count == LAYERS
    assert {one["length"] for one in found.curve} == set(LENGTHS)


TWO_RANKS = """
import sys
from pathlib import Path
import torch
from test_calibration_descent import descent_of, planted_from
from mrrope.calibration.processes import joined_processes

folder = Path(sys.argv[1])
with joined_processes(torch.device("cpu")) as processes:
    planted = planted_from(folder / "planted.pt")
    own = folder / f"{processes.rank}"
    own.mkdir()
    found = descent_of(planted, own, processes=processes)
    found.run()
    losses = [one["loss"] for one in found.curve]
    result = {"moves": found.learnable.moves.detach(), "step": found.step, "losses": losses}
    torch.save(result, folder / f"result{processes.rank}")
"""


def planted_from(path: Path) -> SimpleNamespace:
    """The planted texts that another process saved."""
    parts = torch.load(path)
    documents = [Document(f"{i}", row) for i, row in enumerate(parts)]
    return SimpleNamespace(model=tiny_llama(torch.float32), search=documents[:64], decide=documents[64:])


def test_two_processes_do_what_one_does_with_their_texts(planted: SimpleNamespace, tmp_path: Path) -> None:
    torch.save([one.tokens for one in (*planted.search, *planted.decide)], tmp_path / "planted.pt")
    importable = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
    result = run_on_two_ranks(importable + TWO_RANKS, tmp_path)
    ranks = [result(f"result{rank}") for rank in range(2)]
    (tmp_path / "alone").mkdir()
    alone = descent_of(planted, tmp_path / "alone", texts_a_step=2)
    alone.run()
    for rank in ranks:
        assert rank["step"] == alone.step
        assert torch.equal(rank["moves"], ranks[0]["moves"])
        # Gradients are summed in another order; Adam divides by their size, so small ones may differ more.
        torch.testing.assert_close(rank["moves"], alone.learnable.moves.detach(), rtol=1e-3, atol=1e-5)
        assert rank["losses"] == pytest.approx([one["loss"] for one in alone.curve], rel=1e-5)
    assert not (tmp_path / "1" / "state.pt").exists()
