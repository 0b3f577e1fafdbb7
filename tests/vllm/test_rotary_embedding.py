"""The rope layer: against a float64 reference, through vLLM's factory, and through vLLM's compiler."""

import copy
import gc
import weakref

import compiled_models
import pytest
import torch
from rotary_reference import TOLERANCES, assert_rotated, rotated
from running_version import VERSION
from torch import nn
from vllm.compilation.counter import compilation_counter
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.model_loader.utils import initialize_model

from mrrope.hf.auto_scale.ladder import Ladder
from mrrope.serving.rope_layer import ServedRotaryEmbedding, served_layers
from mrrope.serving.rope_settings import merged
from mrrope.tables.frequency_table import frequency_table

BASE, LENGTH = 10_000.0, 128
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 24
PAIRING = {True: "halves", False: "interleaved"}
SECTIONS = [4, 2, 2]


def ladder_of(*scales: float, rotary_dim: int = 16) -> Ladder:
    tables = tuple(
        frequency_table("mrrope_pro", rotary_dim=rotary_dim, base=BASE, original_max_position=LENGTH, scale=scale)
        for scale in scales
    )
    return Ladder(tables, tuple(LENGTH * scale for scale in scales))


def layer_of(
    ladder: Ladder, head_size: int = HEAD_SIZE, is_neox_style: bool = True, **options
) -> ServedRotaryEmbedding:
    return ServedRotaryEmbedding(
        ladder, head_size=head_size, max_position=512, is_neox_style=is_neox_style, dtype=torch.bfloat16, **options
    )


def qkv_of(tokens: int, head_size: int = HEAD_SIZE, dtype: torch.dtype = torch.float32):
    """Return q, k and v as views of one tensor, as models have them."""
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * head_size, generator=generator).to(dtype)
    return qkv.split([HEADS * head_size, KV_HEADS * head_size, KV_HEADS * head_size], dim=-1)


def by_head(x: torch.Tensor, head_size: int = HEAD_SIZE) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1] // head_size, head_size)


def random_positions(*shape: int, below: int = 2**20) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_rows_rotated(actual, x, positions, row_of_pair, table, pairing: str = "halves") -> None:
    """Assert that every pair is rotated by its row of positions."""
    half = table.rotary_dim // 2
    expected = x.double()
    for pair, row in enumerate(row_of_pair):
        ends = [pair, pair + half] if pairing == "halves" else [2 * pair, 2 * pair + 1]
        expected[..., ends] = rotated(x, positions[row], table, "thd", pairing)[..., ends]
    tolerance = TOLERANCES[x.dtype]
    assert ((actual.double() - expected).abs() <= 10 * (tolerance.arithmetic + tolerance.rounding)).all()


# --- numbers ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("head_size", [16, HEAD_SIZE])
@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("is_3d", [True, False])
def test_rotates_views_of_one_tensor(dtype, is_neox_style, head_size, has_key, is_3d):
    ladder = ladder_of(4.0)
    layer = layer_of(ladder, head_size, is_neox_style)
    q, k, v = qkv_of(7, head_size, dtype)
    before = [x.clone() for x in (q, k, v)]
    positions = random_positions(7)
    given = (by_head(q, head_size), by_head(k, head_size)) if is_3d else (q, k)
    got = layer(positions, given[0], given[1] if has_key else None)
    assert got[0].shape == given[0].shape
    for x, y in zip(got[: 1 + has_key], before, strict=False):
        x = by_head(x.flatten(1), head_size)
        assert_rotated(x, by_head(y, head_size), positions, ladder.tables[0], "thd", PAIRING[is_neox_style])
    if not has_key:
        assert got[1] is None
        assert torch.equal(k, before[1])
    assert torch.equal(v, before[2])


