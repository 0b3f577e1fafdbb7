"""Registration: vLLM finds the entry point, hooks fit the functions they wrap, and other vLLM is left alone."""

import importlib
import importlib.machinery
import importlib.metadata
import inspect
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import vllm
from running_version import VERSION
from tiny_engine import engine_config
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config.utils import Range

from mrrope.vllm import hooks, plugin

BEAM_SEARCH = "self max_tokens default_sampling_params"
# The functions that hooks wrap, with the parameters that the hooks rely on, in vLLM 0.25. A version of vLLM in which
# this table with CHANGES does not hold is a version that the plugin does not know.
TARGETS: dict[str, str | None] = {
    "vllm.compilation.backends.VllmBackend.__call__": "self graph example_inputs",
    "vllm.compilation.passes.pass_manager.PostGradPassManager.configure": "self config",
    "vllm.config.model.ModelConfig._apply_dict_overrides": "self config overrides",
    "vllm.config.model._get_and_verify_max_len": "hf_config model_arch_config tokenizer_config max_model_len "
    "disable_sliding_window sliding_window spec_target_max_model_len encoder_config",
    "vllm.config.vllm.VllmConfig.__post_init__": "self",
    "vllm.config.vllm.VllmConfig.compute_hash": "self",
    "vllm.entrypoints.anthropic.serving.AnthropicServingMessages.create_messages": "self request raw_request",
    "vllm.entrypoints.openai.api_server.build_app": "args supported_tasks model_config",
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest.to_beam_search_params": BEAM_SEARCH,
    "vllm.entrypoints.openai.completion.protocol.CompletionRequest.to_beam_search_params": BEAM_SEARCH,
    "vllm.model_executor.layers.rotary_embedding.get_rope": "head_size max_position is_neox_style "
    "rope_parameters dtype dual_chunk_attention_config",
    "vllm.model_executor.model_loader.utils.initialize_model": "vllm_config prefix model_class model_config",
    "vllm.transformers_utils.config.get_config": "model trust_remote_code revision code_revision config_format "
    "hf_overrides_kw hf_overrides_fn kwargs",
    "vllm.v1.core.sched.scheduler.Scheduler.__init__": "self vllm_config kv_cache_config structured_output_manager "
    "block_size hash_block_size mm_registry include_finished_set log_stats",
    "vllm.v1.core.sched.scheduler.Scheduler._preempt_request": "self request timestamp",
    "vllm.v1.core.sched.scheduler.Scheduler.schedule": "self throttle_prefills",
    "vllm.v1.engine.async_llm.AsyncLLM.__init__": "self vllm_config executor_class log_stats usage_context mm_registry "
    "log_requests start_engine_loop stat_loggers aggregate_engine_logging client_addresses client_count client_index",
    "vllm.v1.engine.core.EngineCore.preprocess_add_request": "self request",
    "vllm.v1.engine.input_processor.InputProcessor.__init__": "self vllm_config renderer mm_registry",
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs": "self request_id prompt params supported_tasks "
    "arrival_time lora_request tokenization_kwargs trace_headers priority data_parallel_rank resumable",
    "vllm.v1.engine.output_processor.OutputProcessor._finish_request": "self req_state",
    "vllm.v1.engine.output_processor.OutputProcessor.abort_requests": "self request_ids internal",
    "vllm.v1.engine.output_processor.OutputProcessor.add_request": "self request prompt parent_req request_index queue",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.add_requests": "self scheduler_output",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_inputs": "self scheduler_output batch_desc",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._prepare_inputs": "self scheduler_output num_scheduled_tokens",
    "vllm.v1.worker.gpu_worker.Worker.load_model": "self load_dummy_weights",
    "vllm.v1.worker.worker_base.WorkerBase.__init__": "self vllm_config local_rank rank distributed_init_method "
    "is_driver_worker",
}
PROCESS = TARGETS["vllm.v1.engine.input_processor.InputProcessor.process_inputs"]
ENGINE = TARGETS["vllm.v1.engine.async_llm.AsyncLLM.__init__"]
PREPARE = "self scheduler_output batch_req_state batch_desc"
# What a release changed; None where the function is gone, or only imported.
CHANGES: dict[tuple[int, int], dict[str, str | None]] = {
    (0, 27): {
        "vllm.v1.core.sched.scheduler.Scheduler._preempt_request": "self request timestamp drop_stale_output",
    },
    (0, 28): {
        "vllm.v1.engine.input_processor.InputProcessor.process_inputs": f"{PROCESS} session_id",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_inputs": PREPARE,
    },
    (0, 29): {
        "vllm.entrypoints.openai.api_server.build_app": None,
        "vllm.entrypoints.launchers.app.build_app": "args supported_tasks model_config",
    },
    (0, 30): {"vllm.config.vllm.VllmConfig.compute_hash": "self include_version"},
    (0, 31): {
        "vllm.v1.engine.input_processor.InputProcessor.process_inputs": f"{PROCESS} session_id kv_hints",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_inputs": f"{PREPARE} num_active_loras",
    },
    (0, 32): {
        "vllm.v1.engine.async_llm.AsyncLLM.__init__": f"{ENGINE} profiler",
        "vllm.model_executor.layers.rotary_embedding.get_rope": "head_size max_position is_neox_style "
        "rope_parameters dtype dual_chunk_attention_config mrope_positions_factor",
    },
}
for since, changed in CHANGES.items():
    TARGETS |= changed if since <= VERSION else {}
