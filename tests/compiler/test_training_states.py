"""Optimizer states in the plan: bytes as the allocator has them, updates as the given optimizer's, and what
is declined.
"""

import copy
import gc
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import MODELS, Batch, Skips, gpt2, twin

import effcompile
from effcompile.backends.torch.optimizer import PlannedOptimizer
from effcompile.compiler import TrainingExecutable, optimize_training, plan_training
from effcompile.compiler.training.compile import frontier_training
from effcompile.core.errors import FormatError, InfeasibleError, InputsError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.units import format_bytes, format_seconds
from effcompile.ir.plan import Plan
from effcompile.machine.machines import load_target
from effcompile.ops.optimizers import COUNTED, StatesForm
from effcompile.report.reasons import words

pytestmark = pytest.mark.usefixtures("quick_training")
# pointwise: its kernels round as they please
EXACT = ["no-pointwise", "checkpoint.groups=false", "no-microbatch", "no-attention"]
BACKWARD = [*EXACT, "states.in_backward=true"]
CODED = [*EXACT, "states.eight_bit=true", "states.offload=false"]


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-3, **options})


def optimize(
    model: nn.Module, batch: Batch, passes: list[str] = EXACT, memory: int | None = None, **given: Any
) -> TrainingExecutable:
    optimizer = given.pop("optimizer", adamw)
    return optimize_training(
        model,
        (),
        batch,
        goal=Goal(mode="training", memory=memory, **given),
        passes=passes,
        optimizer=optimizer,
    )


