"""The kernels of exact attention in Triton's interpreter, against attention in float64."""

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton import masked_forward, nonprefix_forward, splitkv_forward
from sage_kernels.triton.configs import masked_forward_config

# Weights and output are rounded to float16; the sum of its weights divides a row in float32.
ROUNDING = 2.0**-10


def draw_call(heads, q_len, kv_len, head_dim, mask=None, causal_offset=None, scale=0.1, v_head_dim=None):
    generator = torch.Generator().manual_seed(0)
    batch = 1 if mask is None else mask.shape[0]
    query, key, value = (
        torch.randn(batch, tokens, count, channels, generator=generator).half().transpose(1, 2)
        for tokens, count, channels in (
            (q_len, heads[0], head_dim),
            (kv_len, heads[1], head_dim),
            (kv_len, heads[1], v_head_dim or head_dim),
        )
    )
    causal = causal_offset is not None
    options = {"is_causal": causal, "causal_offset": causal_offset or 0, "scale": scale}
    return Call(query, key, value, get_recipe("exact"), Mask.of(mask, kv_len), **options)


def assert_exact(call, output):
    options = {"is_causal": call.is_causal, "causal_offset": call.causal_offset, "scale": call.scale}
    truth, lse = sdpa.attention(call.query, call.key, call.value, mask=call.mask.tensor, **options)
    # Rounded weights of a row are at most its largest values' share off.
    largest = call.value.abs().max().double()
    assert (output - truth).abs().max() <= ROUNDING * largest
    assert not output[lse == -torch.inf].any()


def key_mask(*lengths, kv_len=200):
    return (torch.arange(kv_len) < torch.tensor(lengths)[:, None])[:, None, None]


def scattered(rows=150, columns=200):
    """A mask with an empty tile, an empty row, and a few keys elsewhere."""
    mask = torch.rand(1, 1, rows, columns, generator=torch.Generator().manual_seed(1)) < 0.1
    mask[..., 64:128] = False
    mask[:, :, 5] = False
    return mask


