"""Compiled graphs of another state of the package are not taken from vLLM's cache."""

import pytest
from tiny_engine import engine_config

from mrrope.vllm import compile_cache


@pytest.mark.parametrize("rope_parameters", [{"rope_type": "mrrope_pro", "factor": 4}, None])
def test_the_key_changes_with_the_package_where_it_serves(rope_parameters, monkeypatch, tmp_path):
    config = engine_config(tmp_path, rope_parameters)
    before = config.compute_hash()
    assert config.compute_hash() == before
    monkeypatch.setattr(compile_cache, "sources_hash", lambda: "another state")
    assert (config.compute_hash() != before) == (rope_parameters is not None)


def test_the_hash_is_of_passes_and_ops(monkeypatch, tmp_path):
    folders = ("ops", "serving", "vllm")
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "fusion.py").write_text("1")
    monkeypatch.setattr(compile_cache.mrrope, "__file__", str(tmp_path / "__init__.py"))
    hashes = {compile_cache.sources_hash.__wrapped__()}
    for folder in folders:
        (tmp_path / folder / "fusion.py").write_text("2")
        hashes.add(compile_cache.sources_hash.__wrapped__())
    assert len(hashes) == 1 + len(folders)