def wide() -> tuple[nn.Module, Batch]:
    """Layers of weights that are kept in 8 bits, captured in a fraction of the time of a transformer's. The
    working memory of an update is that of the largest weight: small beside all states.
    """
    torch.manual_seed(0)
    return Skips(layers=4, width=64).train(), {"x": torch.randn(6, 64), "y": torch.randint(0, 8, (6,))}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of all tensors in the state_dict; of quantised ones, of what they are made of."""

    def size(value: Any) -> int:
        if isinstance(value, dict):
            return sum(map(size, value.values()))
        if hasattr(value, "__tensor_flatten__"):
            return sum(getattr(value, name).nbytes for name in value.__tensor_flatten__()[0])
        return value.nbytes if isinstance(value, torch.Tensor) else 0

    return size(optimizer.state_dict()["state"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int = 4) -> list[float]:
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        outputs = model(**batch)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def least(model: nn.Module, batch: Batch, passes: list[str], optimizer: Any = adamw) -> int:
    """The smallest budget that planning names as feasible."""
    with pytest.raises(InfeasibleError) as caught:
        plan_training(
            model, (), batch, goal=Goal(mode="training", memory=1), passes=passes, optimizer=optimizer
        )
    return int(caught.value.nearest["memory"])


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("t5 of one layer", EXACT[:2]),
        ("albert", [*BACKWARD, "no-loss_head"]),
        ("gpt2 of one layer", [*BACKWARD, "loss_head.chunks=2", "states.offload=false"]),
    ],
)
def test_the_peak_with_the_optimizers_step_is_the_allocators(name: str, passes: list[str]) -> None:
    model, batch = gpt2(layers=1) if name == "gpt2 of one layer" else MODELS[name]()
    memory = least(model, batch, passes)
    plan = optimize(model, batch, passes, memory).plan
    assert plan.measured is not None and plan.met, plan.over_memory
    assert plan.measured.peak_bytes <= memory
    assert plan.predicted.peak_bytes == pytest.approx(plan.measured.peak_bytes, rel=0.02)


def test_consuming_gradients_reaches_budgets_that_nothing_else_does() -> None:
    model, batch = MODELS["skips"]()
    lower = least(model, batch, BACKWARD)
    assert lower < least(model, batch, EXACT)
    assert (
        optimize(model, batch, BACKWARD, lower).plan.decision("optimizer.gradients").option
        == "consumed in the backward"
    )
    with pytest.raises(InfeasibleError, match=r"in_backward=true"):
        optimize(model, batch, EXACT, lower)


def test_a_frontier_holds_ways_to_keep_the_states() -> None:
    model, batch = MODELS["skips"]()
    front = frontier_training(
        model, (), batch, goal=Goal(mode="training"), passes=EXACT, optimizer=adamw, points=4
    )
    assert {plan.decision("optimizer").option for plan in front} >= {"as given, on the host"}
    assert [plan.peak_bytes for plan in front] == sorted(plan.peak_bytes or 0 for plan in front)


@pytest.mark.parametrize(
    "kind",
    [adamw, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), lambda p: torch.optim.RMSprop(p, lr=1e-3)],
)
def test_training_is_the_given_optimizers(kind: Any) -> None:
    """States on the host, gradients consumed in the backward: the losses of eager."""
    model, batch = MODELS["skips"]()
    eager = twin(model)
    planned = optimize(model, batch, BACKWARD, least(model, batch, BACKWARD, kind), optimizer=kind)
    states = planned.plan.decision("optimizer")
    assert states.option == "as given, on the host" and planned.plan.decision("optimizer.gradients")
    reference = kind(eager.parameters())
    for group in reference.param_groups:
        group.update({"fused": True} if "fused" in group else {})
    assert planned.optimizer is not None
    assert train(planned, planned.optimizer, batch) == train(eager, reference, batch)
    assert all(torch.equal(p, eager.get_parameter(name)) for name, p in planned.named_parameters())


def test_bytes_of_the_states_are_as_planned_and_on_the_host_when_planned() -> None:
    model, batch = gpt2(n_embd=64)
    whole = optimize(model, batch)
    train(whole, whole.optimizer, batch)
    assert state_bytes(whole.optimizer) == whole.plan.decision("optimizer").cost.bytes_kept
    assert isinstance(whole.optimizer, torch.optim.AdamW)
    host = optimize(twin(model), batch, memory=int(0.7 * whole.plan.peak_bytes))
    train(host, host.optimizer, batch)
    decision = host.plan.decision("optimizer")
    assert decision.option == "as given, on the host" and decision.cost.bytes_kept == 0
    assert state_bytes(host.optimizer) == state_bytes(whole.optimizer)
    pages = {state["exp_avg"].untyped_storage().resizable() for state in host.optimizer.state.values()}
    assert pages == {False}  # memory that torch's allocator does not own


def test_8_bit_states_take_the_planned_bytes_and_train_alike() -> None:
    pytest.importorskip("torchao")
    model, batch = wide()
    passes = [*EXACT, "states.eight_bit=true", "states.offload=false"]
    whole = optimize(twin(model), batch, EXACT)
    eight = optimize(model, batch, passes, int(0.92 * whole.plan.peak_bytes))
    assert eight.plan.decision("optimizer").option == "8-bit"
    assert any("two updates differ from those of AdamW" in str(note) for note in eight.plan.notes)
    losses, wanted = train(eight, eight.optimizer, batch, 8), train(whole, whole.optimizer, batch, 8)
    assert losses == pytest.approx(wanted, rel=5e-3) and losses[-1] < losses[0]
    kept = eight.plan.decision("optimizer").cost.bytes_kept
    # torchao keeps the learning rate in a tensor, which is no state
    rates = 4 * sum(1 for _ in eight.optimizer.state)
    assert state_bytes(eight.optimizer) == kept - rates
    assert kept < 0.6 * whole.plan.decision("optimizer").cost.bytes_kept


def test_another_optimizer_only_where_the_user_allows_it() -> None:
    pytest.importorskip("pytorch_optimizer")
    model, batch = MODELS["skips"]()
    whole = optimize(model, batch)
    assert not any(d.option == "Lion" for d in whole.plan.declined)
    allowed = optimize(
        model,
        batch,
        [*EXACT, "states.change=lion", "states.offload=false"],
        int(0.85 * whole.plan.peak_bytes),
    )
    assert allowed.plan.decision("optimizer").option == "Lion"
    assert any("another optimizer, as allowed" in str(note) for note in allowed.plan.notes)
    losses = train(allowed, allowed.optimizer, batch, 6)
    assert losses[-1] < losses[0]
    with pytest.raises(UsageError, match=r"lion, lamb, lars"):
        optimize(model, batch, ["states.change=nadam"])


def test_lion_in_8_bits_takes_the_planned_bytes_where_the_user_allows_it() -> None:
    """A byte per parameter and a scale per 256, beside the table of each; the peak that is planned for it
    holds.
    """
    model, batch = gpt2(layers=4, n_embd=64)
    whole = optimize(twin(model), batch)
    assert not any(d.option == "Lion8bit" for d in whole.plan.declined)
    passes = [*EXACT, "states.change=lion8", "states.offload=false"]
    memory = int(0.85 * whole.plan.peak_bytes)
    lion = optimize(model, batch, passes, memory)
    assert lion.plan.decision("optimizer").option == "Lion8bit" and lion.plan.measured is not None
    assert lion.plan.measured.peak_bytes <= memory
    assert any("another optimizer, as allowed" in str(note) for note in lion.plan.notes)
    losses = train(lion, lion.optimizer, batch, 6)
    assert losses[-1] < losses[0]
    coded = [p.numel() for p in model.parameters() if p.numel() >= 4096]
    assert all(n % 256 == 0 for n in coded) and sum(coded) > 0.9 * sum(p.numel() for p in model.parameters())
    plain = sum(4 * p.numel() for p in model.parameters() if p.numel() < 4096)
    kept = lion.plan.decision("optimizer").cost.bytes_kept
    assert state_bytes(lion.optimizer) == kept == sum(n + n // 64 + 1024 for n in coded) + plain


def test_8_bit_is_declined_unless_an_error_is_allowed() -> None:
    model, batch = MODELS["skips"]()
    plan = plan_training(model, (), batch, goal=Goal(mode="training"), passes=EXACT, optimizer=adamw)
    reasons = {d.option: words(d.reason) for d in plan.declined if d.by == "states"}
    assert (
        "max_error" in reasons["8-bit"]
        and "in_backward=true" in reasons["gradients consumed in the backward"]
    )
    granted = plan_training(
        model, (), batch, goal=Goal(mode="training", max_error=0.05), passes=EXACT, optimizer=adamw
    )
    assert not any("max_error" in words(d.reason) for d in granted.declined)


@pytest.mark.parametrize(
    ("kind", "passes", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, maximize=True), ["states.eight_bit=true"], "maximize"),
        (lambda p: torch.optim.SGD(p), ["states.eight_bit=true"], "no 8-bit SGD"),
    ],
)
def test_options_that_cannot_be_changed_are_declined_with_the_reason(
    kind: Any, passes: list[str], reason: str
) -> None:
    model, batch = MODELS["skips"]()
    plan = plan_training(
        model, (), batch, goal=Goal(mode="training"), passes=[*EXACT, *passes], optimizer=kind
    )
    assert any(reason in words(d.reason) for d in plan.declined if d.by == "states")


def test_states_do_not_go_over_a_link_that_carries_nothing() -> None:
    model, batch = MODELS["skips"]()
    none = replace(load_target("v100-32gb"), link_bandwidth=0.0)
    plan = plan_training(
        model, (), batch, goal=Goal(mode="training"), target=none, passes=EXACT, optimizer=adamw
    )
    assert {words(d.reason) for d in plan.declined if d.option == "on the host"} == {
        "the link of the target 'v100-32gb' has 0 B/s"
    }


def test_a_plan_says_what_crosses_the_link_for_states_on_the_host() -> None:
    """Once in bytes: gradients there, and new weights back, are moved in every step."""
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]), (torch.randn(1, 128),)
    asked: dict[str, Any] = {
        "target": "v100-32gb",
        "optimizer": adamw,
        "loss": lambda outputs, inputs: outputs.square().mean(),
    }
    whole = plan_training(model, batch, {}, goal=Goal(mode="training"), passes=EXACT, **asked)
    budget = (whole.peak_bytes or 0) - whole.decision("optimizer").cost.bytes_kept // 2
    plan = plan_training(
        model, batch, {}, goal=Goal(mode="training", memory=budget), passes=BACKWARD, **asked
    )
    cost = plan.decision("optimizer").cost
    told = next(note for note in map(words, plan.notes) if "cross the link" in note)
    assert cost.bytes_link > 0
    assert (
        f"{format_bytes(cost.bytes_link)} cross the link in a step of "
        f"{format_seconds(plan.predicted.seconds)}" in told
    )


@pytest.mark.parametrize("option", ["maximize", "decoupled_weight_decay"])
@pytest.mark.parametrize(
    ("form", "named"), [("eight_bit=true", "the 8-bit one"), ("change=lion8", "the one that 'lion8' names")]
)
def test_options_of_one_group_are_declined_for_all(option: str, form: str, named: str) -> None:
    """A group with an option that another form lacks; the other group does not hide it."""
    model, batch = MODELS["skips"]()

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.Adam([{"params": rest}, {"params": [first], option: True}], lr=1e-3)

    passes = [*EXACT, f"states.{form}"]
    goal = Goal(mode="training")
    plan = plan_training(model, (), batch, goal=goal, passes=passes, optimizer=grouped)
    said = f"the option {option}=True of this Adam is not in {named}"
    # how a decay is applied is a matter of Adam's own forms: another optimizer was allowed, as it decays
    wanted = option == "maximize" or named == "the 8-bit one"
    assert any(said in words(d.reason) for d in plan.declined) == wanted


def test_an_option_that_is_set_afterwards_and_the_form_lacks_is_refused() -> None:
    """Adam in 8 bits went on downhill."""
    model, batch = wide()
    whole = plan_training(model, (), batch, goal=Goal(mode="training"), passes=EXACT, optimizer=adamw)
    memory = int(0.92 * (whole.predicted.peak_bytes or 0))
    planned = optimize(model, batch, [*EXACT, "states.eight_bit=true", "states.offload=false"], memory)
    train(planned, planned.optimizer, batch, 1)
    planned.optimizer.param_groups[0]["maximize"] = True
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InputsError, match=r"maximize=True was set on a group.*8-bit.*Take it back"):
        train(planned, planned.optimizer, batch, 1)
    assert all(map(torch.equal, before, model.parameters()))
    planned.optimizer.param_groups[0]["maximize"] = False
    train(planned, planned.optimizer, batch, 1)


def test_an_optimizer_of_unknown_kind_is_left_as_it_is() -> None:
    class Own(torch.optim.AdamW):
        pass

    Own.__module__ = "mine"
    model, batch = MODELS["skips"]()
    plan = optimize(model, batch, BACKWARD, optimizer=lambda p: Own(p)).plan
    assert plan.decision("optimizer").option == "as given" and plan.met
    assert {d.option for d in plan.declined if "by itself" in words(d.reason)} == {
        "on the host",
        "gradients consumed in the backward",
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.optim.LBFGS, "closure"),
        (3, "int"),
        (lambda p: None, "NoneType"),
        (lambda p: adamw([torch.nn.Parameter(torch.ones(3))]), "none of"),
    ],
)
def test_what_is_no_optimizer_of_the_model_is_refused(given: Any, said: str) -> None:
    model, batch = MODELS["skips"]()
    with pytest.raises(UsageError, match=said):
        optimize(model, batch, optimizer=given)


def consuming(model: nn.Module, batch: Batch, **given: Any) -> TrainingExecutable:
    return optimize(model, batch, BACKWARD, least(model, batch, BACKWARD), **given)


def test_a_second_backward_before_the_step_is_refused_not_applied_twice() -> None:
    model, batch = MODELS["skips"]()
    planned = consuming(model, batch)
    planned(**batch).backward()
    with pytest.raises(InputsError, match=r"in_backward=false"):
        planned(**batch).backward()
    planned.optimizer.step()
    planned(**batch).backward()


def test_what_a_backward_that_updates_cannot_follow_is_refused() -> None:
    """A learning rate set after it, and hooks that wait for a gradient."""
    model, batch = MODELS["skips"]()
    planned = consuming(model, batch)
    planned(**batch).backward()
    planned.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(
        InputsError, match=r"lr was changed between the backward and optimizer.step\(\).*in_backward=false"
    ):
        planned.optimizer.step()
    planned(**batch).backward()
    planned.optimizer.step()
    name = planned.runner.consumed[0]
    parameter = dict(model.named_parameters())[name]
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with pytest.raises(
            InputsError, match=rf"The parameter {name} has a hook on its gradient.*in_backward=false"
        ):
            planned(**batch)
        handle.remove()
    planned(**batch).backward()
    planned.optimizer.step()
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, nn.Parameter(parameter.detach() * 2))
    with pytest.raises(InputsError, match=rf"The parameter {name} is another one than the optimizer has"):
        planned(**batch)
    setattr(model.get_submodule(path), own, parameter)
    planned(**batch).backward()


def test_a_rate_that_is_a_tensor_is_looked_at_too_and_a_group_may_come_after_the_backward() -> None:
    """Rates in tensors are what schedulers write to; a new group was not used by the backward."""
    model, batch = MODELS["skips"]()
    others = list(model.parameters())[-1:]

    def kind(parameters: Any) -> torch.optim.Optimizer:
        return adamw(list(parameters)[:-1], lr=torch.tensor(1e-3))

    planned = optimize(model, batch, BACKWARD, least(model, batch, BACKWARD, kind), optimizer=kind)
    planned(**batch).backward()
    assert planned.runner.consumed
    before = others[0].detach().clone()
    planned.optimizer.add_param_group({"params": others, "lr": 0.5})
    planned.optimizer.step()
    assert not torch.equal(others[0], before)
    planned(**batch).backward()
    planned.optimizer.param_groups[0]["lr"].fill_(0.5)
    with pytest.raises(InputsError, match="lr was changed between the backward"):
        planned.optimizer.step()


def test_schedules_of_the_learning_rate_reach_every_form() -> None:
    model, batch = MODELS["skips"]()
    planned, eager = consuming(model, batch), twin(model)
    runs = []
    for trained, optimizer in ((planned, planned.optimizer), (eager, adamw(eager.parameters(), fused=True))):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        losses = []
        for _ in range(3):
            losses += train(trained, optimizer, batch, 1)
            schedule.step()
        runs.append(losses)
    assert runs[0] == runs[1]


def test_a_schedule_made_before_planning_reaches_the_planned_optimizer() -> None:
    """It wraps the given one's `step`; after a load_state_dict, too."""
    model, batch = MODELS["skips"]()
    eager, runs = twin(model), []
    given, theirs = adamw(model.parameters()), adamw(eager.parameters(), fused=True)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda n: 1 / (1 + n)) for each in (given, theirs)]
    planned = optimize(model, batch, BACKWARD, least(model, batch, BACKWARD), optimizer=given)
    assert isinstance(planned.optimizer, PlannedOptimizer) and not given.state
    for trained, optimizer, schedule in zip(
        (planned, eager), (planned.optimizer, theirs), schedules, strict=True
    ):
        losses = []
        for step in range(4):
            losses += train(trained, optimizer, batch, 1)
            schedule.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        runs.append((losses, optimizer.param_groups[0]["lr"]))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("passes", [EXACT, CODED], ids=["host", "8-bit"])
