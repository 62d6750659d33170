import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fresh_process import CAPTURE, Forks, forks
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from effcompile.capture import capture_training
from effcompile.core.errors import CaptureError, EffcompileError, InputsError
from effcompile.ir.program import module_path
from effcompile.ir.step import Step

aten = torch.ops.aten
X, Y = torch.randn(3, 8), torch.tensor([0, 1, 3])


def run_step(step: Step, model: nn.Module, args: tuple[Any, ...] = (), kwargs: Any = None) -> tuple[Any, ...]:
    """Interpret the joint graph: (loss, shown outputs, updated buffers by name, gradients by name)."""
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    given = {node: weights[name].detach() for node, name in (*step.parameters.items(), *step.buffers.items())}
    given |= dict(step.constants) | dict(zip(step.inputs, step.leaves(args, kwargs or {}), strict=True))
    if step.tangent is not None:
        given[step.tangent] = torch.ones((), dtype=step.tangent.meta["val"].dtype)
    with torch.no_grad():
        flat = fx.Interpreter(step.module).run(
            *[given[node] for node in step.graph.find_nodes(op="placeholder")]
        )
    count = len(step.outputs)
    shown, rest = list(flat[1:count]), flat[count:]
    updated, gradients = rest[: len(step.updated)], rest[len(step.updated) :]
    return (
        flat[0],
        shown,
        dict(zip(step.updated, updated, strict=True)),
        dict(zip(step.differentiated, gradients, strict=True)),
    )


def mistakes(
    step: Step,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Any = None,
    loss_of: Any = lambda out: out,
    limit: float = 0.0,
) -> list[str]:
    """Where the interpreted graph and eager differ by more than `limit` (relative L2), from the same random
    seed.
    """
    torch.manual_seed(5)
    loss, _, updated, gradients = run_step(step, model, args, kwargs)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    wanted = loss_of(model(*args, **(kwargs or {})))
    wanted.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    wrong = (
        [f"gradients of {sorted(theirs.keys() ^ gradients.keys())}"]
        if theirs.keys() != gradients.keys()
        else []
    )
    pairs = [
        ("loss", loss, wanted.detach()),
        *((name, gradients[name], g) for name, g in theirs.items() if name in gradients),
    ]
    pairs += [(name, value, model.get_buffer(name)) for name, value in updated.items()]
    for name, found, right in pairs:
        off = float((found - right).double().norm()) > limit * float(right.double().norm()) + 1e-7 * bool(
            limit
        )
        if off or found.shape != right.shape or found.dtype != right.dtype or found.isnan().any():
            wrong.append(f"{name}: {found} for {right}"[:200])
    return wrong


def calls(step: Step, *targets: Any) -> list[fx.Node]:
    return [
        node
        for node in step.graph.nodes
        if node.op == "call_function" and (not targets or node.target in targets)
    ]