TARGETS = {dotted: parameters for dotted, parameters in TARGETS.items() if parameters is not None}


def run_in_fresh_process(script: str, plugins: str = "mrrope") -> subprocess.CompletedProcess[str]:
    """Run a script that imports vLLM as these tests do, with the package under test."""
    environment = {**os.environ, "VLLM_PLUGINS": plugins}
    # In this folder, where hopper_platform is, and not in the checkout, whose package need not be compiled.
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


# What vLLM does on its own: load the plugins, configure an engine, and build a rope layer and the compiler's passes.
SERVE = """
import json, sys
from pathlib import Path
import hopper_platform
hopper_platform.pretend()
import vllm
vllm.__version__ = {version!r}
from vllm.compilation.backends import VllmBackend
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.plugins import load_general_plugins
from vllm.v1.worker import gpu_model_runner
before = set(sys.modules)
load_general_plugins()
imported = sorted(set(sys.modules) - before)
import tiny_engine
config = tiny_engine.engine_config(Path({folder!r}), {rope_parameters!r})  # the folder is in the hash
passes = PostGradPassManager()
passes.configure(config)
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config.utils import Range
from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin as Mixin
with pass_context(Range(1, 2)):
    key_of_passes = passes.uuid()
print(json.dumps({{
    "imported": imported,
    "wrapped": sorted(sys.modules["mrrope.vllm.hooks"].INSTALLED) if "mrrope.vllm.hooks" in sys.modules else [],
    "modules": sorted(name for name in sys.modules if name.startswith(("mrrope.serving.", "mrrope.vllm."))),
    "validators": sorted(name for name in dir(Mixin) if "mrrope" in repr(vars(Mixin).get(name))),
    "config": config.compute_hash(),
    "passes": key_of_passes,
}}))
"""
OURS = {"rope_type": "mrrope_pro", "factor": 4.0}
FOLDER = tempfile.mkdtemp()


def serve(
    rope_parameters: dict[str, Any] | None = None, version: str = vllm.__version__, plugins: str = "mrrope"
) -> tuple[dict[str, Any], str]:
    """Return what a process of vLLM looks like once it has configured an engine, and what it logged."""
    script = SERVE.format(version=version, rope_parameters=rope_parameters, folder=FOLDER)
    run = run_in_fresh_process(script, plugins)
    assert run.returncode == 0, run.stderr
    *log, result = run.stdout.strip().splitlines()
    return json.loads(result), "\n".join(log) + run.stderr


@pytest.fixture(scope="module")
def stock() -> tuple[dict[str, Any], str]:
    """A process that configures a model of none of mrrope's types."""
    return serve()


# The installed package


def test_the_installed_package_has_the_entry_point() -> None:
    (entry_point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="mrrope")
    assert entry_point.dist.name == "mrrope"
    assert entry_point.load() is plugin.register


def test_only_the_extra_asks_for_vllm() -> None:
    requirements = importlib.metadata.metadata("mrrope").get_all("Requires-Dist")
    assert [line.split(";")[1].strip() for line in requirements if line.startswith("vllm")] == ['extra == "vllm"']
    assert [line for line in requirements if "extra" not in line and not line.startswith("torch==")] == []


