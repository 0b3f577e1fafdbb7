"""TableSet: the class, its files, the lookup of tables for a model, and cached keys of all layers."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from layer_tables import MODEL, head_by_head, random_heads, random_set, random_table
from op_errors import assert_refused
from rotary_reference import TOLERANCES, rotated

import mrrope
from mrrope import FrequencyTable, HeadTables, TableSet
from mrrope.tables import shipped
from mrrope.tables.lookup import NativeRope, is_saved_table, load_tables, resolve_table, resolve_tables
from mrrope.tables.table_set import every_table

CPU = torch.device("cpu")


# --- the class ---


def test_it_is_like_a_tuple():
    layers = [random_heads(3), random_table(5), random_heads(3, seed=1)]
    tables = TableSet(layers)
    assert len(tables) == 3
    assert list(tables) == layers
    assert tables[1] is layers[1]
    assert tables[-1] is layers[2]
    with pytest.raises(IndexError):
        tables[3]
    assert tables.key_heads == 3
    assert TableSet([random_table(1)]).key_heads is None
    assert (tables.rotary_dim, tables.base, tables.original_max_position, tables.scale) == (16, 1e4, 2048, 8.0)
    assert list(every_table(tables)) == [*layers[0], layers[1], *layers[2]]
    for text in ("TableSet(3 layers x 3 key heads", "rotary_dim=16", "base=10000", "=2048", "scale=8"):
        assert text in repr(tables)
    assert "3 layers, rotary_dim" in repr(TableSet([random_table(1)] * 3))


def test_equality_and_hash():
    tables = random_set(3, 2)
    assert tables == random_set(3, 2)
    assert hash(tables) == hash(random_set(3, 2))
    assert tables != TableSet(list(tables)[::-1])
    assert tables != TableSet(list(tables)[:2])
    assert tables != list(tables)
    assert TableSet([random_table(0)]) != TableSet([HeadTables([random_table(0)])])
    assert len({tables, random_set(3, 2), random_set(3, 2, seed=1)}) == 2


BAD_LAYERS = {
    "none": ([], ValueError, ["layers must hold the tables of every layer, got none"]),
    "a table": (random_table(0), TypeError, ["layers must be the tables of every layer, got FrequencyTable"]),
    "heads": (random_heads(2), TypeError, ["layers must be the tables of every layer, got HeadTables"]),
    "a name": ([random_table(0), "rope"], TypeError, ["layers[1] must be a FrequencyTable or HeadTables, got str"]),
    "axes": ([mrrope.AxisTables([random_table(0)])], TypeError,
             ["layers[0] must be a FrequencyTable or HeadTables, got AxisTables"]),
    "nested": ([random_set(1, 1)], TypeError, ["layers[0] must be a FrequencyTable or HeadTables, got TableSet"]),
    "other heads": ([random_table(0), random_heads(3), random_heads(2)], ValueError,
                    ["layers[2] must hold tables for 3 key heads, as those before it do, got 2"]),
    **{f"another {name}": ([random_heads(2), random_table(2, **{name: value})], ValueError,
                           [f"layers[1] must have layers[0]'s {name} {MODEL[name]:g}, got {value:g}"])
       for name, value in (("base", 2e4), ("original_max_position", 4096), ("scale", 4.0))},
    "another rotary_dim": ([random_heads(2), random_table(2, rotary_dim=18)], ValueError,
                           ["layers[1] must have layers[0]'s rotary_dim 16, got 18"]),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "error", "texts"), BAD_LAYERS.values(), ids=BAD_LAYERS.keys())
def test_what_is_no_set_is_refused(layers, error, texts):
    assert_refused(lambda: TableSet(layers), error, *texts)


def test_packed_words(device):
    table = random_table(5)
    tables = TableSet([random_heads(3), table])
    packed = tables.packed(CPU)
    assert (packed.shape, packed.dtype, packed.is_contiguous()) == ((1, 2, 3, 9), torch.int64, True)
    assert torch.equal(packed[:, :1], tables[0].packed(CPU))
    assert torch.equal(packed[0, 1], table.packed(CPU).expand(3, -1))
    assert TableSet([table, table]).packed(CPU).shape == (1, 2, 1, 9)
    on_device = torch.empty(0, device=device).device
    assert tables.to(device) is tables
    assert tables.packed(on_device) is tables.packed(on_device)
    with torch.inference_mode():
        assert not random_set(2, 2).packed(CPU).is_inference()


def test_is_like():
    tables = random_set(2, 3)
    renamed = [
        HeadTables(FrequencyTable.from_dict({**t.to_dict(), "bounds": [0, 1]}) for t in heads) for heads in tables
    ]
    assert tables != TableSet(renamed)
    assert tables.is_like(TableSet(renamed))
    assert not tables.is_like(random_set(2, 3, seed=1))
    assert not tables.is_like(random_set(3, 3))
    table = random_table(0)
    assert TableSet([table, HeadTables([table] * 3)]).is_like(table)
    assert not tables.is_like(table)


# --- files ---

SETS = {
    "found": random_set(4, 3),
    "one table per layer": TableSet([random_table(i) for i in range(3)]),
    "mixed": TableSet([random_heads(2), random_table(1), mrrope.frequency_table("yarn", **MODEL)]),
    "equal layers": TableSet([mrrope.frequency_table("mrrope_pro", **MODEL)] * 5),
    "relative": TableSet([random_heads(2).relative_to(random_heads(2, seed=1))]),
}


@pytest.mark.parametrize("tables", SETS.values(), ids=SETS.keys())
def test_round_trips_are_exact(tmp_path, tables):
    tables.save(tmp_path / "set.json")
    copies = {
        "dict": TableSet.from_dict(tables.to_dict()),
        "json": TableSet.from_dict(json.loads(json.dumps(tables.to_dict(), allow_nan=False))),
        "file": TableSet.load(tmp_path / "set.json"),
        "path": TableSet.load(str(tmp_path / "set.json")),
        "pickle": pickle.loads(pickle.dumps(tables)),
        "copy": copy.copy(tables),
        "deepcopy": copy.deepcopy(tables),
    }
    for name, copied in copies.items():
        assert copied == tables, name
        assert hash(copied) == hash(tables), name
        assert [t.to_dict() for t in every_table(copied)] == [t.to_dict() for t in every_table(tables)], name
        assert torch.equal(copied.packed(CPU), tables.packed(CPU)), name
        assert copied.key_heads == tables.key_heads, name
    assert json.loads((tmp_path / "set.json").read_text()) == tables.to_dict()


def test_files_are_compact(tmp_path):
    tables = random_set(30, 3, rotary_dim=64, base=1e5, original_max_position=8192, scale=16.0)
    tables.save(tmp_path / "set.json")
    # 2880 cumulative scales of 17 digits, point and comma take 55 KB.
    assert (tmp_path / "set.json").stat().st_size <= 60_000
    assert TableSet.load(tmp_path / "set.json") == tables
    lines = (tmp_path / "set.json").read_text().splitlines()
    assert sum("cumulative_scale" in line for line in lines) == 30, "a line for every layer"
    same = TableSet([random_table(0)] * 30)
    same.save(tmp_path / "same.json")
    random_table(0).save(tmp_path / "table.json")
    assert (tmp_path / "same.json").stat().st_size < (tmp_path / "table.json").stat().st_size


def without(data: dict, name: str) -> dict:
    return {key: value for key, value in data.items() if key != name}


def bad_dicts() -> dict[str, tuple]:
    data = TableSet([random_heads(2), random_table(3)]).to_dict()
    heads, row = data["layers"]
    return {
        "a list": ([1], TypeError, ["data must be a dict as to_dict makes it, got list"]),
        "heads'": (random_heads(2).to_dict(), ValueError,
                   ["format must be 'mrrope.TableSet/1'", "'mrrope.HeadTables/1', which mrrope.HeadTables reads"]),
        "another version": ({**data, "format": "mrrope.TableSet/2"}, ValueError, ["got 'mrrope.TableSet/2'"]),
        "a list as format": ({**data, "format": ["x"]}, ValueError, ["format must be 'mrrope.TableSet/1', got ['x']"]),
        "no layers": (without(data, "layers"), ValueError, ["layers must be a list", "got None"]),
        "empty layers": ({**data, "layers": []}, ValueError, ["layers must be a list", "got []"]),
        "a layer of text": ({**data, "layers": [heads, "x"]}, TypeError, ["layers[1] must be a JSON object"]),
        "a layer without heads": ({**data, "layers": [[], row]}, ValueError, ["layers[0] must be a list", "got []"]),
        "a head of text": ({**data, "layers": [[heads[0], 1]]}, TypeError, ["layers[0][1] must be a JSON object"]),
        "a missing field": (without(data, "method"), ValueError,
                            ["layers[0][0]: a table needs the fields ['method']"]),
        "an unknown field": ({**data, "layers": [heads, {**row, "theta": 1.0}]}, ValueError,
                             ["layers[1]: a table has no fields ['theta']"]),
        "a wrong factor": ({**data, "layers": [heads, {**row, "attention_factor": -1.0}]}, ValueError,
                           ["layers[1]: attention_factor must be", "got -1"]),
    }  # fmt: skip


@pytest.mark.parametrize(("data", "error", "texts"), bad_dicts().values(), ids=bad_dicts().keys())
def test_corrupted_dicts(tmp_path, data, error, texts):
    assert_refused(lambda: TableSet.from_dict(data), error, *texts)
    if isinstance(data, dict):
        (tmp_path / "set.json").write_text(json.dumps(data))
        assert_refused(lambda: TableSet.load(tmp_path / "set.json"), error, *texts)


def test_what_is_no_file_of_a_set(tmp_path):
    path = tmp_path / "set.json"
    random_set(2, 2).save(path)
    for kind in (FrequencyTable, HeadTables):
        assert_refused(
            lambda kind=kind: kind.load(path), ValueError, "'mrrope.TableSet/1', which mrrope.TableSet reads"
        )
    random_table(0).save(path)
    assert_refused(lambda: TableSet.load(path), ValueError, "which mrrope.FrequencyTable reads")
    path.write_text("{")
    assert_refused(lambda: TableSet.load(path), ValueError, str(path), "is not JSON")
    assert_refused(lambda: TableSet.load(tmp_path / "nowhere.json"), FileNotFoundError, "nowhere.json")


KINDS = {"table": random_table(0), "heads": random_heads(3), "set": random_set(2, 3)}


@pytest.fixture
def shipped_folder(tmp_path, monkeypatch) -> Path:
    """A folder of shipped tables with one of each kind."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    for name, tables in KINDS.items():
        tables.save(tmp_path / f"tiny-{name}.json")
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_names_of_every_kind(shipped_folder, kind):
    assert shipped.names() == ["tiny-heads", "tiny-set", "tiny-table"]
    name = f"tiny-{kind}"
    assert is_saved_table(name)
    for source in (name, shipped_folder / f"{name}.json", str(shipped_folder / f"{name}.json")):
        assert load_tables(source) == KINDS[kind]
        assert type(KINDS[kind]).load(source) == KINDS[kind]


def test_ladders_are_shipped_names_with_a_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert shipped.ladders() == shipped.ladder("tiny") == []
    names = "tiny-16x tiny-2x tiny-1.5x tiny-heads-4x tiny-heads-2x tiny tiny-x 2x tinier-2x"
    for name in names.split():
        random_table(0).save(tmp_path / f"{name}.json")
    assert shipped.ladders() == ["tinier", "tiny", "tiny-heads"]
    assert shipped.ladder("tiny") == ["tiny-1.5x", "tiny-2x", "tiny-16x"]
    assert shipped.ladder("tiny-heads") == ["tiny-heads-2x", "tiny-heads-4x"]
    for other in ("tin", "tiny-", "tiny-2x", "", "t.ny"):
        assert shipped.ladder(other) == []


# --- tables for a model ---

TRAINED = NativeRope(16, 1e4, 2048, trained_length=2048)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_for_a_model(shipped_folder, kind):
    tables = KINDS[kind]
    for method in (tables, f"tiny-{kind}", shipped_folder / f"tiny-{kind}.json"):
        assert resolve_tables(TRAINED, method, None, {}) == tables
    if kind == "table":
        assert resolve_table(TRAINED, tables, None, {}) is tables
    else:
        text = "method must be one table for all layers and heads here, got"
        assert_refused(lambda: resolve_table(TRAINED, tables, None, {}), ValueError, text, repr(tables))


def test_methods_still_resolve():
    table = resolve_tables(TRAINED, "yarn", 8.0, {})
    assert table == resolve_table(TRAINED, "yarn", 8.0, {}) == mrrope.frequency_table("yarn", **MODEL)


UNFIT = {
    "rotary_dim": (
        random_heads(3, rotary_dim=18),
        {},
        "method must give a table of the model's rotary_dim 16, got Head",
    ),
    "base": (random_set(2, 3, base=2e4), {}, "method must be a table for the model's base 10000, got TableSet"),
    "length": (random_set(2, 3, original_max_position=512), {}, "the model's original_max_position 2048, got TableSet"),
    "options": (random_set(2, 3), {"alpha": 2.0}, "method is a ready table, which leaves no room for {'alpha': 2.0}"),
}


@pytest.mark.parametrize(("tables", "options", "text"), UNFIT.values(), ids=UNFIT.keys())
def test_tables_of_another_model_are_refused(tables, options, text):
    assert_refused(lambda: resolve_tables(TRAINED, tables, None, options), ValueError, text)


def test_a_scale_beside_ready_tables_is_refused():
    text = "method is a ready table, which leaves no room for {'scale': 4.0}"
    assert_refused(lambda: resolve_tables(TRAINED, random_set(2, 3), 4.0, {}), ValueError, text)


def test_tables_that_add_to_a_held_temperature_warn():
    holding = NativeRope(16, 1e4, 2048, trained_length=2048, held_attention_factor=1.25)
    with pytest.warns(UserWarning, match="the attention of the model holds a temperature already, and TableSet"):
        resolve_tables(holding, random_set(2, 3), None, {})


# --- cached keys ---


def test_rescale_cache_of_every_layer(device):
    old, new = random_set(3, 2), TableSet([random_heads(2, seed=7), random_table(8), random_heads(2, seed=9)])
    positions = torch.arange(5, device=device)
    generator = torch.Generator().manual_seed(0)
    unrotated = [torch.randn(3, 4, 5, 20, generator=generator).to(device) for _ in range(3)]
    keys = [mrrope.rotary(x, None, positions, old[i])[0] for i, x in enumerate(unrotated)]
    before = [layer.clone() for layer in keys]
    mrrope.rescale_cache_(keys, positions, [old, old, old[0][0]], [new, old, old[0][0]])
    for layer, (x, changed) in enumerate(zip(unrotated, keys, strict=True)):
        for index, table in head_by_head(x[:1], new[layer], "bhsd"):
            expected = rotated(x[:1][index], positions, table)
            error = (changed[:1][index].cpu().double() - expected).abs().max()
            # Rounded after both rotations, with factors of at most 1.5 and their quotient of 3.
            assert error <= 8 * TOLERANCES[torch.float32].arithmetic * x.norm(dim=-1).max().item()
        assert torch.equal(changed[1:], before[layer][1:]), "tables that do not change leave keys as they are"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rescale_cache_of_blocks(device, layout):
    old, new = random_set(2, 2), TableSet([random_table(5), random_table(6)])
    blocks = torch.tensor([3, 1], device=device)
    positions = torch.arange(8, device=device).view(2, 4)
    shape = (5, 2, 4, 16) if layout == "bhsd" else (5, 4, 2, 16)
    keys = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2)]
    expected = [layer.clone() for layer in keys]
    mrrope.rescale_cache_(keys, positions, old, new, layout=layout, blocks=blocks)
    for layer in range(2):
        part = expected[layer][blocks]
        mrrope.rescale_cache_(part, positions, old[layer], new[layer], layout=layout)
        expected[layer][blocks] = part
        assert torch.equal(keys[layer], expected[layer])


RESCALE_ERRORS = {
    "layers": (random_set(3, 2), random_table(0), ValueError,
               "old[0] must have tables for the 2 layers of keys, got 3"),
    "new layers": ([random_table(0)] * 2, [random_table(0), random_set(1, 2)], ValueError,
                   "new[1] must have tables for the 2 layers of keys, got 1"),
    "key heads": (random_set(2, 2), random_heads(4), ValueError,
                  "new[0] must hold tables for 2 key heads, as those before it do, got 4"),
    "heads": (random_set(2, 3), random_table(0), ValueError, "must have a multiple of 3 heads"),
    "rotary_dim": (random_set(2, 2), random_table(0, rotary_dim=8), ValueError,
                   "new[0] must have old[0]'s rotary_dim 16, got 8"),
    "type": (random_set(2, 2), "rope", TypeError,
             "new must be a FrequencyTable or a list of them, of HeadTables, AxisTables or TableSets, got 'rope'"),
    "factors": (TableSet([random_table(0), mrrope.frequency_table("rope", **MODEL, attention_factor=1e-30)]),
                TableSet([random_table(0), mrrope.frequency_table("rope", **MODEL, attention_factor=1e30)]), ValueError,
                "old and new must have attention factors whose quotients are in float32's range, got 1e-30 and 1e+30"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "error", "text"), RESCALE_ERRORS.values(), ids=RESCALE_ERRORS.keys())
def test_errors_of_rescale_cache(old, new, error, text):
    keys = [torch.ones(2, 4, 5, 16) for _ in range(2)]
    assert_refused(lambda: mrrope.rescale_cache_(keys, torch.arange(5), old, new), error, text)
    assert all(torch.equal(layer, torch.ones(2, 4, 5, 16)) for layer in keys)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_of_rescale_cache(device, backend):
    old, new = random_set(2, 2), random_set(2, 2, seed=1)
    positions = torch.arange(5, device=device)
    keys = [torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2)]
    expected, actual = ([layer.clone() for layer in keys] for _ in range(2))
    mrrope.rescale_cache_(expected, positions, old, [new, old])
    torch.compile(mrrope.rescale_cache_, fullgraph=True, backend=backend)(actual, positions, old, [new, old])
    for ours, theirs, before in zip(actual, expected, keys, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, before)
