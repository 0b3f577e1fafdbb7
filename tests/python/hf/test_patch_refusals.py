"""Models and tables that are refused or not fused, and a model with positions of two axes that is."""

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from model_tolerance import relative, tolerance
from tiny_models import TINY_SIZES, tiny_config, tokens
from transformers import AutoModel, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def tiny_base_model(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config(CONFIG_MAPPING[model_type](), {})).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)  # scales initialized to zero would hide the effect of RoPE
    return model


@pytest.mark.parametrize("scale", [2.0, "auto"])
def test_a_model_on_the_meta_device(scale: float | str) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINY_SIZES))
    with pytest.raises(ValueError, match=r"model must have its weights: LlamaRotaryEmbedding\.inv_freq is on the meta"):
        mrrope.patch(model, "mrrope_pro", scale=scale)


@pytest.mark.parametrize("scale", [2.0, "auto"])
def test_a_rotary_embedding_without_its_sections(scale: float | str) -> None:
    model = tiny_base_model("hunyuan_vl")
    with pytest.raises(ValueError, match=r"HunYuanVLRotaryEmbedding with rope_parameters .* does not"):
        mrrope.patch(model, "mrrope_pro", scale=scale)


def test_components_of_a_pair_at_different_positions() -> None:
    """HunYuan-VL's four sections of components are no rotation: the model's own code keeps the table."""
    config = tiny_config(CONFIG_MAPPING["hunyuan_vl"](), {})
    config.text_config.rope_parameters["mrope_section"] = [2, 2, 2, 2]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    positions = torch.stack([torch.arange(16) // (row + 1) for row in range(4)])[:, None].expand(4, 2, 16)

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return model(tokens(2, 16), position_ids=positions).logits

    plain = logits()
    reason = "two components of a pair turn by different positions, which is no rotation"
    with pytest.raises(ValueError, match=f"scale must be a number for HunYuanVL.*: its {reason}"):
        mrrope.patch(model, "mrrope_pro", scale="auto")
    assert torch.equal(logits(), plain)
    with pytest.warns(UserWarning, match=f"the table but not the fused op: its {reason}"):
        mrrope.patch(model, "mrrope_pro", scale=4.0)
    assert relative(logits(), plain) > 1e-3
    assert torch.equal((mrrope.unpatch(model), logits())[1], plain)


@pytest.mark.parametrize(("scale", "in_list"), [(1.0, False), ("auto", False), ("auto", True)])
def test_axis_tables(scale: float | str, in_list: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY_SIZES))
    table = mrrope.frequency_table("rope", rotary_dim=16, base=1e4, original_max_position=64)
    tables = mrrope.AxisTables.of_sections(table, [4, 2, 2])
    with pytest.raises(TypeError, match=r"method must be .* which of a token's positions .* got AxisTables\(3 axes"):
        mrrope.patch(model, [tables] if in_list else tables, scale=scale)
    assert not mrrope.is_patched(model)


def test_neomme_has_two_positions_a_token() -> None:
    model, reference = (tiny_base_model("neomme") for _ in range(2))
    positions = torch.stack([torch.arange(16) // 4, torch.arange(16) % 4])[:, None].expand(2, 2, 16)

    @torch.no_grad()
    def states(of: PreTrainedModel) -> torch.Tensor:
        return of(tokens(2, 16), position_ids=positions).last_hidden_state

    plain = states(model)
    own = reference.rotary_emb.full_attention_inv_freq
    table = mrrope.frequency_table(
        "mrrope_pro", rotary_dim=2 * own.numel(), base=1e6, original_max_position=64, scale=4.0
    )
    own.copy_(table.inv_freq)
    reference.rotary_emb.full_attention_attention_scaling = table.attention_factor
    want = states(reference)
    got = states(mrrope.patch(model, "mrrope_pro", scale=4.0))
    assert relative(want, plain) > 100 * tolerance(reference, states)
    assert relative(got, want) < tolerance(reference, states)
    assert torch.equal(states(mrrope.unpatch(model)), plain)
    with pytest.raises(ValueError, match="scale must be a number for NeoMMEModel"):
        mrrope.patch(model, "mrrope_pro", scale="auto")
    assert torch.equal(states(model), plain)