def test_no_tokens():
    for layer in (layer_of(ladder_of(4.0)), layer_of(ladder_of(4.0), mrope_section=SECTIONS)):
        q, k, _ = qkv_of(0)
        for positions in [torch.zeros(0, dtype=torch.int64), torch.zeros(3, 0, dtype=torch.int64)][
            : 1 + bool(layer.mrope_section)
        ]:
            assert [x.shape for x in layer(positions, q, k)] == [q.shape, k.shape]


def test_every_token_has_its_table():
    ladder = ladder_of(1.0, 2.0, 4.0)
    layer = layer_of(ladder)
    layer.table_index = torch.tensor([2, 0, 1, 1, 0, 2, 2, 2], dtype=torch.int32)
    q, k, _ = qkv_of(5)
    before, positions = (q.clone(), k.clone()), random_positions(5)
    for x, y in zip(layer(positions, q, k), before, strict=True):
        for token, number in enumerate([2, 0, 1, 1, 0]):
            part = slice(token, token + 1)
            assert_rotated(by_head(x)[part], by_head(y)[part], positions[part], ladder.tables[number], "thd")


def test_several_tables_need_an_index():
    with pytest.raises(RuntimeError, match=r"table_index must be set before the first call of a layer with 2 tables"):
        layer_of(ladder_of(1.0, 2.0))(torch.arange(3), *qkv_of(3)[:2])


def test_offsets_are_refused():
    with pytest.raises(ValueError, match=r"offsets must be None, got Tensor"):
        layer_of(ladder_of(4.0))(torch.arange(3), *qkv_of(3)[:2], torch.zeros(3))


def test_pairs_may_change_after_construction():
    layer = layer_of(ladder_of(4.0))
    layer.is_neox_style = False  # as vLLM's glm.py does
    q, _, _ = qkv_of(3)
    before = q.clone()
    got, _ = layer(torch.arange(3), q)
    assert_rotated(by_head(got), by_head(before), torch.arange(3), layer.ladder.tables[0], "thd", "interleaved")


@pytest.mark.parametrize(
    ("is_interleaved", "row_of_pair"), [(False, [0, 0, 0, 0, 1, 1, 2, 2]), (True, [0, 1, 2, 0, 1, 2, 0, 0])]
)
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("is_auto", [False, True])
def test_rows_of_positions(is_interleaved, row_of_pair, is_neox_style, is_auto):
    ladder = ladder_of(*([1.0, 2.0, 4.0] if is_auto else [4.0]))
    options = {"mrope_section": SECTIONS, "mrope_interleaved": is_interleaved}
    layer = layer_of(ladder, is_neox_style=is_neox_style, **options)
    numbers = [2, 0, 1, 1, 0, 2] if is_auto else [0] * 6
    layer.table_index = torch.tensor(numbers, dtype=torch.int32)
    q, k, _ = qkv_of(6)
    before, positions = (q.clone(), k.clone()), random_positions(3, 9)[:, :6]
    for x, y in zip(layer(positions, q, k), before, strict=True):
        for token, number in enumerate(numbers):
            part = slice(token, token + 1)
            assert_rows_rotated(by_head(x)[part], by_head(y)[part], positions[:, part], row_of_pair,
                                ladder.tables[number], PAIRING[is_neox_style])  # fmt: skip


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rows_are_those_of_vllm(is_interleaved):
    ladder = ladder_of(1.0)
    options = {"mrope_section": SECTIONS, "mrope_interleaved": is_interleaved}
    layer = layer_of(ladder, **options)
    with set_current_vllm_config(VllmConfig()):
        theirs = MRotaryEmbedding(HEAD_SIZE, 16, 512, BASE, True, torch.float32, **options)
    positions = random_positions(3, 6, below=512)
    q, k, _ = qkv_of(6)
    expected = theirs.forward_native(positions, q.clone(), k.clone())
    for x, y in zip(layer(positions, q, k), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=5e-4)  # their angles are float32


