"""QuantEmbedding: exactly the rows of the dequantised table, and one weight with a tied output layer."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from qmm import ZeroKind
from qmm.nn import QuantEmbedding, embedding
from qmm.testing import Case, make_weight

DIM, ROWS = 64, 37
CASES = {
    "int zeros": Case(bits=3, k=DIM, n=ROWS, group_size=16),
    "two levels": Case(
        k=DIM, n=ROWS, group_size=16, zero_kind=ZeroKind.BIAS, scale_dtype=torch.int8, two_level="rows"
    ),
    "e4m3": Case(k=DIM, n=ROWS, zero_kind=ZeroKind.NONE, scale_dtype=torch.float8_e4m3fn, two_level="one"),
    "codebook": Case(k=DIM, n=ROWS, codebook=torch.float32, zero_kind=ZeroKind.NONE),
    "act-order": Case(k=DIM, n=ROWS, act_order=True, group_size=16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_are_those_of_the_table(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    w = make_weight(case, np.random.default_rng(0))
    table = w.dequantize().t()
    mine = QuantEmbedding.from_weight(w)
    ids = torch.randint(0, ROWS, (2, 50))
    for index in (ids, ids[0, 0], ids[:, :0], ids.int(), ids.t()):
        assert torch.equal(mine(index), nn.functional.embedding(index, table))
    monkeypatch.setattr(embedding, "_CODES_AT_ONCE", 7 * DIM)
    assert torch.equal(mine(ids), nn.functional.embedding(ids, table)) and mine(ids).is_contiguous()
    assert torch.equal(mine.half()(ids), nn.functional.embedding(ids, table.half()))


def test_from_embedding() -> None:
    plain = nn.Embedding(ROWS, DIM, padding_idx=3, dtype=torch.bfloat16).eval()
    mine = QuantEmbedding.from_embedding(plain, group_size=32)
    ids = torch.arange(ROWS)
    assert mine(ids).dtype == torch.bfloat16 and (mine(ids) - plain(ids)).abs().max() < 0.05
    assert (mine.num_embeddings, mine.embedding_dim, mine.padding_idx) == (ROWS, DIM, 3)
    assert not mine.training and mine.weight.bits == 8 and "bfloat16" in repr(mine)
    for outside in (ROWS, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            mine(torch.tensor([outside]))
    with pytest.raises(ValueError, match=r"max_norm=1\.0"):
        QuantEmbedding.from_embedding(nn.Embedding(3, 4, max_norm=1.0))
    with pytest.raises(TypeError, match="got Linear"):
        QuantEmbedding.from_embedding(nn.Linear(3, 4))


def test_a_tied_output_layer_shares_the_weight() -> None:
    table = QuantEmbedding.from_weight(make_weight(CASES["int zeros"], np.random.default_rng(0)))
    model = nn.ModuleDict({"table": table, "out": table.tied_linear()})
    x, ids = torch.randn(2, DIM), torch.tensor([4, 2])
    assert torch.equal(model["out"](torch.eye(DIM)).t()[ids], table(ids))
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    for other in (model, *copies):
        assert other["table"].weight is other["out"].weight
        assert torch.equal(other["out"](x), model["out"](x))
    moved = copies[0].to("meta")
    assert moved["table"].weight is moved["out"].weight and moved["out"].weight.device.type == "meta"
    assert sum(t.nbytes for t in model.buffers()) == table.weight.nbytes
    new = make_weight(CASES["int zeros"], np.random.default_rng(1))
    table.load_state_dict(QuantEmbedding.from_weight(new).state_dict(), assign=True)
    torch.testing.assert_close(model["out"](x), x @ new.dequantize())
