"""``mrrope calibrate --by gradient``: gradients are exact, planted tables are found, and stopped runs resume."""

import contextlib
import itertools
import math
import random
import re
from collections.abc import Iterator

import pytest
import torch
from byte_llama import byte_tokenizer, random_words
from learnable_tables import (
    HEADS,
    LAYERS,
    NATIVE,
    QUERY_HEADS,
    ROTARY_DIM,
    TRAINED,
    learnable,
    random_set,
    table,
    tiny_llama,
)
from tiny_models import tiny_model
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
)

import mrrope
from mrrope.calibration.command import trained_with
from mrrope.calibration.gradient import why_no_query_factors
from mrrope.calibration.learnable_tables import (
    FACTOR_RATE,
    FREE_SHARE,
    QUERY_FACTOR_RATE,
    SHARINGS,
    LearnableTables,
)
from mrrope.calibration.objective import table_numbers
from mrrope.calibration.pass_keys import KEYS_A_LENGTH, with_keys
from mrrope.calibration.recomputation import Recomputation, decoder_layers, layers_to_recompute, recomputed
from mrrope.calibration.table_gradient import TableGradient
from mrrope.calibration.token_weights import length_weights, reading_lengths, token_weights
from mrrope.calibration.training_texts import TrainingText, TrainingTexts
from mrrope.calibration.weighted_loss import frozen_weights, weighted_loss
from mrrope.evaluation.documents import Document
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.tables.lookup import NativeRope

FLOAT64_EPS = torch.finfo(torch.float64).eps


@contextlib.contextmanager
def rotating(model: nn.Module, tables: LearnableTables) -> Iterator[None]:
    """Rotate by floating tables. Norms are fused as in the search: those of transformers compute in float32."""
    with mrrope.patched(model, mrrope.TableSet([table()] * LAYERS), fuse_norms=True):
        for module in model.modules():
            if isinstance(module, TableRotaryEmbedding):
                module.learned = {None: tables.frequencies()}
                module.learned_query_factors = tables.query_factors()
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


# Factors of query heads


def test_query_factors_start_at_one() -> None:
    tables = learnable(None, query_heads=QUERY_HEADS)
    assert tables.moves.shape == (LAYERS, HEADS, ROTARY_DIM // 2 + 1 + QUERY_HEADS // HEADS)
    assert torch.equal(tables.query_factors(), torch.ones(LAYERS, QUERY_HEADS, dtype=torch.float64))
    torch.testing.assert_close(tables.frequencies(), learnable().frequencies(), rtol=0, atol=0)
    found = tables.tables()
    assert [one.query_factors for one in found] == [(1.0,) * QUERY_HEADS] * LAYERS
    assert [list(one) for one in found] == [list(one) for one in learnable().tables()]
    assert learnable().query_factors() is None
    assert learnable().tables().query_heads is None


@pytest.mark.parametrize("form", ["set", "one table", "some layers"])
def test_query_factors_start_where_the_set_has_them(form: str) -> None:
    start = random_set(4, query_heads=QUERY_HEADS)
    if form == "one table":
        start = mrrope.HeadTables([table()], [0.5, 1.0, 2.0, 4.0])
    if form == "some layers":
        start = mrrope.TableSet([random_set(4)[0], start[1]])
    tables = learnable(start, query_heads=QUERY_HEADS)
    rows = list(start) if isinstance(start, mrrope.TableSet) else [start] * LAYERS
    expected = torch.tensor([row.query_factors or (1.0,) * QUERY_HEADS for row in rows], dtype=torch.float64)
    torch.testing.assert_close(tables.query_factors(), expected, rtol=4 * FLOAT64_EPS, atol=0)
    found = tables.tables()
    assert all(isinstance(one, mrrope.HeadTables) and len(one) == HEADS for one in found)
    # Seven significant digits.
    got = torch.tensor([one.query_factors for one in found], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_query_factors_move_apart_from_the_attention_factor() -> None:
    tables = learnable(None, query_heads=QUERY_HEADS)
    with torch.no_grad():
        tables.moves[1, 1, -1] = 0.1  # the last query head of the last key head
        tables.moves[0, 1, -3] = 0.2  # an attention factor
    assert QUERY_FACTOR_RATE == 2 * FACTOR_RATE
    expected = torch.ones(LAYERS, QUERY_HEADS, dtype=torch.float64)
    expected[1, 3] = math.exp(0.1 * QUERY_FACTOR_RATE)
    torch.testing.assert_close(tables.query_factors(), expected, rtol=4 * FLOAT64_EPS, atol=0)
    ratio = tables.frequencies() / learnable().frequencies()
    assert ratio[0, 1, -1].item() == pytest.approx(math.exp(0.2 * FACTOR_RATE))
    ratio[0, 1, -1] = 1.0
    assert torch.equal(ratio, torch.ones_like(ratio))


def test_one_key_head_may_have_query_factors() -> None:
    found = learnable(None, heads=1, query_heads=3).tables()
    assert [(len(one), one.query_factors) for one in found] == [(1, (1.0, 1.0, 1.0))] * LAYERS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "start must have no query factors for a search without them, got TableSet"),
        ({"query_heads": 6}, "start must have a factor for each of the model's 6 query heads, got 4"),
        ({"query_heads": 3}, "query_heads must be None, or a multiple of 2 key heads with a table each, got 3"),
        ({"query_heads": 4, "per": "layer"}, "query_heads must be None, or a multiple of 2 key heads .*, got 4"),
    ],
)
def test_query_factors_that_do_not_fit_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        learnable(random_set(0, query_heads=4), **options)


