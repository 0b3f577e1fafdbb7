"""Where rope layers are built, and which attention layers may call them."""

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from torch import nn

from mrrope.serving.rope_layer import ServedRotaryEmbedding
from mrrope.serving.rope_settings import merged
from mrrope.sglang.rotary_embedding import LOADED_MODEL, require_served

BASE = 10_000.0
OURS = merged({"rope_type": "mrrope_uni", "factor": 2}, {"rope_type": "default", "rope_theta": BASE}, 64)


def rope(parameters=OURS, **more):
    return get_rope(
        **{"head_size": 16, "rotary_dim": 16, "max_position": 64, "base": BASE, **more}, rope_scaling=parameters
    )


def test_equal_layers_of_a_process_are_ours():
    layer = rope()
    assert isinstance(layer, ServedRotaryEmbedding)
    assert layer.rotary_dim == layer.head_size == 16
    assert not isinstance(rope({"rope_type": "default", "rope_theta": BASE}), ServedRotaryEmbedding)


class Config:
    """Stands for the model that is being loaded."""


@pytest.fixture
def loaded_model():
    config = Config()
    token = LOADED_MODEL.set(config)
    yield config
    LOADED_MODEL.reset(token)


def test_a_model_of_the_meta_device_shares_no_layer(loaded_model):
    """SGLang builds one for the names of sharded weights, and kernels do nothing with tables of that device."""
    with torch.device("meta"):
        of_shapes = rope()
    layer = rope()
    assert of_shapes.tables.is_meta
    assert rope() is layer
    assert torch.equal(layer.tables[:-1], layer.ladder.tables[0].turns)


@pytest.mark.parametrize("more", [{"rotary_dim": 8}, {"partial_rotary_factor": 0.5}])
def test_a_part_of_a_head_rotates_as_the_model_says(more):
    assert rope(**more).rotary_dim == 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"base": 500.0}, "base must be the rope_theta of rope_parameters, 10000.0, got 500.0"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config must be None"),
        ({"parameters": OURS | {"video_rope": True}}, "rope_parameters' video_rope must be off .* got True"),
        ({"parameters": OURS | {"mrope_interleaved_glm": True}}, "mrope_interleaved_glm must be off .* got True"),
    ],
)
def test_a_rotation_that_no_table_describes_is_refused(more, message):
    with pytest.raises(ValueError, match=message):
        rope(**more)


class Attention(nn.Module):
    """Calls its rope layer."""

    def __init__(self, rotary_emb, window=-1):
        super().__init__()
        if rotary_emb is not None:
            self.rotary_emb = rotary_emb
        self.attn = RadixAttention(2, 16, 1.0, 1, layer_id=0, sliding_window_size=window)


class WithKernel(Attention):
    """Has a kernel for norm and rope, which an attribute turns off."""

    use_fused_qk_norm_rope = True

    def kernel(self):
        return self.rotary_emb.cos_sin_cache


class WithCacheWrite(Attention):
    """Has a kernel that rotates and writes the cache, which SGLang's function turns off."""

    def kernel(self, forward_batch):
        return create_fused_set_kv_buffer_arg() if enable_fused_set_kv_buffer(forward_batch) else None  # noqa: F821


class WithOwnKernel(Attention):
    """Has a kernel that nothing turns off."""

    def kernel(self):
        return self.rotary_emb.cos_sin_cache


class WithInheritedKernel(WithOwnKernel):
    """Has the kernel of the class that it inherits from."""


STOCK = {"rope_type": "default", "rope_theta": BASE}


def test_kernels_of_norm_and_rope_are_turned_off():
    module = WithKernel(rope())
    require_served(nn.Sequential(module, WithCacheWrite(rope()), Attention(rope(STOCK), window=32)))
    assert module.use_fused_qk_norm_rope is False


def test_no_kernel_writes_the_cache_too():
    from sglang.srt.models import utils

    assert utils.enable_fused_set_kv_buffer(None) is False
    with pytest.raises(ValueError, match="fused_set_kv_buffer_arg must be None, got dict"):
        rope()(None, None, None, fused_set_kv_buffer_arg={})


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (lambda: [WithOwnKernel(rope())], r"0, a WithOwnKernel, calls a kernel of its own \(cos_sin_cache\)"),
        (lambda: [WithInheritedKernel(rope())], r"0, a WithInheritedKernel, calls a kernel of its own"),
        (lambda: [Attention(rope()), Attention(rope(STOCK))], "1 of Sequential holds no rotary embedding of mrrope"),
        (lambda: [Attention(None)], "0 of Sequential holds no rotary embedding of mrrope"),
        (lambda: [Attention(rope(STOCK), window=32)], "but Sequential holds no rotary embedding of mrrope"),
    ],
)
def test_attention_that_rotates_by_anything_else_is_refused(modules, message):
    with pytest.raises(ValueError, match=message):
        require_served(nn.Sequential(*modules()))
