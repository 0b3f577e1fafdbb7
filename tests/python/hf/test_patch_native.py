"""patch extends the model's own frequencies and its own length, in its text model alone."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch

import mrrope
from mrrope.hf import rope_config
from mrrope.hf.rotary_embedding import TableRotaryEmbedding
from mrrope.hf.swapped_table import SwappedTable

pytest.importorskip("transformers")

import tiny_models
import transformers
from model_tolerance import relative, tolerance
from patched_models import UNFUSABLE, model_named
from tiny_models import LENGTH, causal_lm_families, inputs, random_model, tiny_config_of, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_transformers", "rope_types")]

TRAINED = LENGTH // 4
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TRAINED}
RISING = [1.0, 1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 4.0]
# Settings of released models, and of users' configurations, beside the defaults of each family.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3 linear": (
        "gemma3_text",
        {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "hunyuan alpha": (
        "hunyuan_v1_dense",
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0},
    ),
    "gpt_oss untruncated": (
        "gpt_oss",
        YARN | {"rope_theta": 1.5e5, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "llama 3.1": (
        "llama",
        YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "llama 3.2": (
        "llama",
        YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 32.0},
    ),
    "qwen3 yarn": ("qwen3", YARN),
    "vicuna linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "longrope": (
        "llama",
        YARN | {"rope_type": "longrope", "short_factor": [1.0] * 4 + [1.1] * 4, "long_factor": RISING},
    ),
    "deepseek mscale": ("deepseek_v3", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek half mscale": ("deepseek_v2", YARN | {"mscale": 0.707, "mscale_all_dim": 0.3}),
    "mrrope": ("llama", YARN | {"rope_type": "mrrope_pro"}),
    "qwen3.5 dynamic": (
        "qwen3_5_text",
        {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 4.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    ),
}
UNSUPPORTED = {"codegen", "gptj", "roformer"}  # no rotary embedding to patch
CASES = [*(family for family in causal_lm_families() if family not in UNSUPPORTED), *SETTINGS]


def model_of(case: str) -> Any:
    """A tiny model of a family with its default RoPE, or of one of the settings."""
    family, rope = SETTINGS.get(case, (case, None))
    config = tiny_config_of(family)
    if rope is not None:
        config.get_text_config().rope_parameters = copy.deepcopy(rope)
    return random_model(config)


@torch.no_grad()
def logits(model: Any, length: int = 40) -> torch.Tensor:
    return model(**inputs(model, tokens(2, length))).logits


def settings_of(model: Any) -> rope_config.RopeSettings:
    return rope_config.global_settings(model)


def table_in(model: Any) -> mrrope.FrequencyTable:
    """The table of the global layers of a patched model."""
    swaps = (swap.tables.by_layer_type for module in model.modules() if (swap := SwappedTable().state_of(module)))
    fused = (module.tables for module in model.modules() if isinstance(module, TableRotaryEmbedding))
    tables = (item for by_layer in (*fused, *swaps) for item in by_layer.items())
    return next(of_layers[-1] for layer_type, of_layers in tables if not rope_config.is_local(layer_type))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*gets the table but not the fused op", "ignore:.*keeps its own tables")
def test_what_extends_nothing_changes_nothing(case: str) -> None:
    model = model_of(case)
    lengths = (TRAINED - 4, 40)  # within the length before an extension, and past it
    before = [logits(model, length) for length in lengths]
    allowed = tolerance(model, logits)
    for method, options in (("rope", {}), ("mrrope_pro", {"scale": 1.0}), ("rope", {"local_layers": True})):
        with mrrope.patched(model, method, **options):
            for length, want in zip(lengths, before, strict=True):
                assert relative(logits(model, length), want) < allowed, (method, options, length)
    assert all(torch.equal(logits(model, length), want) for length, want in zip(lengths, before, strict=True))


READ = {  # the length that each reads without a patch
    "gemma3 linear": LENGTH,
    "hunyuan alpha": LENGTH,
    "gpt_oss untruncated": LENGTH,
    "llama 3.1": LENGTH,
    "llama 3.2": LENGTH,
    "qwen3 yarn": LENGTH,
    "vicuna linear": LENGTH,
    "llama dynamic": 4 * LENGTH,
    "longrope": LENGTH,
    "deepseek mscale": LENGTH,
    "mrrope": LENGTH,
}


@pytest.mark.parametrize("case", READ)
@pytest.mark.filterwarnings("ignore:.*is extended by its configuration already")
def test_scale_counts_from_what_the_model_reads(case: str) -> None:
    """pi slows every frequency that the module has by the scale, and nothing else."""
    model = model_of(case)
    rotary = next(rope_config.rotary_embeddings(model))
    layer_type = next(kind for kind in rope_config.layer_types(rotary) if not rope_config.is_local(kind))
    extra = {} if layer_type is None else {"layer_type": layer_type}
    rotary(torch.zeros(1, 1, 8), torch.tensor([[READ[case] - 1]]), **extra)  # dynamic types take their frequencies
    own = getattr(rotary, rope_config.attribute(layer_type, "inv_freq")).double()
    factor = getattr(rotary, rope_config.attribute(layer_type, "attention_scaling"), 1.0)
    table = table_in(mrrope.patch(model, "pi", scale=4.0))
    assert (table.original_max_position, table.scale) == (READ[case], 4.0)
    assert (table.inv_freq * 4.0 / own - 1).abs().max() < 2e-6  # float32 frequencies, powers of a large base
    assert table.attention_factor == pytest.approx(factor)


def ernie_vl() -> Any:
    """Its three sections of pairs need heads of 128."""
    text = {"head_dim": 128, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tiny_models.tiny_config(transformers.Ernie4_5_VLMoeConfig(), {"text_config": text})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.Ernie4_5_VLMoeForConditionalGeneration(config).eval()


@pytest.mark.parametrize("family", ["ernie4_5_vl_moe", "cohere_compass_text"])
@pytest.mark.filterwarnings("error:.*gets the table but not the fused op")
def test_frequencies_in_another_order(family: str) -> None:
    """Each pair is scaled as plain RoPE's pair of that frequency."""
    model = ernie_vl() if family == "ernie4_5_vl_moe" else model_of(family)
    before, allowed = logits(model), tolerance(model, logits)
    with mrrope.patched(model, "rope"):
        assert relative(logits(model), before) < allowed
    own = settings_of(model)
    rotary = next(rope_config.rotary_embeddings(model))
    layer_type = next(kind for kind in rope_config.layer_types(rotary) if not rope_config.is_local(kind))
    frequencies = getattr(rotary, rope_config.attribute(layer_type, "inv_freq")).double()
    assert not (frequencies.diff() <= 0).all(), "in the usual order nothing is shown"
    plain = mrrope.frequency_table(
        "mrrope_pro", rotary_dim=own.rotary_dim, base=own.base, original_max_position=LENGTH, scale=4.0
    )
    order = frequencies.argsort(descending=True)
    found = table_in(mrrope.patch(model, "mrrope_pro", scale=4.0))
    assert found.bounds == plain.bounds
    torch.testing.assert_close(found.inv_freq[order], plain.inv_freq, rtol=1e-14, atol=0)


