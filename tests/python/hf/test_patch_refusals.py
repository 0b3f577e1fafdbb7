"""Models whose rotary embedding cannot be read, and one with positions of two axes that can."""

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from model_tolerance import relative, tolerance
from tiny_models import TINY_SIZES, tiny_config, tokens
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
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
