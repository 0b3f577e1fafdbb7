"""Frequency tables: exact values, edge cases, relative tables and round trips."""

import copy
import json
import math
import pickle

import mpmath
import pytest
import torch
from exact_tables import ExactTable
from rotary_reference import TOLERANCES

import mrrope
from mrrope import FrequencyTable, frequency_table
from mrrope.tables.frequency_table import METHOD_TRAITS, METHODS, SCALE_ONLY_METHODS

LLAMA = {"rotary_dim": 128, "base": 5e5, "original_max_position": 8192, "scale": 16.0}
SMALL = {"rotary_dim": 24, "base": 1e4, "original_max_position": 1000, "scale": 6.5}
LAMBDAS = [1 + 0.37 / (i + 1) for i in range(63)]

REQUESTS = [
    *[(method, settings) for method in (*SCALE_ONLY_METHODS, "llama3") for settings in (LLAMA, SMALL)],
    *[("mrrope_pow", {**LLAMA, "power": power}) for power in (0, 1, 2, -1, 0.5, -2.25, math.pi, 50, -50, 400)],
    ("mrrope_pow", {**SMALL, "power": 1.7, "bounds": (3, 20)}),
    ("llama3", {**LLAMA, "beta": 4.0, "scale": 8.0}),
    ("yarn", {**LLAMA, "bounds": (6, 20)}),
    ("yarn_ratio", {**LLAMA, "bounds": (6, 20)}),
    ("mrrope_pro", {**SMALL, "alpha": 0.25, "beta": 7.5}),
    ("radix", {**LLAMA, "factors": LAMBDAS}),
    ("longrope", {**LLAMA, "factors": [1.0, *LAMBDAS]}),
]  # fmt: skip
NAMES = [f"{method}-{i}" for i, (method, _) in enumerate(REQUESTS)]
TABLES_BY_BOUNDS = ["yarn", "mrrope_uni", "mrrope_pro"]


def assert_close(actual: torch.Tensor, expected, relative: float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=relative, atol=0)


def assert_same_frequencies(actual: FrequencyTable, expected: FrequencyTable) -> None:
    assert torch.equal(actual.turns, expected.turns)
    assert torch.equal(actual.inv_freq, expected.inv_freq)


def round_trips(table: FrequencyTable, folder) -> dict[str, FrequencyTable]:
    table.save(folder / "table.json")
    return {
        "dict": FrequencyTable.from_dict(table.to_dict()),
        "json": FrequencyTable.from_dict(json.loads(json.dumps(table.to_dict()))),
        "file": FrequencyTable.load(folder / "table.json"),
        "path": FrequencyTable.load(str(folder / "table.json")),
        "pickle": pickle.loads(pickle.dumps(table)),
        "copy": copy.copy(table),
        "deepcopy": copy.deepcopy(table),
    }


# --- against golden values, mpmath and transformers ---


def test_golden_tables(golden):
    assert len(golden) == 28
    for entry in golden:
        keys = ("rotary_dim", "base", "original_max_position", "scale", "alpha", "beta")
        table = frequency_table(entry["method"], **{key: entry[key] for key in keys})
        assert table.bounds == (entry["d_l"], entry["d_h"])
        assert_close(table.inv_freq, entry["inv_freq"], 1e-14)
        assert_close(table.cumulative_scale, entry["cumulative_scale"], 1e-14)
        assert table.attention_factor == pytest.approx(entry["attention_factor"], rel=1e-15)