def test_bounds_count_revolutions_over_the_length_that_the_model_reads() -> None:
    table = table_in(mrrope.patch(model_of("llama 3.1"), "mrrope_pro", scale=4.0, alpha=1.0, beta=4.0))
    own = settings_of(model_of("llama 3.1"))
    turned = LENGTH * own.table.inv_freq / (2 * torch.pi)
    low, high = table.bounds
    assert turned[low] >= 4.0 > turned[low + 1]
    assert turned[high] <= 1.0 < turned[high - 1]


@pytest.mark.parametrize("case", ["llama 3.1", "gemma3 linear"])
def test_trained_extensions_are_not_warned_of(case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(model_of(case), "mrrope_pro", scale=2.0)


@pytest.mark.parametrize("case", ["qwen3 yarn", "llama dynamic", "mrrope"])
@pytest.mark.parametrize("scale", [2.0, "auto"])
def test_extensions_that_need_no_training_are_named(case: str, scale: Any) -> None:
    if (case, scale) == ("llama dynamic", "auto"):
        pytest.skip("no scale follows a table that changes with the length: test_auto_refuses_tables_that_change")
    model = model_of(case)
    trained = LENGTH if case == "llama dynamic" else TRAINED
    message = rf"extended by its configuration already.* the {READ[case]} tokens .*original_max_position={trained} "
    with pytest.warns(UserWarning, match=message):
        mrrope.patch(model, "mrrope_pro", scale=scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(model, "mrrope_pro", scale=scale, original_max_position=trained)


@pytest.mark.filterwarnings("ignore:.*gets the table but not the fused op", "ignore:.*is extended by its configuration")
def test_patching_leaves_what_a_dynamic_type_has_grown_to() -> None:
    model = model_of("llama dynamic")
    rotary = model.model.rotary_emb
    logits(model, LENGTH + 8)
    kept = rotary.inv_freq.clone(), rotary.max_seq_len_cached
    for method, scale in (("rope", 1.0), ("mrrope_pro", 2.0)):
        with mrrope.patched(model, method, scale=scale):
            pass
        assert torch.equal(rotary.inv_freq, kept[0])
        assert rotary.max_seq_len_cached == kept[1]


@pytest.mark.filterwarnings("ignore:.*is extended by its configuration already")
def test_a_table_does_not_depend_on_what_was_read_before() -> None:
    before, after = model_of("llama dynamic"), model_of("llama dynamic")
    logits(after, 5 * LENGTH)
    assert table_in(mrrope.patch(after, "pi", scale=2.0)) == table_in(mrrope.patch(before, "pi", scale=2.0))


@pytest.mark.parametrize("case", ["llama dynamic", "longrope"])
@pytest.mark.filterwarnings("ignore:.*is extended by its configuration already")
def test_auto_refuses_tables_that_change(case: str) -> None:
    with pytest.raises(ValueError, match="its own table changes with the length"):
        mrrope.patch(model_of(case), "mrrope_pro", scale="auto")


@pytest.mark.parametrize("case", ["qwen3 yarn", "llama 3.1", "longrope", "deepseek mscale"])
def test_starting_over_is_plain_rope(case: str) -> None:
    own = settings_of(model_of(case))
    plain = {"rotary_dim": own.rotary_dim, "base": own.base, "original_max_position": TRAINED}
    for told in ({"original_max_position": TRAINED}, {"base": own.base}):
        table = table_in(mrrope.patch(model_of(case), "mrrope_pro", scale=8.0, attention_factor=1.0, **told))
        assert table == mrrope.frequency_table("mrrope_pro", **plain, scale=8.0, attention_factor=1.0)


@pytest.mark.parametrize("case", ["deepseek mscale", "deepseek half mscale", "qwen3 yarn"])
def test_a_temperature_that_the_attention_holds_counts_once(case: str) -> None:
    """Started over with its own factor, yarn is the model's own table."""
    model = model_of(case)
    before = logits(model)
    options = {"attention_factor": settings_of(model).table.attention_factor} if case == "deepseek half mscale" else {}
    allowed = tolerance(model, logits)
    mrrope.patch(model, "yarn", scale=4.0, original_max_position=TRAINED, **options)
    assert relative(logits(model), before) < allowed


HOLDING = ["axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "longcat_flash"]
HOLDING += ["minicpm3", "youtu"]


@pytest.mark.parametrize("family", HOLDING)
def test_every_attention_that_holds_a_temperature(family: str) -> None:
    config = tiny_config_of(family)
    old = config.get_text_config().rope_parameters
    new = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    kept = {key: old[key] for key in ("partial_rotary_factor", "llama_4_scaling_beta") if key in old}
    config.get_text_config().rope_parameters = new | kept
    model = random_model(config)
    before, allowed = logits(model), tolerance(model, logits)
    mrrope.patch(model, "yarn", scale=4.0, original_max_position=TRAINED)
    assert relative(logits(model), before) < allowed
    twice = mrrope.patch(model, "yarn", scale=4.0, original_max_position=TRAINED, attention_factor=1.138629436111989)
    assert relative(logits(twice), before) > 100 * allowed, "a temperature that counts twice must matter"


# rope_parameters of released configurations; all rotate 64 components, from base 10000 or 50000.
RELEASED = {
    "DeepSeek-V2": ("deepseek_v2", {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "DeepSeek-V3": ("deepseek_v3", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "Kimi-K2": ("deepseek_v3", {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 5e4}),
    "two scales": ("deepseek_v2", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}),
}


@pytest.mark.parametrize("name", RELEASED)
def test_mscales_of_latent_attention(name: str) -> None:
    """Cos/sin get mscale(factor, mscale) / mscale(factor, mscale_all_dim), logits mscale(factor, mscale_all_dim)^2."""
    family, parameters = RELEASED[name]
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 4096} | parameters
    config = tiny_config_of(family)
    config.head_dim = config.qk_rope_head_dim = 64
    config.qk_nope_head_dim = 128
    config.max_position_embeddings = int(4096 * parameters["factor"])
    config.rope_parameters = parameters
    model = random_model(config)
    own = settings_of(model)
    scales = {key: 0.1 * parameters[key] * math.log(parameters["factor"]) + 1.0 for key in ("mscale", "mscale_all_dim")}
    assert own.rotary_dim == 64
    assert own.table.attention_factor == pytest.approx(scales["mscale"] / scales["mscale_all_dim"], rel=1e-12)
    assert rope_config.held_attention_factor(model) == pytest.approx(scales["mscale_all_dim"], rel=1e-12)
    rotary = next(rope_config.rotary_embeddings(model))
    assert own.table.attention_factor == rotary.attention_scaling
    torch.testing.assert_close(own.table.inv_freq.float(), rotary.inv_freq.cpu(), rtol=1e-6, atol=0.0)
    attention = next(module for module in model.modules() if hasattr(module, "qk_head_dim"))
    assert attention.scaling == pytest.approx(192**-0.5 * scales["mscale_all_dim"] ** 2, rel=1e-12)


def test_a_ready_table_that_adds_a_temperature_is_named() -> None:
    model = model_of("deepseek mscale")
    own = settings_of(model)
    plain = {"rotary_dim": own.rotary_dim, "base": own.base, "original_max_position": TRAINED, "scale": 4.0}
    with pytest.warns(UserWarning, match=r"holds a temperature already.*attention_factor=1 would count it once"):
        mrrope.patch(model, mrrope.frequency_table("yarn", **plain))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.patch(model, mrrope.frequency_table("yarn", **plain, attention_factor=1.0))


@pytest.mark.parametrize("head_dim", [24, 40, 72, 192])
def test_without_an_extension_no_temperature_is_held(head_dim: int) -> None:
    """head_dim ** -0.5 * sqrt(head_dim) may be off 1 by a rounding."""
    config = tiny_config_of("deepseek_v3")
    config.qk_rope_head_dim, config.qk_nope_head_dim = 16, head_dim - 16
    assert rope_config.held_attention_factor(random_model(config)) == 1.0


def test_a_ready_table_that_reads_less_is_named() -> None:
    model = model_of("llama 3.1")
    plain = {"rotary_dim": 16, "base": 1e4, "original_max_position": TRAINED, "scale": 2.0}
    with pytest.warns(UserWarning, match="reads 32 tokens, and the unpatched model 64"):
        mrrope.patch(model, mrrope.frequency_table("yarn", **plain))


def test_a_held_temperature_is_extended() -> None:
    model = model_of("deepseek mscale")
    with pytest.warns(UserWarning, match="extended by its configuration"):
        table = table_in(mrrope.patch(model, "yarn", scale=2.0))
    assert table.attention_factor == pytest.approx(0.1 * torch.tensor(2.0).log() + 1)


@pytest.mark.parametrize("case", ["llama", "llama 3.1", "gemma3 linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_does_not_round_the_frequencies(case: str, dtype: torch.dtype) -> None:
    """A model's .to(bfloat16) rounds its rotary embedding's buffers, too."""
    before, cast = model_of(case), model_of(case).to(dtype)
    tables = [table_in(mrrope.patch(model, "mrrope_pro", scale=4.0)) for model in (before, cast)]
    assert tables[0] == tables[1]


@torch.no_grad()
def test_auto_extends_past_a_trained_factor() -> None:
    """Gemma 3's linear factor counts towards the length that it reads without a patch."""
    model = model_of("gemma3 linear")
    stock, at_twice, allowed = logits(model), logits(model, 2 * LENGTH), tolerance(model, logits)
    mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=4.0)
    assert relative(logits(model), stock) < allowed
    by_two = logits(mrrope.patch(model_of("gemma3 linear"), "mrrope_pro", scale=2.0), 2 * LENGTH)
    assert relative(logits(model, 2 * LENGTH), by_two) < allowed
    assert relative(by_two, at_twice) > 1e-3


def patched_in(model: Any) -> list[str]:
    """The paths of the rotary embeddings that were extended."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, TableRotaryEmbedding) or SwappedTable().state_of(module)
    ]


def composite(model_type: str, name: str) -> Any:
    """A tiny random model of a class outside AutoModelForCausalLM."""
    config = tiny_config_of(model_type)
    for codec in ("codec_config", "audio_encoder_config"):
        if hasattr(config, codec):  # sizes that fit its convolutions
            setattr(
                config,
                codec,
                transformers.MimiConfig(num_hidden_layers=1, hidden_size=64, num_filters=4, upsample_groups=64),
            )
    if model_type == "qwen2_5_omni":
        for part in (config.thinker_config.text_config, config.talker_config):
            part.rope_parameters["mrope_section"] = [2, 3, 3]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, name)(config).eval()


COMPOSITES = {
    "glmasr": ("GlmAsrForConditionalGeneration", "language_model", "audio_tower"),
    "voxtral_realtime": ("VoxtralRealtimeForConditionalGeneration", "language_model", "audio_tower"),
    "csm": ("CsmForConditionalGeneration", "backbone_model", "codec_model"),
    "moshi": ("MoshiForConditionalGeneration", "decoder", "audio_encoder"),
    "pi0": ("PI0ForConditionalGeneration", "vlm", "dit"),
    "qwen2_5_omni": ("Qwen2_5OmniForConditionalGeneration", "thinker", "talker"),
}


@pytest.mark.parametrize("model_type", COMPOSITES)
@pytest.mark.filterwarnings("ignore:.*gets the table but not the fused op", "ignore:.*keeps its own tables")
def test_the_text_model_alone_is_extended(model_type: str) -> None:
    name, text, other = COMPOSITES[model_type]
    model = composite(model_type, name)
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    patched = patched_in(model)
    assert patched
    assert all(text in path.split(".") for path in patched), patched
    path = next(path for path, _ in model.named_modules() if path.split(".")[-1] == other)
    part = model.get_submodule(path)
    mrrope.patch(part, "mrrope_pro", scale=4.0, local_layers=True)
    assert patched_in(part)
    mrrope.unpatch(model)
    assert not mrrope.is_patched(model)


def test_the_audio_encoder_of_an_encoder_decoder_is_left_alone() -> None:
    mrrope.patch(model := composite("moonshine", "MoonshineForConditionalGeneration"), "mrrope_pro", scale=4.0)
    assert patched_in(model) == ["model.decoder.rotary_emb"]


def test_every_language_model_in_a_module_is_extended() -> None:
    both = torch.nn.ModuleDict({"one": model_of("qwen3"), "other": model_of("llama")})
    assert len(patched_in(mrrope.patch(both, "mrrope_pro", scale=4.0))) == 2


def test_a_text_model_of_several_rotary_embeddings_is_extended_whole() -> None:
    model = model_of("granite_swa")
    mrrope.patch(model, "mrrope_pro", scale=4.0)
    assert len(patched_in(model)) == 3


@pytest.mark.parametrize("family", ["llama", UNFUSABLE])
@pytest.mark.filterwarnings("ignore:.*gets the table but not the fused op")
def test_patching_again_extends_the_model_as_it_came(family: str) -> None:
    """Also where the table is in the model's own rotary embedding, which cannot be fused."""
    once, twice = (mrrope.patch(model_named(family), "mrrope_pro", scale=4.0) for _ in range(2))
    mrrope.patch(twice, "mrrope_pro", scale=4.0)
    assert table_in(twice) == table_in(once)
    assert torch.equal(logits(twice), logits(once))


def test_is_patched_takes_models_alone() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        mrrope.is_patched("llama")
    model = model_of("llama")
    assert not mrrope.is_patched(model)
    assert mrrope.is_patched(mrrope.patch(model, "rope"))
    assert not mrrope.is_patched(mrrope.unpatch(model))
