"""Registration: SGLang finds the entry point, hooks fit the functions they wrap, unknown versions are told."""

import importlib.metadata
import inspect
import logging
import pkgutil
from collections import defaultdict

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils.hf_transformers import config as loading
from tiny_server import save_model

from mrrope.sglang import hooks, plugin

# The functions that are hooked, with the parameters that the hooks rely on. A version of SGLang in which this table
# does not hold is a version that the plugin does not know.
TARGETS = {
    "sglang.srt.configs.model_config.ModelConfig.from_server_args": "server_args model_path model_revision "
    "is_draft_model context_length kwargs",
    "sglang.srt.layers.rotary_embedding.factory.get_rope": "head_size rotary_dim max_position base is_neox_style "
    "rope_scaling dtype partial_rotary_factor dual_chunk_attention_config",
    "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens": "self req",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__": "self server_args port_args "
    "start_pd_bootstrap_service",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object": "self obj input_text input_ids "
    "input_embeds mm_inputs token_type_ids",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": "batch model_runner capture_hidden_mode "
    "return_hidden_states_before_norm extend_position_info spec_mrope_positions kv_loc_plan write_cols",
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": "self",
    "sglang.srt.models.utils.enable_fused_set_kv_buffer": "forward_batch",
    "sglang.srt.utils.hf_transformers.common.get_context_length": "config",
    "sglang.srt.utils.hf_transformers.config.get_config": "model trust_remote_code revision model_override_args "
    "model_config_parser kwargs",
}


def test_the_installed_package_has_the_entry_point():
    (entry_point,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="mrrope")
    assert entry_point.dist.name == "mrrope"
    assert entry_point.load() is plugin.register


def test_the_extra_is_the_version_that_is_known():
    requirements = importlib.metadata.metadata("mrrope").get_all("Requires-Dist")
    (extra,) = [line for line in requirements if line.startswith("sglang")]
    assert extra.replace(" ", "") == f'sglang=={plugin.KNOWN_VERSIONS[0]};extra=="sglang"'


def test_all_hooks_are_applied_to_functions_of_the_expected_parameters():
    assert {*plugin.FOR_ALL_MODELS, *hooks._targets()} == TARGETS.keys() <= HookRegistry._patched
    for target, parameters in TARGETS.items():
        assert " ".join(inspect.signature(pkgutil.resolve_name(target)).parameters) == parameters, target


def test_a_hook_that_is_not_applied_is_an_error(monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(RuntimeError, match=r"hooks must be applied .* got none on sglang.*get_rope"):
        hooks.install()


@pytest.fixture
def unknown_version(monkeypatch):
    """The hooks that a version of SGLang that is not known gets."""
    monkeypatch.setattr("sglang.version.__version__", "0.6.0")
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(plugin, "_logged", set())
    plugin.register()
    return {target: found for target, ((_, found, _),) in HookRegistry._hooks.items()}


OURS = {"rope_parameters": {"rope_type": "mrrope_uni", "factor": 2}}


@pytest.mark.parametrize(
    ("overrides", "errors"), [({}, 0), ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, 0), (OURS, 1)]
)
def test_an_unknown_version_is_told_where_a_model_needs_the_plugin(
    unknown_version, tmp_path, caplog, overrides, errors
):
    save_model(tmp_path)
    ((target, hook),) = unknown_version.items()
    assert target == "sglang.srt.utils.hf_transformers.config.get_config"
    stock = inspect.unwrap(loading.get_config)
    with caplog.at_level(logging.ERROR, "sglang.mrrope"):
        for _ in range(2):
            hook(stock, str(tmp_path), trust_remote_code=False, model_override_args=overrides)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "mrrope's plugin knows SGLang 0.5.23"
    ] * errors