class Classifier(nn.Module):
    """A loss in the forward, dropout, a block under the name `model`, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(OrderedDict(up=nn.Linear(8, 8), act=nn.GELU(), drop=nn.Dropout(0.4)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.model(self.model(x))), labels)


def test_loss_and_gradients_are_eagers_with_dropout_on() -> None:
    model = Classifier()
    step = capture_training(model, (X, Y))
    assert mistakes(step, model, (X, Y)) == []
    assert len(calls(step, aten.native_dropout.default)) == 2
    torch.manual_seed(6)
    assert float(run_step(step, model, (X, Y))[0]) != float(model(X, Y))  # the comparison above sees the seed
    assert {node.op for node in step.graph.nodes} == {"placeholder", "call_function", "output"}
    assert (step.name, len(step.outputs), step.updated, step.mends, dict(step.dropped)) == (
        "Classifier",
        1,
        (),
        (),
        {},
    )
    assert step.differentiated == tuple(name for name, _ in model.named_parameters())
    assert step.tangent is not None
    assert all("val" in node.meta for node in calls(step))


def test_eval_mode_has_no_dropout() -> None:
    model = Classifier().eval()
    step = capture_training(model, (X, Y))
    assert mistakes(step, model, (X, Y)) == []
    assert calls(step, aten.native_dropout.default) == []


def test_modules_have_the_users_names_forward_and_backward() -> None:
    step = capture_training(Classifier(), (X, Y))
    forward = {
        module_path(node)
        for node in calls(step, aten.addmm.default, aten.gelu.default, aten.native_dropout.default)
    }
    backward = {
        module_path(node)
        for node in calls(step, aten.gelu_backward.default, aten.native_dropout_backward.default)
    }
    assert forward == {"model.up", "model.act", "model.drop", "head"}
    assert backward == {"model.act", "model.drop"}
    assert all("fwd_nn_module_stack" in node.meta for node in calls(step, aten.gelu_backward.default))
    assert all("seq_nr" in node.meta for node in calls(step, aten.addmm.default))


def test_the_model_and_the_random_state_are_left_alone() -> None:
    model = Classifier()
    model.head.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    capture_training(model, (X, Y))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [module.training for module in (model, model.model, model.head)] == [True, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert set(vars(model)) == set(vars(Classifier()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.table(input_ids)).flatten(0, 1), labels.flatten())


def test_a_tied_weight_is_one_placeholder_with_the_sum_of_its_gradients() -> None:
    model, ids = Tied(), torch.randint(0, 10, (2, 5))
    step = capture_training(model, (ids, ids.flip(0)))
    assert list(step.parameters.values()) == ["table.weight"]
    assert step.differentiated == ("table.weight",)
    assert mistakes(step, model, (ids, ids.flip(0))) == []


def test_one_tensor_given_twice_is_two_inputs() -> None:
    model, ids = Tied(), torch.randint(0, 10, (2, 5))
    step = capture_training(model, (), {"labels": ids, "input_ids": ids})
    assert len(set(step.inputs)) == 2
    assert mistakes(step, model, (), {"labels": ids.flip(1), "input_ids": ids}) == []


def test_frozen_parameters_have_no_gradient_and_leave_no_dead_code() -> None:
    model = Classifier()
    model.model.requires_grad_(False)
    model.unused = nn.Linear(3, 3)
    step = capture_training(model, (X, Y))
    assert step.differentiated == ("head.weight", "head.bias")
    assert mistakes(step, model, (X, Y)) == []
    assert [node for node in calls(step) if not node.users] == []
    assert calls(step, aten.gelu_backward.default) == []
    assert "unused.weight" not in step.parameters.values()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)
        self.shift = torch.full((8,), 0.5)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        return ((self.norm(x) * self.scale + self.shift + torch.tensor([2.0])) ** 3).mean()


def test_buffers_are_updated_and_constants_lifted() -> None:
    model = Normed()
    step = capture_training(model, (X,))
    assert int(model.norm.num_batches_tracked) == 0
    assert set(step.updated) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert "scale" in step.buffers.values()
    assert sorted(value.numel() for value in step.constants.values()) == [1, 8]
    assert mistakes(step, model, (X,)) == []
    assert int(model.norm.num_batches_tracked) == 1


class Forgetful(nn.Module):
    """Draws random numbers that it does not use: the later ones must be what they are in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        functional.dropout(y, 0.3)
        with torch.no_grad():
            torch.rand(5)
        return functional.dropout(y, 0.3).sum() + torch.randn(()) * 0


def test_random_operators_stay_though_nothing_reads_them() -> None:
    model = Forgetful()
    step = capture_training(model, (X,))
    names = [
        str(node.target)
        for node in calls(step)
        if "dropout" in str(node.target) or "rand" in str(node.target)
    ]
    assert names == [
        "aten.native_dropout.default",
        "aten.rand.default",
        "aten.native_dropout.default",
        "aten.randn.default",
        "aten.native_dropout_backward.default",
    ]
    assert mistakes(step, model, (X,)) == []


class Pair(NamedTuple):
    loss: Tensor | None
    logits: Tensor | None


@dataclass
class Record:
    loss: Tensor
    logits: Tensor
    note: str = "kept"


