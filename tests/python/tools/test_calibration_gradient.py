"""``mrrope calibrate --by gradient``: gradients are exact, planted tables are found, and stopped runs resume."""

import contextlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_llama import byte_llama, byte_tokenizer, random_words, save_byte_llama
from command_line import as_arguments
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
)
from two_ranks import run_on_two_ranks

import mrrope
from mrrope.calibration import descent as descent_module
from mrrope.calibration.descent import Descent, learning_rate
from mrrope.calibration.journal import Journal
from mrrope.calibration.learnable_tables import FREE_SHARE, SHARINGS, LearnableTables
from mrrope.calibration.objective import Readings, Rung, table_numbers
from mrrope.calibration.pass_keys import KEYS_A_LENGTH, with_keys
from mrrope.calibration.recomputation import Recomputation, decoder_layers, layers_to_recompute, recomputed
from mrrope.calibration.report import OTHER_KINDS
from mrrope.calibration.search import BudgetSpentError
from mrrope.calibration.table_gradient import TableGradient
from mrrope.calibration.token_weights import length_weights, reading_lengths, token_weights
from mrrope.calibration.training_texts import TrainingText, TrainingTexts
from mrrope.calibration.weighted_loss import frozen_weights, weighted_loss
from mrrope.cli import main
from mrrope.evaluation.documents import Document
from mrrope.hf.patch import is_patched
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.tables.lookup import NativeRope, load_tables

FLOAT64_EPS = torch.finfo(torch.float64).eps
LAYERS, HEADS, ROTARY_DIM, NATIVE = 2, 2, 8, 32
TRAINED = NativeRope(ROTARY_DIM, 1e4, NATIVE)


def table(method: str = "yarn", scale: float = 4.0, **options) -> mrrope.FrequencyTable:
    settings = {"rotary_dim": ROTARY_DIM, "base": 1e4, "original_max_position": NATIVE, "scale": scale}
    return mrrope.frequency_table(method, **settings, **options)