def test_a_state_dict_takes_training_up_again(passes: list[str]) -> None:
    model, batch = wide()
    whole = plan_training(model, (), batch, goal=Goal(mode="training"), passes=EXACT, optimizer=adamw)
    memory = int(0.92 * (whole.predicted.peak_bytes or 0))
    first = optimize(model, batch, passes, memory)
    assert isinstance(first.optimizer, PlannedOptimizer)
    train(first, first.optimizer, batch, 2)
    second = optimize(twin(model), batch, passes, memory)
    file = io.BytesIO()
    torch.save(first.optimizer.state_dict(), file)
    file.seek(0)
    second.optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert train(second, second.optimizer, batch, 3) == train(first, first.optimizer, batch, 3)
    with pytest.raises(FormatError):
        second.optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})


@pytest.mark.parametrize("passes", [BACKWARD, [*EXACT, "states.eight_bit=true"]], ids=["backward", "8-bit"])
def test_the_given_optimizers_step_is_refused_where_another_is_planned(passes: list[str]) -> None:
    """It would keep states of its own beside the planned ones, beyond the budget and unsaid."""
    model, batch = wide() if passes is not BACKWARD else MODELS["skips"]()
    given = adamw(model.parameters())
    whole = plan_training(model, (), batch, goal=Goal(mode="training"), passes=EXACT, optimizer=adamw)
    memory = int(0.92 * (whole.predicted.peak_bytes or 0))
    planned = optimize(model, batch, passes, memory, optimizer=given)
    assert isinstance(planned.optimizer, PlannedOptimizer)
    planned(**batch).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r"step\(\) of the AdamW that was given .*`optimizer`"):
        given.step()
    assert not given.state and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    planned.optimizer.step()
    planned.optimizer.zero_grad()
    given.state[model.get_parameter(next(iter(before)))] = {"step": torch.ones(())}
    with pytest.raises(UsageError, match=r"given has states .*Load them into the planned model's"):
        planned.optimizer.step()


