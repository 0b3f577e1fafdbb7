"""Models with several positions per token (M-RoPE): patched, they compute what their own code does with the table."""

import warnings

import pytest
import torch

import mrrope
from mrrope.hf import rope_config
from mrrope.hf.cos_sin_uses import cos_sin_uses
from mrrope.hf.pair_sources import pair_sources
from mrrope.hf.rotary_embedding import TableRotaryEmbedding

pytest.importorskip("transformers")

import transformers
from model_tolerance import relative, tolerance
from mrope_models import FAMILIES, mrope_model, positions_of
from patched_models import NEW, assert_same, assert_same_gradients, assert_same_text, decoded, generated, gradients
from tiny_models import tiny_config, tokens
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

SCALE = 4.0
WITH_IMAGE = torch.cat([positions_of([20, (4, 6), 40]), positions_of([8, (6, 4), 52])], dim=1)

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def fused(family, scale=SCALE, **options):
    """A patched model; a warning that it is not fused is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not the fused op")
        return mrrope.patch(mrope_model(family), "mrrope_pro", scale=scale, **options)


def in_own_code(family, patched):
    """The stock model with the frequencies of a patched one."""
    model = mrope_model(family)
    replacements = [module for module in patched.modules() if isinstance(module, TableRotaryEmbedding)]
    for rotary, replacement in zip(rope_config.rotary_embeddings(model), replacements, strict=True):
        for layer_type, (table,) in replacement.tables.items():
            getattr(rotary, rope_config.attribute(layer_type, "inv_freq")).copy_(table.inv_freq)
            setattr(rotary, rope_config.attribute(layer_type, "attention_scaling"), table.attention_factor)
    return model


@torch.no_grad()
def logits(model, **options):
    return model(**({"input_ids": tokens(2, WITH_IMAGE.shape[-1]), "position_ids": WITH_IMAGE} | options)).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_with_images(family):
    model = fused(family)
    reference = in_own_code(family, model)
    want = logits(reference)
    allowed = tolerance(reference, logits)
    assert relative(logits(model), want) < allowed
    assert relative(logits(mrope_model(family)), want) > 10 * allowed, "the table must matter"
    frames_alone = WITH_IMAGE[:1].expand(3, -1, -1)
    assert relative(logits(model, position_ids=frames_alone), want) > 10 * allowed, "rows must matter"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen4_exp_text", "ernie4_5_vl_moe"])
def test_decoding_generating_and_training(family):
    model = fused(family)
    reference = in_own_code(family, model)
    ids = tokens(2, 24)
    assert_same(decoded(model, ids, 13), decoded(reference, ids, 13))
    assert_same_text(generated(model, ids), generated(reference, ids))
    assert_same_gradients(gradients(model.train()), gradients(reference.train()))


def second_turn(model):
    """Generate twice with one cache. Return the whole text, and the logits of the second turn."""
    cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    text = tokens(2, 12)
    for _ in range(2):
        mask = torch.ones_like(text)  # else the pad token, which a random model may write, would count as padding
        answer = generated(model, text, attention_mask=mask, past_key_values=cache)
        text = torch.cat([answer.sequences, tokens(2, 5)], dim=1)
    return answer


@pytest.mark.parametrize("scale", [SCALE, "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_with_a_kept_cache(family, scale):
    """transformers passes one row of positions then, ``[1, batch, tokens]``, for all axes."""
    model = fused(family, scale=scale)
    reference = mrope_model(family) if scale == "auto" else in_own_code(family, model)
    got = second_turn(model)
    with torch.no_grad():
        want = reference(got.sequences).logits[:, -NEW["max_new_tokens"] - 1 : -1]
    assert_same(torch.stack(got.logits, dim=1), want)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5_text", "qwen4_exp_text"])
def test_fractions_of_a_position(family):
    """Qwen3-Omni gives the frames of a video such positions."""
    model = fused(family)
    reference = in_own_code(family, model)
    positions = WITH_IMAGE * 0.4

    def run(of):
        return logits(of, position_ids=positions)

    want = run(reference)
    assert relative(run(model), want) < tolerance(reference, run)
    assert relative(logits(reference, position_ids=positions.long()), want) > 1e-2, "fractions must matter"


def test_fractions_that_qwen3_omni_gives_a_video():
    family = "qwen3_omni_moe_thinker"
    config = tiny_config(CONFIG_MAPPING[family](), {})
    config.text_config.rope_parameters["mrope_section"] = [4, 2, 2]
    torch.manual_seed(0)
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()
    config.vision_start_token_id = 1
    ids = tokens(1, 30)
    ids[0, 9], ids[0, 10:18] = config.vision_start_token_id, config.video_token_id
    positions, _ = model.get_rope_index(
        ids, None, torch.tensor([[2, 4, 4]]), torch.ones_like(ids), False, None, torch.tensor([0.7])
    )
    assert positions.frac().any()

    @torch.no_grad()
    def states(of):
        return of.model(inputs_embeds=of.get_input_embeddings()(ids), position_ids=positions).last_hidden_state

    plain = states(model)
    allowed = tolerance(model, states)
    mrrope.patch(model, "rope")  # keeps the model's own frequencies
    assert relative(states(model), plain) < allowed
    mrrope.patch(model, "mrrope_pro", scale="auto")
    with pytest.raises(ValueError, match=r"position_ids must be whole numbers where the scale follows .*, got 27.5"):
        states(model)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen4_exp_text"])
def test_norms_of_q_and_k(family):
    """By 1 + weight, before a rotation of interleaved sections; of Qwen3.5, of a part of the head."""
    model, unfused = fused(family, fuse_norms=True), fused(family)
    run = logits
    assert relative(run(model), run(unfused)) < tolerance(unfused, run)


def test_pairs_in_an_order_of_their_own():
    rotary = next(rope_config.rotary_embeddings(mrope_model("ernie4_5_vl_moe")))
    sources = pair_sources(rotary, None, 8)
    assert sources.are_rotations
    assert sources.rows == 3
    assert sources.row.tolist() == [1, 2, 1, 2, 1, 2, 0, 0]
    assert (rotary.inv_freq[sources.frequency].diff() < 0).all(), "pairs are in the usual order, frequencies are not"


class TestSelectedTokens:
    """Attention that selects tokens of cosines and sines is fused; one that computes with them is not."""

    def test_of_a_model(self):
        model = mrope_model("qwen4_exp_text")
        uses = [use for kind in {type(module) for module in model.model.layers.modules()} for use in cos_sin_uses(kind)]
        assert uses
        assert all(use.selects_tokens for use in uses)
        rotaries = [module for module in fused("qwen4_exp_text").modules() if isinstance(module, TableRotaryEmbedding)]
        assert [rotary.by_token for rotary in rotaries] == [True]
        assert not any(rotary.by_token for rotary in fused("qwen3_5_text").modules() if hasattr(rotary, "by_token"))

    @pytest.mark.parametrize(
        ("kind", "selects_tokens"),
        [("Slices", True), ("Gathers", True), ("Halves", False), ("Multiplies", False), ("Keeps", False)],
    )
    def test_by_source(self, kind, selects_tokens):
        uses = cos_sin_uses(globals()[kind])
        assert uses
        assert all(use.selects_tokens for use in uses) == selects_tokens

    def test_head_tables_are_refused(self):
        model = mrope_model("qwen4_exp_text")
        table = mrrope.frequency_table("mrrope_pro", rotary_dim=16, base=1e4, original_max_position=64, scale=4.0)
        with pytest.raises(ValueError, match=r"method must be one table for all heads .* selects tokens"):
            mrrope.patch(model, mrrope.HeadTables([table] * model.config.num_key_value_heads))


def apply_rotary_pos_emb(x, cos, sin):
    return x


class Slices:
    def forward(self, x, cos, sin):
        past_cos, past_sin = cos[:, -4:, :], sin[:, -4:, :]
        return apply_rotary_pos_emb(x, past_cos, past_sin)


class Gathers:
    def forward(self, x, cos, sin, i, starts):
        return apply_rotary_pos_emb(x, cos=cos[i].index_select(0, starts), sin=sin[i].index_select(0, starts))


class Halves:
    def forward(self, x, cos, sin):
        return apply_rotary_pos_emb(x, cos[..., :8], sin[..., :8])


class Multiplies:
    def forward(self, x, cos, sin):
        return x * cos[0] + x * sin[0]


class Keeps:
    def forward(self, x, cos, sin):
        first = cos[0]
        return x * first