class Returning(nn.Module):
    """Returns what `make` makes of loss and logits."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.head, self.make = nn.Linear(8, 4), make

    def forward(self, x: Tensor) -> Any:
        logits = self.head(x)
        return self.make(logits.logsumexp(-1).mean(), logits)


OUTPUTS = {
    "dict": (
        lambda loss, logits: {"loss": loss, "logits": logits, "states": (logits, [logits])},
        dict,
        ["logits", "states.0", "states.1.0"],
    ),
    "tuple": (lambda loss, logits: (loss, logits, 7), tuple, ["1"]),
    "named": (Pair, Pair, ["logits"]),
    "dataclass": (Record, Record, ["logits"]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_beside_the_loss_are_dropped_and_the_type_is_kept(kind: str) -> None:
    make, cls, names = OUTPUTS[kind]
    model = Returning(make)
    step = capture_training(model, (X,))
    assert (len(step.outputs), dict(step.dropped)) == (1, dict.fromkeys(names, 3 * 4 * 4))
    out = step.rebuild(torch.tensor(2.0), [])
    assert type(out) is cls
    loss = out["loss"] if kind == "dict" else out[0] if isinstance(out, tuple) else out.loss
    assert loss == 2.0
    wanted = {
        "dict": {"loss": loss},
        "tuple": (loss, None, 7),
        "named": Pair(loss, None),
        "dataclass": Record(loss, None),
    }
    assert out == wanted[kind]


def test_the_loss_may_stand_behind_the_logits() -> None:
    """nanoGPT's forward returns (logits, loss)."""
    step = capture_training(Returning(lambda loss, logits: (logits, loss)), (X,))
    assert step.rebuild(torch.tensor(2.0), []) == (None, 2.0)
    assert dict(step.dropped) == {"0": 3 * 4 * 4}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_are_kept_when_asked_for(kind: str) -> None:
    make, cls, names = OUTPUTS[kind]
    model = Returning(make)
    step = capture_training(model, (X,), keep_outputs=True)
    assert (len(step.outputs), dict(step.dropped)) == (1 + len(names), {})
    loss, shown, _, _ = run_step(step, model, (X,))
    out, wanted = step.rebuild(loss, shown), model(X)
    assert type(out) is cls
    ours, theirs = (pytree.tree_leaves(vars(o) if kind == "dataclass" else o) for o in (out, wanted))
    assert len(ours) == len(theirs)
    assert all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(ours, theirs, strict=True)
    )
    assert len([n for n in step.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]) == 1


def test_the_users_own_loss_sees_inputs_that_the_forward_does_not_take() -> None:
    model = Returning(lambda loss, logits: {"logits": logits})

    def loss(outputs: Any, inputs: Any) -> Tensor:
        return functional.cross_entropy(outputs["logits"], inputs["target"])

    step = capture_training(model, (), {"x": X, "target": Y}, loss=loss, keep_outputs=True)
    found, shown, _, gradients = run_step(step, model, (), {"x": X, "target": Y})
    wanted = loss(model(X), {"target": Y})
    wanted.backward()
    assert torch.equal(found, wanted) and torch.equal(gradients["head.weight"], model.head.weight.grad)
    rebuilt = step.rebuild(found, shown)
    assert rebuilt[0] is found and list(rebuilt[1]) == ["logits"]
    assert (
        capture_training(
            model, (X, Y), loss=lambda out, given: functional.cross_entropy(out["logits"], given[1])
        ).rebuild(found, [])
        is found
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda loss, logits: logits,
            ["no loss", "float32 tensor of shape (3, 4)", "labels=", "loss(outputs, inputs)"],
        ),
        (
            lambda loss, logits: {"logits": logits},
            ["no loss", "dict (logits: a float32 tensor of shape (3, 4))", "labels="],
        ),
        (lambda loss, logits: Pair(None, logits), ["no loss", "Pair (logits:"]),
        (
            lambda loss, logits: (logits, loss, 2 * loss),
            ["no loss", "tuple (0: a float32 tensor of shape (3, 4)"],
        ),
        (lambda loss, logits: 3.0, ["no loss", "float"]),
        (lambda loss, logits: {"loss": logits}, ["no scalar", "shape (3, 4)", "loss.mean()"]),
        (lambda loss, logits: {"loss": logits.argmax()}, ["int64", "floating-point"]),
        (lambda loss, logits: loss.detach(), ["depends on no parameter", "detach()"]),
    ],
)
def test_a_forward_without_a_usable_loss_is_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(CaptureError) as refused:
        capture_training(Returning(make), (X,))
    assert [word for word in words if word not in str(refused.value)] == []


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"No parameter of Classifier requires a gradient.*requires_grad_\(True\)"
    ):
        capture_training(Classifier().requires_grad_(False), (X, Y))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).sum()
        if y > 0:  # the offending line
            return y
        return -y


