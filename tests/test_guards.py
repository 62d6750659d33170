"""Plan, change one thing, call again: the answer is that of the changed model, or the call is refused in
words.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mutations
import pytest
import torch
from mutations import HARMLESS, LASTING, REVERSIBLE, WEIGHTS, Model
from torch import nn
from torch.overrides import TorchFunctionMode

import effcompile
from effcompile.core.errors import EffcompileError, GuardError, InputsError
from effcompile.ir.plan import Plan

IDS = torch.arange(12).reshape(2, 6)
LABELS = IDS.flip(1) + 1
QUICK = {"dynamic": False, "target": "cpu-generic"}
Answer = list[torch.Tensor]


@dataclass
class Planned:
    """A model, its executable, and how either is run."""

    model: Model
    executable: Any
    training: bool

    def run(self, which: Any, *args: Any, **kwargs: Any) -> Answer:
        self.model.zero_grad()
        torch.manual_seed(1)
        if not self.training:
            with torch.no_grad():
                return [which(*(args or (IDS,)), **kwargs)]
        loss = which(IDS, labels=LABELS, **kwargs)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]

    def agrees_or_is_refused(self) -> bool:
        """Whether the executable answered; what it answers must be the model's own."""
        try:
            found = self.run(self.executable)
        except EffcompileError:
            return False
        wanted = self.run(self.model)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        return True


def made(kind: str, **options: Any) -> Planned:
    training = kind == "training"
    model = Model(0.1 if training else 0.0).train(training)
    with torch.enable_grad():
        if training:
            executable = effcompile.optimize(
                model, inputs={"ids": IDS, "labels": LABELS}, mode="training", **options
            )
        else:
            executable = effcompile.optimize(model, inputs={"ids": IDS}, backend=kind, **QUICK, **options)
    return Planned(model, executable, training)


@pytest.fixture(scope="module", params=["torch-eager", "onnxruntime", "training"])
def planned(request: pytest.FixtureRequest) -> Planned:
    return made(request.param)