@pytest.mark.parametrize("is_auto", [False, True])
def test_a_layer_with_rows_takes_positions_of_text(is_auto):
    ladder = ladder_of(*([1.0, 4.0] if is_auto else [4.0]))
    layer = layer_of(ladder, mrope_section=SECTIONS)
    layer.table_index = torch.ones(5, dtype=torch.int32)
    q, k, _ = qkv_of(5)
    before, positions = (q.clone(), k.clone()), random_positions(5)
    for x, y in zip(layer(positions, q, k), before, strict=True):
        assert_rotated(by_head(x), by_head(y), positions, ladder.tables[-1], "thd")


def test_sections_that_miss_pairs_are_refused():
    with pytest.raises(ValueError, match=r"mrope_section must have a sum of rotary_dim / 2, 8, got \[4, 2, 1\]"):
        layer_of(ladder_of(4.0), mrope_section=[4, 2, 1])


# --- cos_sin_cache ---


def test_cosines_for_kernels_of_models():
    table = ladder_of(4.0).tables[0]
    layer = layer_of(ladder_of(4.0))
    angles = torch.arange(512)[:, None].double() * table.inv_freq
    expected = torch.cat([angles.cos(), angles.sin()], dim=-1) * table.attention_factor
    assert torch.equal(layer.cos_sin_cache, expected.to(torch.bfloat16))
    assert layer.cos_sin_cache is layer.cos_sin_cache


def test_cosines_of_several_tables_are_refused():
    with pytest.raises(NotImplementedError, match=r'this layer has 2: .* factor must be a number .*, got "auto"'):
        layer_of(ladder_of(1.0, 2.0)).cos_sin_cache  # noqa: B018


# --- the module ---


def test_casts_and_state_dicts_leave_the_tables_alone():
    layer = layer_of(ladder_of(1.0, 2.0))
    before = layer.tables.clone()
    for cast in (nn.Module.half, nn.Module.bfloat16, lambda module: module.to(torch.float64)):
        assert torch.equal(cast(layer).tables, before)
    assert layer.state_dict() == {}
    assert torch.equal(copy.deepcopy(layer).tables, before)


def test_tables_are_on_the_device_that_the_model_is_built_on():
    with torch.device("meta"):
        layer = layer_of(ladder_of(1.0, 2.0), mrope_section=SECTIONS)
    assert layer.tables.device.type == "meta"
    assert layer.tables.shape == (2, 2, 9)


# --- get_rope ---


def parameters(request: dict | None = None, **native) -> dict:
    request = {"rope_type": "mrrope_pro", "factor": 4.0} if request is None else request
    return merged(request, {"rope_type": "default", "rope_theta": BASE, **native}, LENGTH)


@pytest.fixture
def config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def test_our_parameters_give_our_layer(config):
    layer = get_rope(32, LENGTH, False, parameters(partial_rotary_factor=0.5), torch.float16)
    assert isinstance(layer, ServedRotaryEmbedding)
    assert (layer.head_size, layer.rotary_dim, layer.is_neox_style) == (32, 16, False)
    assert (layer.dtype, layer.base, layer.max_position_embeddings) == (torch.float16, BASE, 4 * LENGTH)
    assert layer.ladder.tables == ladder_of(4.0).tables
    assert layer.table_index is None


def test_rope_dim_overrides_the_factor(config):
    assert get_rope(32, LENGTH, rope_parameters=parameters(rope_dim=24, partial_rotary_factor=0.5)).rotary_dim == 24


def test_sections_reach_the_layer(config):
    layer = get_rope(16, LENGTH, rope_parameters=parameters(mrope_section=SECTIONS, mrope_interleaved=True))
    assert (layer.mrope_section, layer.mrope_interleaved) == (SECTIONS, True)


@pytest.mark.parametrize("is_of_text_model", [True, False])
def test_vllms_layers_of_a_served_model_have_rows_for_the_whole_text(is_of_text_model):
    config = compiled_models.vllm_config()  # of 64 native and 1024 served positions
    length = config.model_config.hf_text_config.max_position_embeddings if is_of_text_model else 50
    with set_current_vllm_config(config):
        layer = get_rope(16, length, rope_parameters={"rope_type": "default", "rope_theta": BASE})
    assert type(layer) is RotaryEmbedding
    assert layer.cos_sin_cache.shape[0] == (config.model_config.max_model_len if is_of_text_model else 50)


