"""The Python of README.md and docs/ runs, does what the pages say, and every path and link in them exists."""

import ast
import builtins
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import readme_install
import torch

from mrrope import cli, is_patched

pytest.importorskip("transformers")

from byte_llama import save_byte_llama
from tiny_models import tiny_model

ROOT = Path(__file__).parents[3]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FENCES = ("```", "```sh")
"""The lines that open a block of commands."""
COMMANDS = ("mrrope", "make", "pip", "python", "pytest", "git", "torchrun", "cmake", "vllm", "curl")
"""Programs whose lines in a page's blocks without a language are commands; other lines are output or pseudo-code."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# The code of docs/serving.md needs a GPU and a server; tests/vllm/test_serving_page.py has what can be tested of it.
PAGES_WITH_PYTHON = [page for page in PAGES if PYTHON.search(page.read_text()) and page.name != "serving.md"]
TOP_FOLDERS = sorted(
    path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and not path.name.startswith("build")
)
PATH_IN_CODE = re.compile(rf"`((?:{'|'.join(TOP_FOLDERS)})/[\w./-]*)`")
INCLUDE_FOLDERS = [ROOT / part / "include" for part in ("csrc", "bindings")]
"""Headers are named by the paths by which they are included."""
LINK = re.compile(r"\]\(([^)\s#]+)(?:#([\w-]+))?\)")

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def names_after_running(page: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Run a page's code from top to bottom; return the names it leaves."""
    text = page.read_text()
    for block in PYTHON.finditer(text):
        # Leading newlines make a traceback show the page's own lines.
        lines_above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_above + block[1], str(page), "exec"), names)
    return names


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder of its own, with tiny models under the names that pages load: transformers looks there first."""
    namespace = tmp_path / "HuggingFaceTB"
    tiny_model("llama").save_pretrained(namespace / "SmolLM2-135M")
    save_byte_llama(namespace / "SmolLM2-135M-Instruct", 64)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=page_id)
def test_code_runs(page: Path, in_folder: Path) -> None:
    names_after_running(page, {})


def undefined_names(page: Path) -> set[str]:
    """Return the names that a page's code uses before the page defines them."""

    def stored(node: ast.AST) -> Iterator[str]:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
                yield part.id
            elif isinstance(part, ast.FunctionDef | ast.ClassDef):
                yield part.name
            elif isinstance(part, ast.arg):
                yield part.arg
            elif isinstance(part, ast.alias):
                yield (part.asname or part.name).split(".")[0]

    defined, missing = set(dir(builtins)), set()
    for block in PYTHON.finditer(page.read_text()):
        for statement in ast.parse(block[1]).body:
            # `x = f(x)` uses an x from before; loops, functions and comprehensions use names of their own.
            used = statement.value if isinstance(statement, ast.Assign) else statement
            loaded = {part.id for part in ast.walk(used) if isinstance(part, ast.Name)}
            missing |= loaded - defined - set(stored(used))
            defined |= set(stored(statement))
    return missing


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON.search(page.read_text())], ids=page_id)
def test_code_defines_its_names(page: Path) -> None:
    assert undefined_names(page) == set()


def test_names_that_are_not_defined_are_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "```python\nx = x + y\nfor i in range(z):\n    print(i, [j for j in x])\n\n\ndef f(a):\n    return a + b\n```\n"
    )
    assert undefined_names(tmp_path / "page.md") == {"x", "y", "z", "b"}