class Doubled(TorchFunctionMode):
    """A user's own, which changes what linears return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.nn.functional.linear else found


def test_a_mode_that_changes_functions_changes_answers(planned: Planned) -> None:
    with Doubled():
        planned.agrees_or_is_refused()
    with torch.device("cpu"):  # one of torch's own, which changes where tensors are made
        assert planned.agrees_or_is_refused()
    assert planned.agrees_or_is_refused()


@pytest.mark.parametrize("name", REVERSIBLE)
def test_a_change_of_the_model(planned: Planned, name: str) -> None:
    assert planned.agrees_or_is_refused()
    undo = REVERSIBLE[name](planned.model)
    try:
        planned.agrees_or_is_refused()
    finally:
        undo()
    assert planned.agrees_or_is_refused(), "the plan holds again"


@pytest.mark.parametrize("name", HARMLESS)
def test_a_change_that_changes_no_answer(planned: Planned, name: str) -> None:
    undo = HARMLESS[name](planned.model)
    assert planned.agrees_or_is_refused()
    undo()


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(IDS, alpha=2.0),
        lambda f: f(IDS, None, 2.0),
        lambda f: f(IDS, alpha=1),
        lambda f: f(IDS, alpha=True),
        lambda f: f(IDS, alpha=-1.0),
        lambda f: f(IDS, alpha=float("nan")),
        lambda f: f(ids=IDS),
        lambda f: f(IDS, None),
        lambda f: f(IDS.int()),
        lambda f: f(IDS.repeat_interleave(2, 1)[:, ::2]),
        lambda f: f(IDS - 1),
        lambda f: f(IDS + 20),
        lambda f: f(IDS - 24),
        lambda f: f(IDS[:0]),
        lambda f: f(IDS[:1]),
        lambda f: f(IDS[:, :3]),
        lambda f: f(IDS.to("meta")),
        lambda f: f(IDS, labels=LABELS),
        lambda f: f(IDS, epsilon=1),
        lambda f: f(IDS.tolist()),
        lambda f: f(),
    ],
)
@pytest.mark.parametrize("backend", ["torch-eager", "onnxruntime"])
def test_another_call(
    backend: str, call: Callable[[Any], torch.Tensor], inference: dict[str, Planned]
) -> None:
    model, executable = inference[backend].model, inference[backend].executable
    with torch.no_grad():
        try:
            found = call(executable)
        except EffcompileError:
            return
        torch.testing.assert_close(found, call(model), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.fixture(scope="module")
def inference() -> dict[str, Planned]:
    return {backend: made(backend) for backend in ("torch-eager", "onnxruntime")}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch: dict[str, torch.Tensor], scale: float = 0.0) -> torch.Tensor:
        return self.a(batch["q"]) - 2 * self.b(batch["k"]) + torch.tensor(scale).reciprocal().clamp(-1, 1)


def test_dicts_are_matched_by_key_and_zero_has_a_sign() -> None:
    torch.manual_seed(0)
    model = Nested().eval()
    q, k = torch.randn(2, 8), torch.randn(2, 8)
    executable = effcompile.optimize(
        model, inputs={"batch": {"q": q, "k": k}, "scale": 0.0}, backend="onnxruntime", **QUICK
    )
    with torch.no_grad():
        wanted = model({"q": q, "k": k}, 0.0)
        torch.testing.assert_close(executable({"k": k, "q": q}, 0.0), wanted)
        torch.testing.assert_close(executable(batch={"q": q, "k": k}), wanted)
        for batch, scale in (
            ({"q": q, "k": k}, -0.0),
            ({"q": q, "x": k}, 0.0),
            ({"q": q, "k": k, "x": k}, 0.0),
            ({"q": q}, 0.0),
        ):
            with pytest.raises(GuardError):
                executable(batch, scale)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.a(q) * k


@pytest.mark.parametrize("training", [False, True])
def test_one_tensor_given_twice_as_the_example_is_two_inputs(training: bool) -> None:
    """As of an attention that is planned for x to x; and of one that the model holds, too."""
    model = Mixed().train(training)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    for q, k in ((x, x), (x, model.a.bias), (model.a.bias.data, x)):
        if training:
            planned = effcompile.optimize(
                model, inputs=(q, k), mode="training", loss=lambda out, _: out.sum(), passes=["checkpoint"]
            )
            torch.testing.assert_close(planned(q, k), model(q, k).sum())
            other = [y.detach()[0] if t.dim() == 1 else y.detach() for t in (q, k)]
            torch.testing.assert_close(planned(*other), model(*other).sum())
            continue
        planned = effcompile.optimize(model, inputs=(q, k), backend="torch-eager", **QUICK)
        other = [y[0] if t.dim() == 1 else y for t in (q, k)]
        with torch.no_grad():
            torch.testing.assert_close(planned(q, k), model(q, k))
            torch.testing.assert_close(planned(*other), model(*other))


class Minding(nn.Module):
    """Asks whether gradients are enabled, and may return something else then."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * (self.factor if torch.is_grad_enabled() else 1.0)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_model_that_is_another_one_where_gradients_are_enabled(factor: float) -> None:
    model, x = Minding(factor).eval(), torch.randn(3, 8)
    planned = effcompile.optimize(model, inputs=(x,), backend="torch-eager", **QUICK)
    with torch.no_grad():
        torch.testing.assert_close(planned(x), model(x))
    if factor == 1.0:
        torch.testing.assert_close(planned(x), model(x))
        return
    with pytest.raises(GuardError, match=r"torch.is_grad_enabled\(\) was False and is True"):
        planned(x)
    with torch.no_grad():
        torch.testing.assert_close(planned(x), model(x))


def test_another_thread_has_values_of_its_own() -> None:
    planned = made("torch-eager")
    refused: list[str] = []

    def call() -> None:
        mutations.THREAD.gain = 3.0
        try:
            planned.executable(IDS)
        except GuardError as error:
            refused.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert refused and "THREAD.gain was 1.0 and is 3.0" in refused[0]
    assert planned.agrees_or_is_refused()


@pytest.mark.parametrize("name", [*WEIGHTS, *LASTING])
def test_weights_that_changed_are_run_as_they_are(name: str) -> None:
    planned = made("torch-eager", on_change="eager")
    (WEIGHTS | LASTING)[name](planned.model)
    with pytest.warns(UserWarning, match="runs the original Model.*was changed|gone|new|was"):
        assert planned.agrees_or_is_refused()


@pytest.mark.parametrize("name", [*WEIGHTS, "pruned"])
def test_a_step_after_weights_changed(name: str) -> None:
    planned = made("training")
    (WEIGHTS | LASTING)[name](planned.model)
    assert planned.agrees_or_is_refused() == (name in WEIGHTS and "assign" not in name)


def test_train_step_and_eval_again() -> None:
    planned = made("onnxruntime")
    planned.executable.train()
    with torch.enable_grad():
        planned.executable(IDS).square().sum().backward()
    torch.optim.SGD(planned.executable.parameters(), lr=0.1).step()
    planned.executable.eval()
    with pytest.raises(GuardError, match=r"embed.weight was changed since Model was planned"):
        planned.run(planned.executable)


def test_nothing_is_recorded_within_inference_mode(planned: Planned) -> None:
    if planned.training:
        with torch.inference_mode(), torch.enable_grad():
            assert not planned.executable(IDS, labels=LABELS).requires_grad


