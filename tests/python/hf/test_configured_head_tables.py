"""Tables per layer and key head in a model's configuration."""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

import transformers
from head_table_models import rotaries_of, set_for
from patched_models import logits
from tiny_models import TINY_SIZES, tiny_model
from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("rope_types", "no_other_patched_models")


# --- in a configuration


def exported(model: PreTrainedModel, tables: Any, **options: Any) -> Any:
    data = mrrope.export_config(model.config, tables, engine="transformers", **options)
    return transformers.AutoConfig.for_model(**data)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", ["set", "heads"])
def test_a_configuration_that_holds_tables(name: str, kind: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    tables = set_for(model, 2)
    tables = tables if kind == "set" else tables[0]
    config = exported(model, tables)
    with mrrope.patched(model, tables):
        want = logits(model)
    model.config.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert mrrope.is_patched(loaded)
    assert torch.equal(logits(loaded), want)
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), want)
    built = transformers.AutoModelForCausalLM.from_config(config)
    built.load_state_dict(model.state_dict())
    assert torch.equal(logits(built.eval()), want)
    plain = logits(model)
    torch.testing.assert_close(logits(mrrope.unpatch(loaded)), plain, rtol=1e-4, atol=1e-5)


def test_a_model_that_was_built_with_tables_is_extended_from_its_own_length() -> None:
    """Not from the length that its tables reach, which its configuration states."""
    model = tiny_model("llama")
    tables = set_for(model, 2)
    built = transformers.AutoModelForCausalLM.from_config(exported(model, tables)).eval()
    built.load_state_dict(model.state_dict())
    for method, options in (("mrrope_pro", {"scale": 2.0}), ([tables], {"scale": "auto"})):
        want = logits(mrrope.patch(model, method, **options))
        torch.testing.assert_close(logits(mrrope.patch(built, method, **options)), want, rtol=1e-4, atol=1e-5)
        assert [rotary.tables[None][-1] for rotary in rotaries_of(built)] == [
            rotary.tables[None][-1] for rotary in rotaries_of(model)
        ]


def test_a_configuration_whose_tables_do_not_fit_it() -> None:
    model = tiny_model("llama")
    config = exported(model, set_for(model, 2))
    for name, value, message in (
        ("head_dim", 2 * config.head_dim, f"rotary_dim {2 * config.head_dim}, got TableSet"),
        ("num_hidden_layers", 3, "a set for the 3 layers of LlamaModel, got one for 2"),
        ("num_key_value_heads", 1, "tables for the 1 key heads of LlamaModel in layer 0, got tables for 2"),
    ):
        wrong = copy.deepcopy(config)
        setattr(wrong, name, value)
        with pytest.raises(ValueError, match=message):
            transformers.LlamaForCausalLM(wrong)


def test_threads_may_load_models_with_tables(tmp_path: Path) -> None:
    model = tiny_model("llama")
    built = transformers.AutoModelForCausalLM.from_config(exported(model, set_for(model, 2)))
    built.save_pretrained(tmp_path)
    want = logits(built.eval())

    def load(_: int) -> torch.Tensor:
        return logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())

    with ThreadPoolExecutor(8) as threads:
        assert all(torch.equal(found, want) for found in threads.map(load, range(16)))


class OddConfig(transformers.PreTrainedConfig):
    model_type = "odd"


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Keep those of torch; that of transformers calls get_text_config."""


@pytest.mark.parametrize(
    "odd",
    [
        {"rope_parameters": [1, 2]},
        {"rope_parameters": "rope_type"},
        {"rope_parameters": 3},
        {"text_config": OddConfig(), "decoder": OddConfig()},  # get_text_config raises
    ],
    ids=["list", "text", "number", "two text parts"],
)
def test_models_without_tables_are_left_alone(odd: dict[str, Any]) -> None:
    config = OddConfig()
    for name, value in odd.items():
        setattr(config, name, value)
    assert not mrrope.is_patched(OddModel(config))


def test_a_configuration_that_names_a_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tables = set_for(model, 2)
    tables.save(tmp_path / "set.json")
    one = tables[0][0]
    one.save(tmp_path / "one.json")
    for file, same in (("set.json", tables), ("one.json", one)):
        config = copy.deepcopy(model.config)
        config.rope_parameters = {"rope_type": "mrrope", "rope_theta": 1e4, "table": str(tmp_path / file)}
        built = transformers.AutoModelForCausalLM.from_config(config).eval()
        built.load_state_dict(model.state_dict())
        with mrrope.patched(model, same):
            torch.testing.assert_close(logits(built), logits(model), rtol=1e-4, atol=1e-5)


def test_a_configuration_without_a_table() -> None:
    with pytest.raises(Exception, match="table field must be a dict of tables, a path or a name, got None"):
        transformers.LlamaConfig(**TINY_SIZES, rope_parameters={"rope_type": "mrrope", "rope_theta": 1e4})
    parameters = {"rope_type": "mrrope", "rope_theta": 1e4, "factor": "auto", "table": ["2x.json", "4x.json"]}
    config = transformers.LlamaConfig(**TINY_SIZES, rope_parameters=parameters)  # as vLLM's plugin reads it
    with pytest.raises(ValueError, match=r"table field must be a dict of tables, a path or a name, got \['2x.json'"):
        transformers.LlamaForCausalLM(config)
