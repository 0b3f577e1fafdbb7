"""mrrope's rope types in configurations of transformers: frequencies, validation, saving, loading and import order."""

import logging
import subprocess
import sys

import pytest
import torch

import mrrope
from mrrope.hf.rope_types import ROPE_TYPES

transformers = pytest.importorskip("transformers")
from huggingface_hub.errors import StrictDataclassError  # noqa: E402
from model_tolerance import relative, tolerance  # noqa: E402
from tiny_models import TINY_SIZES  # noqa: E402

pytestmark = pytest.mark.usefixtures("rope_types")

BASIC = {"rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
TINY = TINY_SIZES | {"max_position_embeddings": 256}


def parameters(rope_type: str, **more: object) -> dict:
    needed = {"power": 2.0} if rope_type == "mrrope_pow" else {}
    return {"rope_type": rope_type, **BASIC, **needed, **more}


def table(rope_type: str, rotary_dim: int = 32, **options: object) -> mrrope.FrequencyTable:
    needed = {"power": 2.0} if rope_type == "mrrope_pow" else {}
    return mrrope.frequency_table(
        rope_type, rotary_dim=rotary_dim, base=50_000.0, original_max_position=64, scale=4.0, **needed, **options
    )


@pytest.fixture
def warnings_of_transformers(caplog):
    """Capture transformers' log, which does not propagate to the root logger by default."""
    logger = logging.getLogger("transformers")
    logger.propagate = True
    # Some warnings are logged once per process.
    transformers.utils.logging.warning_once.cache_clear()
    # Modeling files warn on import that conftest disables kernels of the Hub.
    caplog.set_level(logging.ERROR, "transformers.integrations.hub_kernels")
    with caplog.at_level(logging.WARNING, "transformers"):
        yield caplog
    logger.propagate = False


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {}),
        ({"beta_slow": 2.0, "beta_fast": 16}, {"alpha": 2.0, "beta": 16.0}),
        ({"bounds": [2, 9]}, {"bounds": (2, 9)}),
        ({"attention_factor": 1.5}, {"attention_factor": 1.5}),
        ({"attention_factor": None, "bounds": None}, {}),
    ],
    ids=["defaults", "betas", "bounds", "attention factor", "nulls"],
)
def test_a_model_gets_the_table(rope_type, more, options, warnings_of_transformers):
    config = transformers.LlamaConfig(**TINY, rope_parameters=parameters(rope_type, **more))
    rotary = transformers.LlamaModel(config).rotary_emb
    expected = table(rope_type, **options)
    assert torch.equal(rotary.inv_freq, expected.inv_freq.float())
    assert rotary.attention_scaling == expected.attention_factor
    assert not warnings_of_transformers.records


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_partial_rotary_factor(rope_type, warnings_of_transformers):
    config = transformers.GPTNeoXConfig(
        **{key: value for key, value in TINY.items() if key != "num_key_value_heads"},
        rope_parameters=parameters(rope_type, partial_rotary_factor=0.5),
    )
    rotary = transformers.GPTNeoXModel(config).rotary_emb
    assert torch.equal(rotary.inv_freq, table(rope_type, rotary_dim=16).inv_freq.float())
    assert not warnings_of_transformers.records


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_a_rope_per_layer_type(rope_type, warnings_of_transformers, tmp_path):
    config = transformers.Gemma3TextConfig(
        **TINY,
        head_dim=32,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": parameters(rope_type),
        },
    )
    config.save_pretrained(tmp_path)
    rotary = transformers.Gemma3TextModel(transformers.AutoConfig.from_pretrained(tmp_path)).rotary_emb
    assert torch.equal(rotary.full_attention_inv_freq, table(rope_type).inv_freq.float())
    assert rotary.full_attention_attention_scaling == table(rope_type).attention_factor
    assert rotary.sliding_attention_attention_scaling == 1.0
    assert not warnings_of_transformers.records


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_saved_and_loaded_again(rope_type, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, rope_parameters=parameters(rope_type, bounds=[1, 12]))
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.rope_parameters == model.config.rope_parameters
    tokens = torch.arange(100)[None] % 40
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_the_same_logits_as_a_patched_model():
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TINY | {"max_position_embeddings": 64}, rope_theta=50_000.0)
    ).eval()
    config = transformers.LlamaConfig(**TINY, rope_parameters=parameters("mrrope_pro"))
    typed = transformers.LlamaForCausalLM(config).eval()
    typed.load_state_dict(plain.state_dict())
    tokens = torch.arange(200)[None] % 40
    with torch.no_grad(), mrrope.patched(plain, "mrrope_pro", scale=4.0):
        torch.testing.assert_close(typed(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("missing", ["factor", "original_max_position_embeddings", "power"])
def test_a_missing_parameter(missing):
    given = parameters("mrrope_pow")
    del given[missing]
    with pytest.raises(KeyError, match=rf"Missing required keys .*'mrrope_pow': {{'{missing}'}}"):
        transformers.LlamaConfig(**TINY, rope_parameters=given)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("factor", "4", "factor field must be a float or int >= 1, got '4'"),
        ("factor", 0.5, "factor field must be a float or int >= 1, got 0.5"),
        ("factor", None, "factor field must be a float or int >= 1, got None"),
        ("original_max_position_embeddings", 0, "original_max_position_embeddings field must be an int >= 1, got 0"),
        ("attention_factor", -1.0, "attention_factor field must be a float or int greater than 0, got -1.0"),
        ("beta_slow", "1", "beta_slow field must be a float or int, got '1'"),
        ("beta_fast", [32], r"beta_fast field must be a float or int, got \[32\]"),
        ("power", "two", "power field must be a float or int, got 'two'"),
        ("bounds", [1], r"bounds field must be a list of two ints, got \[1\]"),
        ("bounds", [1, 2.5], r"bounds field must be a list of two ints, got \[1, 2.5\]"),
        ("bounds", 7, "bounds field must be a list of two ints, got 7"),
    ],
)
def test_a_wrong_parameter(key, value, message):
    with pytest.raises(StrictDataclassError, match=message):  # transformers' wrapping of our ValueError
        transformers.LlamaConfig(**TINY, rope_parameters=parameters("mrrope_pow", **{key: value}))


