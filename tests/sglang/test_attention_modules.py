"""Attention modules of SGLang's models, and M-RoPE: which of them get our layer, and that it rotates as theirs."""

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.models.gpt_oss import GptOssAttention
from sglang.srt.models.mixtral import MixtralAttention
from sglang.srt.models.qwen3_moe import Qwen3MoeAttention
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import ServerArgs
from tiny_server import save_model
from torch import nn
from transformers import Qwen3MoeConfig

from mrrope.serving.rope_layer import ServedRotaryEmbedding
from mrrope.serving.rope_settings import merged
from mrrope.sglang.rotary_embedding import require_served

SIZE, BASE, NATIVE_LENGTH = 64, 10_000.0, 64
SIZES = {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "layer_id": 0}
PLAIN = {"rope_type": "default", "rope_theta": BASE}
OURS = merged({"rope_type": "mrrope_uni", "factor": 2}, PLAIN, NATIVE_LENGTH)


@pytest.fixture(scope="module", autouse=True)
def published(tmp_path_factory):
    """The options that modules read when they are built, of a process with one rank."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    arguments = ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native")
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    yield
    reset_context()


def qwen3_moe():
    config = Qwen3MoeConfig(head_dim=SIZE, max_position_embeddings=NATIVE_LENGTH)
    config.rope_parameters = OURS
    return Qwen3MoeAttention(**SIZES, rope_theta=BASE, rope_scaling=OURS, head_dim=SIZE, config=config)


def gpt_oss(layer_type="full_attention"):
    return GptOssAttention(
        **SIZES, rope_theta=BASE, rope_scaling=OURS, head_dim=SIZE, layer_type=layer_type, sliding_window_size=16
    )


@pytest.mark.parametrize("attention", [qwen3_moe, gpt_oss, lambda: gpt_oss("sliding_attention")])
def test_kernels_that_fuse_the_rotation_are_turned_off(attention):
    module = attention()
    flags = [flag for flag in vars(module) if flag.startswith("use_fused")]
    for flag in flags:
        setattr(module, flag, True)  # as on a GPU
    require_served(nn.Sequential(module))
    assert isinstance(module.rotary_emb, ServedRotaryEmbedding)
    assert not any(getattr(module, flag) for flag in flags)


def test_a_model_that_ignores_rope_parameters_is_refused():
    module = MixtralAttention(**SIZES, max_position=NATIVE_LENGTH, rope_theta=BASE)
    with pytest.raises(ValueError, match="but 0 of Sequential holds no rotary embedding of mrrope"):
        require_served(nn.Sequential(module))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rows_of_positions_rotate_as_sglang_does(interleaved, partial):
    """Of a factor of 1, with which our table is that of the model."""
    pairs = int(SIZE * partial) // 2
    section = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    plain = PLAIN | {"mrope_section": section, "mrope_interleaved": interleaved}
    arguments = {"head_size": SIZE, "rotary_dim": SIZE, "max_position": 512, "base": BASE, "dtype": torch.float32}
    arguments["partial_rotary_factor"] = partial
    theirs = get_rope(**arguments, rope_scaling=plain)
    ours = get_rope(**arguments, rope_scaling=merged({"rope_type": "mrrope_uni", "factor": 1}, plain, NATIVE_LENGTH))
    assert isinstance(ours, ServedRotaryEmbedding)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(7, heads * SIZE, generator=generator) for heads in (4, 2))
    for positions in (torch.randint(512, (3, 7), generator=generator), torch.arange(7)):
        expected = theirs.forward_native(positions, q.clone(), k.clone())
        for found, other in zip(ours(positions, q.clone(), k.clone()), expected, strict=True):
            torch.testing.assert_close(found, other, rtol=0, atol=1e-4)
