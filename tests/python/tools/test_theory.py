"""``mrrope plot``: curves by hand, in 50 digits and by known zeros; attention scores against rotated heads."""

import json
import math

import pytest
import torch
from byte_llama import save_byte_llama
from layer_tables import random_heads, random_set
from mpmath import cos, fmod, mp, mpf, pi
from tiny_models import tiny_model, tokens

import mrrope
from mrrope.cli import main
from mrrope.theory import attention_scores, curves, figure_data, table_set_figure
from mrrope.theory.command import wavering_past_native
from mrrope.theory.figure_data import Setting

LLAMA2 = Setting(rotary_dim=128, base=10_000.0, original_max_position=4096, scale=16.0)
FLOAT64 = torch.finfo(torch.float64).eps


def test_similarity_is_the_sum_of_cosines() -> None:
    frequencies = torch.tensor([math.pi, math.pi / 2, math.pi / 4], dtype=torch.float64)
    by_hand = [-1 + 0 + math.sqrt(0.5), 1 - 1 + 0, -1 + 0 - math.sqrt(0.5), 1 + 1 - 1]
    found = curves.similarities_up_to(frequencies, 4)
    torch.testing.assert_close(found, torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=16 * FLOAT64)
    assert curves.first_zero(found) == 1


def test_similarity_in_fifty_digits() -> None:
    distances = [1, 777, 4096, 65_536]
    found = curves.similarity(LLAMA2.table("rope").inv_freq, torch.tensor(distances))
    with mp.workdps(50):
        exact = [float(sum(cos(m * mpf(10_000) ** (-mpf(i) / 64)) for i in range(64))) for m in distances]
    # Each of 64 cosines has the rounding error of an angle of up to 65536 radians.
    assert found.tolist() == pytest.approx(exact, abs=64 * 65_536 * FLOAT64)


def test_similarities_come_in_blocks_without_a_seam() -> None:
    frequencies = LLAMA2.table("mrrope_pro").inv_freq
    limit = curves.BLOCK + 3
    together = curves.similarity(frequencies, torch.arange(1, limit + 1))
    assert torch.equal(curves.similarities_up_to(frequencies, limit), together)


ZEROS = {"rope": 1707, "ntk": 7920, "yarn": 11_671, "yarn_ratio": 15_037, "mrrope_uni": 10_263, "mrrope_pro": 14_239}


@pytest.mark.parametrize(("method", "zero"), ZEROS.items())
def test_first_zeros_of_llama2(method: str, zero: int) -> None:
    frequencies = LLAMA2.table(method).inv_freq
    assert curves.first_zero(curves.similarities_up_to(frequencies, LLAMA2.reach)) == zero


def test_zeros_by_scale_are_those_of_each_scales_own_tables() -> None:
    found = figure_data.zeros_by_scale(LLAMA2)
    assert list(found) == ["4", "8", "16", "32"]
    assert {method: zero for method, zero in found["16"].items() if method != "pi"} == ZEROS
    # PI slows all pairs by the scale, so its zero is RoPE's times the scale, rounded up to a token.
    for scale, zeros in found.items():
        assert zeros["rope"] == ZEROS["rope"]
        assert (ZEROS["rope"] - 1) * float(scale) < zeros["pi"] <= ZEROS["rope"] * float(scale)


def test_no_zero_within_the_limit() -> None:
    assert curves.first_zero(torch.tensor([2.0, 1.0, 0.5])) is None
    assert curves.first_zero(torch.tensor([2.0, 0.0, 0.5])) == 2


def test_dips_are_the_lowest_of_each_stretch() -> None:
    values = torch.tensor([5.0, 3.0, 4.0, -1.0, 2.0, 0.5])  # B(1) to B(6)
    assert curves.lowest_between(values, [1, 2, 5, 7]) == [5.0, -1.0, 0.5]


