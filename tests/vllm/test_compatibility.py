"""What is refused when an engine is configured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from running_version import VERSION
from tiny_engine import AUTO, engine_config
from vllm.config import KVTransferConfig, VllmConfig

import mrrope
from mrrope.vllm.compatibility import conflicts
from mrrope.vllm.hooks import is_served

FIXED = {"rope_type": "mrrope_pro", "factor": 4.0}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def transfer(connector: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)


REFUSED_WITH_AUTO = {
    "dual batch overlap": ({"enable_dbo": True, "all2all_backend": "deepep_low_latency"}, "enable_dbo must be off"),
    "microbatches": (
        {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"},
        "ubatch_size at most 1, got .* and 2",
    ),
    "fast prefill": ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill must be off"),
    "disaggregation": ({"kv_transfer_config": transfer("NixlConnector")}, "kv_connector .*, got 'NixlConnector'"),
    "shared tier": (
        {"kv_transfer_config": transfer("OffloadingConnector", spec_name="TieringOffloadingSpec")},
        "without spec_name, got 'OffloadingConnector' with .*Tiering",
    ),
    "pooling": ({"runner": "pooling", "convert": "embed"}, "runner must be 'generate', got 'pooling'"),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED_WITH_AUTO.values(), ids=REFUSED_WITH_AUTO)
def test_auto_refuses(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)cannot be served: .*{reason}"):
        engine_config(tmp_path, AUTO, **options)


@pytest.mark.parametrize("options", [options for options, _ in REFUSED_WITH_AUTO.values()], ids=REFUSED_WITH_AUTO)
@pytest.mark.parametrize("rope_parameters", [FIXED, None], ids=["fixed", "stock"])
def test_one_table_allows(tmp_path: Path, rope_parameters: dict[str, Any] | None, options: dict[str, Any]) -> None:
    engine_config(tmp_path, rope_parameters, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        {"kv_transfer_config": transfer("OffloadingConnector", cpu_bytes_to_use=1 << 20)},
        {"kv_offloading_size": 1.0},
        {"enable_lora": True},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    ],
    ids=lambda options: "-".join(options) or "nothing",
)
def test_auto_allows(tmp_path: Path, options: dict[str, Any]) -> None:
    config = engine_config(tmp_path, AUTO, **options)
    assert list(conflicts(config)) == []


def test_auto_allows_a_shared_cache_that_keeps_salts_apart(tmp_path: Path) -> None:
    """Set afterwards, since vLLM imports a connector where it is configured, and this one needs LMCache."""
    config = engine_config(tmp_path, AUTO)
    config.kv_transfer_config = transfer("LMCacheMPConnector")
    assert list(conflicts(config)) == []
    config.kv_transfer_config = transfer("LMCacheConnectorV1")
    (reason,) = conflicts(config)
    assert "got 'LMCacheConnectorV1'" in reason
    # Lookups, stores and loads: requests' salts, which tests/vllm/test_request_scale.py shows to be those of a scale.
    folder = Path(vllm.__file__).parent / "distributed/kv_transfer/kv_connector/v1"
    source = (folder / "lmcache_mp_connector.py").read_text()
    assert "self.cache_salt: str = request.cache_salt" in source
    assert source.count("cache_salt=tracker.cache_salt") == 3


def test_auto_refuses_a_draft_model(tmp_path: Path) -> None:
    engine_config(tmp_path / "draft")
    draft = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="must be one of ngram, ngram_gpu, suffix, got 'draft_model'"):
        engine_config(tmp_path / "target", AUTO, speculative_config=draft)


QWEN_MTP = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_nextn_predict_layers": 1,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention"] * 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}


def test_a_set_has_no_tables_for_layers_of_mtp(tmp_path: Path) -> None:
    settings = {"rotary_dim": 16, "base": 10_000.0, "original_max_position": 64}
    one = mrrope.frequency_table("mrrope_pro", scale=4.0, **settings)
    draft = {"method": "mtp", "num_speculative_tokens": 1}
    given = {"rope_type": "mrrope", "table": mrrope.TableSet([one] * 4).to_dict()}
    config = QWEN_MTP | {"num_key_value_heads": 2, "partial_rotary_factor": 1.0}
    with pytest.raises(ValueError, match="method must not be 'mtp' with a table set"):
        engine_config(tmp_path, given, config=config, speculative_config=draft)
    engine_config(tmp_path, given | {"table": one.to_dict()}, config=config, speculative_config=draft)


class TestDraftersOfAFixedFactor:
    """Past its own length a drafter with a RoPE of its own drafts nothing that is accepted, or ends the process."""

    @staticmethod
    def draft(folder: Path, length: int) -> dict[str, Any]:
        engine_config(folder, config={"max_position_embeddings": length})
        return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}

    def test_a_shorter_one_is_refused(self, tmp_path: Path) -> None:
        draft = self.draft(tmp_path / "draft", 64)
        with pytest.raises(ValueError, match=r"must read max_model_len 256 tokens, got .*draft with 64: .* ngram"):
            engine_config(tmp_path / "target", FIXED, speculative_config=draft)
        engine_config(tmp_path / "target", FIXED, speculative_config=draft, max_model_len=64)
        engine_config(tmp_path / "target", None, speculative_config=draft)

    def test_one_that_reads_as_far_is_served(self, tmp_path: Path) -> None:
        config = engine_config(tmp_path / "target", FIXED, speculative_config=self.draft(tmp_path / "draft", 256))
        assert not is_served(SimpleNamespace(model_config=config.speculative_config.draft_model_config))

    def test_eagle_is_refused_too(self, tmp_path: Path) -> None:
        eagle = self.draft(tmp_path / "eagle", 128) | {"method": "eagle"}
        with pytest.raises(ValueError, match=r"must read max_model_len 256 tokens, got .*eagle with 128"):
            engine_config(tmp_path / "target", FIXED, speculative_config=eagle)

    @pytest.mark.parametrize("rope_parameters", [FIXED, None], ids=["fixed", "stock"])
    def test_mtp_of_the_checkpoint_gets_the_tables(
        self, tmp_path: Path, rope_parameters: dict[str, Any] | None
    ) -> None:
        mtp = {"method": "mtp", "num_speculative_tokens": 1}
        config = engine_config(tmp_path, rope_parameters, config=QWEN_MTP, speculative_config=mtp)
        target, drafter = config.model_config, config.speculative_config.draft_model_config
        assert drafter.hf_config.model_type == "qwen3_next_mtp"
        own = [each.hf_config.get_text_config().rope_parameters for each in (target, drafter)]
        assert own[0] == own[1]
        assert own[0] is not own[1]
        assert drafter.hf_text_config.rope_parameters == own[0]
        assert drafter.max_model_len == target.max_model_len == (64 if rope_parameters is None else 256)

    def test_mtp_beyond_a_length_that_the_user_sets_is_refused(self, tmp_path: Path) -> None:
        mtp = {"method": "mtp", "num_speculative_tokens": 1, "max_model_len": 32}
        with pytest.raises(ValueError, match=r"must read max_model_len 256 tokens, got .* with 32"):
            engine_config(tmp_path, FIXED, config=QWEN_MTP, speculative_config=mtp)


def test_auto_refuses_context_parallel_prefill_and_encoder_decoders(tmp_path: Path) -> None:
    """vLLM configures neither for a small model of text, so the options are set afterwards."""
    config = engine_config(tmp_path, AUTO)
    config.parallel_config.prefill_context_parallel_size = 2
    (reason,) = conflicts(config)
    assert reason.startswith("prefill_context_parallel_size must be 1, got 2")
    config.parallel_config.prefill_context_parallel_size = 1
    config.model_config.model_arch_config.is_encoder_decoder = True
    config.model_config.hf_config.is_encoder_decoder = True
    config.model_config.__dict__.pop("is_encoder_decoder", None)
    (reason,) = conflicts(config)
    assert "encoder-decoder" in reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_impl": "transformers"}, "model_impl must not be 'transformers'"),
        ({"config": DEEPSEEK}, "must rotate by its rope_parameters, got deepseek_v2"),
        ({"config": GPT_OSS}, "must rotate by its rope_parameters, got gpt_oss"),
    ],
    ids=["transformers", "deepseek", "gpt_oss"],
)
def test_models_with_a_rope_of_their_own_are_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engine_config(tmp_path, FIXED, **options)


def test_kernels_that_read_vllms_cache_are_refused(tmp_path: Path) -> None:
    """As a type that vLLM knows in every version: the whole Qwen4 has more settings than matter here."""
    config = engine_config(tmp_path, FIXED)
    config.model_config.hf_text_config.model_type = "qwen4_exp_text"
    (reason,) = conflicts(config)
    assert reason.startswith("the model must rotate by its rope layers, got qwen4_exp_text")


@pytest.mark.skipif(VERSION < (0, 28), reason="since vLLM 0.28")
def test_auto_refuses_adaptive_verification(tmp_path: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = engine_config(tmp_path, AUTO, speculative_config=ngram)
    config.speculative_config.enable_adaptive_verification = True
    (reason,) = conflicts(config)
    assert reason.startswith("speculative_config's enable_adaptive_verification must be off")


def test_all_reasons_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)kv_sharing_fast_prefill must be off.*got 'NixlConnector'"):
        engine_config(tmp_path, AUTO, kv_sharing_fast_prefill=True, kv_transfer_config=transfer("NixlConnector"))


def test_configuration_without_model_is_left_alone() -> None:
    assert VllmConfig().model_config is None
    assert list(conflicts(SimpleNamespace(model_config=None))) == []  # type: ignore[arg-type]
