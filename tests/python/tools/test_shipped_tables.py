"""Tables that come with the package."""

from pathlib import Path

import pytest
from calibration_runs import calibration_folder
from command_line import as_arguments
from transformers import LlamaForCausalLM

import mrrope
from mrrope.cli import main
from mrrope.tables import shipped
from mrrope.tables.frequency_table import METHODS
from mrrope.tables.lookup import load_tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_folder(tmp_path_factory.mktemp("calibration"))


@pytest.fixture
def shipped_table(tmp_path: Path, monkeypatch) -> mrrope.FrequencyTable:
    table = mrrope.frequency_table("mrrope_uni", rotary_dim=16, base=1e4, original_max_position=32, scale=4.0)
    table.save(tmp_path / "tiny-4x.json")
    table.save(tmp_path / "another.json")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    return table


def test_a_table_that_comes_with_the_package_is_loaded_by_name(shipped_table: mrrope.FrequencyTable) -> None:
    assert mrrope.FrequencyTable.load("tiny-4x") == shipped_table
    with pytest.raises(FileNotFoundError, match=r"comes with mrrope \(another, tiny-4x\), got 'tiny-8x'"):
        mrrope.FrequencyTable.load("tiny-8x")


def test_patch_and_eval_take_the_name(shipped_table: mrrope.FrequencyTable, folder: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    assert mrrope.patch(model, "tiny-4x").model.rotary_emb.tables[None] == (shipped_table,)
    options = {"--text": str(folder / "text.txt"), "--lengths": "64", "--device": "cpu", "--methods": "rope,tiny-4x"}
    options["--output"] = str(tmp_path / "out")
    assert main(["eval", str(folder / "model"), *as_arguments(options)]) == 0


def test_patch_names_methods_and_tables_where_a_name_is_neither(shipped_table, folder: Path, monkeypatch) -> None:
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    listed = rf"method must be one of {', '.join(METHODS)}, .* comes with mrrope \(another, tiny-4x\), got 'tiny-8x'"
    with pytest.raises(ValueError, match=listed):
        mrrope.patch(model, "tiny-8x")
    monkeypatch.setattr(shipped, "FOLDER", folder / "model" / "nothing")
    with pytest.raises(ValueError, match=r"comes with mrrope \(there is none yet\), got 'tiny-8x'"):
        mrrope.patch(model, ["tiny-8x"], scale="auto")


def test_a_file_of_that_name_is_meant_where_there_is_one(shipped_table, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = mrrope.frequency_table("rope", rotary_dim=16, base=1e4, original_max_position=64)
    other.save("tiny-4x")
    assert mrrope.FrequencyTable.load("tiny-4x") == other


def test_every_table_of_the_package_can_be_loaded() -> None:
    for name in shipped.names():
        tables = load_tables(name)
        assert name.endswith(f"-{tables.scale:g}x")
        # By gradient every pair of every head is free; the search keeps scales that grow with the wavelength.
        if isinstance(tables, mrrope.FrequencyTable):
            assert (tables.radix_factors >= 1 - 1e-12).all()
        else:
            assert (len(tables), tables.key_heads) == (30, 3)
    with pytest.raises(FileNotFoundError, match="the name of a table that comes with mrrope"):
        mrrope.FrequencyTable.load("no-such-table")