def test_the_spelled_number_is_the_sum_of_remainders() -> None:
    """A phase times its weight is the position modulo the wavelength: 4, 10 and 100 tokens here."""
    frequencies = 2 * math.pi / torch.tensor([4.0, 10.0, 100.0], dtype=torch.float64)
    positions = torch.tensor([3, 7, 25, 131])
    by_hand = [3 + 3 + 3, 3 + 7 + 7, 1 + 5 + 25, 3 + 1 + 31]
    assert curves.spelled_number(frequencies, positions).tolist() == pytest.approx(by_hand, abs=1000 * FLOAT64)


def test_the_weights_of_the_digits_are_powers_of_the_radix() -> None:
    beta = 10_000 ** (1 / 64)
    position = 12_345
    with mp.workdps(50):
        digits = [float(fmod(position * mpf(10_000) ** (-mpf(j) / 64), 2 * pi)) for j in range(64)]
    by_hand = sum(digit * beta**j for j, digit in enumerate(digits))
    found = curves.spelled_number(LLAMA2.table("rope").inv_freq, torch.tensor([position]))
    # Rounding of the angle times the largest weight.
    assert found.item() == pytest.approx(by_hand, abs=64 * position * FLOAT64 * 10_000)


@pytest.mark.parametrize(
    ("factors", "trend"),
    [
        ([1.1, 1.2, 1.3], "progressive"),
        ([1.3, 1.2, 1.1], "regressive"),
        ([1.2, 1.2, 1.2], "uniform"),
        ([1.1, 1.3, 1.2], "mixed"),
    ],
)
def test_trend(factors: list[float], trend: str) -> None:
    assert curves.trend(torch.tensor(factors)) == trend


@pytest.mark.parametrize("setting", [LLAMA2, Setting(64, 100_000.0, 8192, 16.0), Setting(128, 500_000.0, 8192, 4.0)])
def test_the_papers_yarn_is_regressive_and_the_deployed_one_progressive(setting: Setting) -> None:
    trends = {method: found["trend"] for method, found in figure_data.radix_factors(setting).items()}
    expected = {"yarn": "progressive", "yarn_ratio": "regressive", "mrrope_uni": "uniform", "mrrope_pro": "progressive"}
    assert trends == expected


def test_cumulative_scales_are_those_of_the_scale_and_of_its_root() -> None:
    found = figure_data.cumulative_scales(LLAMA2)
    assert list(found) == ["16", "4"]
    for scale, by_method in found.items():
        # Pair 33 is in the middle of (20, 46), after 13 of 26 steps: uni has the root of the scale there, pro the power
        # 13 * 14 / (26 * 27).
        assert by_method["mrrope_uni"][33] == pytest.approx(math.sqrt(float(scale)), rel=1e-4)
        assert by_method["mrrope_pro"][33] == pytest.approx(float(scale) ** (7 / 27), rel=1e-4)
        assert by_method["rope"][63] == 1


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_scores_are_those_of_the_rotated_heads(pairing: str) -> None:
    """The sum over all pairs is the score of heads rotated by the op."""
    torch.manual_seed(0)
    table = mrrope.frequency_table(
        "mrrope_pro", rotary_dim=16, base=100.0, original_max_position=64, scale=4.0, attention_factor=1.0
    )
    q, k = (torch.randn(1, 1, 2, 16, dtype=torch.float64) for _ in "qk")
    with attention_scores.RecordedHeads() as recorded:
        mrrope.rotary(q, k, torch.arange(2), table, pairing=pairing)
    [call] = recorded.calls
    queries, keys = call.heads
    products = queries[:, 1] * keys[:, 0].conj()
    distances = torch.tensor([0, 1, 50, 200])
    for distance, found in zip(
        distances, attention_scores.scores(products, table, distances, slice(None))[0], strict=True
    ):
        rotated_q = mrrope.rotary(q[:, :, 1:], None, distance[None], table, pairing=pairing)[0]
        rotated_k = mrrope.rotary(k[:, :, :1], None, torch.tensor([0]), table, pairing=pairing)[0]
        expected = (rotated_q * rotated_k).sum() / 4
        # The op has 64-bit phases; the score here rounds position times frequency.
        assert found.item() == pytest.approx(expected.item(), abs=200 * 64 * FLOAT64)


