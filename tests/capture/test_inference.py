import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.as_module import as_module
from effcompile.backends.torch.lowered import lower_eager
from effcompile.capture import capture, variants, verify_capture
from effcompile.core.errors import CaptureError, InputsError, UsageError
from effcompile.ir.export import allowed, reexport, refresh_shapes, resized, sizes_of
from effcompile.ir.program import module_path, shape_of

aten = torch.ops.aten


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the offending line
            return x + 1
        return x - 1


class Tied(nn.Module):
    """Tied weights, a buffer, nested inputs and outputs, `**kwargs`, scalars and None."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, xs, *rest, flag=False, times=1, nothing=None, **more):  # type: ignore[no-untyped-def]
        y = self.head(self.table(xs["ids"][0]) * self.scale)
        y = y * times if flag else y
        return {"y": [y, y.argmax(-1)], "z": (more["extra"] + rest[0], None)}


def test_an_mlp_keeps_its_batch_dynamic_and_its_features_fixed() -> None:
    program = capture(mlp(), (torch.randn(3, 8),))
    assert [(spec.name, spec.dtype, spec.shape) for spec in program.inputs] == [
        ("input", "float32", ("batch", 8))
    ]
    assert [(spec.name, spec.shape) for spec in program.outputs] == [("output_0", ("batch", 4))]
    assert program.fixed == ()
    assert program.mends == ()
    assert [node.target for node in program.calls()] == [
        aten.linear.default,
        aten.gelu.default,
        aten.linear.default,
    ]


@pytest.mark.parametrize("batch", [1, 4])
def test_batch_1_is_dynamic_too_and_shapes_are_the_examples(batch: int) -> None:
    program = capture(mlp(), (torch.randn(batch, 8),))
    assert program.inputs[0].shape == ("batch", 8)
    assert program.args[0].shape == (batch, 8)
    assert [shape_of(node) for node in program.calls()] == [(batch, 16), (batch, 16), (batch, 4)]
    assert program.module(torch.randn(5, 8)).shape == (5, 4)


def test_batch_equal_to_sequence_gives_two_axes() -> None:
    program = capture(nn.Embedding(10, 4), (torch.randint(0, 10, (3, 3)),))
    assert program.inputs[0].shape == ("batch", "seq")
    assert program.outputs[0].shape == ("batch", "seq", 4)
    assert program.module(torch.randint(0, 10, (2, 7))).shape == (2, 7, 4)


def test_dynamic_false_captures_the_example_only() -> None:
    program = capture(mlp(), (torch.randn(3, 8),), dynamic=False)
    assert program.inputs[0].shape == (3, 8)
    assert [name for name, _, _ in variants(program)] == ["example"]


def test_a_mapping_goes_to_torch_export() -> None:
    program = capture(
        nn.Embedding(10, 4),
        (torch.zeros(1, 6, dtype=torch.long),),
        dynamic={"input": {0: torch.export.Dim("n", min=1, max=9)}},
    )
    assert program.inputs[0].shape == ("batch", 6)


def test_every_call_has_a_value_and_its_modules_name() -> None:
    program = capture(encoder(), (torch.randn(2, 6, 16),))
    for node in program.calls():
        assert "val" in node.meta
        assert node.meta["nn_module_stack"]
    names = {module_path(node) for node in program.calls(aten.linear.default)}
    assert {"layers.0.self_attn", "layers.0.linear1", "layers.0.linear2"} == names


def test_torch_transformer_agrees_with_eager_everywhere_and_its_fast_path_is_restored() -> None:
    model = encoder().train()
    inputs = {"src": torch.randn(2, 6, 16), "src_key_padding_mask": torch.zeros(2, 6, dtype=torch.bool)}
    before = torch.backends.mha.get_fastpath_enabled()
    program = capture(model, (), inputs)
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled() is before
    assert any("Transformer" in str(mend) for mend in program.mends)
    checks = verify_capture(program, model)
    assert [check.name for check in checks] == ["example", "second shape 3×9", "padded mask 3×9"]
    assert all(check.passed for check in checks)
    assert "changes the output" in str(checks[-1].note)


def test_a_causal_mask_given_as_tensor_is_captured_as_data() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    model = encoder()
    program = capture(model, (torch.randn(2, 6, 16),), {"mask": mask})
    x = torch.randn(2, 6, 16)
    model.eval()
    with torch.no_grad():
        free = program.module(x, mask=torch.zeros(6, 6))
        assert torch.allclose(free, model(x, mask=torch.zeros(6, 6)), atol=1e-5)
        assert not torch.allclose(free, program.module(x, mask=mask), atol=1e-3)


def test_nn_transformer() -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    program = capture(model, (torch.randn(2, 6, 16), torch.randn(2, 6, 16)))
    assert [spec.shape for spec in program.inputs] == [("batch", "seq", 16), ("batch", "decoder_seq", 16)]
    assert all(check.passed for check in verify_capture(program, model))


def test_tied_weights_nested_values_scalars_and_none() -> None:
    model = Tied()
    args = ({"ids": [torch.randint(0, 10, (1, 6))]}, torch.ones(1, 5))
    kwargs = {"flag": True, "times": 2, "nothing": None, "extra": torch.ones(1, 5)}
    program = capture(model, args, kwargs)
    assert [spec.name for spec in program.inputs] == ["xs_ids_0", "rest_0", "extra"]
    assert [spec.name for spec in program.outputs] == ["y_0", "y_1", "z_0"]
    assert program.parameter_count() == 40
    assert len(program.graph.find_nodes(op="get_attr")) == 2
    checks = verify_capture(program, model)
    assert all(check.passed for check in checks)
    assert len(checks) == 2
    assert program.module(*args, **kwargs)["z"][1] is None
    assert "forward" not in vars(model)


def test_a_data_dependent_branch_names_its_line_the_construct_and_a_fix() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Branch(), (torch.randn(2, 3),))
    text = str(caught.value)
    line = next(
        number
        for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the offending line" in line
    )
    assert f"test_inference.py:{line}" in text
    assert "if x.sum() > 0" in text
    assert "torch.where" in text


def test_an_axis_that_the_code_makes_constant_is_reported_with_its_line() -> None:
    class Fixed(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids * 2 if ids.shape[1] == 16 else ids

    program = capture(Fixed(), (torch.ones(2, 16, dtype=torch.long),))
    assert program.inputs[0].shape == ("batch", 16)
    assert len(program.fixed) == 1
    assert str(program.fixed[0]).startswith("fixed: seq of ids: fixed at 16 by the model's code (")
    assert "test_inference.py:" in str(program.fixed[0])


def test_an_axis_of_size_1_that_the_code_needs_stays_1() -> None:
    class Single(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(8)

    model = Single()
    program = capture(model, (torch.randn(1, 8),))
    assert program.inputs[0].shape == (1, 8)
    assert program.fixed
    assert all(check.passed for check in verify_capture(program, model))


def test_a_model_that_raises_is_the_inputs_fault() -> None:
    with pytest.raises(InputsError, match=r"itself raises.*mat1 and mat2"):
        capture(mlp(), (torch.randn(2, 9),))
    with pytest.raises(InputsError, match="unexpected keyword argument 'nope'"):
        capture(mlp(), (), {"nope": torch.randn(2, 8)})


def test_nan_outputs_are_refused() -> None:
    model = mlp()
    with torch.no_grad():
        model[3].bias[0] = float("nan")
    with pytest.raises(InputsError, match=r"outputs are NaN.*output_0, 2 of 8"):
        capture(model, (torch.randn(2, 8),))


def test_an_empty_batch_is_refused_for_nothing_could_be_compared() -> None:
    with pytest.raises(InputsError, match=r"nothing but empty tensors.*\[0, 4\]"):
        capture(nn.Linear(8, 4), (torch.randn(0, 8),))


def test_the_model_is_left_as_it_was() -> None:
    model = mlp().train()
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    capture(model, (torch.randn(2, 8),))
    assert [module.training for module in model] == [True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_editable_copy_has_a_signature_of_its_own_and_warns_of_nothing() -> None:
    program = capture(mlp(), (torch.randn(1, 8),))
    before = program.graph._codegen.pytree_info
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's tree specs warn when they are copied
        copied = program.editable("test")
    copied.graph._codegen.pytree_info = before._replace(out_spec=pytree.tree_structure({"y": 0}))
    assert program.graph._codegen.pytree_info is before


def test_reexport_works_at_batch_1_after_an_edit_and_keeps_names() -> None:
    program = capture(mlp(), (torch.randn(1, 8),)).editable("test")
    gelu = next(program.calls(aten.gelu.default))
    with program.graph.inserting_after(gelu):
        doubled = program.graph.call_function(aten.mul.Tensor, (gelu, 2.0))
    gelu.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    program.module.recompile()
    refresh_shapes(program.module, program.args, program.kwargs)
    assert shape_of(doubled) == (1, 16)
    exported = reexport(program)
    x = torch.randn(6, 8)
    assert torch.allclose(exported.module()(x), program.module(x), atol=1e-6)
    linears = [n for n in exported.graph.nodes if n.target is aten.linear.default]
    assert [module_path(node) for node in linears] == ["0", "3"]


def test_resized_inputs_stay_among_the_examples_values() -> None:
    ids = torch.tensor([[3, 5, 7]])
    program = capture(nn.Embedding(8, 4), (ids,))
    assert sizes_of(program) == {"batch": 1, "seq": 3}
    (longer,), _ = resized(program, {"batch": 2, "seq": 5})
    assert longer.tolist() == [[3, 5, 7, 3, 5]] * 2
    (shorter,), _ = resized(program, {"seq": 2})
    assert shorter.tolist() == [[3, 5]]


def test_when_a_dynamic_sequence_cannot_be_traced_the_batch_stays_dynamic_and_the_reason_is_said() -> None:
    class Blocks(nn.Module):
        """Runs at any length eagerly; as a loop over a symbolic length it cannot be traced."""

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_exporting() and not isinstance(ids.shape[1], int):
                raise NotImplementedError("no symbolic length")
            return ids * 2

    model = Blocks()
    program = capture(model, (torch.ones(2, 6, dtype=torch.long),))
    assert program.inputs[0].shape == ("batch", 6)
    assert len(program.fixed) == 1
    assert str(program.fixed[0]).startswith(
        "fixed: seq of ids: fixed at the example's size. NotImplementedError: no symbolic length ("
    )
    assert all(check.passed for check in verify_capture(program, model))


def test_a_model_on_the_meta_device_can_be_captured_but_not_run() -> None:
    with torch.device("meta"):
        model = mlp()
        program = capture(model, (torch.randn(2, 8),))
    assert program.inputs[0].shape == ("batch", 8)
    assert [shape_of(node) for node in program.calls()] == [(2, 16), (2, 16), (2, 4)]
    assert all(parameter.is_meta for parameter in program.module.parameters())


def test_a_strided_input_keeps_its_dynamic_axes() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8))
    program = capture(model, (torch.randint(0, 10, (3, 9))[:, :-1],), {})
    assert program.inputs[0].shape == ("batch", "seq")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.eye(8).to_sparse())
        self.held: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.held, x.T).T


def test_a_sparse_tensor_is_refused_in_words() -> None:
    with pytest.raises(
        CaptureError, match=r"held is a tensor of layout torch.sparse_coo, and a plan holds dense ones"
    ):
        capture(Sparse().eval(), (torch.randn(3, 8),))


def test_what_torch_export_made_is_taken_and_torchscript_refused_in_words() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(3, 8)
    exported = torch.export.export(model, (x,)).module()
    program = capture(exported, (x,), dynamic=False)
    torch.testing.assert_close(program.module(x), model(x))
    with pytest.raises(UsageError, match="TorchScript"):
        as_module(torch.jit.trace(model, x))


class DoublesItsInput(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(2)
        return x, x + y


def test_an_input_that_is_written_and_returned() -> None:
    """The write comes last in the graph, and what is returned is its result, of which torch says no shape."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    program = capture(DoublesItsInput(), (x.clone(), y))
    assert [spec.shape for spec in program.outputs] == [("batch", "seq")] * 2
    torch.testing.assert_close(program.module(x.clone(), y), (2 * x, 2 * x + y))