def test_an_unknown_parameter_warns(warnings_of_transformers):
    transformers.LlamaConfig(**TINY, rope_parameters=parameters("mrrope_pro", temperature=1.0))
    assert "Unrecognized keys in `rope_parameters` for 'rope_type'='mrrope_pro': {'temperature'}" in (
        warnings_of_transformers.text
    )


# In a process of its own: what an import or a call changes in transformers.
STATE = """
import copy, importlib, sys
def state():
    rope_utils = importlib.import_module("transformers.modeling_rope_utils")
    modeling_utils = importlib.import_module("transformers.modeling_utils")
    importlib.import_module("transformers.models.phi3.modeling_phi3")
    functions = dict(rope_utils.ROPE_INIT_FUNCTIONS)
    return functions, dict(vars(rope_utils.RotaryEmbeddingConfigMixin)), dict(vars(modeling_utils.PreTrainedModel))
"""


def run_apart(program: str, folder) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STATE + program], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr


IMPORTS = {
    "mrrope first": "import mrrope; assert 'transformers' not in sys.modules and 'gguf' not in sys.modules",
    "transformers first": "before = state(); import mrrope; assert state() == before",
}


@pytest.mark.parametrize("imports", IMPORTS.values(), ids=IMPORTS)
def test_importing_mrrope_changes_nothing_outside(imports, tmp_path):
    run_apart(
        f"finders, hooks = list(sys.meta_path), list(sys.path_hooks); {imports}\n"
        "assert sys.path_hooks == hooks\n"
        "assert [finder for finder in sys.meta_path if type(finder).__module__.startswith('mrrope')] == []\n"
        "if 'transformers' not in sys.modules: assert sys.meta_path == finders\n"
        "functions, mixin, model = state()\n"
        f"for name in {(*ROPE_TYPES, 'mrrope')}:\n"
        "    assert name not in functions and f'_validate_{name}_rope_parameters' not in mixin, name\n"
        "for name in ('post_init', 'from_pretrained'):\n"
        "    function = getattr(model[name], '__func__', model[name])\n"
        "    while function is not None:\n"
        "        assert function.__globals__['__name__'].startswith(('transformers', 'torch')), function\n"
        "        function = getattr(function, '__wrapped__', None)",
        tmp_path,
    )


def test_importing_mrrope_imports_torch_only(tmp_path):
    """Import time is that of torch and of mrrope's own modules."""
    run_apart(
        "import torch; before = set(sys.modules); import mrrope; new = set(sys.modules) - before\n"
        "foreign = {name for name in new if name.split('.')[0] not in (*sys.stdlib_module_names, 'mrrope')}\n"
        "assert foreign == set(), foreign\n"
        "parts = {name.split('.')[1] for name in new if name.startswith('mrrope.')}\n"
        "assert parts == {'_core', 'export', 'hf', 'ops', 'tables', 'torch_library'}, parts",
        tmp_path,
    )