def test_the_extra_is_the_versions_that_are_known() -> None:
    (oldest, (major, newest)) = plugin.KNOWN_VERSIONS
    (requirement,) = (r for r in importlib.metadata.metadata("mrrope").get_all("Requires-Dist") if r.startswith("vllm"))
    known = {">={}.{}".format(*oldest), f"<{major}.{newest + 1}"}
    assert set(requirement.split(";")[0].removeprefix("vllm").split(",")) == known


def test_the_tested_versions_are_the_oldest_and_the_newest_that_are_known() -> None:
    pins = sorted(Path(__file__).parent.glob("vllm*-requirements.txt"))
    assert [pin.name for pin in pins] == [
        "vllm{}.{}-requirements.txt".format(*known) for known in plugin.KNOWN_VERSIONS
    ]
    assert VERSION in plugin.KNOWN_VERSIONS


def test_importing_mrrope_imports_no_vllm() -> None:
    run = run_in_fresh_process("import sys, mrrope, mrrope.cli; print([m for m in sys.modules if 'vllm' in m])")
    assert run.stdout.strip() == "[]", run.stderr


# Registration


def test_vllm_loads_the_plugin(stock: tuple[dict[str, Any], str]) -> None:
    found, log = stock
    assert "vllm.transformers_utils.config.get_config" in found["wrapped"]
    assert "ERROR" not in log


LOOKING = ["mrrope.serving.mark", "mrrope.vllm.config_look", "mrrope.vllm.hooks", "mrrope.vllm.plugin"]
"""All that a process of a model of other types imports of the plugin."""


def test_registering_imports_nothing_of_vllm(stock: tuple[dict[str, Any], str]) -> None:
    found, _ = stock
    assert {name.partition(".")[0] for name in found["imported"]} == {"mrrope"}
    assert [name for name in found["imported"] if name.startswith(("mrrope.serving.", "mrrope.vllm."))] == LOOKING


def test_a_model_of_other_types_meets_only_the_check(stock: tuple[dict[str, Any], str]) -> None:
    """No rope layer, runner or compiler is hooked, so that its graphs have the keys that they have without mrrope."""
    found, _ = stock
    hooked = {name.rsplit(".", 1)[0] for name in found["wrapped"] if name.startswith("vllm.")}
    assert hooked <= {
        "vllm.config.model",
        "vllm.config.model.ModelConfig",
        "vllm.config.vllm.VllmConfig",
        "vllm.transformers_utils.config",
        "vllm.v1.engine.async_llm.AsyncLLM",
        "vllm.v1.engine.core.EngineCore",
        "vllm.v1.engine.input_processor.InputProcessor",
        "vllm.v1.worker.worker_base.WorkerBase",
    }
    assert found["modules"] == LOOKING
    assert found["validators"] == []
    without, _ = serve(plugins="")
    assert without["wrapped"] == []
    assert {key: found[key] for key in ("config", "passes")} == {key: without[key] for key in ("config", "passes")}


def test_a_stock_model_in_a_process_that_serves_has_the_same_keys(tmp_path: Path) -> None:
    # In these tests all hooks are installed.
    def keys(rope_parameters: dict[str, Any] | None) -> tuple[Any, Any]:
        config, passes = engine_config(tmp_path, rope_parameters), PostGradPassManager()
        passes.configure(config)
        with pass_context(Range(1, 2)):
            return config.compute_hash(), passes.uuid()

    stock, served = keys(None), keys(OURS)
    config, passes = engine_config(tmp_path), PostGradPassManager()
    getattr(PostGradPassManager.configure, hooks.WRAPPED)(passes, config)
    with pass_context(Range(1, 2)):
        assert stock == (getattr(type(config).compute_hash, hooks.WRAPPED)(config), passes.uuid())
    assert stock[0] != served[0]
    assert stock[1] != served[1]


REGISTER_WITHOUT_A_GPU = """
import hopper_platform
hopper_platform.load_empty_driver()
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
from mrrope.vllm import plugin, worker_hooks
plugin.register()
worker_hooks.install()
"""


def test_registers_on_a_machine_without_a_gpu() -> None:
    # An error in a plugin ends vLLM, whatever the model.
    run = run_in_fresh_process(REGISTER_WITHOUT_A_GPU)
    assert run.returncode == 0, run.stderr


SABOTAGED = """
from vllm.v1.engine.input_processor import InputProcessor
InputProcessor.process_inputs = staticmethod(InputProcessor.process_inputs)
load_general_plugins()
"""
THEN_SERVED = """
try:
    tiny_engine.engine_config(Path({folder!r}), {ours})
except RuntimeError as error:
    print("refused:", error)
"""