def documents(rows=150, columns=200, length=40):
    return (torch.arange(rows)[:, None] // length == torch.arange(columns) // length)[None, None]


def bias(heads, rows=150, columns=200):
    mask = torch.randn(1, heads, rows, columns, generator=torch.Generator().manual_seed(1)).half()
    mask[:, :, 7] = -torch.inf
    mask[:, :, 8] = torch.finfo(torch.float16).min
    return mask


@pytest.mark.parametrize(
    "case",
    [
        ((4, 2), 150, 200, 72, key_mask(0, 150)),
        ((4, 2), 150, 200, 64, key_mask(7, 200), 50),
        ((2, 1), 70, 1100, 64, key_mask(0, 330, kv_len=1100)),
        ((2, 1), 70, 1100, 64, key_mask(60, 1100, kv_len=1100), 1030),
        ((2, 1), 150, 200, 64, scattered()),
        ((2, 2), 150, 200, 32, documents(), None, -0.2),
        ((2, 2), 150, 200, 40, documents(), 3, 0.1, 72),
        ((4, 4), 150, 200, 64, bias(4)),
        ((2, 1), 150, 200, 64, bias(1), 20, 0.0),
        ((2, 1), 70, 333, 128, None, 263),
        ((2, 1), 70, 150, 64),
    ],
    ids=[
        "keys",
        "causal keys",
        "more keys",
        "more causal keys",
        "scattered",
        "documents",
        "causal documents",
        "bias",
        "causal bias",
        "behind a cache",
        "plain",
    ],
)
def test_masks_are_read_and_rows_without_a_key_are_0(case):
    call = draw_call(*case)
    assert_exact(call, masked_forward.attend(call))


def test_an_infinite_value_never_becomes_a_finite_number():
    call = draw_call((2, 1), 70, 150, 64)
    call.value[0, 0, 20, 3] = torch.inf
    output = masked_forward.attend(call)
    assert not output[..., 3].isfinite().any() and output[..., 4:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [scattered(), documents(), key_mask(0, 130, 200)], ids=["scattered", "docs", "keys"])
def test_the_tiles_listed_are_those_in_which_a_query_may_attend(mask, causal):
    call = draw_call((2, 1), 150, 200, 64, mask, -20 if causal else None)
    config = masked_forward_config(64, call.mask.kind)
    bits, listed = masked_forward.pack_bool_mask(mask, call, config)
    allowed = mask
    if causal and mask.shape[2] > 1:
        allowed = allowed & torch.ones(150, 200, dtype=torch.bool).tril(-20)
    unpacked = (bits.unsqueeze(-1) >> torch.arange(32) & 1).flatten(-2)
    assert torch.equal(unpacked[..., :200].bool(), allowed) and not unpacked[..., 200:].any()
    for batch, lists in enumerate(listed[:, 0]):
        for block, (number, *entries) in enumerate(lists.tolist()):
            rows = allowed[batch, 0, block * config.block_m : (block + 1) * config.block_m]
            tiles = [rows[:, start : start + config.block_n] for start in range(0, 200, config.block_n)]
            some = [index for index, tile in enumerate(tiles) if tile.any()]
            assert [entry // 2 for entry in entries[:number]] == some
            for entry in entries[:number]:
                tile = tiles[entry // 2]
                assert entry % 2 or (tile.all() and tile.shape[1] == config.block_n)


@pytest.fixture
def multiprocessors(monkeypatch):
    for module in (nonprefix_forward, splitkv_forward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 4)


@pytest.mark.parametrize("row_blocks", [0, 2])
def test_another_kernel_attends_to_keys_that_come_first_and_this_one_to_others(multiprocessors, row_blocks):
    mask = key_mask(130, 0, 200, 77)
    mask[3, ..., 70:77], mask[3, ..., 190:] = False, True
    call = draw_call((4, 2), 150, 200, 64, mask)
    truth, _ = sdpa.attention(call.query, call.key, call.value, mask=mask, scale=call.scale)
    found = []

    def attend_to_prefix(call, q_lengths, kv_lengths, schedule, output):
        found.extend(None if x is None else x.tolist() for x in (q_lengths, kv_lengths, schedule))
        for element in (0, 2):
            output[element] = truth[element]

    output = nonprefix_forward.attend_nonprefix(call, attend_to_prefix, row_blocks)
    schedule = [1, 1, 1, 1, 2, 0, 2, 0, 0, 1, 2, 3, 0]
    assert found == ([None, [130, 0, 200, 0], schedule] if row_blocks else [[150, 0, 150, 0], [130, 0, 200, 0], None])
    assert torch.equal(output[0], truth[0].half()) and torch.equal(output[2], truth[2].half())
    assert_exact(call, output)


def test_a_mask_for_all_elements_of_a_batch_gives_each_its_length(multiprocessors):
    call = draw_call((2, 1), 70, 300, 64, key_mask(130, kv_len=300))
    tensors = (x.expand(3, -1, -1, -1) for x in (call.query, call.key, call.value))
    call = Call(*tensors, call.recipe, call.mask, scale=call.scale)
    found = []
    nonprefix_forward.attend_nonprefix(call, lambda call, q_lengths, kv_lengths, *_: found.extend(kv_lengths.tolist()))
    assert found == [130] * 3


@pytest.mark.parametrize(
    "case",
    [
        ((8, 2), 1, 700, 64),
        ((8, 2), 1, 500, 64, key_mask(0, 300, kv_len=500)),
        ((8, 2), 4, 700, 128, None, 696),
        ((8, 2), 3, 500, 72, key_mask(60, 500, kv_len=500), 100),
        ((4, 4), 1, 60, 64, None, None, -0.1),
        ((16, 1), 4, 333, 16, None, None, 0.0, 32),
    ],
    ids=["decoding", "padded", "behind a cache", "padded and causal", "few keys", "one head of keys"],
)
def test_programs_that_share_keys_attend_to_all_of_them(multiprocessors, case):
    call = draw_call(*case)
    assert_exact(call, splitkv_forward.attend(call))


def test_keys_are_divided_so_that_programs_fill_the_gpu():
    assert splitkv_forward.parts_of(tiles=64, sequences=8, programs=132) == 16
    assert splitkv_forward.parts_of(tiles=6, sequences=8, programs=132) == 3
    assert splitkv_forward.parts_of(tiles=64, sequences=512, programs=132) == 1
    assert splitkv_forward.parts_of(tiles=1, sequences=1, programs=132) == 1


@pytest.mark.parametrize(
    ("keys", "first", "stride"),
    [*((90, first, 1) for first in (0, 1, 7, 16)), (90, 1, 2), (9, 3, 1), (9, 15, 1), (9001, 5, 1)],
)
def test_masks_of_leading_keys_are_detected_wherever_they_begin(multiprocessors, keys, first, stride):
    """Bytes around the mask are not read as keys, wherever it begins."""
    mask = torch.ones(4, keys * stride + 40, dtype=torch.bool)[:, first : first + keys * stride : stride]
    mask[:] = torch.arange(keys) < torch.tensor([keys, keys - 1, 0, keys // 2])[:, None]
    mask[3, keys // 2 + 1] = True
    call = draw_call((2, 1), 20, keys, 64, mask[:, None, None])
    truth, _ = sdpa.attention(call.query, call.key, call.value, mask=call.mask.tensor, scale=call.scale)
    lengths = []

    def attend_to_prefix(call, q_lengths, kv_lengths, schedule, output):
        lengths.extend((q_lengths.tolist(), kv_lengths.tolist()))
        output[:2] = truth[:2]

    output = nonprefix_forward.attend_nonprefix(call, attend_to_prefix)
    assert lengths == [[20, 20, 0, 0], [keys, keys - 1, 0, 0]]
    assert_exact(call, output)
