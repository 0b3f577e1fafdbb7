"""``mrrope export``: files, options, and errors."""

import json
import math

import pytest

import mrrope
from mrrope import cli
from mrrope.export import hf_config

transformers = pytest.importorskip("transformers")
from tiny_exports import GEMMA, SCALE, TINY, tables_for, tiny, yarn_ratio  # noqa: E402

pytestmark = pytest.mark.usefixtures("rope_types")


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def test_the_command_takes_a_set(folder, tmp_path_factory, capsys):
    path = tmp_path_factory.mktemp("set") / "t.json"
    tables = tables_for(tiny("llama"))
    tables.save(path)
    assert command(folder, "--table", path, "--engine", "transformers") == 0
    assert json.loads(capsys.readouterr().out) == mrrope.export_config(folder, tables, engine="transformers")
    assert command(folder, "--table", path, "--engine", "vllm") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("mrrope export: vllm has one table for all layers and heads")
    assert printed.count("\n") == 1


def command(*arguments: object) -> int:
    return cli.main(["export", *map(str, arguments)])


def test_the_command(folder, tmp_path_factory, capsys):
    output = tmp_path_factory.mktemp("out")
    common = ("--method", "mrrope_pro", "--scale", SCALE, "--engine")
    for engine in hf_config.ENGINES:
        expected = mrrope.export_config(folder, "mrrope_pro", scale=SCALE, engine=engine)
        assert command(folder, *common, engine) == 0
        assert json.loads(capsys.readouterr().out) == expected
        assert command(folder / "config.json", *common, engine, "--output", output) == 0
        assert capsys.readouterr().out == f"{output}: for {engine}\n"
        assert json.loads((output / "config.json").read_text()) == expected


def test_the_command_takes_tables_and_options(folder, tmp_path, capsys):
    table = yarn_ratio()
    table.save(tmp_path / "t.json")
    assert command(folder, "--table", tmp_path / "t.json", "--engine", "vllm", "--json") == 0
    assert json.loads(capsys.readouterr().out) == mrrope.export_config(folder, table, engine="vllm")
    assert command(folder, "--method", "ntk", "--scale", 2, "--original-max-position", 32, "--engine", "vllm") == 0
    expected = mrrope.export_config(folder, "ntk", scale=2.0, original_max_position=32, engine="vllm")
    assert json.loads(capsys.readouterr().out) == expected
    assert expected["rope_parameters"]["original_max_position_embeddings"] == 32
    assert (
        command(folder, "--method", "mrrope_pow", "--scale", 2, "--power", 2, "--bounds", 1, 9, "--engine", "sglang")
        == 0
    )
    expected = mrrope.export_config(folder, "mrrope_pow", scale=2.0, power=2.0, bounds=(1, 9), engine="sglang")
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--engine", "vllm", "--scale", "4", "--output", "{folder}"),
            "--output must be another file than the model's own",
        ),
        (("--engine", "vllm", "--scale", "-1"), "scale must be"),
        (("--engine", "vllm"), "scale must be given with method 'mrrope_pro': scale=4.0 covers 4 times the 64 tokens"),
        (("--engine", "llama.cpp", "--local-layers", "--output", "x.gguf"), "--local-layers is for configurations"),
        (("--engine", "llama.cpp"), "--engine llama.cpp needs --output FILE"),
        (("--engine", "llama.cpp", "--output", "x.gguf"), "--engine llama.cpp needs a .gguf file"),
    ],
)
def test_the_commands_errors_are_one_line(folder, arguments, message, capsys):
    arguments = [argument.format(folder=folder) for argument in arguments]
    assert command(folder, "--method", "mrrope_pro", *arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("mrrope export: ")
    assert printed.count("\n") == 1


def test_the_command_takes_local_layers(tmp_path, capsys):
    config = transformers.Gemma3TextConfig(**TINY, **GEMMA)
    config.save_pretrained(tmp_path)
    common = (tmp_path, "--method", "mrrope_uni", "--scale", SCALE, "--engine", "transformers-longrope")
    for options, extended in (((), ["full_attention"]), (("--local-layers",), [*GEMMA["layer_types"]])):
        assert command(*common, *options) == 0
        parameters = json.loads(capsys.readouterr().out)["rope_parameters"]
        assert sorted(extended) == sorted(kind for kind, own in parameters.items() if own["rope_type"] == "longrope")


def test_infinities_are_strict_json(tmp_path):
    """In transformers' encoding. Python's own encoding of infinities is not JSON."""
    config = tiny("granitemoehybrid", layer_types=["mamba", "attention"], position_embedding_type="rope")
    assert math.isinf(config.time_step_limit[1])
    config.save_pretrained(tmp_path)
    for form in (config, config.to_dict(), tmp_path):
        exported = mrrope.export_config(form, "mrrope_pro", scale=SCALE, engine="transformers-longrope")
        (tmp_path / "exported").mkdir(exist_ok=True)
        (tmp_path / "exported" / "config.json").write_text(json.dumps(exported, allow_nan=False))
        again = transformers.AutoConfig.from_pretrained(tmp_path / "exported")
        assert list(again.time_step_limit) == list(config.time_step_limit)


def test_the_command_distinguishes_an_engine_from_a_file(tmp_path, capsys):
    assert command(tmp_path / "m.gguf", "--method", "mrrope_pro", "--engine", "vllm") == 2
    assert "--engine vllm needs a model's folder or config.json" in capsys.readouterr().err
    assert command(tmp_path / "none", "--method", "mrrope_pro", "--engine", "vllm") == 2
    assert f"a config.json or a folder with one, and there is no {tmp_path / 'none'}\n" in capsys.readouterr().err