@pytest.mark.parametrize("passes", [BACKWARD, CODED], ids=["backward", "8-bit"])
def test_the_given_optimizers_checkpoint_is_the_planned_ones(passes: list[str]) -> None:
    """A loop of the user's saves `optimizer.state_dict()` of the one that it made."""
    model, batch = wide() if passes is not BACKWARD else MODELS["skips"]()
    whole = plan_training(model, (), batch, goal=Goal(mode="training"), passes=EXACT, optimizer=adamw)
    memory = int(0.92 * (whole.predicted.peak_bytes or 0))
    given = adamw(model.parameters())
    first = optimize(model, batch, passes, memory, optimizer=given)
    train(first, first.optimizer, batch, 2)
    file = io.BytesIO()
    torch.save(given.state_dict(), file)
    file.seek(0)
    other = twin(model)
    theirs = adamw(other.parameters(), lr=0.5)
    second = optimize(other, batch, passes, memory, optimizer=theirs)
    assert isinstance(second.optimizer, PlannedOptimizer)
    theirs.load_state_dict(torch.load(file, weights_only=True))
    assert not theirs.state and theirs.param_groups is second.optimizer.param_groups
    for group in (*given.param_groups, *theirs.param_groups):
        group["lr"] *= 0.5  # by a scheduler of the given one's
    assert train(second, second.optimizer, batch, 3) == train(first, first.optimizer, batch, 3)
    with pytest.raises(UsageError, match=r"that plan's optimizer has states.*load_state_dict\(state\)"):
        effcompile.optimize(model, inputs=batch, mode="training", optimizer=given)
    second.optimizer.state.clear()
    del first, second
    gc.collect()
    assert not given.state_dict()["state"]  # the planned one is gone


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 640))