def test_golden_phases(golden, device):
    checked = 0
    for entry in golden:
        keys = ("rotary_dim", "base", "original_max_position", "scale", "alpha", "beta")
        table = frequency_table(entry["method"], **{key: entry[key] for key in keys}, attention_factor=1.0)
        half = table.rotary_dim // 2
        # (1, 0) rotates to (cos, sin).
        one = torch.cat([torch.ones(half), torch.zeros(half)]).double().to(device)
        for phase in entry.get("phases", []):
            position = torch.tensor([phase["position"]], device=device)
            rotated, _ = mrrope.rotary(one[None, None], None, position, table, "thd")
            expected = torch.tensor(phase["cos"] + phase["sin"], dtype=torch.float64)
            # The phase step is off by half a unit at most, times the position.
            phase_error = math.pi * phase["position"] * 2.0**-64
            allowed = TOLERANCES[torch.float64].arithmetic + phase_error
            assert (rotated.cpu().flatten() - expected).abs().max() <= allowed
            checked += 1
    assert checked == 48


@pytest.mark.parametrize(("method", "settings"), REQUESTS, ids=NAMES)
def test_exact_tables(method, settings):
    table, exact = frequency_table(method, **settings), ExactTable(method, **settings)
    assert table.method == method
    assert table.bounds == exact.bounds
    assert_close(table.inv_freq, [float(x) for x in exact.inv_freq], 3e-16)
    assert_close(table.cumulative_scale, [float(x) for x in exact.cumulative_scale], 3e-16)
    # Phase steps are correctly rounded.
    assert [step % 2**64 for step in table.turns.tolist()] == exact.turns


def transformers_table(rope_type: str, **parameters) -> tuple[torch.Tensor, float]:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": rope_type, "rope_theta": LLAMA["base"], **parameters},
    )
    if rope_type == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=131072)


LENGTH = {"original_max_position_embeddings": 8192}
FACTORS = [1.0, *LAMBDAS]


@pytest.mark.parametrize(
    ("method", "settings", "rope_type", "parameters"),
    [
        ("rope", {}, "default", {}),
        ("pi", {}, "linear", {"factor": 16.0}),
        ("yarn", {}, "yarn", {"factor": 16.0, **LENGTH}),
        ("yarn", {"alpha": 2.0, "beta": 20.0}, "yarn", {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0, **LENGTH}),
        ("yarn", {"attention_factor": 1.5}, "yarn", {"factor": 16.0, "attention_factor": 1.5, **LENGTH}),
        ("yarn", {"alpha": 32.0}, "yarn", {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 32.0, **LENGTH}),
        ("llama3", {"beta": 4.0}, "llama3",
         {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH}),
        ("longrope", {"factors": FACTORS, "attention_factor": 1.19}, "longrope",
         {"factor": 16.0, "short_factor": [1.0] * 64, "long_factor": FACTORS, "attention_factor": 1.19, **LENGTH}),
    ],
)  # fmt: skip
def test_transformers_tables(method, settings, rope_type, parameters):
    inv_freq, attention_factor = transformers_table(rope_type, **parameters)
    table = frequency_table(method, **LLAMA, **settings)
    # transformers rounds the exponent to float32, which the power multiplies by ln(base).
    rounding = torch.finfo(torch.float32).eps * (2 + math.log(LLAMA["base"]) / 2)
    torch.testing.assert_close(table.inv_freq, inv_freq.double(), rtol=rounding, atol=0)
    assert table.attention_factor == pytest.approx(attention_factor, rel=1e-15)


# --- edges ---


@pytest.mark.parametrize("method", [*SCALE_ONLY_METHODS, "llama3"])
def test_scale_one_is_rope(method):
    settings = {**LLAMA, "scale": 1.0}
    table = frequency_table(method, **settings)
    assert_same_frequencies(table, frequency_table("rope", **settings))
    assert table.attention_factor == 1.0
    assert table.cumulative_scale.tolist() == [1.0] * 64


@pytest.mark.parametrize("method", METHODS)
def test_default_attention_factor(method):
    extra = {"mrrope_pow": {"power": 2.0}, "radix": {"factors": LAMBDAS}, "longrope": {"factors": FACTORS}}
    table = frequency_table(method, **LLAMA, **extra.get(method, {}))
    with_temperature = method.startswith(("yarn", "mrrope"))
    assert METHOD_TRAITS[method].has_temperature == with_temperature
    assert table.attention_factor == pytest.approx(0.1 * math.log(16.0) + 1 if with_temperature else 1.0, rel=1e-15)
    explicit = frequency_table(method, **LLAMA, **extra.get(method, {}), attention_factor=0.75)
    assert explicit.attention_factor == 0.75
    assert_same_frequencies(explicit, table)


