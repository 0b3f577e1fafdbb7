"""GGUF files for llama.cpp: their bytes by gguf's own reader, and llama.cpp's logits of a real model."""

import json
import math
import re
import warnings
from pathlib import Path

import pytest
import smollm2
import torch
from layer_tables import random_set
from markers import takes_minutes

import mrrope
from mrrope import cli

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
np = pytest.importorskip("numpy")

HEAD_DIM, ORIGINAL = 16, 128


def write_model(path: Path, *, architecture: str = "llama", factors: int = 0, **more: object) -> Path:
    """Write a small file like those of llama.cpp's converter, with quantized tensors and every kind of metadata."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture, endianess=more.pop("endianess", gguf.GGUFEndian.LITTLE))
    if alignment := more.pop("alignment", 0):
        writer.add_custom_alignment(alignment)
    writer.add_name("tiny")
    writer.add_context_length(ORIGINAL)
    writer.add_embedding_length(2 * HEAD_DIM)
    writer.add_head_count(2)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(50_000.0)
    writer.add_token_list(["a", "ÿ", "<|end|>"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_uint16("split.count", more.pop("split", 1))
    kinds = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    tensors = more.pop("tensors", [])
    for key, value in more.items():
        kinds[type(value)](f"{architecture}.rope.{key.replace('__', '.')}", value)
    for name in [*tensors, *(["rope_freqs.weight"] if factors else [])]:
        writer.add_tensor(name, np.ones(factors or HEAD_DIM // 2, dtype=np.float32))
    writer.add_tensor("token_embd.weight", random.standard_normal((3, 32), dtype=np.float32).astype(np.float16))
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0):
        blocks = gguf.quants.quantize(random.standard_normal((5, 64), dtype=np.float32), kind)
        writer.add_tensor(f"blk.0.{kind.name}.weight", blocks, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", random.standard_normal(7, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(reader) -> dict:
    return {key: (field.types, field.contents()) for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def tensors(reader) -> dict:
    return {
        tensor.name: (tensor.tensor_type, tensor.shape.tolist(), tensor.data.tobytes()) for tensor in reader.tensors
    }


def check_copy(source: Path, destination: Path, table: mrrope.FrequencyTable, length: int) -> None:
    """Assert that the copy differs from the source only in the table and the lengths."""
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(destination)
    factors = tensors(new).pop("rope_freqs.weight")
    assert factors[0] == gguf.GGMLQuantizationType.F32
    assert factors[1] == [table.rotary_dim // 2]
    order = ">f4" if new.endianess is gguf.GGUFEndian.BIG else "<f4"
    np.testing.assert_array_equal(np.frombuffer(factors[2], order), table.cumulative_scale.float().numpy())
    without = {name: value for name, value in tensors(old).items() if name != "rope_freqs.weight"}
    assert without == {name: value for name, value in tensors(new).items() if name != "rope_freqs.weight"}
    assert [name for name in tensors(new) if name in tensors(old)] == list(tensors(old))
    # llama.cpp requires tensors to be adjacent, up to padding.
    offset = 0
    for tensor in new.tensors:
        assert tensor.data_offset - new.data_offset == offset
        offset += math.ceil(tensor.n_bytes / new.alignment) * new.alignment
    assert destination.stat().st_size == new.data_offset + offset

    float32, uint32 = [gguf.GGUFValueType.FLOAT32], [gguf.GGUFValueType.UINT32]
    expected = {
        key: value for key, value in metadata(old).items() if ".rope.scaling." not in key and "scale_linear" not in key
    }
    expected["llama.context_length"] = (uint32, length)
    expected["llama.rope.scaling.original_context_length"] = (uint32, metadata(old)["llama.context_length"][1])
    expected["llama.rope.freq_base"] = (float32, float(np.float32(table.base)))
    expected["llama.rope.scaling.attn_factor"] = (float32, float(np.float32(table.attention_factor)))
    assert metadata(new) == expected


VARIANTS = {
    "plain": {},
    "scaled": {"scaling__type": "yarn", "scaling__factor": 2.0, "scaling__attn_factor": 1.1, "scale_linear": 2.0},
    "with factors": {"factors": HEAD_DIM // 2},
    "big endian": {"endianess": gguf.GGUFEndian.BIG},
    "aligned": {"alignment": 256},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("method", ["mrrope_pro", "yarn_ratio"])
def test_everything_else_is_copied(variant, method, tmp_path):
    source = write_model(tmp_path / "s.gguf", **variant)
    before = source.read_bytes()
    table = mrrope.export_gguf(source, tmp_path / "d.gguf", method, scale=4.0, original_max_position=ORIGINAL)
    assert table == mrrope.frequency_table(
        method, rotary_dim=HEAD_DIM, base=50_000.0, original_max_position=ORIGINAL, scale=4.0
    )
    check_copy(source, tmp_path / "d.gguf", table, 4 * ORIGINAL)
    assert source.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"s.gguf", "d.gguf"}


def test_a_ready_table_and_its_file(tmp_path):
    source = write_model(tmp_path / "s.gguf", factors=HEAD_DIM // 2)
    table = mrrope.frequency_table(
        "longrope", rotary_dim=HEAD_DIM, base=5e4, original_max_position=ORIGINAL, factors=[1, 1.5, 2, 3, 4, 5, 6, 7]
    )
    table.save(tmp_path / "t.json")
    for given in (table, tmp_path / "t.json", str(tmp_path / "t.json")):
        assert mrrope.export_gguf(source, tmp_path / "d.gguf", given) == table
        check_copy(source, tmp_path / "d.gguf", table, ORIGINAL)


def test_exporting_an_export_again(tmp_path):
    source = write_model(tmp_path / "s.gguf")
    mrrope.export_gguf(source, tmp_path / "one.gguf", "mrrope_pro", scale=4.0)
    mrrope.export_gguf(source, tmp_path / "two.gguf", "mrrope_uni", scale=8.0)
    mrrope.export_gguf(
        tmp_path / "one.gguf", tmp_path / "three.gguf", "mrrope_uni", scale=8.0, original_max_position=ORIGINAL
    )
    assert (tmp_path / "two.gguf").read_bytes() == (tmp_path / "three.gguf").read_bytes()


@pytest.mark.parametrize("key", ["scaling", "legacy"])
def test_a_linear_factor_is_extended(key, tmp_path):
    more = {"scaling": {"scaling__type": "linear", "scaling__factor": 4.0}, "legacy": {"scale_linear": 4.0}}[key]
    table = mrrope.export_gguf(write_model(tmp_path / "s.gguf", **more), tmp_path / "d.gguf", "pi", scale=2.0)
    assert table.cumulative_scale.tolist() == [8.0] * (HEAD_DIM // 2)
    assert table.original_max_position == ORIGINAL


def test_an_export_is_extended(tmp_path):
    """From its own factors and its context length."""
    source = write_model(tmp_path / "s.gguf")
    first = mrrope.export_gguf(source, tmp_path / "one.gguf", "mrrope_pro", scale=4.0)
    second = mrrope.export_gguf(tmp_path / "one.gguf", tmp_path / "two.gguf", "pi", scale=2.0)
    assert (second.original_max_position, second.scale) == (4 * ORIGINAL, 2.0)
    torch.testing.assert_close(second.cumulative_scale, 2 * first.cumulative_scale.float().double(), rtol=1e-15, atol=0)
    assert second.attention_factor == pytest.approx(first.attention_factor)


def test_an_extended_file_is_extended_with_the_warning_of_patch(tmp_path):
    """Old 128 tokens, x4 to 512, x2 to 1024: which of the two lengths a scale counts from is not obvious."""
    source, one = write_model(tmp_path / "s.gguf"), tmp_path / "one.gguf"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.export_gguf(source, one, "pi", scale=4.0)
        mrrope.export_gguf(one, tmp_path / "two.gguf", "pi", scale=4.0, original_max_position=ORIGINAL)
    expected = "one.gguf is extended by its configuration already .*scale=2.0 extends the 512 tokens that it "
    with pytest.warns(UserWarning, match=expected + "covers now; original_max_position=128 extends plain RoPE instead"):
        table = mrrope.export_gguf(one, tmp_path / "two.gguf", "pi", scale=2.0)
    assert table.cumulative_scale.tolist() == [8.0] * (HEAD_DIM // 2)


def test_a_context_shift_would_apply_the_attention_factor_again(tmp_path):
    source = write_model(tmp_path / "s.gguf")
    expected = r"multiplies every cached key by the attention factor again, here 1\.13863: .*--no-context-shift"
    with pytest.warns(UserWarning, match=expected):
        mrrope.export_gguf(source, tmp_path / "d.gguf", "mrrope_pro", scale=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mrrope.export_gguf(source, tmp_path / "d.gguf", "mrrope_pro", scale=4.0, attention_factor=1.0)


@pytest.mark.parametrize(
    "architecture",
    ["mistral3", "exaone4", "exaone-moe", "granite", "granite_swa", "arcee", "deci", "llama4", "nanbeige"],
)
def test_every_architecture_that_loads_the_factors(architecture, tmp_path):
    """Under the keys of the architecture; the length that Mistral 3 scales its attention by stays."""
    made = {"scaling__finetuned": True, "scaling__original_context_length": 64, "scaling__type": "yarn"}
    source = write_model(tmp_path / "s.gguf", architecture=architecture, **made)
    table = mrrope.export_gguf(source, tmp_path / "d.gguf", "mrrope_pro", scale=4.0, original_max_position=64)
    new = gguf.GGUFReader(tmp_path / "d.gguf")
    np.testing.assert_array_equal(
        np.frombuffer(tensors(new)["rope_freqs.weight"][2], "<f4"), table.cumulative_scale.float().numpy()
    )
    rope = {key: value for key, (_, value) in metadata(new).items() if ".rope." in key or ".context" in key}
    assert rope == {
        f"{architecture}.context_length": 4 * 64,
        f"{architecture}.rope.dimension_count": HEAD_DIM,
        f"{architecture}.rope.freq_base": 50_000.0,
        f"{architecture}.rope.scaling.attn_factor": float(np.float32(table.attention_factor)),
        f"{architecture}.rope.scaling.finetuned": True,
        f"{architecture}.rope.scaling.original_context_length": 64,
    }


@pytest.mark.parametrize(
    ("made", "arguments", "message"),
    [
        ({"architecture": "granite", "scaling__finetuned": False}, {}, "the file says that it does not rotate"),
        ({"tensors": ["rope_factors_long.weight"]}, {}, "the file holds the factors of longrope"),
        ({"architecture": "qwen2"}, {}, "llama.cpp cannot run qwen2 by another table: .*rope_freqs.weight"),
        ({"scaling__type": "yarn"}, {}, "source is extended by yarn already: give original_max_position"),
        ({"split": 3}, {}, "source must be one whole file, and this is one of 3"),
        ({"factors": 3}, {"original_max_position": 64}, "rope_freqs.weight of 8 float32 numbers or none"),
        ({}, {"destination": "s.gguf"}, "destination must be another file than the source"),
        ({}, {"method": "mrope"}, "method must be one of"),
        ({}, {"scale": -1.0}, "scale must be"),
        ({}, {"scale": None}, "scale must be given with method 'mrrope_pro'"),
        ({}, {"method": "mrrope_pow"}, "power"),
    ],
)
def test_errors_leave_nothing_behind(made, arguments, message, tmp_path):
    source = write_model(tmp_path / "s.gguf", **made)
    before = source.read_bytes()
    arguments = {"destination": "d.gguf", "method": "mrrope_pro", "scale": 4.0} | arguments
    with pytest.raises(ValueError, match=message):
        mrrope.export_gguf(source, tmp_path / arguments.pop("destination"), **arguments)
    assert source.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s.gguf"]


def test_a_table_of_another_model(tmp_path):
    source = write_model(tmp_path / "s.gguf")
    table = mrrope.frequency_table("rope", rotary_dim=64, base=1e4, original_max_position=64)
    with pytest.raises(ValueError, match="rotary_dim 16"):
        mrrope.export_gguf(source, tmp_path / "d.gguf", table)


@pytest.mark.parametrize("kind", ["set", "heads"])
def test_tables_per_layer_and_head_are_refused(tmp_path, kind):
    source = write_model(tmp_path / "s.gguf")
    base = mrrope.export_gguf(source, tmp_path / "d.gguf", "rope").base
    (tmp_path / "d.gguf").unlink()
    tables = random_set(2, 2, rotary_dim=HEAD_DIM, base=base, original_max_position=ORIGINAL)
    tables = tables if kind == "set" else tables[0]
    expected = f"llama.cpp has one table for all layers and heads and cannot express {tables!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        mrrope.export_gguf(source, tmp_path / "d.gguf", tables)
    assert [path.name for path in tmp_path.iterdir()] == ["s.gguf"]


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"nothing of the kind", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_other_files(content, tmp_path):
    (tmp_path / "s.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"s\.gguf is not a GGUF file that can be read"):
        mrrope.export_gguf(tmp_path / "s.gguf", tmp_path / "d.gguf", "mrrope_pro")
    with pytest.raises(FileNotFoundError, match=r"source must be a .gguf file, and there is no .*none\.gguf"):
        mrrope.export_gguf(tmp_path / "none.gguf", tmp_path / "d.gguf", "mrrope_pro")


def test_without_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'mrrope\[gguf\]'"):
        mrrope.export_gguf(tmp_path / "s.gguf", tmp_path / "d.gguf", "mrrope_pro")


def test_the_command(tmp_path, capsys):
    source, destination = write_model(tmp_path / "s.gguf"), tmp_path / "d.gguf"
    arguments = ["export", str(source), "--method", "mrrope_pro", "--scale", "4", "--engine", "llama.cpp"]
    arguments += ["--output", str(destination)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == f"{destination}: for llama.cpp\n"
    assert cli.main([*arguments, "--json", "--original-max-position", "64"]) == 0
    table = mrrope.FrequencyTable.from_dict(json.loads(capsys.readouterr().out))
    assert table.original_max_position == 64
    check_copy(source, destination, table, 256)
    assert cli.main([*arguments[:-1], str(source)]) == 2
    assert capsys.readouterr().err.startswith("mrrope export: destination must be another file than the source")


def test_a_real_file(tmp_path):
    source = smollm2.gguf_file()
    table = mrrope.export_gguf(source, tmp_path / "d.gguf", "mrrope_pro", scale=4.0)
    assert table == mrrope.frequency_table("mrrope_pro", rotary_dim=64, base=1e5, original_max_position=8192, scale=4.0)
    check_copy(source, tmp_path / "d.gguf", table, 4 * 8192)


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return the mean over tokens of KL(p || q), from logits."""
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def llama_cpp_logits(path: Path, tokens: list[int], last: int) -> torch.Tensor:
    """Return llama.cpp's logits of the last tokens, with its KV cache in float32."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=len(tokens), n_batch=512, logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False
    )
    model.eval(tokens)
    logits = torch.from_numpy(model.scores[len(tokens) - last : len(tokens)].copy())
    model.close()
    return logits


class LlamaCppRotaryEmbedding(torch.nn.Module):
    """cos/sin as in llama.cpp: float32 throughout, each pair's angle computed from the previous one."""

    def __init__(self, table: mrrope.FrequencyTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step = np.power(np.float32(self.table.base), np.float32(-2.0 / self.table.rotary_dim))
        angle = position_ids[0].numpy().astype(np.float32)
        columns = []
        for factor in self.table.cumulative_scale.float().numpy():
            columns.append(angle / factor)
            angle = angle * step
        angles = np.stack(columns + columns, axis=-1)
        factor = np.float32(self.table.attention_factor)
        return torch.from_numpy(np.cos(angles) * factor)[None], torch.from_numpy(np.sin(angles) * factor)[None]


@takes_minutes
def test_the_real_llama_cpp_agrees_with_the_patched_model(tmp_path):
    """With the same angles, an export past the native length agrees as closely as the original at 2048 tokens.

    llama.cpp rounds its angles to float32 pair after pair. This alone changes its logits by a divergence of 1e-9 at
    2048 tokens and 3e-8 at 9216.
    """
    pytest.importorskip("llama_cpp", reason="the package llama-cpp-python is not installed")
    source, short, long, last = smollm2.gguf_file(), 2048, 9216, 256
    model, tokenizer = smollm2.model_and_tokenizer()
    tokens = tokenizer(smollm2.real_text())["input_ids"]
    original, exported = dequantized(source, tmp_path / "original.gguf"), tmp_path / "exported.gguf"
    table = mrrope.export_gguf(original, exported, "mrrope_pro", scale=4.0)
    plain = mrrope.frequency_table("rope", rotary_dim=64, base=table.base, original_max_position=8192)

    def logits(length: int, angles: torch.nn.Module) -> torch.Tensor:
        own, model.model.rotary_emb = model.model.rotary_emb, angles
        with torch.no_grad():
            found = model(torch.tensor([tokens[:length]]), logits_to_keep=last, use_cache=False).logits[0]
        model.model.rotary_emb = own
        return found

    with mrrope.patched(model, table):
        patched = logits(short, model.model.rotary_emb)
    on_original = llama_cpp_logits(original, tokens[:short], last)
    agreement = {
        "original at 2048, same angles": divergence(logits(short, LlamaCppRotaryEmbedding(plain)), on_original),
        "export at 9216, same angles": divergence(
            logits(long, LlamaCppRotaryEmbedding(table)), llama_cpp_logits(exported, tokens[:long], last)
        ),
        "export at 2048, patched": divergence(patched, llama_cpp_logits(exported, tokens[:short], last)),
        "patched, but llama.cpp on the original": divergence(patched, on_original),
    }
    print(agreement)
    assert agreement["export at 9216, same angles"] < 2 * agreement["original at 2048, same angles"]
    assert agreement["export at 2048, patched"] < 1e-8
    assert agreement["patched, but llama.cpp on the original"] > 1e-2


def dequantized(source: Path, destination: Path) -> Path:
    """Write the same model in float32.

    llama.cpp rounds activations to 8 bits where weights are quantized. The divergence of 1e-3 that results would hide
    a wrong table.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(destination, "llama")
    for key, (types, value) in metadata(reader).items():
        if key != "general.architecture":
            writer.add_key_value(key, value, types[0], types[-1] if len(types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return destination