@pytest.mark.parametrize(
    ("saved", "planned"),
    [("given", "8-bit"), ("given", "lion8"), ("8-bit", "given"), ("8-bit", "lion8"), ("lion8", "8-bit")],
)
def test_states_of_another_form_are_refused_and_change_nothing(saved: str, planned: str) -> None:
    """Those of an 8-bit plan in pieces, too, and those that an optimizer without a plan has saved."""

    def stepped(form: str) -> PlannedOptimizer:
        model = linears()
        piece = 1 << 18 if form == "8-bit" else 0
        made = PlannedOptimizer(
            adamw(model.parameters()), StatesForm(name=form, piece=piece), on_host=False, names={}
        )
        model(torch.ones(2, 64)).sum().backward()
        made.step()
        return made

    mine = stepped(planned)
    before = {p: dict(state) for p, state in mine.state.items()}
    with pytest.raises(FormatError, match=f"not of the form '{planned}'"):
        mine.load_state_dict(stepped(saved).state_dict())
    assert mine.state.keys() == before.keys()
    assert all(value is before[p][key] for p, state in mine.state.items() for key, value in state.items())
    mine.load_state_dict(stepped(planned).state_dict())


def test_the_given_optimizer_is_the_users_again_without_the_planned_one() -> None:
    """It can be planned with once more, and steps when the planned one is gone."""
    model, batch = MODELS["skips"]()
    given = adamw(model.parameters())
    memory = least(model, batch, BACKWARD)
    for _ in range(2):
        planned = optimize(model, batch, BACKWARD, memory, optimizer=given)
        assert isinstance(planned.optimizer, PlannedOptimizer)
    del planned
    gc.collect()
    model(**batch).backward()
    given.step()
    assert given.state