def test_traits_name_what_a_method_needs():
    needs = {name: traits.needs for name, traits in METHOD_TRAITS.items() if traits.needs is not None}
    assert needs == {"mrrope_pow": "power", "radix": "factors", "longrope": "factors", "llama3": "beta"}
    assert (*METHOD_TRAITS,) == METHODS == (*dict.fromkeys([*SCALE_ONLY_METHODS, *needs]),)


@pytest.mark.parametrize("method", [name for name, traits in METHOD_TRAITS.items() if traits.power is not None])
def test_the_power_of_a_method_gives_its_table(method):
    by_power = frequency_table("mrrope_pow", **LLAMA, power=METHOD_TRAITS[method].power)
    assert_same_frequencies(by_power, frequency_table(method, **LLAMA))


def test_lower_bound_is_clamped_to_the_first_pair():
    # The fastest pair makes fewer than 32 rotations over the training length.
    table = frequency_table("mrrope_pro", rotary_dim=64, base=1e4, original_max_position=100, scale=4.0)
    assert table.bounds[0] == 0
    assert table.cumulative_scale[0] == 1.0
    assert table.cumulative_scale[1] > 1.0


@pytest.mark.parametrize("method", TABLES_BY_BOUNDS)
def test_upper_bound_beyond_the_last_pair(method):
    # The slowest pair makes more than one rotation over the training length.
    table = frequency_table(method, rotary_dim=64, base=1e4, original_max_position=1e6, scale=4.0)
    d_l, d_h = table.bounds
    assert d_l < 31 < d_h
    assert (table.cumulative_scale < 4.0).all()
    assert (table.cumulative_scale.diff() >= 0).all()
    exact = ExactTable(method, rotary_dim=64, base=1e4, original_max_position=1e6, scale=4.0)
    assert_close(table.cumulative_scale, [float(x) for x in exact.cumulative_scale], 3e-16)


@pytest.mark.parametrize("method", TABLES_BY_BOUNDS)
def test_coinciding_bounds_are_a_step(method):
    table = frequency_table(method, **LLAMA, bounds=(20, 20))
    assert_close(table.cumulative_scale, [1.0] * 21 + [16.0] * 43, 3e-16)


@pytest.mark.parametrize("method", ["yarn_ratio", "llama3"])
def test_coinciding_ratios_are_a_step(method):
    table = frequency_table(method, **LLAMA, alpha=8.0, beta=8.0)
    rotations = 8192 * frequency_table("rope", **LLAMA).inv_freq / (2 * math.pi)
    assert_close(table.cumulative_scale, torch.where(rotations >= 8.0, 1.0, 16.0), 3e-16)


@pytest.mark.parametrize("method", ["rope", "pi", "ntk", "yarn", "mrrope_uni", "mrrope_pro", "radix", "longrope"])
def test_a_single_pair(method):
    factors = {"longrope": [3.0]}.get(method)
    table = frequency_table(method, rotary_dim=2, base=1e4, original_max_position=4096, scale=4.0, factors=factors)
    slowed = {"pi": 4.0, "longrope": 3.0}.get(method, 1.0)
    assert table.cumulative_scale.tolist() == [slowed]
    assert table.inv_freq.tolist() == [1 / slowed]
    assert table.radix_factors.tolist() == []


@pytest.mark.parametrize(("power", "method"), [(0, "mrrope_uni"), (0.0, "mrrope_uni"), (1, "mrrope_pro")])
def test_powers_zero_and_one_are_uni_and_pro(power, method):
    table = frequency_table("mrrope_pow", **LLAMA, power=power)
    assert_same_frequencies(table, frequency_table(method, **LLAMA))


