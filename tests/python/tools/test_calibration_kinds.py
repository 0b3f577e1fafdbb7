"""``mrrope calibrate --text A --text B``: texts of several kinds have equal shares, whatever their sizes."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from byte_llama import byte_tokenizer, random_words, save_byte_llama
from command_line import as_arguments
from learnable_tables import table
from transformers import LlamaForCausalLM

import mrrope
from mrrope.calibration import document_sets
from mrrope.calibration.kinds import named_texts
from mrrope.calibration.report import OTHER_KINDS
from mrrope.calibration.training_texts import TrainingTexts
from mrrope.cli import main
from mrrope.evaluation.documents import Document
from mrrope.tables.lookup import load_tables

FLOAT32_EPS = torch.finfo(torch.float32).eps
LENGTHS = (32, 64, 128)


def digits(seed: int) -> str:
    """A text of another kind than ``random_words``: numbers."""
    return "".join(chr(ord(letter) % 10 + 48) for letter in random_words(26, seed))


TEXTS = {
    "proofs.txt": [random_words(26, seed) for seed in range(9)],
    "code/a.py": [digits(20)],
    "code/b.py": [digits(21)],
    "code/c.py": [digits(22)],
    "prose.txt": [random_words(26, seed).upper() for seed in (30, 31, 32)],
    "tables.txt": [digits(33)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny random model and texts of four kinds."""
    folder = tmp_path_factory.mktemp("kinds")
    save_byte_llama(folder / "model", 32, layers=2, heads=4, num_key_value_heads=2, initializer_range=0.5)
    (folder / "code").mkdir()
    for name, documents in TEXTS.items():
        (folder / name).write_text("\0".join(documents))
    table().save(folder / "yarn.json")
    return folder


def arguments(folder: Path, output: Path, texts: Iterable[str], *options: str, **replaced: str) -> list[str]:
    given = {"--device": "cpu", "--scale": "4", "--budget": "0.05", "--output": str(output), **replaced}
    repeated = [part for text in texts for part in ("--text", str(folder / text))]
    return ["calibrate", str(folder / "model"), *repeated, *options, *as_arguments(given)]