@pytest.mark.parametrize("theirs", [None, {"rope_type": "default", "rope_theta": BASE}])
def test_other_parameters_give_vllms_layer(config, theirs):
    assert type(get_rope(16, LENGTH, rope_parameters=theirs)) is RotaryEmbedding


def test_rows_of_vllms_cache_change_nothing(config):
    """Qwen3's layers pass a factor since vLLM 0.32, whether they have M-RoPE or not."""
    ours = get_rope(16, LENGTH, rope_parameters=parameters(), mrope_positions_factor=4)
    assert ours is get_rope(16, LENGTH, rope_parameters=parameters())
    if VERSION >= (0, 32):
        theirs = {"rope_type": "default", "rope_theta": BASE, "mrope_section": SECTIONS}
        lengths = [
            len(get_rope(16, LENGTH, rope_parameters=theirs, mrope_positions_factor=factor).cos_sin_cache)
            for factor in (1, 4)
        ]
        assert lengths == [LENGTH, 4 * LENGTH]
    with pytest.raises(ValueError, match=r"must be called without scale with a rope type of mrrope"):
        get_rope(16, LENGTH, rope_parameters=parameters(), scale=2)


def test_modules_that_imported_the_factory_have_the_hook():
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.models import llama, qwen3

    assert llama.get_rope is qwen3.get_rope is rotary_embedding.get_rope is get_rope


def test_equal_settings_share_a_layer_within_a_model(config):
    first = get_rope(16, LENGTH, rope_parameters=parameters())
    assert get_rope(16, LENGTH, rope_parameters=parameters()) is first
    assert get_rope(16, LENGTH, rope_parameters=parameters({"rope_type": "mrrope_pro", "factor": 2.0})) is not first
    assert get_rope(16, LENGTH, False, parameters()) is not first
    with set_current_vllm_config(VllmConfig()):
        assert get_rope(16, LENGTH, rope_parameters=parameters()) is not first


def test_layers_die_with_their_model(config):
    layer = weakref.ref(get_rope(16, LENGTH, rope_parameters=parameters()))
    gc.collect()
    assert layer() is None


def test_a_type_that_the_model_replaced_is_refused(config):
    with pytest.raises(ValueError, match=r"rope_type must still be 'mrrope' .*, got 'deepseek_yarn'"):
        get_rope(16, LENGTH, rope_parameters={**parameters(), "rope_type": "deepseek_yarn"})


def test_dual_chunk_attention_is_refused(config):
    with pytest.raises(ValueError, match=r"dual_chunk_attention_config must be None .*, got {'chunk_size': 8}"):
        get_rope(16, LENGTH, rope_parameters=parameters(), dual_chunk_attention_config={"chunk_size": 8})


def test_fourier_features_are_refused(config):
    with pytest.raises(ValueError, match="use_fope must be off"):
        get_rope(16, LENGTH, rope_parameters={**parameters(), "use_fope": True})


# --- compiled ---


