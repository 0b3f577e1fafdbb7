"""Phi-3 and its relatives drop their cache at a length that the configuration states; patched, they keep it."""

import copy
import warnings

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from model_tolerance import relative, tolerance
from patched_models import Snapshot
from tiny_models import LENGTH, random_model, tiny_config_of, tiny_model, tokens
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

FAMILIES = ("phi3", "phimoe", "phi4_multimodal")
PROMPT, NEW = LENGTH - 14, 40
PREPARE = "prepare_inputs_for_generation"

pytestmark = pytest.mark.usefixtures("quiet_transformers", "rope_types")


def config_of(family: str) -> PreTrainedConfig:
    config = tiny_config_of(family)
    config.original_max_position_embeddings = LENGTH
    return config


def assert_generates_as_one_forward(model: PreTrainedModel) -> None:
    """Compare the logits of every step of ``generate`` with those of one forward over the whole text."""
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    out = model.generate(tokens(1, PROMPT), **options, return_dict_in_generate=True, output_logits=True)

    @torch.no_grad()
    def of_one_forward(of: PreTrainedModel) -> torch.Tensor:
        return of(out.sequences, use_cache=False).logits[:, PROMPT - 1 : -1]

    got, want = torch.stack(out.logits, dim=1), of_one_forward(model)
    assert got.shape == want.shape
    assert relative(got, want) < tolerance(model, of_one_forward)


@pytest.mark.parametrize("scale", [4.0, "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generating_across_the_native_length(family, scale):
    model = random_model(config_of(family))
    before, config = Snapshot(model), copy.deepcopy(model.config.to_dict())
    mrrope.patch(model, "mrrope_pro", scale=scale)
    assert_generates_as_one_forward(model)
    assert model.config.to_dict() == config
    mrrope.unpatch(model)
    before.assert_untouched()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_that_is_patched_without_the_whole_warns(family):
    """The part cannot reach the whole, whose generation would be wrong."""
    model = random_model(config_of(family))
    said = rf"{type(model.base_model).__name__} is patched without {type(model).__name__}, which drops its cache"
    with pytest.warns(UserWarning, match=said):
        mrrope.patch(model.base_model, "mrrope_pro", scale=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(model, "mrrope_pro", scale=4.0)
        mrrope.patch(tiny_model("llama").base_model, "mrrope_pro", scale=4.0)
    assert_generates_as_one_forward(model)


def test_a_table_that_is_not_fused():
    model = random_model(config_of("phi3"))
    attention = type(model.model.layers[0].self_attn)

    class OwnCosines(attention):
        def forward(self, hidden_states, position_embeddings, *args, **kwargs):
            cos, sin = position_embeddings
            return super().forward(hidden_states, (cos * 1.0, sin * 1.0), *args, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnCosines
    with pytest.warns(UserWarning, match="not the fused op"):
        mrrope.patch(model, "mrrope_pro", scale=4.0)
    assert_generates_as_one_forward(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_configuration(family):
    config = config_of(family)
    exported = mrrope.export_config(config, "mrrope_pro", scale=4.0, engine="transformers-longrope")
    model = random_model(AutoConfig.for_model(**exported))
    assert not mrrope.is_patched(model)
    assert_generates_as_one_forward(model)


@pytest.mark.parametrize("family", ["phimoe"])  # the configurations of the others take longrope alone
def test_a_registered_rope_type(family):
    config = config_of(family)
    extension = {"rope_type": "mrrope_pro", "factor": 4.0, "original_max_position_embeddings": LENGTH}
    factor = mrrope.frequency_table(
        "mrrope_pro", rotary_dim=16, base=1e6, original_max_position=LENGTH, scale=4.0
    ).attention_factor
    parameters = {**config.rope_parameters, **extension, "short_mscale": factor, "long_mscale": factor}
    model = random_model(type(config)(**{**config.to_dict(), "rope_parameters": parameters}))
    assert not mrrope.is_patched(model)
    assert_generates_as_one_forward(model)
    mrrope.patch(model, "mrrope_uni", scale=2.0, original_max_position=LENGTH)
    mrrope.unpatch(model)
    assert_generates_as_one_forward(model)


def test_tables_in_the_configuration():
    """The model is patched part by part while it is built."""
    config = config_of("phimoe")
    table = mrrope.frequency_table("mrrope_pro", rotary_dim=16, base=1e6, original_max_position=LENGTH, scale=4.0)
    config.rope_parameters["rope_theta"] = 1e6
    tables = mrrope.HeadTables([table] * config.num_key_value_heads)
    exported = mrrope.export_config(config, tables, engine="transformers")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is patched without")
        model = random_model(AutoConfig.for_model(**exported))
    assert mrrope.is_patched(model)
    assert_generates_as_one_forward(model)


def test_factors_that_do_switch():
    """A model with long factors recomputes at the switch, so that its own code stays where its own tables do."""
    config = config_of("phi3")
    pairs = config.hidden_size // config.num_attention_heads // 2
    factors = {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    settings = {**config.to_dict(), "rope_parameters": parameters, "original_max_position_embeddings": 32}
    model = random_model(type(config)(**settings))
    with pytest.warns(UserWarning, match="changes with the length"):
        mrrope.patch(model, "rope")
    assert PREPARE not in vars(model)
    mrrope.patch(model, "mrrope_pro", scale=2.0)
    assert PREPARE in vars(model)
    assert_generates_as_one_forward(model)


def test_embeddings_as_a_prompt():
    model = random_model(config_of("phi3"))
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    ids = tokens(1, PROMPT)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)[:, PROMPT:]
    got = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **options)
    assert torch.equal(got, want)