def reference(folder: Path, tables: Any, lengths: Sequence[int] = LENGTHS) -> Callable[[str], float]:
    """Return a function of a document's text: its loss, in the mean over the second halves of the lengths."""
    model = mrrope.patch(LlamaForCausalLM.from_pretrained(folder / "model").eval(), tables)

    def loss(text: str) -> float:
        tokens = byte_tokenizer(adds_bos=True)(text).input_ids[: LENGTHS[-1]]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1].double()
        losses = -logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        return fmean(losses[one // 2 - 1 : one - 1].mean().item() for one in lengths)

    return loss


def proofs(*numbers: int) -> list[str]:
    return [TEXTS["proofs.txt"][number - 1] for number in numbers]


def test_a_search_reads_every_text_alike(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = ["--other-text", str(folder / "prose.txt"), "--other-text", str(folder / "tables.txt")]
    settings = {"--retrieval": "0", "--documents": "8", "--lengths": "128"}
    given = arguments(folder, tmp_path / "out", ("proofs.txt", "code"), *others, **settings)
    assert main(given) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "out.json").read_text())
    assert {part: [name for name, _ in found] for part, found in data["documents"].items()} == {
        "search": ["proofs.txt#1", "proofs.txt#4", "a.py"],
        "decide": ["proofs.txt#2", "proofs.txt#5", "b.py"],
        "held_out": ["proofs.txt#3", "proofs.txt#6", "c.py"],
    }
    assert data["texts"] == [
        {"name": "proofs.txt", "share": 0.5, "search": 2, "decide": 2, "held_out": 2},
        {"name": "code", "share": 0.5, "search": 1, "decide": 1, "held_out": 1},
    ]
    for name, count in (("proofs.txt", 2), ("code", 1)):
        assert re.search(rf"^{re.escape(name)} +50% +{count} +{count} +{count}$", printed, re.MULTILINE)
    # A text's documents together weigh half.
    is_by_document = []  # where the code's loss is that of the proofs, both ways to weigh give the same
    for found in data["calibration"]["finalists"].values():
        loss = reference(folder, mrrope.FrequencyTable.from_dict(found["table"]), (128,))
        for part, (first, second, code) in {"search": (1, 4, "a"), "decide": (2, 5, "b")}.items():
            one, other = map(loss, proofs(first, second))
            alone = loss(TEXTS[f"code/{code}.py"][0])
            # Losses of about 10 in float32, summed in another order.
            assert found[f"{part}_loss"] == pytest.approx(((one + other) / 2 + alone) / 2, rel=64 * FLOAT32_EPS)
            is_by_document.append(found[f"{part}_loss"] == pytest.approx((one + other + alone) / 3, rel=1e-4))
    assert not all(is_by_document)
    # So do the held-out ones, and those of other kinds.
    chosen = mrrope.FrequencyTable.load(tmp_path / "out.table.json")
    part = data["parts"][OTHER_KINDS]
    assert part["texts"] == [{"name": "prose.txt", "documents": 3}, {"name": "tables.txt", "documents": 1}]
    loss = reference(folder, chosen, (128,))
    for of, kinds in (
        (data, (proofs(3, 6), TEXTS["code/c.py"])),
        (part, (TEXTS["prose.txt"], TEXTS["tables.txt"])),
    ):
        figures = of["results"]["perplexity"]["calibrated"]["128"]
        expected = fmean(fmean(map(loss, kind)) for kind in kinds)
        assert math.log(figures["second_half_perplexity"]) == pytest.approx(expected, rel=64 * FLOAT32_EPS)
    # The same command resumes, one with other texts does not.
    before = (tmp_path / "out.journal").read_bytes()
    assert main(given) == 0
    assert (tmp_path / "out.journal").read_bytes() == before
    capsys.readouterr()
    assert main(arguments(folder, tmp_path / "out", ("proofs.txt", "prose.txt"), *others, **settings)) == 2
    assert "is of a run with another documents, texts" in capsys.readouterr().err
    assert (tmp_path / "out.journal").read_bytes() == before


@pytest.mark.parametrize("per", ["model", "layer", "head"])
def test_a_search_by_gradient_reads_every_text_alike(folder: Path, tmp_path: Path, per: str) -> None:
    settings = {"--per": per, "--by": "gradient", "--retrieval": "0", "--start": str(folder / "yarn.json")}
    given = arguments(folder, tmp_path / "out", ("proofs.txt", "code"), **settings)
    assert main(given) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["texts"] == [
        {"name": "proofs.txt", "share": 0.5, "search": 5, "decide": 2, "held_out": 2},
        {"name": "code", "share": 0.5, "search": 1, "decide": 1, "held_out": 1},
    ]
    loss = reference(folder, table())
    expected = (fmean(map(loss, proofs(2, 5))) + loss(TEXTS["code/b.py"][0])) / 2
    # The file of the tables says what they were searched on, and is read all the same.
    written = json.loads((tmp_path / "out.table.json").read_text())
    assert written["searched_on"] == {
        **{name: data[name] for name in ("model", "weights", "lengths", "retrieval", "texts")},
        "start": "yarn.json",
    }
    found = load_tables(tmp_path / "out.table.json")
    assert {**found.to_dict(), "searched_on": written["searched_on"]} == written
    assert data["calibration"]["evaluations"][0]["loss"] == pytest.approx(expected, rel=64 * FLOAT32_EPS)
    lines = [json.loads(line) for line in (tmp_path / "out.journal").read_text().splitlines()[1:]]
    read = [name for line in lines if line["key"].startswith("step") for name in line["documents"]]
    assert len(read) > 1
    assert all("a.py" in pair for pair in zip(read[::2], read[1::2], strict=False))
    assert abs(len(read) - 2 * read.count("a.py")) <= 1
    # A finished run reads nothing again.
    before = (tmp_path / "out.journal").read_bytes()
    assert main(given) == 0
    assert (tmp_path / "out.journal").read_bytes() == before


def test_every_kind_is_in_a_step_and_at_every_length() -> None:
    counts = {"many": 7, "two": 2, "one": 1}
    documents = [
        Document(f"{kind} {number}", list(range(100)), kind=kind)
        for kind, count in counts.items()
        for number in range(count)
    ]
    texts = TrainingTexts(documents, byte_tokenizer(adds_bos=False), [32, 64], 0.0)
    for step in range(20):
        assert {texts.text(step, place, 3).name.split()[0] for place in range(3)} == set(counts)
    read = [texts.text(step) for step in range(420)]
    names = [text.name for text in read]
    for start in range(0, 420, 3):
        assert {name.split()[0] for name in names[start : start + 3]} == set(counts)
    for kind, count in counts.items():
        own = [text for text in read if text.name.startswith(kind)]
        # Every document of a kind comes once before any comes again.
        for start in range(0, 140, count):
            assert len({text.name for text in own[start : start + count]}) == count
        # Every third text has 64 tokens, and there are three kinds: none is tied to a length.
        assert 0.2 < fmean(len(text) == 64 for text in own) < 0.47
        assert set(Counter(text.name for text in own).values()) == {140 // count}


def test_sets_have_documents_of_every_text(folder: Path) -> None:
    tokenizer = byte_tokenizer(adds_bos=False)
    paths = [folder / "proofs.txt", folder / "code", folder / "prose.txt"]

    def dealt(**options) -> list[list[tuple[str, str]]]:
        sizes = {"count": 2, "held_out_count": 1}
        sets = document_sets.document_sets(paths, tokenizer, 100, **sizes, **options)
        return [[(one.kind, one.name[-2:]) for one in some] for some in (sets.search, sets.decide, sets.held_out)]

    kinds = ["proofs.txt", "code", "prose.txt"]
    names = [["#1", "py", "#1"], ["#2", "py", "#2"], ["#3", "py", "#3"]]
    assert dealt() == [list(zip(kinds, some, strict=True)) for some in names]
    assert dealt(held_out=folder / "tables.txt") == [*dealt()[:2], [("", "xt")]]
    keyed = document_sets.document_sets(paths, tokenizer, 100, count=2, held_out_count=1).with_keys(tokenizer, [100])
    assert [one.kind for one in keyed.search] == [one.kind for one in keyed.decide] == kinds
    # Documents are joined within a text.
    joined = document_sets.document_sets(paths[:2], tokenizer, 150, count=2, held_out_count=1, join=True)
    assert [one.name for one in joined.search] == ["proofs.txt#1", "a.py"]
    with pytest.raises(ValueError, match=r"text must hold at least 3 documents of 160 tokens, .*code has 1"):
        document_sets.document_sets(paths[:2], tokenizer, 160, count=2, held_out_count=1, join=True)


def test_texts_are_named_by_their_last_part_where_that_tells_them_apart(tmp_path: Path) -> None:
    assert list(named_texts(["a/proofs.txt", Path("b/code/"), "b/prose/."])) == ["proofs.txt", "code", "prose"]
    assert list(named_texts(["a/train.txt", "b/train.txt", "c"])) == ["a/train.txt", "b/train.txt", "c"]


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("proofs.txt missing.txt", "", r"text must be a file or a folder, and there is no \S*missing\.txt"),
        ("proofs.txt few.txt", "", r"text must hold at least 3 documents of 128 tokens, .*few\.txt has 2; --join puts"),
        (
            "proofs.txt short.txt",
            "",
            r"text must hold a document of at least 128 tokens, and the longest of \S*short\.txt is 'short\.txt': 30",
        ),
        (
            "proofs.txt copy.txt",
            "",
            r"text must hold documents that the texts before it do not, and \S*copy\.txt has none left of 128 tokens",
        ),
        ("proofs.txt bytes.txt", "", r"text must be UTF-8, plain or in \.xz, and \S*bytes\.txt is not"),
        ("code code", "", r"--text must be another text each time, got \S*code 2 times"),
        (
            "proofs.txt code",
            "--other-text prose.txt --other-text prose.txt",
            r"--other-text must be another text each time, got prose\.txt 2 times",
        ),
        (
            "proofs.txt code",
            "--documents 3",
            "--documents must be at least 4, one to search and one to decide with of each of 2 texts, got 3",
        ),
        (
            "proofs.txt code",
            "--held-out-documents 1",
            "--held-out-documents must be at least 2, one of each of 2 texts, got 1",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:left out of")
def test_bad_texts_are_named(
    folder: Path, tmp_path: Path, texts: str, options: str, message: str, monkeypatch, capsys
) -> None:
    (folder / "few.txt").write_text("\0".join(random_words(26, seed) for seed in (40, 41)))
    (folder / "short.txt").write_text(random_words(5))
    (folder / "copy.txt").write_text("\0".join(TEXTS["proofs.txt"][:3]))
    (folder / "bytes.txt").write_bytes(b"\xff" * 200)
    monkeypatch.chdir(folder)
    assert main(arguments(folder, tmp_path / "out", texts.split(), *options.split())) == 2
    printed = capsys.readouterr().err
    assert re.search(f"^mrrope calibrate: {message}", printed, re.MULTILINE), printed
    assert "Traceback" not in printed
