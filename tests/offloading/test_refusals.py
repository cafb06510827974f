"""What `te.offload` refuses, by name and before anything is changed."""

import copy

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.offloading.models import Transformer, adam, build, loss_of, mlp, on, steps, train


@pytest.mark.parametrize("params", ["host", "disk"])
def test_access_outside_names_the_parameter(params, tmp_path):
    model = train(mlp, tmp_path, 1, offload=on(mlp, params)).model
    weight = model[0].weight
    for use in (
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.mul_(2),
        lambda: model.to(torch.float64),
        weight.tolist,
    ):
        with pytest.raises(RuntimeError, match=r"parameter '0.weight' is offloaded.*te.gather_parameters"):
            use()
    assert weight.shape == (64, 70)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in mlp().parameters())


@pytest.mark.parametrize("change", ["embedding", "item", "method"])
def test_a_forward_that_changes_a_parameter_is_refused(change, tmp_path):
    """Only the copy would change; whatever the operator is called, its schema says that it writes."""

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        @torch.no_grad()
        def forward(self, ids):
            if change == "embedding":
                return nn.functional.embedding(ids, self.weight, max_norm=0.1)
            if change == "item":
                self.weight[0] = 3
            else:
                torch.ops.aten.mul_.Scalar(self.weight, 2)
            return ids

    model, _ = build(Changing, params="host", budget=40_000)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 'weight' is offloaded.*cannot change it in place"):
            model(torch.arange(3))
    assert torch.equal(model.state_dict()["weight"], torch.ones(8, 4))
    assert model.weight.shape == (8, 4)


def test_a_parameter_that_changes_between_forward_and_backward_is_refused(tmp_path):
    trained = train(mlp, tmp_path, 1, offload=on(mlp, "host"))
    loss = loss_of(trained.model, torch.Generator())
    loss.backward(retain_graph=True)
    trained.optimizer.step()
    with pytest.raises(RuntimeError, match="was changed between this forward and its backward"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_between_forward_and_backward_of_parameters_on_the_device_is_refused(dtype):
    """As without offload: the backward would use the stepped weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    model, optimizer = te.offload(model, adam(model.parameters()), states="host", budget="1MiB")
    first, second = (model(torch.ones(2, 4, dtype=dtype)).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("offloaded", ["params", "activations"])
def test_a_saved_tensor_that_is_changed_in_place_is_refused(offloaded):
    """As without offload, although autograd does not check tensors that hooks have packed."""

    class Changed(nn.Linear):
        def forward(self, x):
            y = super().forward(x).exp()
            y.detach().add_(1)
            return y.sum()

    model = Changed(4, 4)
    model, _ = te.offload(model, adam(model.parameters()), budget="1MiB", **{offloaded: "host"})
    with pytest.raises(RuntimeError, match=r"a tensor \[2, 4\] .* modified by an inplace operation"):
        model(torch.ones(2, 4)).backward()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": "cpu"}, "params must be one of .'device', 'host', 'disk'., got 'cpu'"),
        ({"grads": "cpu"}, "grads must be one of"),
        ({"states": "disk", "path": None}, "pass path="),
        ({"grads": "disk", "path": None}, "pass path="),
        ({"states": "host", "ratio": 2}, "ratio must be between 0 and 1, got 2"),
        ({"params": "host", "budget": "8 gigs"}, "a budget must be a positive number of bytes, or a string like"),
        ({"params": "host", "budget": -1}, "a budget must be a positive number of bytes"),
    ],
)
def test_wrong_arguments_are_named(options, text, tmp_path):
    model, optimizer = build()
    with pytest.raises(ValueError, match=text):
        te.offload(model, optimizer, **{"path": tmp_path, **options})
    steps(model, optimizer, 1)  # nothing was changed


def test_an_optimizer_that_is_not_element_wise_is_refused_and_nothing_changed(tmp_path):
    model = mlp()
    for make in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ValueError, match=make.__name__):
            te.offload(model, make(model.parameters()), params="disk", states="disk", path=tmp_path)
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match="the model lacks 1 of the optimizer"):
        te.offload(model, strange, states="host")
    assert not list(tmp_path.iterdir())
    steps(model, adam(model.parameters()), 1)


def test_the_old_optimizer_and_a_second_offload_are_refused(tmp_path):
    model = mlp()
    old = adam(model.parameters())
    model, new = te.offload(model, old, states="host")
    with pytest.raises(RuntimeError, match=r"step the one that te.offload returned"):
        old.step()
    with pytest.raises(ValueError, match="offloaded already"):
        te.offload(model, new, states="host")
    with pytest.raises(ValueError, match="added to the optimizer before"):
        new.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_budget_that_is_too_small_names_the_layer():
    model, optimizer = build(lambda: Transformer(dim=64, tied=False), params="host", budget=40_000)
    text = r"budget: 36,864 bytes .* cannot hold .*blocks.0.attention.in_proj_weight 49,152"
    with pytest.raises(ValueError, match=text):
        steps(model, optimizer, 1)


def test_only_models_that_are_offloaded_have_a_report():
    with pytest.raises(ValueError, match=r"is not offloaded; pass the model that te.offload returned"):
        te.offloading.report(mlp())


def test_an_optimizer_with_a_scheduler_is_refused():
    model = mlp()
    optimizer = adam(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match="make schedulers of the optimizer that te"):
        te.offload(model, optimizer, states="host")


def test_parameters_that_share_memory_are_refused():
    """Offloaded, each would have values of its own."""
    for tie in ("data", "view", "buffer"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if tie == "buffer":
            model[1].register_buffer("copy", model[0].weight.detach())
        else:
            model[1].weight.data = model[0].weight.data.t() if tie == "view" else model[0].weight.data
        expected = r"'1.copy'|'1.weight'"
        with pytest.raises(ValueError, match=f"'0.weight' and ({expected}) share memory.*assign the same nn.Parameter"):
            te.offload(model, adam(model.parameters()), params="host", budget="1MiB")
        te.offload(model, adam(model.parameters()), states="host", budget="1MiB")
    # Views of one storage without common elements are independent anyway.
    halves = nn.ParameterList(nn.Parameter(half) for half in torch.ones(8, 4).split(4))
    te.offload(halves, adam(halves.parameters()), params="host", budget="1MiB")


def test_parameters_with_gaps_are_refused():
    model = nn.Linear(12, 10)
    model.weight = nn.Parameter(torch.randn(10, 24)[:, :12])
    with pytest.raises(ValueError, match=r"of shape \(10, 12\) has the strides \(24, 1\), with gaps"):
        te.offload(model, adam(model.parameters()), states="host")


@pytest.mark.parametrize("tiered", ["params", "states", "grads", "activations"])
@pytest.mark.parametrize("copy_of", [copy.deepcopy, torch.optim.swa_utils.AveragedModel])
def test_an_offloaded_model_is_not_copied(tiered, copy_of):
    model, _ = build(lambda: nn.Sequential(nn.Linear(8, 4)), budget="1MiB", **{tiered: "host"})
    with pytest.raises(TypeError, match=r"cannot be copied or pickled; load its state_dict\(\) into another model"):
        copy_of(model)