def test_a_branch_on_data_names_the_line_and_the_fix() -> None:
    with pytest.raises(CaptureError) as refused:
        capture_training(Branch(), (X,))
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# the offending line")
    )
    assert f"{__file__}:{line}" in str(refused.value)
    assert "torch.where" in str(refused.value)


def test_a_model_that_raises_by_itself_keeps_its_buffers() -> None:
    class Raising(Normed):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).sum() + torch.nn.functional.linear(x, torch.zeros(2, 3)).sum()

    model = Raising()
    with pytest.raises(InputsError, match=r"itself raises with these inputs"):
        capture_training(model, (X,))
    assert int(model.norm.num_batches_tracked) == 0


def test_a_loss_of_other_arguments_is_told_how_it_is_called() -> None:
    for loss in (lambda outputs: outputs.sum(), nn.CrossEntropyLoss()):
        with pytest.raises(InputsError, match=r"which is called as loss\(outputs, inputs\)"):
            capture_training(nn.Linear(8, 2), (torch.randn(3, 8),), loss=loss)


class Writing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.up, self.seen, self.what = nn.Linear(8, 8), torch.zeros(()), what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "its inputs":
            x.mul_(2)
        elif self.what == "the parameter up.bias":
            with torch.no_grad():
                self.up.bias.mul_(0.9)
        else:
            self.seen.add_(1)
        return self.up(x).sum()


@pytest.mark.parametrize("what", ["its inputs", "the parameter up.bias", "no buffer"])
def test_writing_into_anything_but_a_buffer_is_refused(what: str) -> None:
    with pytest.raises(CaptureError, match=f"writes into .*{what}"):
        capture_training(Writing(what), (X.clone(),))


class ThroughNumpy(nn.Module):
    """torch.export cannot trace NumPy; Dynamo can."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        functional.dropout(x, 0.3)  # nothing reads it
        return {"loss": (self.up(x) * torch.from_numpy(np.sin(x.numpy()))).sum(), "show": x + 1}


def test_dynamo_is_the_second_way() -> None:
    model = ThroughNumpy()
    step = capture_training(model, (X,))
    assert any("Dynamo" in str(mend) for mend in step.mends)
    # NumPy sums in another order
    assert mistakes(step, model, (X,), loss_of=lambda out: out["loss"], limit=1e-6) == []
    assert list(step.parameters.values()) == ["up.0.weight", "up.0.bias"]
    assert module_path(calls(step, aten.addmm.default)[0]) == "up.0"
    assert dict(step.dropped) == {"show": 96}


class Straight(torch.autograd.Function):
    """Rounds, with a gradient as if it did not: torch.export alone would record a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.kind == "function":
            y = Straight.apply(y)
        elif self.kind == "hook":
            y.register_hook(lambda gradient: gradient * 2)
        elif self.kind == "checkpoint":
            y = checkpoint(lambda z: functional.dropout(z.sin(), 0.3), y, use_reentrant=False)
        elif self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                y = self.up(y)
        elif self.kind == "in place":
            y.relu_()
        elif self.kind in ("random", "numpy"):
            y = y * (random.random() if self.kind == "random" else float(np.random.rand()))
        return (y * y).sum()


@pytest.mark.parametrize("kind", ["function", "hook", "checkpoint", "autocast", "in place"])
def test_what_export_alone_would_get_wrong_or_might(kind: str) -> None:
    model = Odd(kind)
    step = capture_training(model, (X,))
    assert mistakes(step, model, (X,)) == []
    assert any("Dynamo" in str(mend) for mend in step.mends) == (kind in ("function", "hook"))
    assert (
        torch.autograd.Function.apply.__name__ == "apply"
        and torch.Tensor.register_hook.__name__ == "register_hook"
    )


