"""GGUF files in the commands: their RoPE as in models of transformers with the same extension, and their tokenizer."""

import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_llama import byte_llama, save_byte_llama_gguf
from transformers import LlamaForCausalLM

import mrrope
from mrrope.evaluation import model_loading
from mrrope.evaluation.gguf_model import tokenizer_faults
from mrrope.export.gguf_file import GgufFile
from mrrope.hf.rope_config import global_settings

pytest.importorskip("gguf", reason="the package gguf is not installed")
pytest.importorskip("accelerate", reason="the package accelerate is not installed")

SIZES = {"layers": 2, "heads": 2, "vocab_size": 260, "initializer_range": 0.2}
BASE, HEAD_DIM, TRAINED = 10_000.0, 16, 32
TEXT = torch.randint(0, 260, (1, 200), generator=torch.Generator().manual_seed(0))


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(TEXT).logits


def stock(length: int, **rope: object) -> LlamaForCausalLM:
    """Return a model without mrrope and with the weights of the file."""
    return byte_llama(length, **SIZES, rope_parameters={"rope_theta": BASE, **rope})


def load(path: Path) -> LlamaForCausalLM:
    return model_loading.load(path, device="cpu")[0]


def check_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Frequencies were rounded to float32 once more than in the stock model: 200 positions, 2 layers."""
    torch.testing.assert_close(found, expected, rtol=0, atol=200 * 2**-23 * expected.abs().max().item())


def llama3_factors(factor: float, low: float, high: float, trained: int) -> list[float]:
    """Return what llama.cpp's converter writes for Llama 3.1."""
    found = []
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * BASE ** (2 * pair / HEAD_DIM)
        if wavelength < trained / high:
            found.append(1.0)
        elif wavelength > trained / low:
            found.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def test_the_factors_of_llama_3(tmp_path: Path) -> None:
    rope = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": TRAINED}
    expected = stock(256, rope_type="llama3", factor=8.0, **rope)
    factors = llama3_factors(8.0, 1.0, 4.0, TRAINED)
    assert 1.0 in factors
    assert 8.0 in factors
    save_byte_llama_gguf(tmp_path / "m.gguf", expected, factors=factors)
    model = load(tmp_path / "m.gguf")
    check_same(logits(model), logits(expected))
    assert (logits(model) - logits(stock(256))).abs().max() > 0.1
    assert global_settings(model).original_max_position == 256
    with warnings.catch_warnings():  # Llama 3.1 is trained so
        warnings.simplefilter("error")
        mrrope.patch(model, "pi", scale=2.0)
        mrrope.patch(expected, "pi", scale=2.0)
    check_same(logits(model), logits(expected))


def test_an_export_of_mrrope(tmp_path: Path) -> None:
    """The table and the attention factor, against YaRN of transformers."""
    plain, source, exported = stock(TRAINED), tmp_path / "m.gguf", tmp_path / "extended.gguf"
    save_byte_llama_gguf(source, plain)
    check_same(logits(load(source)), logits(plain))
    mrrope.export_gguf(source, exported, "yarn", scale=8.0)
    model = load(exported)
    expected = stock(256, rope_type="yarn", factor=8.0, original_max_position_embeddings=TRAINED)
    check_same(logits(model), logits(expected))
    settings = global_settings(model)
    assert (settings.original_max_position, settings.trained_length) == (256, TRAINED)
    assert settings.table.attention_factor == pytest.approx(0.1 * math.log(8.0) + 1.0)
    with pytest.warns(UserWarning, match="extended by its configuration already .*the 256 tokens that it covers now"):
        mrrope.patch(model, "pi", scale=2.0)


def test_a_linear_factor(tmp_path: Path) -> None:
    expected = stock(128, rope_type="linear", factor=4.0)
    save_byte_llama_gguf(tmp_path / "m.gguf", expected, scaling__type="linear", scaling__factor=4.0)
    check_same(logits(load(tmp_path / "m.gguf")), logits(expected))


def test_an_attention_factor_alone(tmp_path: Path) -> None:
    save_byte_llama_gguf(tmp_path / "m.gguf", stock(128), scaling__attn_factor=1.25)
    table = mrrope.frequency_table(
        "rope", rotary_dim=HEAD_DIM, base=BASE, original_max_position=128, attention_factor=1.25
    )
    check_same(logits(load(tmp_path / "m.gguf")), logits(mrrope.patch(stock(128), table)))


def test_what_no_table_says_is_refused(tmp_path: Path) -> None:
    save_byte_llama_gguf(tmp_path / "m.gguf", stock(128), scaling__type="yarn", scaling__factor=4.0)
    with pytest.raises(ValueError, match=r"it would read .*m\.gguf as plain RoPE: its extension is yarn"):
        load(tmp_path / "m.gguf")


# The tokenizer

WORDS = ["the", "and", "for", "with", "that"]


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """Return a file with words as SentencePiece writes them, whose merges transformers replaces by dummies."""
    import gguf

    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_token_list(["<pad>", "<eos>", "<bos>", "a", *(f"▁{word}" for word in WORDS)])
    writer.add_tokenizer_model("llama")
    writer.add_bos_token_id(2)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class WordTokenizer:
    """Numbers the words of the file as the file does, or splits them into letters."""

    def __init__(self, split: set[str], opening: list[int]) -> None:
        self.split, self.opening = split, opening

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        found = self.opening if add_special_tokens else []
        for word in text.split():
            found = found + ([3] * len(word) if word in self.split or word == "a" else [4 + WORDS.index(word)])
        return SimpleNamespace(input_ids=found)


@pytest.mark.parametrize(
    ("split", "opening", "expected"),
    [
        (set(), [2], []),
        (set(WORDS), [2], ["it splits 5 of 5 words that are one token in the file, such as 'the'"]),
        (set(), [], ["it does not begin texts with '<bos>'"]),
    ],
)
def test_a_tokenizer_is_compared_with_the_files_tokens(
    gemma: Path, split: set[str], opening: list[int], expected: list[str]
) -> None:
    assert tokenizer_faults(WordTokenizer(split, opening), GgufFile(gemma)) == expected


def test_a_tokenizer_that_differs_is_warned_of(tmp_path: Path) -> None:
    """transformers does not begin texts with the first token that this file asks for."""
    save_byte_llama_gguf(tmp_path / "m.gguf", stock(64), adds_bos=True)
    with pytest.warns(UserWarning, match=r"another tokenizer of .*m\.gguf than .*: it does not begin texts with '<s>'"):
        load(tmp_path / "m.gguf")
    save_byte_llama_gguf(tmp_path / "m.gguf", stock(64))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(tmp_path / "m.gguf")


def test_the_metadata_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    parsed = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: str, *args: str) -> None:
            parsed.append(path)
            super().__init__(path, *args)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    save_byte_llama_gguf(tmp_path / "m.gguf", stock(64))
    load(tmp_path / "m.gguf")
    assert len(parsed) == 1
    assert gguf.GGUFReader is Counted