def test_radix_factors_rebuild_their_table():
    table = frequency_table("mrrope_pro", **LLAMA)
    scales = table.cumulative_scale
    assert_close(table.radix_factors, scales[1:] / scales[:-1], 0)
    again = frequency_table("radix", **LLAMA, factors=table.radix_factors)
    # Every radix factor is rounded once.
    assert_close(again.cumulative_scale, scales, 64 * 2.0**-53)


def test_bounds_override_alpha_and_beta():
    by_bounds = frequency_table("mrrope_pro", **LLAMA, bounds=(18, 35), alpha=3.0, beta=5.0)
    assert by_bounds.bounds == (18, 35)
    assert_same_frequencies(by_bounds, frequency_table("mrrope_pro", **LLAMA))
    assert frequency_table("mrrope_pro", **LLAMA, alpha=3.0, beta=5.0).bounds != (18, 35)


def test_attributes_repeat_the_request():
    table = frequency_table("yarn", **LLAMA)
    assert (table.rotary_dim, table.base, table.original_max_position, table.scale) == (128, 5e5, 8192, 16.0)
    for text in ("yarn", "128", "500000", "8192", "16", "(18, 35)", "1.27726"):
        assert text in repr(table)
    assert (table.turns.dtype, table.inv_freq.dtype) == (torch.int64, torch.float64)
    assert table.turns.shape == table.inv_freq.shape == table.cumulative_scale.shape == (64,)


def test_attributes_are_copies():
    table = frequency_table("yarn", **LLAMA)
    before = table.to_dict()
    table.inv_freq.zero_(), table.turns.zero_(), table.cumulative_scale.zero_()
    table.to_dict()["turns"][0] = 7
    assert table.to_dict() == before


# --- relative tables ---


