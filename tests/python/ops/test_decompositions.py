"""The decomposition: right against float64 and the op, and emitted where compiled models decode."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rotary_cases import Case, cases
from rotary_reference import assert_rotated
from table_stacks import stack_of, tables_of

import mrrope
from mrrope.hf import conventions
from mrrope.ops import decompositions
from mrrope.ops.decompositions import is_decode_step
from mrrope.tables.position_rows import packed_rows

pytest.importorskip("transformers")

from patched_models import assert_same
from tiny_models import inputs, tiny_model, tokens
from transformers import PreTrainedModel, StaticCache

TRACED_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BATCHED = ["bhsd", "bshd"]


def traced_cases() -> st.SearchStrategy[Case]:
    """Patched models have positions of [batch, tokens], and no packed sequences."""
    positions = st.sampled_from(["broadcast", "matrix"])
    batched = cases(dtypes=TRACED_DTYPES).filter(lambda case: case.layout in BATCHED)
    return st.builds(lambda case, shape: case.with_changes(positions_shape=shape), batched, positions)


@given(case=traced_cases(), conjugate=st.booleans())
def test_against_float64(device: str, case: Case, conjugate: bool) -> None:
    heads = [x for x in case.heads_on(device) if x is not None]
    positions, table = case.positions(device), case.table()
    packed = table.packed(heads[0].device)
    result = decompositions.rotary(heads, positions, packed, case.layout, case.pairing, conjugate)
    for x, y in zip(heads, result, strict=True):
        assert_rotated(y, x, positions, table, case.layout, case.pairing, conjugate)


@pytest.mark.parametrize("layout", BATCHED)
@pytest.mark.parametrize("position_rows", [None, False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_tables_as_the_op_takes_them(device: str, layout: str, position_rows: bool | None, count: int) -> None:
    """One table for all sequences or one per sequence, with and without the row of positions that rotates each pair."""
    case = Case(layout=layout, batch=3, head_dim=20, rotary_dim=16)
    (q, k), generator = case.heads_on(device), torch.Generator().manual_seed(0)
    table = stack_of(tables_of(count, 16), "cpu")
    if position_rows is not None:
        rows = torch.randint(0, 4, (count, 8), generator=generator)
        table = torch.stack([table, packed_rows(rows)], dim=1)
    shape = (4, 3, case.tokens) if position_rows else (3, case.tokens)
    positions = torch.randint(0, 2**31, shape, generator=generator).to(device)
    arguments = [q, k], positions, table.to(device), layout, "interleaved", False
    result, by_op = decompositions.rotary(*arguments), torch.ops.mrrope.rotary.default(*arguments)
    for x, y in zip(result, by_op, strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=3e-6)


def test_rows_of_positions_for_all_sequences_with_a_table_for_each(device: str) -> None:
    case, generator = Case(batch=3), torch.Generator().manual_seed(0)
    (q, k), table = case.heads_on(device), stack_of(tables_of(3, 16), "cpu")
    rows = torch.randint(0, 4, (3, 8), generator=generator)
    table = torch.stack([table, packed_rows(rows)], dim=1).to(device)
    positions = torch.randint(0, 2**31, (4, 1, case.tokens), generator=generator).to(device)
    arguments = [q, k], positions, table, "bhsd", "halves", False
    result, by_op = decompositions.rotary(*arguments), torch.ops.mrrope.rotary.default(*arguments)
    for x, y in zip(result, by_op, strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=3e-6)


def test_rows_that_do_not_exist_are_the_last(device: str) -> None:
    """On a GPU the op cannot look at the table before it runs, and clamps: so must the decomposition."""
    case, generator = Case(batch=2), torch.Generator().manual_seed(0)
    (q, k), table = case.heads_on(device), stack_of(tables_of(1, 16), "cpu")
    rows = torch.randint(0, 8, (1, 8), generator=generator)
    positions = torch.randint(0, 2**31, (3, 2, case.tokens), generator=generator).to(device)

    def rotated(rows: torch.Tensor) -> list[torch.Tensor]:
        stack = torch.stack([table, packed_rows(rows)], dim=1).to(device)
        return decompositions.rotary([q, k], positions, stack, "bhsd", "halves", False)

    for x, y in zip(rotated(rows), rotated(rows.clamp(max=2)), strict=True):
        assert torch.equal(x, y)


def test_a_negated_table_rotates_backwards(device: str) -> None:
    case = Case(dtype=torch.bfloat16)
    (q, k), positions, table = case.heads_on(device), case.positions(device), case.table()
    result = decompositions.rotary([q, k], positions, -table.packed(q.device), case.layout, case.pairing, False)
    for x, y in zip((q, k), result, strict=True):
        assert_rotated(y, x, positions, table, conjugate=True)


# --- in patched models ---

FAMILIES = {
    "llama": "halves",
    "cohere": "interleaved",
    "deepseek_v3": "interleaved in, halves out; the caller splits off the rotated part",
    "deepseek_v4": "the last components; backwards by a negated table",
    "gpt_neox": "a part of the head",
    "qwen3": "norms of heads",
    "olmo2": "norms over all heads",
    "gemma3_text": "norms with 1 + weight, tables for two kinds of layers",
    "llama4_text": "table and positions in one tensor",
    "qwen3_5_text": "positions in rows",
}
PATCH = {"scale": 4.0, "original_max_position": 64}
UNFOLLOWABLE = {"deepseek_v4"}
SCALES = [(family, 4.0) for family in FAMILIES] + [
    (family, "auto") for family in FAMILIES if family not in UNFOLLOWABLE
]


def decoded(model: PreTrainedModel, forward: Any = None, length: int = 1) -> torch.Tensor:
    """Return the logits of tokens that follow a prompt."""
    ids = tokens(2, 8 + length).to(model.device)
    with torch.no_grad():
        cache = model(**inputs(model, ids[:, :8]), use_cache=True).past_key_values
        return (model if forward is None else forward)(
            input_ids=ids[:, 8:], past_key_values=cache, use_cache=True
        ).logits


@pytest.mark.parametrize(("family", "scale"), SCALES)
@pytest.mark.usefixtures("quiet_transformers")
def test_decomposed_models_decode_the_same(family: str, scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mrrope.patch(tiny_model(family), "mrrope_pro", **PATCH | {"scale": scale})
    want = decoded(model)
    calls = []

    def noted(heads: list[torch.Tensor], layout: str) -> bool:
        calls.append(is_decode_step(heads, layout))
        return calls[-1]

    monkeypatch.setattr(conventions, "should_decompose", noted)
    found = decoded(model)
    assert {*calls} == {False, True}
    assert_same(found, want)


@pytest.mark.parametrize("family", ["llama", "deepseek_v4", "qwen3", "qwen3_5_text"])
@pytest.mark.usefixtures("quiet_transformers")
def test_the_decomposition_compiles(family: str, dynamo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mrrope.patch(tiny_model(family), "mrrope_pro", **PATCH)
    want = decoded(model)
    monkeypatch.setattr(conventions, "should_decompose", is_decode_step)
    assert_same(decoded(model, torch.compile(model, backend="aot_eager")), want)


class Graphs:
    """A torch.compile backend that records the targets of the graph's nodes and runs the graph as it is."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.targets += [str(node.target) for node in graph.graph.nodes]
        return graph.forward

    def has_op(self) -> bool:
        return any("mrrope" in target and "rotary" in target for target in self.targets)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.usefixtures("quiet_transformers")