def test_hooks_that_do_not_fit_refuse_served_models_only() -> None:
    """A function of vLLM that cannot be wrapped, which no release has."""
    script = SERVE.format(version=vllm.__version__, rope_parameters=None, folder=FOLDER)
    script = script.replace("load_general_plugins()\n", SABOTAGED, 1)
    run = run_in_fresh_process(script + THEN_SERVED.format(folder=FOLDER, ours=OURS))
    assert run.returncode == 0, run.stderr
    refused = run.stdout.partition("refused: ")[2]
    reason = (
        "its hooks must fit this vLLM, got vllm.v1.engine.input_processor: TypeError: name must be a function or a "
        "plain method, got vllm.v1.engine.input_processor.InputProcessor.process_inputs"
    )
    assert reason in refused
    (error,) = (line for line in (run.stdout + run.stderr).splitlines() if "ERROR" in line)
    assert reason in error


def test_an_unknown_version_is_left_alone_without_a_message() -> None:
    found, log = serve(version="0.34.0")
    assert found["wrapped"] == ["vllm.config.model.ModelConfig.__post_init__"]
    assert "mrrope" not in log


@pytest.mark.parametrize("is_file", [False, True])
def test_an_unknown_version_names_itself_where_a_model_uses_mrrope(is_file: bool) -> None:
    overrides = None if is_file else OURS
    script = SERVE.format(version="0.34.0", rope_parameters=overrides, folder=FOLDER)
    if is_file:
        in_file = {**OURS, "rope_theta": 1e4, "original_max_position_embeddings": 16}
        script = script.replace(
            "import tiny_engine", f"import tiny_engine; tiny_engine.LLAMA['rope_scaling'] = {in_file}"
        )
    run = run_in_fresh_process(script)
    (message,) = (line for line in (run.stdout + run.stderr).splitlines() if "mrrope's plugin" in line)
    assert "ERROR" in message.split("mrrope's plugin")[0]  # from vLLM 0.33 on behind the process's name
    for part in ("knows vLLM 0.25 to 0.33, got 0.34.0", "mrrope export --engine vllm"):
        assert part in message


@pytest.mark.parametrize(
    "version",
    [
        *("0.25.0", "0.25.1", "0.25.1rc2", "0.25.2.post1", "0.25.1+cu129", "0.25.1+empty.dev", "v0.25.1", "0.25"),
        *("0.26.0", "0.29.0", "0.33.0", "0.33.1rc1", "0.33.0+cpu"),
    ],
)
def test_known_versions(version: str) -> None:
    assert plugin.is_known(version)


@pytest.mark.parametrize(
    "version",
    [
        *("0.24.9", "0.34.0", "0.34.0rc1", "0.2.5", "0.250.0", "1.25.1", "0.25.1.dev0", "0.25.1rc1.dev7+g1a2b3c4"),
        *("0.25.1dev", "0.1.dev1+g1a2b3c4", "dev", "unknown", ""),
    ],
)
def test_unknown_versions(version: str) -> None:
    assert not plugin.is_known(version)


def resolve(dotted: str) -> tuple[Any, str]:
    """Return the module or class that holds a dotted name, and the last part of it."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise AssertionError(f"{dotted} does not exist")


@pytest.mark.parametrize("dotted", TARGETS)
def test_hooked_functions_have_the_parameters_that_hooks_rely_on(dotted: str) -> None:
    owner, name = resolve(dotted)
    # Through the hook, if it is installed: functools.wraps keeps the signature.
    assert list(inspect.signature(getattr(owner, name)).parameters) == TARGETS[dotted].split()


def test_every_hook_is_in_the_table() -> None:
    # Less, where some are installed later, by a worker's process.
    assert {dotted for dotted in hooks.INSTALLED if dotted.startswith("vllm.")} <= TARGETS.keys()


def test_registering_again_changes_nothing() -> None:
    def functions() -> dict[str, Any]:
        return {dotted: getattr(*resolve(dotted)) for dotted in hooks.INSTALLED}

    before = functions()
    plugin.register()
    assert functions() == before
    assert before


# Wrapping


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An empty list of hooks, for functions that are not vLLM's."""
    monkeypatch.setattr(hooks, "INSTALLED", {})
    return hooks.INSTALLED


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any]) -> ModuleType:
    """A module with a function ``double``, which another module imported by name."""
    module, importer, namesake = (ModuleType(f"hooked_{name}") for name in ("module", "importer", "namesake"))

    def double(x: int, *, plus: int = 0) -> int:
        """Return twice x."""
        return 2 * x + plus

    module.double = importer.double = double
    module.importer, module.namesake = importer, namesake
    namesake.double = len
    for each in (module, importer, namesake):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return module


