"""Tables per layer and key head that are being learned."""

from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from head_table_models import FAMILIES, ROUNDING, Family, is_local, rotaries_of, set_for
from model_tolerance import relative
from patched_models import logits
from tiny_models import tiny_model, tokens

pytestmark = pytest.mark.usefixtures("rope_types", "no_other_patched_models")


# --- tables being learned


def learned(tables: Any, key_heads: int = 2) -> torch.Tensor:
    """Return tables as a float64 tensor of radians per position and attention factor."""
    heads = [tables] * key_heads if isinstance(tables, mrrope.FrequencyTable) else tables
    return torch.tensor([[*table.inv_freq, table.attention_factor] for table in heads], dtype=torch.float64)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere", "gemma3_text", "llama4_text", "gemma4_text"])
def test_learned_tables_rotate_as_ready_ones(name: str) -> None:
    family = FAMILIES[name]
    model = tiny_model(name, dtype=family.dtype)
    tables, start = set_for(model, family.key_heads), set_for(model, family.key_heads, seed=1)
    want = logits(mrrope.patch(model, tables))
    mrrope.patch(model, start)
    (rotary,) = rotaries_of(model)
    by_layer = torch.stack([learned(entry) for entry in tables]).requires_grad_()
    rotary.learned = {"full_attention": by_layer, None: by_layer}
    assert relative(logits(model), want) < ROUNDING
    model(input_ids=tokens(2, 24)).logits.square().sum().backward()
    is_used = torch.tensor([not is_local(model, i) and i not in dict(family.keys_of) for i in range(len(tables))])
    if name == "llama4_text":
        is_used = torch.tensor([bool(layer) for layer in model.config.no_rope_layers])
    assert (by_layer.grad.abs().amax((1, 2)) > 0).equal(is_used)
    rotary.learned = None
    assert relative(logits(model), logits(mrrope.patch(model, start))) == 0


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere", "gemma3_text", "deepseek_v2", "deepseek_v3", "falcon"])
def test_learned_query_factors_scale_as_ready_ones(name: str) -> None:
    """DeepSeek-V2 passes positions and tables in one tensor, with as many rows as the factors take."""
    family = FAMILIES.get(name, Family(key_heads=1, dtype=torch.float32))
    model = tiny_model(name, dtype=family.dtype)
    without = set_for(model, family.key_heads)
    heads = model.config.num_attention_heads
    factors = 0.5 + torch.rand(len(without), heads, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tables = mrrope.TableSet(map(mrrope.HeadTables, without, factors.tolist()))
    plain = logits(mrrope.patch(model, without))
    want = logits(mrrope.patch(model, tables))
    mrrope.patch(model, set_for(model, family.key_heads, seed=1))
    (rotary,) = rotaries_of(model)
    by_layer = torch.stack([learned(entry, family.key_heads) for entry in without])
    rotary.learned = {"full_attention": by_layer, None: by_layer}
    rotary.learned_query_factors = factors.requires_grad_()
    assert relative(logits(model), want) < ROUNDING
    assert relative(plain, want) > 100 * ROUNDING
    model(input_ids=tokens(2, 24)).logits.square().sum().backward()
    is_used = torch.tensor([not is_local(model, i) for i in range(len(tables))])
    assert (factors.grad != 0).equal(is_used[:, None].expand_as(factors))


def test_too_few_learned_query_factors_show() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    mrrope.patch(model, set_for(model, 2))
    (rotary,) = rotaries_of(model)
    rotary.learned = {None: torch.stack([learned(entry) for entry in set_for(model, 2)])}
    rotary.learned_query_factors = torch.ones(2, 3, dtype=torch.float64)
    assert logits(model).isnan().any()


def test_gradients_of_learned_tables() -> None:
    """Against central differences of the patched model itself, with packed tables."""
    model = tiny_model("llama", dtype=torch.float64)
    tables = set_for(model, 2)
    mrrope.patch(model, tables, fuse_norms=False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    (rotary,) = rotaries_of(model)
    values = torch.stack([learned(entry) for entry in tables]).requires_grad_()
    weights = torch.randn(2, 24, model.config.vocab_size, generator=torch.Generator().manual_seed(0)).double()

    def loss(values: torch.Tensor) -> torch.Tensor:
        rotary.learned = {None: values}
        return (model(input_ids=tokens(2, 24)).logits * weights).sum()

    (gradient,) = torch.autograd.grad(loss(values), values)
    step = 1e-3  # float32 norms in the model: smaller steps drown in their rounding
    with torch.no_grad():
        for index in [(0, 0, 0), (0, 1, 3), (1, 0, 7), (1, 1, 2), (1, 0, 8)]:
            moved = values.detach().clone()
            moved[index] += step
            ahead = loss(moved)
            moved[index] -= 2 * step
            slope = (ahead - loss(moved)) / (2 * step)
            assert abs(float(slope - gradient[index])) < 2e-2 * float(gradient.abs().max())


def test_learned_tables_for_all_layers_need_no_set() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    tables = set_for(model, 2)[0]
    want = logits(mrrope.patch(model, tables))
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    (rotary,) = rotaries_of(model)
    rotary.learned = {None: learned(tables)}
    assert relative(logits(model), want) < ROUNDING
    rotary.learned = {None: learned(tables).expand(2, -1, -1)}
    with pytest.raises(ValueError, match="a table of 2 layers must pass an attention module that knows its layer"):
        logits(model)