def test_a_module_hook_on_gradients_is_refused() -> None:
    model = Odd("")
    model.up.register_full_backward_hook(lambda module, given, arrived: None)
    with pytest.raises(
        CaptureError, match=r"by a backward hook on a module, .* \(.*test_training.py:\d+\).*handle\.remove"
    ):
        capture_training(model, (X,))


@pytest.mark.parametrize(("kind", "whose"), [("random", "Python"), ("numpy", "NumPy")])
def test_random_numbers_from_outside_torch_are_refused(kind: str, whose: str) -> None:
    state = random.getstate()
    with pytest.raises(CaptureError, match=f"{whose}'s generator"):
        capture_training(Odd(kind), (X,))
    assert random.getstate() == state


def test_leaves_take_the_same_inputs_in_any_form_and_no_others() -> None:
    step = capture_training(Classifier(), (X,), {"labels": Y})
    forms: list[Any] = [((X, Y), {}), ((), {"labels": Y, "x": X}), ((X,), {"labels": Y, "nothing": None})]
    assert all(found[0] is Y and found[1] is X for found in (step.leaves(*form) for form in forms))
    bad: list[Any] = [
        (((X[:2], Y), {}), r"x = float32 \(3, 8\), but got float32 \(2, 8\)"),
        (((X.double(), Y), {}), "got float64"),
        (((X,), {}), "missing: labels"),
        (((X, Y), {"mask": Y}), "takes no 'mask'"),
        (((X, 3), {}), r"labels = a tensor .* but got 3"),
    ]
    for form, words in bad:
        with pytest.raises(InputsError, match=words):
            step.leaves(*form)
    with pytest.raises(InputsError, match="is a object"):
        capture_training(Classifier(), (X, object()))


@torch.library.custom_op("tests::bent", mutates_args=())
def bent(x: Tensor) -> Tensor:
    """The identity, whose registered gradient is three times the incoming one."""
    return x.clone()


bent.register_fake(torch.empty_like)
bent.register_autograd(lambda context, grad: 3 * grad)


def test_a_gradient_that_is_registered_of_an_operator_is_captured() -> None:
    """What the refusal of a torch.autograd.Function tells the user to write instead."""

    class Bent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return bent(self.inner(x)).square().sum()

    torch.manual_seed(0)
    model, x = Bent(), torch.randn(3, 4)
    step = capture_training(model, (x,))
    assert any("bent" in str(n.target) for n in calls(step))
    assert mistakes(step, model, (x,), {}, loss_of=lambda out: out, limit=1e-6) == []