def test_exporting_changes_nothing_outside(tmp_path):
    """A configuration with mrrope's types is read and written without them being registered afterwards."""
    transformers.LlamaConfig(**TINY, rope_parameters=parameters("mrrope_uni")).save_pretrained(tmp_path)
    run_apart(
        "import mrrope; before = state()\n"
        "config = mrrope.export_config('.', 'mrrope_pro', scale=2.0, original_max_position=64, engine='transformers')\n"
        "assert config['rope_parameters']['rope_type'] == 'mrrope_pro' and state() == before",
        tmp_path,
    )


REGISTERED = {
    "mrrope first": "import mrrope; mrrope.register_rope_types()",
    "transformers first": "import transformers, mrrope; mrrope.register_rope_types()",
    "within an export": "import mrrope; from mrrope.hf.rope_types import types_registered\n"
    "with types_registered(): mrrope.register_rope_types()\n"
    "mrrope.register_rope_types()",
}


@pytest.mark.parametrize("registered", REGISTERED.values(), ids=REGISTERED)
def test_registering(registered, tmp_path):
    run_apart(
        f"{registered}\n"
        "functions, mixin, model = first = state()\n"
        f"for name in {(*ROPE_TYPES, 'mrrope')}:\n"
        "    assert name in functions and f'_validate_{name}_rope_parameters' in mixin, name\n"
        "mrrope.register_rope_types(); assert state() == first\n"
        "mrrope.export_config({'model_type': 'llama', 'rope_theta': 1e4}, 'pi', scale=2.0); assert state() == first\n"
        "assert model['post_init'].patches_as_configured",
        tmp_path,
    )


def test_a_type_that_is_not_registered_is_unknown_to_transformers(tmp_path):
    """What docs/models.md says of it."""
    run_apart(
        "import transformers, mrrope\n"
        f"config = transformers.LlamaConfig(**{TINY}, rope_parameters={parameters('mrrope_uni')})\n"
        "try:\n"
        "    transformers.LlamaForCausalLM(config)\n"
        "except KeyError as error:\n"
        "    assert str(error) == repr('mrrope_uni')\n"
        "mrrope.register_rope_types(); transformers.LlamaForCausalLM(config)",
        tmp_path,
    )


def test_torch_export_with_and_without_the_ops(tmp_path):
    """ONNX has no mrrope ops; a configuration carries the table instead."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(tmp_path)
    exported = mrrope.export_config(tmp_path, "mrrope_pro", scale=4.0, engine="transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    patched = mrrope.patch(load(tmp_path), "mrrope_pro", scale=4.0)
    configured = load(tmp_path, config=transformers.AutoConfig.for_model(**exported))
    ids = torch.arange(24)[None]

    def exported(model):
        """Return whether the exported program has mrrope ops, and its result."""
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
        return "mrrope" in str(program.graph), program.module()(input_ids=ids, use_cache=False).logits

    (has_ops, got), (still_has_ops, want) = exported(patched), exported(configured)
    assert has_ops
    assert not still_has_ops
    assert relative(got, want) < tolerance(configured, lambda model: model(ids).logits)


BEFORE_ROPE_PARAMETERS = {
    "__init__.py": "__version__ = '4.57.6'\n",
    "modeling_rope_utils.py": "ROPE_INIT_FUNCTIONS = {'yarn': None}\n\ndef rope_config_validation(config): ...\n",
}


@pytest.mark.parametrize("imports", [("mrrope", "transformers"), ("transformers", "mrrope")], ids=lambda pair: pair[0])
def test_transformers_4_still_works(imports, tmp_path):
    """A stub of its RoPE module, without the mixin that validation registers with. The real 4.57.6 behaves the same."""
    package = tmp_path / "transformers"
    package.mkdir()
    for name, source in BEFORE_ROPE_PARAMETERS.items():
        (package / name).write_text(source)
    program = (
        f"import {imports[0]}, {imports[1]}\n"
        "import transformers.modeling_rope_utils as rope_utils, mrrope, torch\n"
        "assert list(rope_utils.ROPE_INIT_FUNCTIONS) == ['yarn']\n"
        "for call in (lambda: mrrope.patch(torch.nn.Linear(2, 2), 'pi', scale=2.0), mrrope.register_rope_types,\n"
        "             lambda: mrrope.export_config({}, 'pi', scale=2.0, engine='vllm')):\n"
        "    try:\n"
        "        call()\n"
        "    except ValueError as error:\n"
        "        assert str(error) == 'transformers must be 5.0 or later, got 4.57.6', error\n"
        "    else:\n"
        "        raise AssertionError('must be refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