def add_one(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) + 1


def negate(original: Any, *args: Any, **kwargs: Any) -> Any:
    return -original(*args, **kwargs)


def test_a_wrapped_function_is_called_through_the_hook(module: ModuleType, installed: dict[str, Any]) -> None:
    own = module.double
    hooks.wrap(module, "double", add_one)
    assert module.double(3, plus=1) == 8
    assert (module.double.__name__, module.double.__doc__) == ("double", "Return twice x.")
    assert inspect.signature(module.double) == inspect.signature(own)
    assert module.importer.double(3) == 6
    assert installed == {"hooked_module.double": own}


def test_the_same_hook_is_installed_once_and_another_is_added(module: ModuleType, installed: dict[str, Any]) -> None:
    own = module.double
    for _ in range(2):
        hooks.wrap(module, "double", add_one)
        hooks.wrap(module, "double", negate)
    assert module.double(3) == -7
    assert installed == {"hooked_module.double": own}


def test_a_function_is_wrapped_wherever_it_was_imported(module: ModuleType) -> None:
    for around in (add_one, negate, add_one):
        hooks.wrap_everywhere(module, "double", around)
    assert module.double(3) == module.importer.double(3) == -7
    assert module.namesake.double is len


class Engine:
    def __init__(self, size: int) -> None:
        self.size = size

    def length(self, extra: int) -> int:
        return self.size + extra

    @staticmethod
    def default() -> int:
        return 1

    @classmethod
    def name(cls) -> str:
        return cls.__name__


def test_methods_are_wrapped_with_self(monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any]) -> None:
    monkeypatch.setattr(Engine, "length", Engine.length)  # restores it

    class Derived(Engine):
        pass

    hooks.wrap(Engine, "length", add_one)
    assert Engine(3).length(extra=4) == Derived(3).length(4) == 8
    hooks.wrap(Derived, "length", negate)
    assert (Engine(3).length(4), Derived(3).length(4)) == (8, -8)
    assert len(installed) == 2


@pytest.mark.parametrize("name", ["default", "name"])
def test_methods_that_a_function_cannot_replace_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"plain method, got test_plugin\.Engine\.{name}"):
        hooks.wrap(Engine, name, add_one)


def test_a_name_that_does_not_exist_is_an_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError):
        hooks.wrap(module, "triple", add_one)


# Modules that are not imported yet


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """An empty list of hooks that do not fit."""
    monkeypatch.setattr(hooks, "FAILED", {})
    monkeypatch.setattr(hooks, "_awaited", {})
    return hooks.FAILED


def test_a_hook_that_does_not_fit_is_kept_for_served_models(
    module: ModuleType, failed: dict[str, Exception], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(hooks.LOGGER), "handlers", [caplog.handler])
    seen: list[ModuleType] = []
    hooks.require_installed()
    hooks.when_imported(module.__name__, lambda module: hooks.wrap(module, "triple", add_one))
    hooks.when_imported(module.__name__, seen.append)
    assert seen == [module]
    with pytest.raises(RuntimeError, match=r"must fit this vLLM, got hooked_module: AttributeError: .*triple"):
        hooks.require_installed()
    assert {(record.levelname, record.getMessage()) for record in caplog.records} == {("ERROR", hooks.failure())}


def test_a_check_that_fails_leaves_stock_models_alone(module: ModuleType, failed: dict[str, Exception]) -> None:
    hooks.wrap(module, "double", hooks.where_served(lambda config: config, "mrrope.none", "around"))
    assert module.double(3, plus=1) == 7
    assert list(failed) == ["mrrope.none.around"]


def test_a_module_that_runs_as_main_is_hooked(
    module: ModuleType, failed: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    seen: list[ModuleType] = []
    hooks.when_imported(module.__name__, seen.append)
    hooks.when_imported("json", seen.append)
    assert seen == [main, module, json]
    hooks.when_imported("hooked_other", seen.append)
    main.__spec__ = None
    hooks.when_imported("hooked_other", seen.append)
    assert seen == [main, module, json]
