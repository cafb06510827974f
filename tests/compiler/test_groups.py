"""What may be merged, what stays, and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.graphs import Compiled, assert_same, compile_pair
from tritonemb.ops.registry import use_kernels

pytestmark = [pytest.mark.public, pytest.mark.usefixtures("dynamo")]
ROWS = 11


class Model(nn.Module):
    """Three bags, and what `use(model, *args)` does with them."""

    def __init__(self, use, **options):
        super().__init__()
        self.a, self.b, self.c = (nn.EmbeddingBag(ROWS, 4, **{"mode": "sum", **options}) for _ in range(3))
        self.row, self.other_row = nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4)
        self.use = use

    def forward(self, *args):
        return self.use(self, *args)


def compiled(use, *args, fullgraph=True, options=None, **changes):
    """Compile a model and compare it, and its gradients, with itself."""
    model = Model(use, **(options or {}))
    for name, module in changes.items():
        setattr(model, name, module)
    result, *pair = compile_pair(model, fullgraph=fullgraph)
    assert_same(result, *pair, args)
    return result


def ids(*shape):
    return torch.randint(0, ROWS, shape)


def test_a_lookup_of_another_ones_result_is_not_merged_with_it():
    def use(m, i):
        first = m.a(i)
        return first, m.b(first.detach().abs().long().clamp(max=ROWS - 1)), m.c(i)

    result = compiled(use, ids(5, 3))
    assert result.fused == [("a", "c")]
    assert "depends on a, c" in result.reasons["b"]


def test_a_chain_of_lookups_is_merged_by_depth():
    def use(m, i):
        nexts = [(bag(i).detach().abs() * 3).long().clamp(max=ROWS - 1) for bag in (m.a, m.b)]
        return m.c(nexts[0]), m.a(nexts[1])

    assert compiled(use, ids(5, 4)).fused == [("a", "b"), ("c", "a")]


def test_groups_that_need_each_other_are_not_both_merged():
    """a → row, other_row → b: merging (a, b) and (row, other_row) would go round in a circle."""

    def use(m, i):
        a = m.a(i)
        row = m.row(a.detach().abs().long().clamp(max=ROWS - 1))
        other = m.other_row(i)
        b = m.b(other.detach().abs().long().clamp(max=ROWS - 1).flatten(1)[:, :3])
        return a, row, other, b

    result = compiled(use, ids(5, 3))
    assert result.fused == [("a", "b")]
    assert set(result.reasons) == {"row", "other_row"}


def test_other_batch_sizes_are_other_groups():
    result = compiled(lambda m, i, j: (m.a(i), m.b(j), m.c(i)), ids(5, 3), ids(4, 3))
    assert result.fused == [("a", "c")]
    assert result.reasons == {"b": "nothing to merge with"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "max"}, 'mode="max"'),
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"sparse": True}, "sparse=True"),
        ({"dtype": torch.float64}, "torch.float64"),
    ],
)
@pytest.mark.few(2)
def test_what_is_not_served_is_left_alone(options, reason):
    odd = nn.EmbeddingBag(ROWS, 4, **{"mode": "sum", **options})
    if options.get("sparse"):
        model = Model(lambda m, i: m.a(i) + m.b(i) + m.c(i))
        model.b = odd
        result = Compiled(model)
        result(ids(5, 3)).sum().backward()
        assert model.b.weight.grad.layout == torch.sparse_coo
        assert model.a.weight.grad.layout == torch.strided
    else:
        result = compiled(lambda m, i: (m.a(i), m.b(i), m.c(i)), ids(5, 3), b=odd)
    if "max_norm" in options:  # it changes its weight, so that nothing is moved across it
        assert result.fused == []
    else:
        assert result.fused == [("a", "c")]
    assert reason in result.reasons["b"]


def test_a_computed_weight_is_left_alone():
    def use(m, i):
        return m.a(i), F.embedding_bag(i, m.b.weight * 2, mode="sum"), m.c(i)

    result = compiled(use, ids(5, 3))
    assert result.fused == [("a", "c")]
    assert "computed" in next(iter(result.reasons.values()))


def looked_up(use, *args):
    """Without gradients, for which PyTorch wants ids as they were."""
    result, _, twin = compile_pair(Model(use))
    with torch.no_grad():
        for actual, expected in zip(result(*args), twin(*args), strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    return result


def test_nothing_is_moved_across_a_change_of_a_tensor_that_it_reads():
    def use(m, i):
        i = i.clone()
        first = m.a(i)
        i[0] = 0
        i.clamp_(max=5)
        return first, m.b(i), m.c(i[:, :2])

    result = looked_up(use, ids(5, 3))
    assert result.fused == [("b", "c")]
    assert "a tensor or a state" in result.reasons["a"]


def test_nothing_is_moved_across_a_change_of_an_input():
    """Another call may have inputs that share memory."""

    def use(m, i, j):
        first = m.a(i)
        j.clamp_(max=5)
        return first, m.b(j), m.c(j)

    assert looked_up(use, ids(5, 3), ids(5, 3)).fused == [("b", "c")]


def test_lookups_before_and_behind_a_change_of_another_tensor_are_merged():
    def use(m, x, i):
        i = i.clone()
        first = m.a(i.clone())
        i[0] = 0
        first *= 2
        x = x * 1
        x.view(-1).add_(first.sum())
        return first, m.b(i), m.c(i) + x

    assert compiled(use, torch.randn(5, 4), ids(5, 3)).fused == [("a", "b", "c")]


def test_what_reads_a_changed_tensor_by_a_view_stays_behind_the_change():
    def use(m, i):
        i = i.clone()
        view = i.view(-1)[:5].unsqueeze(1)
        first = m.a(view)
        i += 0
        i.clamp_(max=2)
        return first, m.b(view), m.c(view)

    assert looked_up(use, ids(5, 3)).fused == [("b", "c")]


def test_nothing_is_moved_across_a_change_of_a_state():
    def use(m, i):
        first = m.a(i)
        with torch.no_grad():
            second, third = m.b(i), m.c(i)
        return first, second, third, m.c(i)

    assert compiled(use, ids(5, 3)).fused == [("b", "c")]


def test_a_weight_that_changes_between_two_lookups():
    def use(m, i):
        first = m.a(i)
        with torch.no_grad():
            m.b.weight.mul_(2)
        return first, m.b(i)

    result, _, twin = compile_pair(Model(use), fullgraph=False)
    with torch.no_grad():
        for actual, expected in zip(result(ids(5, 3) * 0 + 1), twin(torch.ones(5, 3).long()), strict=True):
            assert torch.equal(actual, expected)
    assert result.fused == []


def test_results_that_are_changed_in_place_or_viewed_are_copies():
    def use(m, i, j):
        a, b, c = m.a(i), m.b(i), m.c(i)
        combined = torch.cat([a, b], 1)
        a += 1
        b.mul_(3)
        row, other = m.row(j), m.other_row(j)
        row[0] = 0
        return combined, a.view(-1), b, c.view(2, -1), row.view(-1), other

    result = compiled(use, ids(6, 3), ids(6, 2))
    assert ("a", "b", "c") in result.fused
    assert ("row", "other_row") in result.fused


def test_a_concatenation_that_is_changed_in_place():
    def use(m, i):
        a, b = m.a(i), m.b(i)
        combined = torch.cat([a, b], 1)
        combined += 1
        return combined, a * 2

    assert compiled(use, ids(6, 3)).fused == [("a", "b")]


def test_a_concatenation_decides_the_order_of_columns():
    def use(m, x, i):
        a, b, c = m.a(i), m.b(i), m.c(i)
        return torch.cat([x, c, a, b, x], dim=-1) * 1

    result = compiled(use, torch.randn(5, 2), ids(5, 3))
    assert result.fused == [("a", "b", "c")]
    (cat,) = [node for node in result.graphs[0].graph.nodes if node.target is torch.cat and node.args[1:] == ()
              and node.kwargs.get("dim") == -1]  # fmt: skip
    assert len(cat.args[0]) == 3
    targets = [node.target for node in result.graphs[0].graph.nodes]
    assert "split" not in [getattr(target, "__name__", target) for target in targets]


def test_a_concatenation_of_all_results_is_the_lookups_own_output():
    result = compiled(lambda m, i: torch.cat([m.b(i), m.a(i), m.c(i)], 1), ids(5, 3))
    output = next(node for node in result.graphs[0].graph.nodes if node.op == "output")
    assert output.args[0][0].target is torch.ops.tritonemb.embedding_bag.default


def test_two_concatenations_and_another_use():
    def use(m, i, j):
        a, b, c, d = m.a(i), m.b(i), m.c(i), m.a(j)
        return torch.cat([b, a], 1) * 2, torch.cat([c, d], 1), torch.cat([a, d], 1), c + 1

    assert compiled(use, ids(5, 3), ids(5, 2)).fused == [("a", "b", "c", "a")]


def test_random_numbers_keep_their_order():
    def use(m, i):
        a = F.dropout(m.a(i), 0.5)
        b = F.dropout(m.b(torch.randint(0, ROWS, (5, 2))), 0.5)
        return a, b, F.dropout(m.c(i), 0.5)

    result, _, twin = compile_pair(Model(use), fullgraph=False)
    i = ids(5, 3)
    torch.manual_seed(7)
    actual = result(i)
    torch.manual_seed(7)
    expected = twin(i)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)  # sums in another order
    assert result.fused == [("a", "c")]


def test_what_is_not_used_has_no_gradient():
    def use(m, i):
        a, _, c = m.a(i), m.b(i) * 2, m.c(i)
        return a, c

    assert compiled(use, ids(5, 3)).fused == [("a", "c")]


def test_lookups_on_both_sides_of_a_graph_break():
    def use(m, i):
        first = m.a(i) + m.b(i)
        torch._dynamo.graph_break()
        return first + m.c(i) + m.a(i)

    result = compiled(use, ids(5, 3), fullgraph=False)
    assert result.fused == [("a", "b"), ("c", "a")]


def test_a_checkpointed_region_is_left_alone():
    def use(m, i):
        inner = torch.utils.checkpoint.checkpoint(lambda j: m.a(j) + m.b(j), i, use_reentrant=False)
        return inner, m.c(i)

    result = compiled(use, ids(5, 3))
    assert result.fused == []
    assert sum("inside" in reason for reason in result.reasons.values()) == 2


def test_under_a_transform_of_torch_func_nothing_is_merged():
    def use(m, i):
        return torch.func.vmap(lambda j: m.row(j) + m.other_row(j))(i)

    result = compiled(use, ids(5, 3), fullgraph=False)
    assert result.fused == []
    assert all("torch.func" in reason for reason in result.reasons.values())


def test_dynamic_sizes_need_no_graph_of_their_own():
    def use(m, i, flat, offsets, rows):
        return torch.cat([m.a(i), m.b(flat, offsets), m.c(i), m.row(rows)], 1)

    result, model, twin = compile_pair(Model(use), dynamic=True)
    for batch_size, length in ((5, 3), (7, 2), (2, 6), (31, 4), (9, 5)):
        offsets = torch.arange(batch_size) * 2
        assert_same(result, model, twin, [ids(batch_size, length), ids(2 * batch_size), offsets, ids(batch_size)])
    assert result.fused == [("a", "b", "c", "row")]


def test_an_id_out_of_range_is_reported_with_its_table():
    result = Compiled(Model(lambda m, i, j: m.a(i) + m.b(j)))
    with pytest.raises(ValueError, match=r"'b\.weight'.*id 11 of feature 'b', sample 1"):
        result(ids(5, 3), torch.tensor([[1, 2], [3, ROWS], [0, 0], [1, 1], [2, 2]]))


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_bad_offsets_give_no_ids_to_a_neighbour(ended, place):
    """They are PyTorch's error, and ours, wherever the bag stands in the batch."""
    good = torch.tensor([0, 2, 3, 6] if ended else [0, 2, 3])
    bad = [[1, 2, 3, 6], [-1, 2, 3, 6], [0, 3, 2, 6], [0, 2, 9, 6], *([[0, 2, 3, 7]] if ended else [])]
    model = Model(
        lambda m, i, *offsets: [bag(i, o) for bag, o in zip((m.a, m.b, m.c), offsets, strict=True)],
        include_last_offset=ended,
    )
    with use_kernels("cpu"):  # the references take offsets as they are
        result = Compiled(model)
        result(ids(6), good, good, good)
        for one in bad:
            offsets = [good, good, good]
            offsets[place] = torch.tensor(one if ended else one[:3])
            with pytest.raises(ValueError, match="offsets must"):
                result(ids(6), *offsets)
    assert len(result.fused[0]) == 3