def random_set(seed: int, spread: float = 0.5, layers: int = LAYERS, heads: int = HEADS) -> mrrope.TableSet:
    """Return tables that differ in every layer and head."""
    rng = random.Random(seed)

    def one() -> mrrope.FrequencyTable:
        factors = [math.exp(rng.uniform(0, spread) + 0.4 * i) for i in range(ROTARY_DIM // 2)]
        return table("longrope", factors=factors, attention_factor=math.exp(rng.uniform(-spread, spread) / 4))

    return mrrope.TableSet([mrrope.HeadTables([one() for _ in range(heads)]) for _ in range(layers)])


def tiny_llama(dtype: torch.dtype = torch.float64):
    return byte_llama(NATIVE, layers=LAYERS, heads=2 * HEADS, num_key_value_heads=HEADS, initializer_range=0.4).to(
        dtype
    )


def learnable(start=None, per: str = "head", **options) -> LearnableTables:
    shape = {"layers": LAYERS, "heads": HEADS} | options
    return LearnableTables(table() if start is None else start, TRAINED, per=per, **shape)


@contextlib.contextmanager
def rotating(model: nn.Module, frequencies: torch.Tensor) -> Iterator[None]:
    """Rotate by floating tables. Norms are fused as in the search: those of transformers compute in float32."""
    with mrrope.patched(model, mrrope.TableSet([table()] * LAYERS), fuse_norms=True):
        for module in model.modules():
            if isinstance(module, TableRotaryEmbedding):
                module.learned = {None: frequencies}
        yield


# Tables with parameters


@pytest.mark.parametrize("per", SHARINGS)
def test_the_start_is_where_the_search_starts(per: str) -> None:
    start = {"model": table(), "layer": mrrope.TableSet([table(), table("ntk")]), "head": random_set(0)}[per]
    tables = learnable(start, per)
    floating = tables.frequencies()
    assert floating.shape == (LAYERS, HEADS, ROTARY_DIM // 2 + 1)
    for layer, head in itertools.product(range(LAYERS), range(HEADS)):
        one = start if per == "model" else start[layer]
        one = one[head] if per == "head" else one
        torch.testing.assert_close(floating[layer, head, :-1], one.inv_freq, rtol=16 * FLOAT64_EPS, atol=0)
        assert floating[layer, head, -1].item() == pytest.approx(one.attention_factor, rel=16 * FLOAT64_EPS)
    found = tables.tables()
    assert type(found) is type(start)
    # Seven significant digits.
    torch.testing.assert_close(
        torch.tensor(table_numbers(found)), torch.tensor(table_numbers(start)), rtol=0, atol=2e-6
    )
    assert found.scale == 4.0


@pytest.mark.parametrize("per", SHARINGS)
def test_what_is_shared_moves_together(per: str) -> None:
    tables = learnable(None, per)
    assert tables.moves.shape == {"model": (1, 1, 5), "layer": (2, 1, 5), "head": (2, 2, 5)}[per]
    weights = torch.randn(LAYERS, HEADS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (tables.frequencies() * weights).sum().backward()
    of_heads = learnable(None, "head")
    (of_heads.frequencies() * weights).sum().backward()
    summed = of_heads.moves.grad
    for dim, is_shared in ((0, per == "model"), (1, per != "head")):
        summed = summed.sum(dim, keepdim=True) if is_shared else summed
    torch.testing.assert_close(tables.moves.grad, summed, rtol=1e-13, atol=0)


def test_fast_pairs_move_less() -> None:
    tables = learnable(None, "model")
    with torch.no_grad():
        tables.moves.fill_(0.1)
    moved = tables.logarithms() - learnable(None, "model").logarithms()
    wavelengths = 2 * math.pi / table("rope").inv_freq
    free = FREE_SHARE * NATIVE
    assert wavelengths[0] < free < wavelengths[-1]
    expected = [0.1 * min(1.0, wavelength / free) for wavelength in wavelengths.tolist()]
    assert moved[0, 0, :-1].tolist() == pytest.approx(expected)
    assert moved[0, 0, -1].item() == pytest.approx(0.1 * 0.004 / 0.03)


def test_scales_are_relative_to_the_models_own_table() -> None:
    native = table("yarn", scale=2.0)
    trained = NativeRope(ROTARY_DIM, 1e4, 2 * NATIVE, native)
    start = mrrope.frequency_table(
        "ntk", rotary_dim=ROTARY_DIM, base=1e4, original_max_position=2 * NATIVE, scale=4.0, native=native
    )
    tables = LearnableTables(start, trained, layers=1, heads=1, per="model")
    torch.testing.assert_close(tables.frequencies()[0, 0, :-1], start.inv_freq, rtol=16 * FLOAT64_EPS, atol=0)
    torch.testing.assert_close(tables.tables().inv_freq, start.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("start", "per", "message"),
    [
        (random_set(0), "layer", "start must be one table per layer for a search per layer, got TableSet"),
        (random_set(0), "model", "start must be one table per model for a search per model, got TableSet"),
        (random_set(0, layers=3), "head", "start must be a set for the model's 2 layers, got one for 3"),
        (random_set(0, heads=3), "head", "start must have a table for each of the model's 2 key heads, got 3"),
    ],
)
def test_a_start_that_does_not_fit_is_named(start, per: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        learnable(start, per)


# The objective


def naive_weights(length: int, weights: dict[int, float], answers: list[int], retrieval: float) -> list[float]:
    found = [0.0] * length
    inside = [one for one in sorted(weights) if one <= length]
    for place in range(length):
        for one in inside:
            if one // 2 <= place < one:
                found[place] += weights[one] / len(range(one // 2, one))
        if place in answers:
            of = min(one for one in inside if place < one)
            shorter = max([one for one in inside if one < of], default=0)
            found[place] += retrieval * weights[of] / sum(shorter <= answer < of for answer in answers)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_weights_follow_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    lengths = sorted(rng.sample(range(2, 60), 4))
    weights = {one: rng.random() for one in lengths}
    length = rng.choice(lengths)
    answers = sorted(rng.sample(range(length), length // 2))
    found = token_weights(length, weights, answers, 0.3)
    assert found.tolist() == pytest.approx(naive_weights(length, weights, answers, 0.3), rel=1e-12)
    # The mean loss of each second half, weighed; the answers likewise.
    assert token_weights(length, weights).sum().item() == pytest.approx(
        sum(weights[one] for one in lengths if one <= length)
    )


@pytest.mark.parametrize("count", range(1, 7))
def test_every_length_weighs_the_same_over_a_cycle(count: int) -> None:
    lengths = [64 * 2**i for i in range(count)]
    cycle, weights = reading_lengths(lengths), length_weights(lengths)
    assert set(cycle) == set(lengths[-3:])
    for one in lengths:
        mean = sum(weights[one] for reading in cycle if reading >= one) / len(cycle)
        assert mean == pytest.approx(1 / count)


SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
}


def models_with_heads_of_their_own() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        tiny_llama(),
        Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0, sliding_window=8)).double().eval(),
        GraniteForCausalLM(GraniteConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logits_scaling=3.0))
        .double()
        .eval(),
        Llama4ForCausalLM(Llama4TextConfig(**SIZES, intermediate_size_mlp=32, num_local_experts=2)).double().eval(),
    ]


@pytest.mark.parametrize("model", models_with_heads_of_their_own(), ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("rows", [5, 2048])
def test_the_loss_is_that_of_the_models_own_logits(model: nn.Module, rows: int, monkeypatch) -> None:
    monkeypatch.setattr("mrrope.calibration.weighted_loss.LOGIT_ROWS", rows)
    rng = torch.Generator().manual_seed(2)
    tokens = torch.randint(60, (33,), generator=rng)
    weights = torch.rand(33, dtype=torch.float64, generator=rng)
    logits = model(tokens[None]).logits[0]
    nll = -logits.log_softmax(-1)[torch.arange(32), tokens[1:]]
    with frozen_weights(model):
        assert not any(weight.requires_grad for weight in model.parameters())
        loss = weighted_loss(model, tokens, weights)
    assert all(weight.requires_grad for weight in model.parameters())
    torch.testing.assert_close(loss, (nll * weights[1:]).sum(), rtol=1e-12, atol=0)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("recomputed_layers", [0, 1, 2])
@pytest.mark.parametrize("per", SHARINGS)
def test_the_gradient_equals_finite_differences(per: str, recomputed_layers: int) -> None:
    model, tables = tiny_llama(), learnable(None, per)
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 258, (24,), generator=rng)
    weights = token_weights(24, {12: 0.5, 24: 0.5}, [20, 21], 0.2)

    rotated = rotating(model, tables.frequencies())
    with frozen_weights(model), recomputed(decoder_layers(model)[:recomputed_layers]), rotated:
        weighted_loss(model, tokens, weights).backward()
    assert all("forward" not in vars(layer) for layer in decoder_layers(model))
    step = 1e-5
    flat = tables.moves.detach().view(-1)
    for place in range(0, flat.numel(), 3):
        values = []
        for move in (step, -step):
            with torch.no_grad():
                flat[place] += move
                with rotating(model, tables.frequencies()):
                    values.append(weighted_loss(model, tokens, weights).item())
                flat[place] -= move
        expected = (values[0] - values[1]) / (2 * step)
        # Third derivatives times step^2, and rounding of the loss divided by the step.
        assert tables.moves.grad.view(-1)[place].item() == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_local_layers_keep_their_table() -> None:
    """A layer with a window and a RoPE of its own does not move, and gets no gradient."""
    layer_types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, max_position_embeddings=NATIVE, sliding_window=8, layer_types=layer_types)
    config.rope_parameters["full_attention"]["rope_theta"] = 1e4
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    gradient = TableGradient(model, learnable())
    tokens = torch.randint(60, (24,), generator=torch.Generator().manual_seed(4))
    text = TrainingText("random", tokens, torch.full((24,), 1 / 23, dtype=torch.float64))
    with gradient.ready():
        loss = gradient.add(text)
    with mrrope.patched(model, gradient.learnable.tables()):
        expected = nn.functional.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    moved = gradient.learnable.moves.grad.abs().amax(dim=(1, 2))
    assert moved[0] == 0 < moved[1]


def test_layers_are_recomputed_where_memory_requires_it() -> None:
    assert layers_to_recompute(80.0, 100.0, 30) == 0
    assert layers_to_recompute(0.0, 100.0, 30) == 0
    assert layers_to_recompute(1e9, 1.0, 30) == 30
    for needed in (101.0, 150.0, 400.0):
        count = layers_to_recompute(needed, 100.0, 30)
        kept = needed * (1 - 0.85 * count / 30)
        assert 0 < count <= 30
        assert kept <= 100.0
        assert needed * (1 - 0.85 * (count - 1) / 30) > 100.0
    # On a CPU none, until memory ran out.
    recomputation = Recomputation(tiny_llama())
    with recomputation.around(8):
        assert recomputation.count == 0
    assert recomputation.recompute_all()
    assert not recomputation.recompute_all()
    with recomputation.around(8):
        assert recomputation.count == LAYERS


# Texts


def test_random_keys_are_hidden_before_they_are_asked_for() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    document = Document("one", tokenizer(random_words(6_000)).input_ids[: 2**15])
    lengths = [2**14, 2**15]
    seen = set()
    for seed in range(20):
        keyed = with_keys(document, tokenizer, lengths, random.Random(seed))
        read = tokenizer.decode(keyed.tokens[1:])
        asked = re.findall(r"\nWhat is the (.*)\? The \1 is (\d{5})", read)
        assert len(asked) == 2 * KEYS_A_LENGTH
        for name, key in asked:
            place = read.index(f"\nThe {name} is {key}. Remember it.\n")
            assert place < read.index(f"What is the {name}?")
            seen.add(round(place / 2**12))
        answers = tokenizer.decode([keyed.tokens[place] for place in keyed.answers])
        assert answers == "".join(f" {key}" for _, key in asked)
    assert seen == set(range(8))


def texts_of(count: int = 5, size: int = 200, retrieval: float = 0.0, lengths=(16, 32, 64, 128)) -> TrainingTexts:
    rng = random.Random(1)
    documents = [Document(f"{i}", [0, *(rng.randrange(2, 258) for _ in range(size))]) for i in range(count)]
    return TrainingTexts(documents, byte_tokenizer(adds_bos=True), list(lengths), retrieval)


def test_every_document_is_read_once_before_any_is_read_again() -> None:
    texts = texts_of()
    names = [texts.text(step, place, 2).name for step in range(10) for place in range(2)]
    for epoch in range(4):
        assert sorted(names[5 * epoch : 5 * epoch + 5]) == ["0", "1", "2", "3", "4"]
    assert names[:5] != names[5:10]


def test_windows_are_random_and_repeatable() -> None:
    texts = texts_of()
    assert [texts.length(step) for step in range(8)] == [32, 64, 32, 128, 32, 64, 32, 32]
    starts = set()
    for step in range(40):
        text = texts.text(step)
        assert len(text) == texts.length(step) == len(text.weights)
        assert text.tokens[0] == 0
        source = texts.documents[int(text.name)].tokens
        window = text.tokens[1:].tolist()
        starts.add(next(i for i in range(1, len(source)) if source[i : i + len(window)] == window))
        assert torch.equal(texts.text(step).tokens, text.tokens)
    assert len(starts) > 20
    # A document as long as the reading has one window.
    whole = texts_of(1, 127)
    assert whole.text(3).tokens.tolist() == whole.documents[0].tokens


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
    torch.manual_seed(5)
    model, wanted = tiny_llama(torch.float32), learnable(table("pi"), "head")
    with torch.no_grad():
        wanted.moves.uniform_(-1, 1)
    tables = wanted.tables()
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
    journal = Journal(folder / "journal", {})
    readings = Readings(model, LENGTHS, journal, chunk=10**6)
    texts = TrainingTexts(planted.search, byte_tokenizer(adds_bos=False), LENGTHS, 0.0)

    def validation_loss(tables) -> float:
        return readings.loss(tables, Rung(planted.decide, LENGTHS[-1]))

    return Descent(
        model,
        learnable(table("pi"), per),
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


def interrupted(planted: SimpleNamespace, folder: Path, at: int) -> None:
    """Run a descent until its step, and stop it there as a kill would."""
    found = descent_of(planted, folder)

    def progress(*_) -> None:
        if found.step == at:
            raise KeyboardInterrupt

    found.progress = progress
    with pytest.raises(KeyboardInterrupt):
        found.run()
    found.journal.close()


@pytest.mark.parametrize("steps", [[3], [14], [20], [5, 18, 25]])
def test_a_stopped_run_resumes(planted: SimpleNamespace, tmp_path: Path, steps: list[int], monkeypatch) -> None:
    monkeypatch.setattr(descent_module, "SECONDS_BETWEEN_SAVES", 12.0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    expected = descent_of(planted, whole)
    tables = expected.run()
    assert expected.step > 25
    for step in steps:
        interrupted(planted, parts, step)
        assert not is_patched(planted.model)
    resumed = descent_of(planted, parts)
    assert 0 < resumed.step <= steps[-1] or steps[-1] < 4
    assert resumed.run() == tables
    assert resumed.evaluations == expected.evaluations
    assert resumed.curve == expected.curve
    lines = [json.loads(line)["key"] for line in (parts / "journal").read_text().splitlines()[1:]]
    assert len(lines) == len(set(lines))
    # A finished run takes no further step; a larger budget goes on.
    for each in (expected, resumed):
        each.journal.close()
    again = descent_of(planted, parts)
    assert again.run() == tables
    assert again.step == expected.step
    again.journal.close()
    longer = descent_of(planted, parts, 80)
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
from test_calibration_gradient import descent_of, planted_from
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


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradient")
    save_byte_llama(folder / "model", 32, layers=2, heads=4, num_key_value_heads=2, initializer_range=0.5)
    (folder / "text.txt").write_text("\0".join(random_words(30, seed) for seed in range(6)))
    (folder / "other.txt").write_text("\0".join(random_words(24, seed) for seed in (7, 8)))
    table().save(folder / "yarn.json")
    random_set(3).save(folder / "set.json")
    return folder


def arguments(folder: Path, output: Path, *options: str, **replaced: str) -> list[str]:
    given = {
        "--text": str(folder / "text.txt"),
        "--held-out": str(folder / "other.txt"),
        "--device": "cpu",
        "--scale": "4",
        "--budget": "0.05",
        "--output": str(output),
        **replaced,
    }
    return ["calibrate", str(folder / "model"), *options, *as_arguments({k: v for k, v in given.items() if v})]


@pytest.mark.parametrize("per", [*SHARINGS, None])
def test_the_command_finds_writes_and_reports(folder: Path, tmp_path: Path, per: str | None, capsys) -> None:
    options = {"--per": per, "--other-text": str(folder / "text.txt"), "--start": str(folder / "yarn.json")}
    options["--by"] = None if per in ("layer", "head") else "gradient"
    stem = tmp_path / "out"
    assert main(arguments(folder, stem, **options)) == 0
    printed = capsys.readouterr().out
    assert "held-out  other kinds" in printed
    assert re.search(r"^search by gradient: \d+ steps? in \d+ s$", printed, re.MULTILINE)
    data = json.loads(stem.with_suffix(".json").read_text())
    assert data["complete"]
    assert (data["by"], data["per"]) == ("gradient", per or "model")
    found = data["calibration"]
    assert found["steps"] == len(found["curve"]) > 0
    assert found["evaluations"][0]["step"] == 0
    best = min(found["evaluations"], key=lambda one: one["loss"])
    assert found["chosen"] == ("given" if best["step"] == 0 else f"gradient per {per or 'model'}")
    assert found["seconds"] < 60
    tables = load_tables(stem.with_suffix(".table.json"))
    assert isinstance(tables, mrrope.TableSet if per in ("layer", "head") else mrrope.FrequencyTable)
    assert set(found["held_out_geometric_means"]) == set(found["other_kinds_geometric_means"])
    assert list(data["results"]["perplexity"])[-2:] == ["truncated", "calibrated"]
    assert list(data["parts"][OTHER_KINDS]["results"]["perplexity"])[-2:] == ["truncated", "calibrated"]
    assert "against truncated" in printed
    # The figures are those of the tables.
    model = mrrope.patch(byte_llama_of(folder), tables)
    tokens = [0, *byte_tokenizer(adds_bos=False)(random_words(24, 7)).input_ids][:128]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    losses = -logits.log_softmax(-1)[torch.arange(127), tokens[1:]]
    row = data["results"]["perplexity"]["calibrated"]["128"]["documents"][0]
    assert row["second_half_loss"] == pytest.approx(losses[63:].mean().item(), rel=1e-4)
    # A finished run reads nothing again.
    before = stem.with_suffix(".journal").read_bytes()
    assert main(arguments(folder, stem, **options)) == 0
    assert stem.with_suffix(".journal").read_bytes() == before


def byte_llama_of(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder / "model").eval()


def test_without_a_start_the_best_fixed_method_is_it(folder: Path, tmp_path: Path) -> None:
    assert main(arguments(folder, tmp_path / "out", **{"--per": "head"})) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["calibration"]["started_from"] in data["results"]["perplexity"]


def test_the_search_goes_on_from_a_set(folder: Path, tmp_path: Path) -> None:
    assert main(arguments(folder, tmp_path / "out", **{"--per": "head", "--start": str(folder / "set.json")})) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["start"] == str(folder / "set.json")


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"--per": "token"}, "--per must be model, layer or head, got 'token'"),
        ({"--by": "luck"}, "--by must be search or gradient, got 'luck'"),
        (
            {"--per": "layer", "--by": "search"},
            "--by must be gradient with --per layer, got search, which finds one table for the model",
        ),
        ({"--per": "head", "--sweep": "3"}, "--sweep goes with --by search, got 3"),
        ({"--start": "yarn"}, "--start goes with --by gradient, got yarn"),
        ({"--by": "gradient", "--start": "magic"}, "--start must be one of rope, .*, got 'magic'"),
        ({"--by": "gradient", "--start": "missing.json"}, ".*missing.json"),
        ({"--by": "gradient", "--start": "set.json"}, "start must be one table per model for a search per model"),
        ({"--by": "gradient", "--start": "yarn.json", "--scale": "2"}, "--start must be tables of scale 2, got 4"),
        ({"--by": "gradient", "--budget": "1e-9"}, "--budget must be above 1e-09 minutes"),
        ({"--by": "gradient", "--other-text": "missing.txt"}, "text must be a file or a folder, and there is no"),
        ({"--learning-rate": "0.1"}, "--learning-rate goes with --by gradient, got 0.1"),
        ({"--by": "gradient", "--learning-rate": "0"}, "--learning-rate must be a positive number, got 0"),
        ({"--by": "gradient", "--documents": "1"}, "--documents must be at least 2"),
    ],
)
def test_bad_options_are_named(
    folder: Path, tmp_path: Path, replaced: dict[str, str], message: str, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(folder)
    assert main(arguments(folder, tmp_path / "out", **replaced)) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope calibrate: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed


def test_a_run_per_head_does_not_take_up_one_per_layer(folder: Path, tmp_path: Path, capsys) -> None:
    assert main(arguments(folder, tmp_path / "out", **{"--per": "layer"})) == 0
    assert main(arguments(folder, tmp_path / "out", **{"--per": "head"})) == 2
    assert "is of a run with another per" in capsys.readouterr().err


ON_TWO_RANKS = """
import os, sys
from pathlib import Path
import torch
from mrrope.cli import main

folder = Path(sys.argv[1])
code = main((folder / "arguments").read_text().split("\\n"))
torch.save({"code": code}, folder / f"rank{os.environ['RANK']}")
"""


def test_the_command_with_torchrun(folder: Path, tmp_path: Path) -> None:
    given = arguments(folder, tmp_path / "out", **{"--per": "head", "--other-text": str(folder / "text.txt")})
    (tmp_path / "arguments").write_text("\n".join(given))
    result = run_on_two_ranks(ON_TWO_RANKS, tmp_path)
    assert [result(f"rank{rank}")["code"] for rank in range(2)] == [0, 0]
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["complete"]
    assert data["processes"] == 2
    assert isinstance(load_tables(tmp_path / "out.table.json"), mrrope.TableSet)
    # Each step reads a document per process, each decision all documents.
    lines = [json.loads(line) for line in (tmp_path / "out.journal").read_text().splitlines()[1:]]
    assert all(len(line["documents"]) == 1 for line in lines if line["key"].startswith("step"))