SCRIPT = """
import json, sys, torch, transformers
from test_training import calls, mistakes, run_step, aten
from effcompile.capture import capture_training
from effcompile.ir.program import module_path
torch.manual_seed(0)
kind = sys.argv[1]
small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
small |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
gpt2 = dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
t5 = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0)
drops = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
llama = dict(**small, num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.1)
experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
ids, mask = torch.randint(3, 64, (2, 8)), torch.ones(2, 8, dtype=torch.long)
mask[0, :3] = 0
text = {"input_ids": ids, "attention_mask": mask, "labels": ids}
image = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
name, config, kwargs = {
    "gpt2": ("GPT2LMHeadModel", gpt2, text),
    "llama": ("LlamaForCausalLM", llama, text),
    "bert": ("BertForSequenceClassification", {**small, **drops}, {**text, "labels": torch.tensor([0, 1])}),
    "t5": ("T5ForConditionalGeneration", t5, text),
    "vit": ("ViTForImageClassification", {**small, **drops, "image_size": 16, "patch_size": 8}, image),
    "mixtral": ("MixtralForCausalLM", {**llama, **experts}, text),
    "mixtral loop": ("MixtralForCausalLM", {**llama, **experts}, text),
    "gpt-oss": ("GptOssForCausalLM", {**llama, **experts, "head_dim": 16}, text),
}[kind]
cls = getattr(transformers, name)
model = cls(cls.config_class(**config)).train()
if "loop" in kind:
    model.set_experts_implementation("eager")
experts = getattr(model.config, "_experts_implementation", None)
cache = getattr(model.config, "use_cache", None)
step = capture_training(model, (), kwargs)
loss, shown, _, _ = run_step(step, model, (), kwargs)
nodes = calls(step)
backward = [n for n in nodes if n.meta.get("fwd_nn_module_stack")]
kept = capture_training(model, (), kwargs, keep_outputs=True)
outputs = kept.rebuild(*run_step(kept, model, (), kwargs)[:2])
uncached = {"use_cache": False} if cache is not None and kind != "bert" else {}
print("ANSWER" + json.dumps({
    "mistakes": mistakes(step, model, (), kwargs, loss_of=lambda out: out.loss, limit=1e-5),
    "random": len([n for n in nodes if n.target in (aten.native_dropout.default, aten.bernoulli.p)]),
    "type": type(step.rebuild(loss, shown)) is type(model(**kwargs)),
    "fields": list(step.rebuild(loss, shown)), "dropped": dict(step.dropped),
    "kept": list(outputs), "eager": list(model(**kwargs, **uncached)),
    "mends": [*map(str, step.mends)], "restored": getattr(model.config, "use_cache", None) == cache
    and getattr(model.config, "_experts_implementation", None) == experts,
    "names": sorted({module_path(n) for n in nodes if n not in backward}),
    "backward": sorted({module_path(n) for n in backward}),
    "modules": [name for name, _ in model.named_modules()],
    "named": sum(bool(module_path(n)) for n in nodes) / len(nodes),
    "ops": sorted({str(n.target) for n in nodes}),
}))
"""
BLOCKS = {
    "gpt2": "transformer.h.0.mlp.c_fc",
    "llama": "model.layers.0.mlp.up_proj",
    "bert": "bert.encoder.layer.0.intermediate.dense",
    "t5": "decoder.block.0.layer.1.EncDecAttention.q",
    "vit": "vit.layers.0.mlp.fc1",
    "mixtral": "model.layers.0.self_attn.q_proj",
    "mixtral loop": "model.layers.0.self_attn.q_proj",
    "gpt-oss": "model.layers.0.self_attn.q_proj",
}


@pytest.fixture(scope="module")
def captures() -> Iterator[Forks]:
    with forks(SCRIPT, (*CAPTURE, "test_training"), Path(__file__).parent) as found:
        yield found


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_tiny_huggingface_model(captures: Forks, kind: str) -> None:
    """Each in a process of its own: HF registers pytree classes globally, so that a warm process
    proves less.
    """
    found = captures.answer(kind)
    assert found["mistakes"] == []
    assert found["random"] > 0
    assert found["type"] and found["fields"] == ["loss"] and "logits" in found["dropped"]
    assert found["kept"] == found["eager"]
    assert found["restored"]
    assert BLOCKS[kind] in found["names"] and BLOCKS[kind] in found["backward"]
    assert set(found["names"]) | set(found["backward"]) <= set(found["modules"])
    assert found["named"] > 0.9
    assert any("_log_softmax" in op for op in found["ops"])
    if kind in ("mixtral", "mixtral loop", "gpt-oss"):
        # one product per expert: no expert's weight is copied for every token
        assert any("grouped_mm" in op for op in found["ops"]) and not any(
            "batched_mm" in str(mend) for mend in found["mends"]
        )
        assert any("grouped_mm" in str(mend) for mend in found["mends"]) is (kind == "mixtral loop")


def test_every_refusal_is_one_of_ours() -> None:
    assert issubclass(CaptureError, EffcompileError) and issubclass(InputsError, EffcompileError)


def test_an_empty_batch_is_refused_for_nothing_could_be_compared() -> None:
    with pytest.raises(InputsError, match="x is an empty batch"):
        capture_training(
            nn.Linear(8, 4), (), {"x": torch.randn(0, 8)}, loss=lambda outputs, inputs: outputs.sum()
        )