class Projection(nn.Module):
    """What an attention layer does before attention."""

    def __init__(self, ladder: Ladder, is_neox_style: bool = True, **options) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(32, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, bias=False)
        self.rotary_emb = layer_of(ladder, is_neox_style=is_neox_style, **options)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = self.split(x)
        return (*self.rotary_emb(positions, q, k), v)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
        return self.qkv_proj(x).split(sizes, dim=-1)


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_compiled_with_a_table_for_each_token(monkeypatch, is_neox_style):
    torch.manual_seed(0)
    ladder, config = ladder_of(1.0, 2.0, 4.0), compiled_models.vllm_config()
    index = torch.zeros(64, dtype=torch.int32)
    with compiled_models.recorded(monkeypatch) as compiled:
        model = compiled_models.model_of(lambda: Projection(ladder, is_neox_style), config)
        (layer,) = served_layers(model)
        layer.table_index = index
        for tokens in (9, 9, 5, 40, 1, 9):
            index.random_(3)
            numbers = index[:tokens].tolist()
            hidden_states, positions = torch.randn(tokens, 32), random_positions(tokens)
            got = compiled_models.run(model, config, positions, hidden_states)
            before = model.body.split(hidden_states)
            for x, y in zip(got[:2], before, strict=False):
                for token, number in enumerate(numbers):
                    part = slice(token, token + 1)
                    assert_rotated(by_head(x)[part], by_head(y.detach())[part], positions[part],
                                   ladder.tables[number], "thd", PAIRING[is_neox_style])  # fmt: skip
    assert compiled.calls["mrrope.rotary.default"] == 1
    # One product, one rotation of views of its result, and no kernel of Inductor.
    assert not any("clone" in name or "copy" in name or "rotary_" in name for name in compiled.calls)
    assert "cpp_fused" not in compiled.code
    assert compiled.code.count("torch.ops.mrrope.rotary.default(") == 1


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_compiled_with_rows_of_positions(monkeypatch, is_interleaved):
    torch.manual_seed(0)
    ladder, config = ladder_of(1.0, 4.0), compiled_models.vllm_config()
    options = {"mrope_section": SECTIONS, "mrope_interleaved": is_interleaved}
    index = torch.randint(2, (64,), dtype=torch.int32)
    with compiled_models.recorded(monkeypatch) as compiled:
        model = compiled_models.model_of(lambda: Projection(ladder, **options), config)
        for layer in served_layers(model):
            layer.table_index = index
        for tokens in (9, 5):
            hidden_states, positions = torch.randn(tokens, 32), random_positions(3, tokens)
            got = compiled_models.run(model, config, positions, hidden_states)
            with torch.no_grad():
                expected = model.body(positions, hidden_states)
            assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert compiled.calls["mrrope.rotary.default"] == 1
    assert "cpp_fused" not in compiled.code


def test_compiled_graphs_are_reloaded(monkeypatch, tmp_path):
    """The second engine loads what the first compiled, and reads its own index and tables."""
    torch.manual_seed(0)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    hidden_states, positions = torch.randn(9, 32), random_positions(9)
    loaded = []
    for ladder in (ladder_of(1.0, 4.0), ladder_of(1.0, 8.0)):
        config = compiled_models.vllm_config()
        before = compilation_counter.num_aot_artifacts_loaded
        model = compiled_models.model_of(lambda ladder=ladder: Projection(ladder), config)
        for layer in served_layers(model):
            layer.table_index = torch.randint(2, (64,), dtype=torch.int32)
        for tokens in (9, 5):
            got = compiled_models.run(model, config, positions[:tokens], hidden_states[:tokens])
            with torch.no_grad():
                expected = model.body(positions[:tokens], hidden_states[:tokens])
            assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
        loaded.append(compilation_counter.num_aot_artifacts_loaded - before)
    assert loaded == [0, 1]


# --- kernels of models ---


class Fused(nn.Module):
    """A model whose attention would call a kernel with cosines instead of the layer."""

    use_fused_qk_norm_rope_gate = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.rotary_emb = get_rope(16, LENGTH, rope_parameters=vllm_config.additional_config["rope"])


@pytest.mark.parametrize("is_ours", [True, False])
def test_kernels_that_read_cosines_are_switched_off(is_ours):
    rope = parameters() if is_ours else {"rope_type": "default", "rope_theta": BASE}
    config = VllmConfig(
        additional_config={"rope": rope}, compilation_config=CompilationConfig(mode=CompilationMode.NONE)
    )
    assert initialize_model(config, model_class=Fused).use_fused_qk_norm_rope_gate is not is_ours