def test_readings_tell_query_factors_apart() -> None:
    plain, start = random_set(4), random_set(4, query_heads=QUERY_HEADS)
    others = mrrope.TableSet([mrrope.HeadTables(one, [2 * each for each in one.query_factors]) for one in start])
    without = mrrope.TableSet([one.without_query_factors() for one in start])
    numbers = [table_numbers(one) for one in (start, others, without)]
    assert all(one != other for one, other in itertools.combinations(numbers, 2))
    assert table_numbers(plain) == [[table_numbers(one) for one in layer] for layer in plain]


def test_the_loss_with_query_factors_is_that_of_the_patched_model() -> None:
    """The floating tables of the search rotate as the packed ones that it writes."""
    model = tiny_llama()
    gradient = TableGradient(model, learnable(random_set(5, query_heads=QUERY_HEADS), query_heads=QUERY_HEADS))
    tokens = torch.randint(2, 258, (24,), generator=torch.Generator().manual_seed(4))
    text = TrainingText("random", tokens, torch.full((24,), 1 / 23, dtype=torch.float64))
    with gradient.ready():
        loss = gradient.add(text).item()
    losses = []
    for tables in (gradient.learnable.tables(), gradient.learnable.tables().without_query_factors()):
        with mrrope.patched(model, tables, fuse_norms=True), torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:]).item())
    assert loss == pytest.approx(losses[0], rel=1e-6)
    assert abs(losses[1] - loss) > 1e-3
    assert (gradient.learnable.moves.grad[..., -2:] != 0).all()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", None),
        ("gpt_neox", None),
        ("gemma4_text", "transformers.models.gemma4.modeling_gemma4.apply_rotary_pos_emb takes queries and keys alike"),
        ("llama4_text", "its Llama4TextL2Norm norms rotated queries"),
    ],
)
def test_models_without_query_factors_are_told(family: str, reason: str | None) -> None:
    model = tiny_model(family)
    found = why_no_query_factors(model, trained_with(model, None), 4.0)
    assert (found is None) if reason is None else found.startswith(reason)
    assert not mrrope.is_patched(model)


def test_layers_of_different_query_heads_have_no_query_factors(monkeypatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr("mrrope.hf.model_layers.ServedLayers.query_heads", lambda _, layer: 4 + 2 * layer)
    reason = "its layers differ in their number of query heads"
    assert why_no_query_factors(model, TRAINED, 4.0) == reason


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
@pytest.mark.parametrize(("per", "query_heads"), [*((per, None) for per in SHARINGS), ("head", QUERY_HEADS)])
def test_the_gradient_equals_finite_differences(per: str, query_heads: int | None, recomputed_layers: int) -> None:
    start = None if query_heads is None else random_set(6, query_heads=query_heads)
    model, tables = tiny_llama(), learnable(start, per, query_heads=query_heads)
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 258, (24,), generator=rng)
    weights = token_weights(24, {12: 0.5, 24: 0.5}, [20, 21], 0.2)

    rotated = rotating(model, tables)
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
                with rotating(model, tables):
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