class OfSeveral(nn.Module):
    """Rows of one input for each of another's, as Git lays captions beside images: for one of each torch's
    guard says that the product of both is not 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x_NSC: torch.Tensor, y_MC: torch.Tensor) -> torch.Tensor:  # noqa: N803
        rows = self.up(y_MC).repeat(x_NSC.size(0) // y_MC.size(0), 1)
        return torch.cat([x_NSC, rows[:, None]], dim=1)


def test_a_graph_that_leaves_the_example_out_is_not_taken() -> None:
    model, x, y = OfSeveral().eval(), torch.randn(1, 6, 4), torch.randn(1, 4)
    program = capture(model, (x, y))
    assert allowed(program, sizes_of(program))
    for length in (6, 9):
        given = torch.randn(1, length, 4), y
        torch.testing.assert_close(lower_eager(program)(*given)[0], model(*given))


class Masked(nn.Module):
    """A mask and positions anew in every layer, as T5 makes them; the last two are returned."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in range(3):
            at = torch.arange(x.shape[1], device=x.device)
            mask = torch.where(at[:, None] >= at, 0.0, -1e9)
            x = (x @ x.mT + mask).softmax(-1) @ x + torch.rand_like(x) * 0 + layer
        return x, mask + 1, mask + 1, (mask - 1).view(-1), (mask - 1).view(-1)