@pytest.mark.parametrize(("kind", "form"), [("Lamb", "lamb"), ("Lion", "given")])
def test_what_an_optimizer_counts_in_its_groups_is_taken_up_again(kind: str, form: str) -> None:
    """pytorch-optimizer's count their steps there; Lamb corrects its averages by that."""
    package = pytest.importorskip("pytorch_optimizer")

    def planned(model: nn.Module) -> PlannedOptimizer:
        given = adamw(model.parameters()) if form != "given" else package.Lion(model.parameters(), lr=1e-3)
        return PlannedOptimizer(given, StatesForm(name=form), on_host=False, names={})

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
        for x in inputs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model, inputs = nn.Linear(8, 8), torch.randn(6, 4, 8)
    other = twin(model)
    whole, first = planned(model), planned(other)
    steps(model, whole, inputs)
    steps(other, first, inputs[:3])
    second = planned(other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(other, second, inputs[3:])
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)
    groups = [each.param_groups[0] for each in (whole, second)]
    assert [group.get("step", group.get(COUNTED, {}).get("step")) for group in groups] == [6, 6]


def test_a_saved_plan_holds_the_states_again(tmp_path: Path) -> None:
    model, batch = MODELS["skips"]()
    planned = consuming(model, batch)
    planned.save(tmp_path)
    plan = Plan.load(tmp_path / "plan.json")
    again = optimize_training(model, (), batch, goal=plan.goal, plan=plan, passes=EXACT, optimizer=adamw)
    assert again.plan.options() == planned.plan.options() and isinstance(again.optimizer, PlannedOptimizer)
    with pytest.raises(FormatError, match=r"give the optimizer"):
        optimize_training(model, (), batch, goal=plan.goal, plan=plan, passes=EXACT)