def test_products_come_from_every_layer_and_head_of_a_model() -> None:
    model = tiny_model("llama")
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    rotary_dim = model.config.hidden_size // heads
    text = tokens(1, 40)[0].tolist()
    found = attention_scores.pair_products(model, text, samples=5)
    assert found.values.shape == (layers * heads * 5, rotary_dim // 2)
    assert found.layers == f"{layers} of {layers} layers that rotate"
    assert torch.equal(found.values, attention_scores.pair_products(model, text, samples=5).values)
    assert not torch.equal(found.values, attention_scores.pair_products(model, text, samples=5, seed=1).values)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_products_come_from_layers_that_see_the_whole_text(family: str) -> None:
    """Sliding-window layers do not count, with or without a RoPE of their own: their keys are NaN here."""
    model = tiny_model(family)
    kinds, heads = model.config.layer_types, model.config.num_attention_heads
    assert {*kinds} == {"full_attention", "sliding_attention"}
    text = tokens(1, 40)[0].tolist()
    kinds.sort()  # full attention first, so that no NaN reaches it
    rebuilt = type(model)(model.config).eval()
    for kind, layer in zip(kinds, rebuilt.model.layers, strict=True):
        if kind == "sliding_attention":
            torch.nn.init.constant_(layer.self_attn.k_proj.weight, math.nan)
    found = attention_scores.pair_products(rebuilt, text, samples=5)
    assert found.values.isfinite().all()
    shown = kinds.count("full_attention")
    assert found.values.shape[0] == shown * heads * 5
    assert found.layers == f"{shown} of {len(kinds)} layers that rotate: full_attention"


def test_products_of_a_model_that_rotates_in_windows_alone() -> None:
    model = tiny_model("cohere2")
    shown = model.config.layer_types.count("sliding_attention")
    assert 0 < shown < len(model.config.layer_types)
    found = attention_scores.pair_products(model, tokens(1, 40)[0].tolist(), samples=5)
    assert found.values.shape[0] == shown * model.config.num_attention_heads * 5
    assert found.layers == f"{shown} of {shown} layers that rotate: sliding_attention"


@pytest.mark.parametrize("over", ["head", "all_heads"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_heads_that_the_op_norms_are_recorded_normed(over: str, layout: str) -> None:
    """The rotation by position 0 is the identity, so the op returns the normed heads."""
    torch.manual_seed(0)
    table = mrrope.frequency_table("rope", rotary_dim=8, base=100.0, original_max_position=64)
    q, k = (torch.randn(1, *((heads, 5) if layout == "bhsd" else (5, heads)), 12).double() for heads in (4, 2))
    weights = [torch.rand(12 if over == "head" else 12 * heads).double() for heads in (4, 2)]
    with attention_scores.RecordedHeads() as recorded:
        rotated = mrrope.qk_norm_rotary(
            q, k, *weights, torch.zeros(5, dtype=torch.int64), table, eps=0.1, weight_offset=1.0, over=over,
            layout=layout,
        )  # fmt: skip
    [call] = recorded.calls
    for heads, normed in zip(call.heads, rotated, strict=True):
        by_head = normed[0] if layout == "bhsd" else normed[0].transpose(0, 1)
        expected = torch.complex(by_head[..., :4], by_head[..., 4:8])
        torch.testing.assert_close(heads, expected, rtol=0, atol=64 * FLOAT64)


def test_a_model_with_norms_is_recorded_as_if_it_normed_by_itself() -> None:
    """A hook on the norms of the first layer makes that layer run its own norms and only rotate by the op."""
    model = tiny_model("qwen3", dtype=torch.float64)
    heads, rotary_dim = model.config.num_attention_heads, model.config.head_dim
    text = tokens(1, 40)[0].tolist()
    found = attention_scores.pair_products(model, text, samples=5).values
    assert found.shape == (model.config.num_hidden_layers * heads * 5, rotary_dim // 2)
    first = model.model.layers[0].self_attn
    for norm in (first.q_norm, first.k_norm):
        norm.register_forward_hook(lambda *_: None)
    by_itself = attention_scores.pair_products(model, text, samples=5).values
    # RMSNorms of transformers compute in float32 in every dtype.
    tolerance = 64 * torch.finfo(torch.float32).eps * found.abs().max().item()
    torch.testing.assert_close(by_itself, found, rtol=0, atol=tolerance)


def test_a_model_that_rotates_q_and_k_one_by_one_is_refused() -> None:
    model = tiny_model("gemma3n_text")
    with pytest.raises(ValueError, match=r"model must rotate q and k together for this, and Gemma3n"):
        attention_scores.pair_products(model, tokens(1, 40)[0].tolist())


def test_a_bad_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"scale must be above 1.*got 1"):
        Setting(128, 10_000.0, 4096, 1.0)


def plotted(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plot", *arguments]) == 0
    return capsys.readouterr().out


def test_plot_writes_numbers_and_a_picture_for_each(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    small = ("--rotary-dim", "32", "--base", "100", "--original-max-position", "128", "--scale", "4")
    out = plotted(capsys, *small, "--output", str(tmp_path / "t"))
    data = json.loads((tmp_path / "t.json").read_text())
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"t.scale.png", "t.radix.png", "t.digits.png", "t.similarity.png"}
    for name in ("scale", "radix", "digits", "similarity"):
        assert name in data
    for name in ("all", "middle"):
        for method, found in data["similarity"][name].items():
            assert len(found["dips"]) == len(data["similarity"]["distances"]), method
    assert str(data["similarity"]["all"]["rope"]["first_zero"]) in out
    printed = plotted(capsys, "radix", *small, "--json", "--output", str(tmp_path / "r"))
    assert json.loads(printed) == json.loads((tmp_path / "r.json").read_text())
    assert [path.name for path in tmp_path.glob("r.*.png")] == ["r.radix.png"]


SET = random_set(4, 3, rotary_dim=8)
KINDS = {"set": SET, "per layer": mrrope.TableSet([SET[0][0], SET[1][0]]), "heads": SET[0], "table": SET[0][0]}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_heads_of_a_model_chose_is_drawn(tmp_path, capsys, kind) -> None:
    pytest.importorskip("matplotlib")
    tables = KINDS[kind]
    tables.save(tmp_path / "s.json")
    out = plotted(capsys, "--table", str(tmp_path / "s.json"), "--output", str(tmp_path / "t"))
    assert repr(tables) in out
    data = json.loads((tmp_path / "t.json").read_text())
    assert set(data) == {"format", "heads"}, "no setting: the figure is not about methods"
    found = data["heads"]
    layers = list(tables) if isinstance(tables, mrrope.TableSet) else [tables]
    rows = [list(layer) if isinstance(layer, mrrope.HeadTables) else [layer] for layer in layers]
    assert found["attention_factor"] == [[table.attention_factor for table in row] for row in rows]
    assert [len(head) for head in found["log2_cumulative_scale"]] == [len(rows)] * len(rows[0])
    for head, by_layer in enumerate(found["log2_cumulative_scale"]):
        for layer, values in enumerate(by_layer):
            table = rows[layer][head]
            exact = [math.log2(1e4 ** (-i / 4) / theta) for i, theta in enumerate(table.inv_freq.tolist())]
            assert values == pytest.approx(exact, abs=64 * FLOAT64)
    assert [path.name for path in tmp_path.glob("t.*.png")] == ["t.heads.png"]
    assert (tmp_path / "t.heads.png").stat().st_size > 10_000


def test_query_factors_are_drawn(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    one = mrrope.HeadTables([SET[1][0]], [0.5] * 6)
    tables = mrrope.TableSet([random_heads(3, 0, 6, rotary_dim=8), SET[1], one])
    tables.save(tmp_path / "s.json")
    out = plotted(capsys, "--table", str(tmp_path / "s.json"), "--output", str(tmp_path / "t"))
    found = json.loads((tmp_path / "t.json").read_text())["heads"]
    assert found["query_factor"] == [list(tables[0].query_factors), [1.0] * 6, [0.5] * 6]
    assert found["attention_factor"][2] == [SET[1][0].attention_factor] * 3
    assert f"query factors      0.5 to {max(tables[0].query_factors):.4g}" in out
    assert "query_factor" not in table_set_figure.numbers(SET)
    assert (tmp_path / "t.heads.png").stat().st_size > 10_000


def test_heads_beside_other_figures(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    SET.save(tmp_path / "s.json")
    plotted(capsys, "radix", "heads", "--table", str(tmp_path / "s.json"), "--output", str(tmp_path / "t"))
    assert {path.name for path in tmp_path.glob("t.*.png")} == {"t.radix.png", "t.heads.png"}


def test_a_layer_with_one_table_is_drawn_for_every_head() -> None:
    found = table_set_figure.numbers(mrrope.TableSet([SET[0], SET[1][0]]))
    assert [head[1] for head in found["log2_cumulative_scale"]] == [SET[1][0].cumulative_scale.log2().tolist()] * 3
    with pytest.raises(ValueError, match="table must have cumulative scales, and HeadTables"):
        table_set_figure.numbers(SET[0].inverse())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scales"], "figures must be of scale, radix, digits, similarity, attention, heads, got 'scales'"),
        (["attention"], "attention needs --model"),
        (["heads"], "heads needs --table"),
        (["--table", "no-such-table"], "path must be that of a table's JSON"),
        (["--scale", "1"], "scale must be above 1"),
        (["--rotary-dim", "7"], "rotary_dim"),
        (["--original-max-position", "1"], "original_max_position must be long enough for a pair to turn once"),
        (["--output", "no/such/folder/t"], "--output must be in a folder that exists"),
    ],
)
def test_bad_input_of_plot(arguments, message, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_wavering_is_averaged_past_the_native_length() -> None:
    found = {
        "setting": {"original_max_position": 10},
        "distances": [1, 9, 10, 20],
        "methods": {"rope": {"wavering": [5.0, 7.0, 1.0, 2.0]}},
    }
    assert wavering_past_native(found) == {"rope": 1.5}


@pytest.fixture
def tiny_folder(tmp_path):
    """Return a saved model whose name contains a dot."""
    folder = tmp_path / "tiny-2.5-3B"
    save_byte_llama(folder, 512, layers=2, heads=2, hidden_size=64)
    return folder


def test_a_scale_that_no_distance_is_past_native_with_is_refused(tiny_folder, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(attention_scores, "pair_products", None)
    given = ["--model", str(tiny_folder), "--scale", "1.01", "--output", str(tmp_path / "t")]
    assert main(["plot", *given]) == 2
    assert "scale must be larger, so that distances past the native length of 512 tokens" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tiny_folder]


def test_a_models_attention_is_drawn(tiny_folder, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    out = plotted(capsys, "attention", "--model", str(tiny_folder), "--scale", "4", "--output", str(tmp_path / "t"))
    found = json.loads((tmp_path / "t.json").read_text())["attention"]
    setting = {"rotary_dim": 32, "base": 10_000.0, "original_max_position": 512, "scale": 4.0}
    assert (found["model"], found["setting"], found["samples"]) == ("tiny-2.5-3B", setting, 2 * 2 * 50)
    for curves_of in found["methods"].values():
        assert len(curves_of["mean"]) == len(curves_of["wavering"]) == len(found["distances"])
    # At the smallest distance all tables agree.
    first = [curves_of["mean"][0] for curves_of in found["methods"].values()]
    assert max(first) - min(first) < 0.1 * max(map(abs, first))
    assert found["layers"] == "2 of 2 layers that rotate"
    assert found["layers"] in out
    assert "mrrope_pro" in out
    assert (tmp_path / "t.attention.png").stat().st_size > 10_000