def test_an_inference_tensor_is_refused_where_the_backward_reads_it(planned: Planned) -> None:
    """As eager does: changes of one between forward and backward are not counted."""
    with torch.inference_mode():
        ids = IDS.clone()
    if planned.training:
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            planned.model(ids, labels=LABELS)
        with pytest.raises(InputsError, match=r"^ids was made .* saved for backward.*clone"):
            planned.executable(ids, labels=LABELS)
    else:
        torch.testing.assert_close(planned.run(planned.executable, ids), planned.run(planned.model))


@pytest.mark.parametrize("kind", ["torch-eager", "training"])
def test_on_change_eager_runs_the_changed_model_with_one_warning(kind: str) -> None:
    planned = made(kind, on_change="eager")
    planned.model.temperature = 3.0
    with pytest.warns(UserWarning, match=r"runs the original Model.*temperature was 1\.0 and is 3\.0 now"):
        assert planned.agrees_or_is_refused()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned.model.temperature = 4.0
        assert planned.agrees_or_is_refused()
        planned.model.temperature = 1.0
        assert planned.agrees_or_is_refused()


@pytest.mark.parametrize("kind", ["torch-eager", "training"])
def test_on_change_replan_plans_the_changed_model(kind: str) -> None:
    planned = made(kind, on_change="replan")
    first = planned.executable.plan
    planned.model.temperature = 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert planned.agrees_or_is_refused()
        assert planned.executable.plan is not first
        planned.model.repeats = 1
        assert planned.agrees_or_is_refused()


@pytest.mark.parametrize("training", [False, True])
def test_without_inputs_a_changed_model_is_planned_again_unless_it_must_not_be(training: bool) -> None:
    options = {"mode": "training"} if training else {"backend": "torch-eager", **QUICK}
    for on_change in (None, "eager", "error"):
        model = Model().train(training)
        planned = Planned(model, effcompile.optimize(model, on_change=on_change, **options), training)
        with torch.enable_grad():
            assert planned.agrees_or_is_refused()
            model.temperature = 3.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert planned.agrees_or_is_refused() == (on_change != "error")


def test_what_on_change_cannot_be() -> None:
    model = Model()
    with pytest.raises(EffcompileError, match="on_change = 'nothing' is not known"):
        effcompile.optimize(model, inputs={"ids": IDS}, on_change="nothing")
    with pytest.raises(EffcompileError, match="lose the states"):
        effcompile.optimize(
            model, inputs={"ids": IDS}, mode="training", optimizer=torch.optim.SGD, on_change="replan"
        )
    with pytest.raises(EffcompileError, match="returns no loss"):
        effcompile.optimize(
            model, inputs={"ids": IDS}, mode="training", loss=lambda o, i: o.sum(), on_change="eager"
        )


def test_guards_are_in_the_plan_and_in_the_report(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned.executable.plan
    places = {guard.place for guard in plan.guards}
    assert {
        "inputs['ids']",
        "inputs['alpha']",
        "model.temperature",
        "model.inner.up.weight",
        "model.drop.p",
    } <= places
    assert Plan.from_dict(plan.to_dict()) == plan
    planned.executable.report()
    assert f"{len(plan.guards)} checked at each call" in " ".join(capsys.readouterr().out.split())


def test_a_guard_that_is_none_is_refused_in_a_saved_plan(planned: Planned) -> None:
    data = planned.executable.plan.to_dict()
    data["guards"][0]["kind"] = "wish"
    with pytest.raises(EffcompileError, match="not a valid plan"):
        Plan.from_dict(data)


class Wide(nn.Module):
    """Too large to be looked at whole at each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_a_few_elements_written_through_data_are_noticed_in_time() -> None:
    """torch counts no such write; each call looks at another part of all bytes."""
    model, x = Wide().eval(), torch.randn(2, 64)
    run = effcompile.optimize(model, inputs=x, backend="onnxruntime", **QUICK)
    (said,) = (str(note) for note in run.plan.notes if "check_weights()" in str(note))
    calls = int(said.partition("within ")[2].split()[0])
    for _ in range(2 * calls):
        run(x)
    before = model.up.weight.data[777].clone()
    model.up.weight.data[777, 3] += 1

    def called(times: int) -> None:
        for _ in range(times):
            run(x)

    with pytest.raises(GuardError, match=r"model.up.weight was changed"):
        called(calls)
    with pytest.raises(GuardError, match=r"model.up.weight was changed"):
        run(x)  # and not forgotten
    model.up.weight.data[777] = before
    run(x)
    before = model.down.weight.data[5].clone()
    model.down.weight.data[5, 1000] = 7
    with pytest.raises(GuardError, match=r"model.down.weight was changed"):
        run.check_weights()
    model.train()
    with pytest.raises(GuardError, match=r"model.down.weight was changed"):
        run(x)  # whoever changes the mode may have trained
    model.eval()
    model.down.weight.data[5] = before
    run.check_weights()
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