def test_planning_leaves_model_and_optimizer_as_they_were() -> None:
    model, batch = MODELS["skips"]()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = adamw(model.parameters())
    planned = optimize(model, batch, optimizer=given)
    assert planned.optimizer is given and not given.state
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, in a tensor there and in itself, as optimizers of other packages do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2, momentum=0.9)
        self.steps, self.rates = 0, list[float]()
        for group in self.param_groups:
            group["factor"] = torch.ones(())

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["factor"].mul_(0.5)
            self.rates.append(group["lr"])
        return super().step(closure)


def test_what_an_optimizer_counts_beside_its_states_is_as_it_was() -> None:
    """Adan, Prodigy, SOAP and schedule-free optimizers correct their first steps by such counters."""
    model, batch = MODELS["skips"]()
    given, called = Counting(model.parameters()), list[str]()
    given.register_step_post_hook(lambda *_: called.append("stepped"))
    factor = given.param_groups[0]["factor"]
    planned = optimize(model, batch, optimizer=given)
    assert planned.optimizer is given and not given.state
    (group,) = given.param_groups
    assert group["factor"] is factor and float(factor) == 1.0 and "step" not in group
    assert (given.steps, given.rates, called) == (0, [], [])
    train(planned, given, batch, 1)
    assert (given.steps, group["step"]) == (1, 1) and called  # by SGD's own step, too, where torch patched it


@pytest.mark.parametrize("name", ["Adan", "Prodigy", "ScheduleFreeAdamW"])
def test_optimizers_of_another_package_take_the_same_steps(name: str) -> None:
    kind = getattr(pytest.importorskip("pytorch_optimizer"), name)
    model, batch = MODELS["skips"]()
    plain = twin(model)
    planned = optimize(model, batch, optimizer=kind(model.parameters(), lr=1e-2))
    train(planned, planned.optimizer, batch, 3)
    train(plain, kind(plain.parameters(), lr=1e-2), batch, 3)
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_states_count_without_data() -> None:
    with torch.device("meta"):
        model, batch = gpt2()
    plan = effcompile.plan(model, batch, mode="training", target="h100-sxm", optimizer=torch.optim.AdamW)
    numel = sum(p.numel() for p in model.parameters())
    # two moments and a counter, as CUDA allocates them
    blocks = sum(2 * -(-4 * p.numel() // 512) * 512 + 512 for p in model.parameters())
    assert plan.decision("optimizer").cost.bytes_kept == blocks
    assert plan.predicted.peak_bytes >= 16 * numel


def test_an_optimizer_that_has_states_already_is_left_alone_and_counted() -> None:
    model, batch = MODELS["skips"]()
    given = adamw(model.parameters())
    train(model, given, batch, 1)
    before = {p: state["exp_avg"].clone() for p, state in given.state.items()}
    plan = optimize(model, batch, optimizer=given).plan
    assert all(torch.equal(state["exp_avg"], before[p]) for p, state in given.state.items())
    assert plan.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.1)
    assert any("has states already" in words(d.reason) for d in plan.declined)