def test_what_layers_compute_anew_is_computed_once() -> None:
    program = capture(Masked().eval(), (torch.randn(2, 5, 4),))
    targets = [node.target for node in program.calls()]
    assert targets.count(aten.arange.default) == 1 and targets.count(aten.softmax.int) == 3
    assert sum("where" in str(target) for target in targets) == 1
    assert sum("rand_like" in str(target) for target in targets) == 3
    # a caller may write to each of them
    results = lower_eager(program)(torch.randn(2, 5, 4))[1:]
    assert len({result.untyped_storage().data_ptr() for result in results}) == 4


def test_results_that_are_not_one_memory_stay_so() -> None:
    class Copies(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 2
            return y.clone().view(-1), y.clone(), y, y.view(-1), (y + 1).clone()

    program = capture(Copies().eval(), (torch.randn(3, 4),))
    storages = [result.untyped_storage().data_ptr() for result in lower_eager(program)(torch.randn(3, 4))]
    # the fourth is a view of the third; the copy of a sum that nobody else has is none
    assert len(set(storages)) == 4 and storages[2] == storages[3]
    assert len(program.graph.find_nodes(op="call_function", target=aten.clone.default)) == 2


class OfEachImage(nn.Module):
    """A result for each image beside that of all, as SmolVLM's `image_hidden_states`."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y = self.project(x)
        return y.sum(0), tuple(y.unbind(0))


@pytest.mark.parametrize("images", [1, 2])
def test_results_as_many_as_images_fix_their_number(images: int) -> None:
    model, x = OfEachImage().eval(), torch.randn(images, 5, 8)
    program = capture(model, (x,))
    assert program.inputs[0].shape[0] == images and len(program.outputs) == 1 + images
    whole, each = program.module(x)
    assert torch.equal(whole, model(x)[0]) and len(each) == images
    assert any("batch of x" in str(said) for said in program.fixed)