@pytest.mark.parametrize(("first", "second"), [("rope", "mrrope_pro"), ("yarn", "pi"), ("mrrope_pro", "mrrope_pro")])
def test_relative_tables_compose(device, first, second):
    a, b = (frequency_table(method, **LLAMA) for method in (first, second))
    x = torch.randn(40, 2, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.randint(-(2**31), 2**31, (40,), generator=torch.Generator().manual_seed(1)).to(device)
    by_a, _ = mrrope.rotary(x, None, positions, a, "thd")
    by_both, _ = mrrope.rotary(by_a, None, positions, b.relative_to(a), "thd")
    by_b, _ = mrrope.rotary(x, None, positions, b, "thd")
    scale = x.norm(dim=-1, keepdim=True) * max(1.0, a.attention_factor, b.attention_factor)
    assert ((by_both - by_b).abs() <= 3 * TOLERANCES[torch.float64].arithmetic * scale).all()


def test_relative_table_is_a_difference():
    a, b = frequency_table("rope", **LLAMA), frequency_table("mrrope_pro", **LLAMA)
    table = b.relative_to(a)
    assert table.method == "relative"
    assert torch.equal(table.turns, b.turns - a.turns)
    assert (table.inv_freq - (b.inv_freq - a.inv_freq)).abs().max() <= 2.0**-52  # each below 1, each rounded
    assert table.attention_factor == b.attention_factor / a.attention_factor
    assert table.bounds is None
    assert table.cumulative_scale.numel() == table.radix_factors.numel() == 0
    back = a.relative_to(b)
    assert torch.equal(back.turns, -table.turns)


def with_attention_factor(factor: float, scale: float = 8.0) -> mrrope.FrequencyTable:
    return mrrope.frequency_table(
        "yarn", rotary_dim=8, base=1e4, original_max_position=64, scale=scale, attention_factor=factor
    )


FLOAT32 = torch.finfo(torch.float32)


@pytest.mark.parametrize("factor", [FLOAT32.max, FLOAT32.smallest_normal])
def test_attention_factors_within_float32(factor):
    assert mrrope.FrequencyTable.from_dict(with_attention_factor(factor).to_dict()).attention_factor == factor


@pytest.mark.parametrize("factor", [2 * FLOAT32.max, FLOAT32.smallest_normal / 2, 1e300])
def test_attention_factors_past_float32_are_refused(factor):
    with pytest.raises(ValueError, match="attention_factor must be a positive finite number in float32's range, got"):
        with_attention_factor(factor)
    data = with_attention_factor(1.0).to_dict() | {"attention_factor": factor}
    with pytest.raises(ValueError, match="attention_factor must be a positive finite number in float32's range, got"):
        mrrope.FrequencyTable.from_dict(data)


def test_relative_attention_factors_past_float32_are_refused():
    small, large = with_attention_factor(1e-30), with_attention_factor(1e30)
    message = "attention_factor of one table relative to another must be .* in float32's range, got"
    for to, from_ in ((small, large), (large, small)):
        with pytest.raises(ValueError, match=message):
            to.relative_to(from_)
    with pytest.raises(ValueError, match=message):
        with_attention_factor(FLOAT32.max).inverse()
    huge = with_attention_factor(1.0, scale=1e200)
    tiny = with_attention_factor(1.0).relative_to(huge)
    with pytest.raises(ValueError, match=r"scale of one table relative to another must be .*, got inf"):
        huge.relative_to(tiny)
    keys = torch.ones(1, 1, 3, 8)
    with pytest.raises(ValueError, match=r"old and new must have attention factors .*, got 1e-30 and 1e\+30"):
        mrrope.rescale_cache_(keys, torch.arange(3), small, large)
    assert torch.equal(keys, torch.ones(1, 1, 3, 8))


def test_inverse_negates():
    table = frequency_table("mrrope_pro", **LLAMA)
    inverse = table.inverse()
    assert torch.equal(inverse.turns, -table.turns)
    assert inverse.attention_factor == 1 / table.attention_factor
    assert torch.equal(inverse.inverse().turns, table.turns)
    assert inverse.inverse().attention_factor == pytest.approx(table.attention_factor, rel=3e-16)


# --- round trips ---


@pytest.mark.parametrize(("method", "settings"), REQUESTS, ids=NAMES)
def test_round_trips_are_exact(tmp_path, method, settings):
    table = frequency_table(method, **settings)
    for name, copied in round_trips(table, tmp_path).items():
        assert copied == table, name
        assert hash(copied) == hash(table), name
        assert_same_frequencies(copied, table)


def test_round_trips_of_derived_tables_are_exact(tmp_path):
    a, b = frequency_table("yarn", **LLAMA), frequency_table("mrrope_pro", **LLAMA)
    for table in (b.relative_to(a), a.relative_to(b), a.inverse()):
        assert all(copied == table for copied in round_trips(table, tmp_path).values())


def test_tables_differ_when_anything_does():
    table = frequency_table("yarn", **LLAMA)
    assert table == frequency_table("yarn", **LLAMA)
    others = [
        frequency_table("yarn", **{**LLAMA, "scale": 16.5}),
        frequency_table("yarn", **LLAMA, attention_factor=1.0),
        frequency_table("mrrope_pro", **LLAMA),
        None,
        "yarn",
    ]
    assert all(table != other for other in others)


def test_dicts_hold_nothing_but_json(tmp_path):
    table = frequency_table("mrrope_pro", **LLAMA)
    assert json.loads(json.dumps(table.to_dict(), allow_nan=False)) == table.to_dict()
    table.save(tmp_path / "table.json")
    assert json.loads((tmp_path / "table.json").read_text()) == table.to_dict()


def test_turns_are_inv_freq_in_revolutions():
    table = frequency_table("mrrope_pro", **LLAMA)
    for radians, step in zip(table.inv_freq.tolist(), table.turns.tolist(), strict=True):
        angle = mpmath.mpf(step % 2**64) / 2**64 * 2 * mpmath.pi
        assert abs(angle - radians) <= radians * 2.0**-53 + math.pi * 2.0**-64