def test_readme_prints_what_it_says(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = names_after_running(ROOT / "README.md", {})
    (expected,) = re.findall(r"^print\(.*\)  # (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert capsys.readouterr().out.strip() == expected
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert not is_patched(names["model"])


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in a page's shell blocks, one list for each part of ``a && b``."""
    # Blocks of every kind, one after the other: the end of one would pass for the beginning of a block of commands.
    for block in CODE_BLOCK.finditer(text):
        fence, *lines = block[0].replace("\\\n", " ").splitlines()
        for line in lines if fence in FENCES else ():
            if line.split(" ")[0] not in COMMANDS:
                continue
            command: list[str] = []
            for word in [*shlex.split(line, comments=True), "&&"]:
                if word != "&&":
                    command.append(word)
                elif command:
                    yield command
                    command = []


def known_options(script: Path) -> str:
    """Return the text of a script and of the modules beside it that can add options to it."""
    return "".join(path.read_text() for path in script.parent.glob("*.py"))


def problem_of(command: list[str]) -> str | None:
    """Return why a command of a page cannot be meant, or None."""
    program, *words = command
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in words if "=" not in word and word not in targets]
        return f"no target {unknown[0]}" if unknown else None
    if program == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        asked = [extra for word in words for found in re.findall(r"^\.\[(.*)\]$", word) for extra in found.split(",")]
        unknown = [extra for extra in asked if extra not in extras]
        return f"no extra {unknown[0]}" if unknown else None
    if program == "python" and words[0].endswith(".py"):
        script = ROOT / words[0]
        if not script.exists():
            return f"no script {words[0]}"
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        shared = (ROOT / "mrrope" / "reporting" / "options.py").read_text()
        unknown = [option for option in options if f'"{option}"' not in known_options(script) + shared]
        return f"no option {unknown[0]}" if unknown else None
    if "mrrope" in command[:-1]:
        arguments = command[command.index("mrrope") + 1 :]
        try:
            cli.parser().parse_args(arguments)
        except SystemExit as error:
            return None if error.code == 0 else "refused by the parser"
    return None


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the commands need the extra eval")
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_are_valid(page: Path) -> None:
    problems = {shlex.join(command): problem_of(command) for command in commands_in(page.read_text())}
    assert {command: problem for command, problem in problems.items() if problem} == {}


def test_commands_that_are_not_valid_are_found() -> None:
    lines = "make nothing", "pip install '.[none]' && mrrope evaluate M", "mrrope eval M --txt F \\", "    --lengths 1"
    page = "\n".join(["```python", "pass", "```", "", "```", *lines, "```", ""])
    assert [problem_of(command) for command in commands_in(page)] == [
        "no target nothing",
        "no extra none",
        "refused by the parser",
        "refused by the parser",
    ]


def test_install_is_run_in_a_fresh_environment() -> None:
    """A job runs README's lines; here they would compile for a minute and fetch a torch."""
    clone, *lines = readme_install.install_lines()
    assert clone == "git clone https://github.com/mrrope/mrrope && cd mrrope"
    assert lines
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text().partition("\n  install:")[2]
    assert "- run: make install-test\n" in workflow


def test_first_comparisons_include_truncation() -> None:
    """Pages that tell a reader to compare with the row ``truncated`` print a command that has it."""
    for name in ("README.md", "docs/getting-started.md", "docs/evaluation.md"):
        page = ROOT / name
        command = next(words for words in commands_in(page.read_text()) if words[:2] == ["mrrope", "eval"])
        assert "truncated" in command[command.index("--methods") + 1].split(","), name


def test_pages_about_methods_name_a_scale() -> None:
    """A method that extends has no default scale."""
    for page in PAGES:
        for call in re.findall(r'mrrope\.patch(?:ed)?\([^()\n]*, "(?:yarn|mrrope)_?\w*"[^()\n]*\)', page.read_text()):
            assert "scale=" in call or "table" in call, f"{page_id(page)}: {call}"


def test_equivalent_of_rotary() -> None:
    names = names_after_running(ROOT / "docs" / "rotary.md", {})
    expected = names["rotary"](*(names[name] for name in ("q", "k", "positions", "table")))
    for rotated, want in zip((names["rotated_q"], names["rotated_k"]), expected, strict=True):
        error = (rotated.double() - want.double()).norm() / want.double().norm()
        # Each is rounded once; the equivalent's float64 angles are off by far less.
        assert error < torch.finfo(torch.float32).eps


def test_equivalent_of_rotary_and_cache() -> None:
    page = (ROOT / "docs" / "rotary-and-cache.md").read_text()
    example, equivalent, _ = (block[1] for block in PYTHON.finditer(page))
    preparation, call = example.rsplit("mrrope.rotary_and_cache_", 1)
    results = []
    for code in (
        f"mrrope.rotary_and_cache_{call}",
        equivalent + "rotary_and_cache_" + call.replace(', layout="thd"', ""),
    ):
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec(preparation + code, names)
        results.append([names[name] for name in ("qkv", "key_cache", "value_cache")])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert all(x.abs().sum() > 0 for x in results[0])


def test_equivalent_of_qk_norm_rotary_and_cache() -> None:
    page = (ROOT / "docs" / "qk-norm-rotary-and-cache.md").read_text()
    example, equivalent, _ = (block[1] for block in PYTHON.finditer(page))
    preparation, call = example.rsplit("mrrope.qk_norm_rotary_and_cache_", 1)
    arguments = "q, k, v, q_weight, k_weight, positions, table, key_cache, value_cache, slots, gate"
    results = []
    for code in (f"mrrope.qk_norm_rotary_and_cache_{call}", f"{equivalent}unfused({arguments})"):
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec(preparation + code, names)
        results.append([names[name] for name in ("projected", "key_cache", "value_cache")])
    for fused, unfused in zip(*results, strict=True):
        torch.testing.assert_close(fused, unfused)
        assert fused.abs().sum() > 0


def test_equivalent_of_mla_rotary_and_cache() -> None:
    page = (ROOT / "docs" / "mla.md").read_text()
    example, equivalent, *_ = (block[1] for block in PYTHON.finditer(page))
    preparation, call = example.rsplit("mrrope.mla_rotary_and_cache_", 1)
    results = []
    for code in (
        f"mrrope.mla_rotary_and_cache_{call}",
        equivalent + "mla_rotary_and_cache_" + call.replace(', layout="thd"', ""),
    ):
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec(preparation + code, names)
        results.append([names[name] for name in ("query", "cache")])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert all(x.abs().sum() > 0 for x in results[0])


def test_equivalent_of_mla_rotary() -> None:
    page = (ROOT / "docs" / "mla.md").read_text()
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in PYTHON.finditer(page):
        exec(block[1], names)
    arguments = [names[name] for name in ("q", "k_nope", "k_rope", "positions", "table")]
    for result, want in zip((names["rotated_q"], names["key"]), names["mla_rotary"](*arguments), strict=True):
        assert torch.equal(result, want)


def test_equivalent_of_qkv_rotary() -> None:
    page = (ROOT / "docs" / "qkv-rotary.md").read_text()
    example, equivalent, *_ = (block[1] for block in PYTHON.finditer(page))
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(example + equivalent, names)
    arguments = [names[name] for name in ("x", "weight", "bias", "positions", "table", "q_heads", "kv_heads")]
    for result, want in zip((names["q"], names["k"], names["v"]), names["qkv_rotary"](*arguments), strict=True):
        assert torch.equal(result, want)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_exist(page: Path) -> None:
    paths = set(PATH_IN_CODE.findall(page.read_text()))
    missing = {path for path in paths if not any((folder / path).exists() for folder in (ROOT, *INCLUDE_FOLDERS))}
    assert missing == set()


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and Python-Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(CODE_BLOCK.sub("", page.read_text())):
        if re.match(r"https?:|mailto:", target):
            continue
        linked = (page.parent / target).resolve()
        assert linked.exists(), f"{page_id(page)} links to {target}"
        if anchor:
            assert anchor in anchors_of(linked), f"{page_id(page)} links to {target}#{anchor}"


def test_tables_are_up_to_date() -> None:
    """Fix with: python docs/generate"""
    check = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate", "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr
