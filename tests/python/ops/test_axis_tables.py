"""Tables for tokens with several positions, against the formulas of image and video models, and of M-RoPE."""

import copy
import pickle

import numpy as np
import pytest
import torch
from norm_reference import EPS, OVERS
from rotary_reference import TOLERANCES, components_of, pairs_of
from tensor_bits import same_bits
from torch.library import opcheck

import mrrope
from mrrope.tables.frequency_table import packed_stack

CACHE_OPS = [mrrope.rotary_and_cache_, mrrope.qk_norm_rotary_and_cache_]


def plain_table(rotary_dim, base=1e4, attention_factor=1.0):
    return mrrope.frequency_table(
        "rope", rotary_dim=rotary_dim, base=base, original_max_position=4096, attention_factor=attention_factor
    )


def rotated_by_angles(x, angles, pairing, factor=1.0):
    """Rotate float64 ``[..., tokens, heads, dim]`` by angles of ``[..., tokens, pairs]``."""
    turned = pairs_of(x.cpu().double().numpy(), pairing) * (factor * np.exp(1j * np.asarray(angles)))[..., None, :]
    return torch.from_numpy(components_of(turned, pairing))


def assert_close(actual, expected, margin=1.0):
    error = (actual.cpu().double() - expected).norm() / expected.norm()
    assert error < TOLERANCES[actual.dtype].frobenius * margin, f"relative error {error:.2e}"


def random_heads(device, *shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


def grid(frames, height, width):
    """Frame, row and column of every patch, ``[3, patches]``."""
    return torch.stack(
        torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    ).flatten(1)


def axis_angles(positions, dims, base):
    """Angles of every pair as Flux, Wan and Qwen-Image have them: every axis has RoPE of its own width."""
    return np.concatenate(
        [
            positions[axis].double().numpy()[:, None] * base ** (-np.arange(0, dim, 2) / dim)
            for axis, dim in enumerate(dims)
        ],
        axis=-1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_flux(device, dtype):
    """Text at position 0, then the patches of an image at (0, row, column): 16 + 56 + 56, interleaved."""
    positions = torch.cat([torch.zeros(3, 5, dtype=torch.int64), grid(1, 6, 7)], dim=1)
    tables = mrrope.AxisTables([plain_table(16), plain_table(56), plain_table(56)])
    assert (tables.rotary_dim, tables.axes) == (128, 3)
    q, k = (random_heads(device, 2, positions.shape[1], 3, 128, dtype=dtype) for _ in range(2))
    got = mrrope.rotary(q, k, positions[:, None].to(device), tables, layout="bshd", pairing="interleaved")
    angles = axis_angles(positions, (16, 56, 56), 1e4)
    for actual, x in zip(got, (q, k), strict=True):
        # The formula's own angles are rounded to float64, by up to 2^-53 of 7 revolutions.
        assert_close(actual, rotated_by_angles(x, angles, "interleaved"), margin=2.0)


def test_wan(device):
    """Frames, rows and columns of a video: height and width have 2 * (128 // 6) components, time the rest."""
    positions = grid(3, 4, 5)
    spatial = 2 * (128 // 6)
    dims = 128 - 2 * spatial, spatial, spatial
    tables = mrrope.AxisTables(map(plain_table, dims))
    q = random_heads(device, 1, positions.shape[1], 2, 128)
    got, _ = mrrope.rotary(q, None, positions[:, None].to(device), tables, layout="bshd", pairing="interleaved")
    assert_close(got, rotated_by_angles(q, axis_angles(positions, dims, 1e4), "interleaved"))


def test_qwen_image(device):
    """Rows and columns counted from the middle, so that half of them are negative; text after the largest."""
    frames, height, width = 1, 5, 6
    patches = grid(frames, height, width)
    patches[1] -= height - height // 2
    patches[2] -= width - width // 2
    text = max(height // 2, width // 2) + torch.arange(4).expand(3, 4)
    positions = torch.cat([patches, text], dim=1)
    assert positions.min() < 0
    tables = mrrope.AxisTables([plain_table(16), plain_table(56), plain_table(56)])
    q = random_heads(device, 1, positions.shape[1], 2, 128)
    got, _ = mrrope.rotary(q, None, positions[:, None].to(device), tables, layout="bshd", pairing="interleaved")
    assert_close(got, rotated_by_angles(q, axis_angles(positions, (16, 56, 56), 1e4), "interleaved"))


def test_rows_and_columns_in_halves(device):
    """Vision towers with rows and columns, and pairs (i, i + half), as Qwen2-VL's."""
    positions = grid(1, 3, 4)[1:]
    tables = mrrope.AxisTables([plain_table(40), plain_table(40)])
    q = random_heads(device, 1, 2, 12, 80)
    got, _ = mrrope.rotary(q, None, positions[:, None].to(device), tables)
    want = rotated_by_angles(q.transpose(1, 2), axis_angles(positions, (40, 40), 1e4), "halves").transpose(1, 2)
    assert_close(got, want)


@pytest.mark.parametrize(("family", "interleaved"), [("qwen2_vl", False), ("qwen3_vl", True)])
def test_sections_are_those_of_transformers(device, family, interleaved):
    transformers = pytest.importorskip("transformers")
    sections = [24, 20, 20]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    config = transformers.AutoConfig.for_model(
        f"{family}_text",
        hidden_size=128,
        num_attention_heads=1,
        head_dim=128,
        num_hidden_layers=1,
        vocab_size=16,
        rope_parameters=rope,
    )
    stock = dict(transformers.AutoModel.from_config(config).named_modules())["rotary_emb"]
    positions = torch.randint(0, 5000, (3, 2, 9))
    q = random_heads(device, 2, 4, 9, 128)
    cos, sin = (x[:, None].double() for x in stock(q.cpu(), positions))
    first, second = q.cpu().double().chunk(2, dim=-1)
    want = q.cpu().double() * cos + torch.cat([-second, first], dim=-1) * sin
    tables = mrrope.AxisTables.of_sections(plain_table(128, base=1e6), sections, interleaved=interleaved)
    got, _ = mrrope.rotary(q, None, positions.to(device), tables)
    # Its float32 angles are off by up to 5000 * 2^-24; a pair that turns with another axis would be off by 1.
    assert ((got.cpu() - want).norm() / want.norm()).item() < 1e-3


def test_one_position_is_that_of_all_axes(device):
    tables = mrrope.AxisTables([plain_table(16), plain_table(8)])
    q = random_heads(device, 2, 3, 7, 32)
    positions = torch.randint(0, 2**40, (2, 7), device=device)
    alone, _ = mrrope.rotary(q, None, positions, tables)
    together, _ = mrrope.rotary(q, None, positions.expand(2, 2, 7), tables)
    assert torch.equal(alone, together)
    assert torch.equal(alone[..., 24:], q[..., 24:])


def test_norm_gradient_and_compilation(device):
    tables = mrrope.AxisTables([plain_table(16, attention_factor=1.25), plain_table(16, attention_factor=1.25)]).to(
        device
    )
    q, k = (random_heads(device, 1, heads, 6, 32) for heads in (4, 2))
    weight = torch.rand(32, device=device)
    positions = torch.randint(-50, 50, (2, 1, 6), device=device)
    normed = mrrope.qk_norm_rotary(q, k, weight, weight, positions, tables, eps=1e-6)

    def norm(x):
        return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()

    angles = axis_angles(positions[:, 0].cpu(), (16, 16), 1e4)
    for actual, x in zip(normed, (q, k), strict=True):
        want = rotated_by_angles(norm(x).transpose(1, 2), angles, "halves", factor=1.25).transpose(1, 2)
        assert_close(actual, want)

    def loss(x):
        return mrrope.rotary(x, None, positions, tables)[0].square().sum()

    x = q.clone().requires_grad_()
    loss(x).backward()
    # A rotation keeps lengths, so that the gradient of the squared norm is that of the input's, times factor squared.
    torch.testing.assert_close(x.grad, 2 * 1.25**2 * q, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(lambda x: mrrope.rotary(x, None, positions, tables)[0], fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), mrrope.rotary(q, None, positions, tables)[0])


def projected(x):
    """Return q, k and v of 4, 2 and 2 heads."""
    return [part.unflatten(-1, (-1, 16)) for part in (x * 2.0).split([64, 32, 32], dim=-1)]


@pytest.mark.usefixtures("dynamo")
def test_norms_compile_with_gradients(device):
    tables = mrrope.AxisTables([plain_table(8), plain_table(8)]).to(device)

    def normed(x, q_weight, k_weight, positions):
        q, k, _ = projected(x)
        return mrrope.qk_norm_rotary(q, k, q_weight, k_weight, positions, tables, eps=1e-6, layout="bshd")

    compiled = torch.compile(normed, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9):
        leaves = [random_heads(device, *shape, dtype=torch.float64) for shape in ((1, tokens, 128), (16,), (16,))]
        leaves = [x.requires_grad_() for x in leaves]
        positions = torch.randint(-50, 50, (2, 1, tokens), device=device)
        results = []
        for function in (normed, compiled):
            out = function(*leaves, positions)
            results.append([*out, *torch.autograd.grad([x.sin().sum() for x in out], leaves)])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-12)


def norm_call(device, over):
    """Return q and k of two sequences, their weights, and two positions a token."""
    heads = [random_heads(device, 2, count, 5, 16) for count in (4, 2)]
    weights = [random_heads(device, 16 * (count if over == "all_heads" else 1)) for count in (4, 2)]
    return heads, weights, torch.randint(-50, 50, (2, 2, 5), device=device)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("over", OVERS)
def test_opcheck_of_norms(device, over, requires_grad):
    heads, weights, positions = norm_call(device, over)
    for x in (*heads, *weights):
        x.requires_grad_(requires_grad)
    tables = mrrope.AxisTables([plain_table(8), plain_table(4)])
    rest = (weights, positions, tables.packed(positions.device), EPS, 1.0, over)
    ops = torch.ops.mrrope
    opcheck(ops.qk_norm_rotary.default, (heads, *rest))
    if not requires_grad:
        opcheck(ops.qk_norm_rotary_.default, (heads, *rest))
        opcheck(ops.qk_norm_rotary_backward.default, ([torch.randn_like(x) for x in heads], heads, *rest))


@pytest.mark.parametrize("over", OVERS)
def test_norms_and_gradients_in_a_cuda_graph(cuda, over):
    tables = mrrope.AxisTables([plain_table(8), plain_table(4)]).to(cuda)
    heads, weights, positions = norm_call(cuda, over)
    leaves = [x.requires_grad_() for x in (*heads, *weights)]

    def step():
        found = mrrope.qk_norm_rotary(*leaves, positions, tables, eps=EPS, over=over)
        return [*found, *torch.autograd.grad([x.square().sum() for x in found], leaves)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # what the first backward sets up is not for the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    positions.random_(-50, 50)
    with torch.no_grad():
        for x in leaves:
            x.normal_()
    graph.replay()
    assert all(same_bits(x, y) for x, y in zip(found, step(), strict=True))


def cache_call(op, device, tables):
    """Return the arguments of a call with two sequences and two positions a token."""
    arguments = {
        **{name: random_heads(device, 2, heads, 5, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))},
        "positions": torch.randint(-50, 50, (2, 2, 5), device=device),
        "table": tables,
        **{name: torch.zeros(4, 4, 2, 16, device=device) for name in ("key_cache", "value_cache")},
        "slots": torch.randperm(16)[:10].view(2, 5).to(device),
    }
    if op is mrrope.rotary_and_cache_:
        return arguments
    return arguments | {name: random_heads(device, 16) for name in ("q_weight", "k_weight")} | {"eps": EPS}


@pytest.mark.parametrize("q_out", [False, True])
@pytest.mark.parametrize("op", CACHE_OPS)
def test_opcheck_of_cache_ops(device, op, q_out):
    tables = mrrope.AxisTables([plain_table(8), plain_table(4)])
    arguments = cache_call(op, device, tables)
    arguments |= {"table": tables.packed(arguments["q"].device), "paged": True}
    if q_out:
        arguments["q_out"] = torch.zeros_like(arguments["q"])
    overloads = getattr(torch.ops.mrrope, op.__name__)
    opcheck(overloads.into if q_out else overloads.default, (), arguments)


@pytest.mark.parametrize("op", CACHE_OPS)
def test_cache_ops_in_a_cuda_graph(cuda, op):
    tables = mrrope.AxisTables([plain_table(8), plain_table(4)]).to(cuda)
    captured, eager = (cache_call(op, cuda, tables) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(**captured)
    for name, x in captured.items():
        if isinstance(x, torch.Tensor):
            x.copy_(eager[name])
    graph.replay()
    op(**eager)
    for name in ("q", "key_cache", "value_cache"):
        assert same_bits(captured[name], eager[name])


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("op", CACHE_OPS)
def test_cache_ops_compile(device, op):
    tables = mrrope.AxisTables([plain_table(8), plain_table(8)]).to(device)
    weights = random_heads(device, 2, 16, dtype=torch.float64)
    norms = () if op is mrrope.rotary_and_cache_ else tuple(weights)
    options = {"layout": "bshd"} | ({"eps": 1e-6} if norms else {})

    def attend(x, positions, slots, *caches):
        return op(*projected(x), *norms, positions, tables, *caches, slots, **options)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9):
        x = random_heads(device, 1, tokens, 128, dtype=torch.float64)
        positions = torch.randint(-50, 50, (2, 1, tokens), device=device)
        slots = torch.arange(tokens, device=device)[None]
        results = []
        for function in (attend, compiled):
            caches = [torch.zeros(4, 4, 2, 16, dtype=torch.float64, device=device) for _ in range(2)]
            results.append([function(x, positions, slots, *caches), *caches])
        for want, got in zip(*results, strict=True):
            assert want.abs().sum() > 0
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_of_a_projection(device, dtype):
    """Of small integers, so that the product is exact."""
    positions = grid(3, 4, 5)
    dims = 16, 24, 24
    generator = torch.Generator().manual_seed(1)

    def integers(*shape):
        return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)

    x, weight = integers(1, positions.shape[1], 24), integers((4 + 2 * 2) * 64, 24)
    tables = mrrope.AxisTables(map(plain_table, dims))
    got = mrrope.qkv_rotary(x, weight, None, positions[:, None].to(device), tables, 4, 2, layout="bshd")
    projected = torch.nn.functional.linear(x.double(), weight.double()).unflatten(-1, (8, 64)).split([4, 2, 2], dim=-2)
    angles = axis_angles(positions, dims, 1e4)
    for actual, part in zip(got[:2], projected[:2], strict=True):
        assert_close(actual, rotated_by_angles(part, angles, "halves"))
    assert torch.equal(got[2].double(), projected[2])


def test_a_list_has_one_per_sequence(device):
    stack = [mrrope.AxisTables([plain_table(8, base), plain_table(8, base)]) for base in (1e4, 1e5, 1e6)]
    q = random_heads(device, 2, 2, 5, 16)
    positions = torch.randint(0, 1000, (2, 2, 5), device=device)
    index = torch.tensor([2, 0], dtype=torch.int32, device=device)
    got, _ = mrrope.rotary(q, None, positions, stack, table_index=index)
    for row, which in enumerate(index.tolist()):
        alone, _ = mrrope.rotary(q[row : row + 1], None, positions[:, row : row + 1], stack[which])
        assert torch.equal(got[row : row + 1], alone)


def test_equality_and_copies():
    tables = mrrope.AxisTables([plain_table(8), plain_table(4)])
    same = mrrope.AxisTables([plain_table(8), plain_table(4)])
    other = mrrope.AxisTables([plain_table(4), plain_table(8)])
    assert tables == same
    assert hash(tables) == hash(same)
    assert tables.is_like(same)
    assert tables != other
    assert not tables.is_like(other)
    assert tables.axis_of_pair == (0, 0, 0, 0, 1, 1)
    for copied in (pickle.loads(pickle.dumps(tables)), copy.deepcopy(tables)):
        assert copied == tables
        assert torch.equal(copied.packed(torch.device("cpu")), tables.packed(torch.device("cpu")))
    assert repr(tables) == "AxisTables(2 axes of [4, 2] pairs, attention_factor=1)"
    sections = mrrope.AxisTables.of_sections(plain_table(12), [2, 0, 4])
    assert (sections.axes, sections.axis_of_pair) == (3, (0, 0, 2, 2, 2, 2))
    assert pickle.loads(pickle.dumps(sections)) == sections


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: mrrope.AxisTables([]), ValueError, "tables must hold a FrequencyTable per axis, 1 to 128, got none"),
        (lambda: mrrope.AxisTables([plain_table(2)] * 129), ValueError, "tables must hold .* 1 to 128, got 129"),
        (lambda: mrrope.AxisTables(3), TypeError, "tables must be a FrequencyTable per axis, got int"),
        (lambda: mrrope.AxisTables(["rope"]), TypeError, r"tables\[0\] must be a FrequencyTable"),
        (
            lambda: mrrope.AxisTables([plain_table(4), plain_table(4, attention_factor=2.0)]),
            ValueError,
            r"tables\[1\] must have tables\[0\]'s attention_factor 1, got 2",
        ),
        (
            lambda: mrrope.AxisTables.of_sections(plain_table(8), [1, 2]),
            ValueError,
            r"sections must add up to the table's 4 pairs, got \[1, 2\]",
        ),
        (
            lambda: mrrope.AxisTables.of_sections(plain_table(8), [-1, 5]),
            ValueError,
            r"sections must add up to the table's 4 pairs, got \[-1, 5\]",
        ),
        (
            lambda: mrrope.AxisTables.of_sections(plain_table(8), [4] + [0] * 128),
            ValueError,
            "sections must be at most 128, got 129",
        ),
        (lambda: mrrope.AxisTables.of_sections(plain_table(8), [1.5, 2.5]), TypeError, "sections must be an integer"),
        (
            lambda: packed_stack([mrrope.AxisTables([plain_table(8)]), plain_table(8)], torch.device("cpu")),
            ValueError,
            r"table\[1\] must have table\[0\]'s axes, 1, got None",
        ),
    ],
)
def test_what_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_positions_must_fit(device):
    tables = mrrope.AxisTables([plain_table(8), plain_table(8)])
    q = random_heads(device, 1, 2, 5, 16)
    with pytest.raises(ValueError, match=r"positions with a table of two rows must be \[rows, 1, 5\]"):
        mrrope.rotary(q, None, torch.zeros(2, 1, 4, dtype=torch.int64, device=device), tables)
    of_packed_tokens = q[0].transpose(0, 1).contiguous()
    rows = torch.zeros(2, 1, 5, dtype=torch.int64, device=device)
    for several, got in ((rows, r"\[2, 1, 5\]"), (rows[:, 0], r"\[2, 5\]")):
        expected = rf"positions must be \[5\] in layout thd, .* got {got}: for several, .* positions \[rows, 1, 5\]"
        with pytest.raises(ValueError, match=expected):
            mrrope.rotary(of_packed_tokens, None, several, tables, layout="thd")
    if device == "cpu":
        with pytest.raises(
            ValueError, match=r"table's second row must name rows of positions, 0 to 0, got 1 for pair 4"
        ):
            mrrope.rotary(q, None, torch.zeros(1, 1, 5, dtype=torch.int64), tables)
    cache = torch.zeros(1, 2, 5, 16, device=device)
    positions = torch.zeros(2, 1, 5, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"cache_positions, or else positions, must be \[5\].*got \[2, 1, 5\]"):
        mrrope.rotary_and_cache_(q, q.clone(), q.clone(), positions, tables, cache, cache.clone())