def test_where_the_decomposition_is_emitted(device: str, dynamo: Any, family: str, length: int) -> None:
    model, graphs = mrrope.patch(tiny_model(family).to(device), "mrrope_pro", **PATCH), Graphs()
    found = decoded(model, torch.compile(model, backend=graphs, fullgraph=True), length)
    assert graphs.has_op() == (device == "cpu" or length == 2)
    assert_same(found, decoded(model, length=length))


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("length", [1, 2])
def test_unbacked_sizes_are_no_decode_steps(dynamo: Any, length: int, is_known: bool) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def is_step(x: torch.Tensor) -> torch.Tensor:
        return x + is_decode_step([x], "bhsd")

    x = torch.zeros(1, 2, length, 16)
    if is_known:
        assert (is_step(x) == (length == 1)).all()
    else:
        torch._dynamo.decorators.mark_unbacked(x, 2)
        assert (is_step(x) == 0).all()


@pytest.mark.parametrize(
    ("family", "dtype", "mode"),
    [
        ("llama", torch.bfloat16, None),
        ("llama", torch.bfloat16, "reduce-overhead"),
        ("llama", torch.float32, None),
        ("llama", torch.float64, None),
        ("qwen3", torch.bfloat16, None),
        ("cohere", torch.bfloat16, None),
    ],
)
@pytest.mark.usefixtures("quiet_transformers")
def test_compiled_decoding(cuda: str, dynamo: Any, family: str, dtype: torch.dtype, mode: str | None) -> None:
    model = mrrope.patch(tiny_model(family).to(cuda, dtype), "mrrope_pro", **PATCH)
    ids, rows = tokens(2, 12).to(cuda), []
    compiled = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    for forward in (model, compiled):
        cache = StaticCache(model.config, max_cache_len=16)
        with torch.no_grad():
            model(input_ids=ids[:, :8], past_key_values=cache)
            steps = [ids[:, place : place + 1] for place in range(8, 12)]
            rows.append(torch.cat([forward(input_ids=step, past_key_values=cache).logits.clone() for step in steps], 1))
    assert_same(*rows)
