"""A head's tokens as rows of a matrix, in every layout that the tensor memory accelerator reads."""

import pytest
import torch

from sage_kernels.spec.layout import TokenRows

BATCH, HEADS, TOKENS, CHANNELS = 3, 4, 5, 64


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)


def tokens_first(batch=BATCH, heads=HEADS):
    return numbered(batch, TOKENS, heads, CHANNELS).transpose(1, 2)


READ = {
    "contiguous": numbered(BATCH, HEADS, TOKENS, CHANNELS),
    "tokens first": tokens_first(),
    "tokens first, one head": tokens_first(heads=1),
    "tokens first, one batch element": tokens_first(batch=1),
    "part of a packed projection": numbered(BATCH, TOKENS, 3, HEADS, CHANNELS)[:, :, 1].transpose(1, 2),
    "part of the tokens": numbered(BATCH, HEADS, 2 * TOKENS, CHANNELS)[:, :, 2 : 2 + TOKENS],
    "part of the heads": numbered(BATCH, 2 * HEADS, TOKENS, CHANNELS)[:, HEADS:],
    "part of the channels": numbered(BATCH, HEADS, TOKENS, 2 * CHANNELS)[..., CHANNELS:],
    "one head for all": numbered(BATCH, 1, TOKENS, CHANNELS).expand(-1, HEADS, -1, -1),
    "one batch element for all": numbered(1, HEADS, TOKENS, CHANNELS).expand(BATCH, -1, -1, -1),
    "every other token": numbered(BATCH, HEADS, 2 * TOKENS, CHANNELS)[:, :, ::2],
}
NOT_READ = {
    "every other channel": numbered(BATCH, HEADS, TOKENS, 2 * CHANNELS)[..., ::2],
    "channels first": numbered(BATCH, HEADS, CHANNELS, TOKENS).mT,
    "one number for all": numbered(1).expand(BATCH, HEADS, TOKENS, CHANNELS),
    "one token for all": numbered(BATCH, HEADS, 1, CHANNELS).expand(-1, -1, TOKENS, -1),
    "not aligned": numbered(BATCH * HEADS * TOKENS * CHANNELS + 1)[1:].view(BATCH, HEADS, TOKENS, CHANNELS),
    "rows that are not aligned": numbered(BATCH, HEADS, TOKENS, CHANNELS + 4)[..., :CHANNELS],
    "a batch that is no whole number of rows": numbered(BATCH, HEADS * TOKENS * CHANNELS + 8)[
        :, : HEADS * TOKENS * CHANNELS
    ].unflatten(1, (HEADS, TOKENS, CHANNELS)),
}


@pytest.mark.parametrize("x", READ.values(), ids=READ)
def test_every_token_is_a_row(x):
    found = TokenRows.of(x)
    assert found is not None
    assert found.rows.data_ptr() == x.data_ptr()
    for batch in range(x.shape[0]):
        for head in range(x.shape[1]):
            first, column = batch * found.rows_of_batch + head * found.rows_of_head, head * found.columns_of_head
            assert torch.equal(found.rows[first : first + TOKENS, column : column + CHANNELS], x[batch, head])


@pytest.mark.parametrize("x", NOT_READ.values(), ids=NOT_READ)
def test_other_layouts_have_none(x):
    assert TokenRows.of(x) is None
