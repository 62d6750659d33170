"""A planned generation after one change: what it answers is the changed model's own, or it is refused in
words. The oracle is a copy.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generation_models import Planned, bare, captured, ids, tiny
from mutations import Undo
from torch import nn

import effcompile
from effcompile.capture.generation import capture_step
from effcompile.core.errors import EffcompileError, GuardError, UsageError
from effcompile.runtime.generation.steps import carried_out

Change = Callable[[Any], Undo]
ONES = torch.ones(2, 9, dtype=torch.int64)
PADDED = torch.cat([torch.tensor([[0] * 4 + [1] * 5]), ONES[:1]])
ENDS = list(range(0, 64, 2))


@pytest.fixture(scope="module")
def both() -> Planned:
    """A copy of a model that was never planned, and the planned one."""
    model = tiny("llama", num_hidden_layers=1, attention_dropout=0.5)
    return copy.deepcopy(model), bare((model, capture_step(model)))[1]


def compared(wanted: Callable[[], Any], found: Callable[[], Any]) -> bool:
    """Whether both answer alike; not where the second refuses in words."""
    torch.manual_seed(5)
    try:
        mine = found()
    except EffcompileError:
        return False
    torch.manual_seed(5)
    torch.testing.assert_close(leaves(mine), leaves(wanted()), rtol=1e-4, atol=1e-5)
    return True


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None:
        return []
    if isinstance(value, tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [each for name in ("logits", "hidden_states", "attentions") for each in leaves(value.get(name))]


def answers(model: Any, prompt: Any = None, **given: Any) -> Callable[[], Any]:
    return lambda: model.generate(
        ids(2, 9) if prompt is None else prompt, max_new_tokens=8, do_sample=False, **given
    )


def forward(model: Any, *args: Any, **given: Any) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return model(*args, **given)

    return run


def put(path: str, value: Any) -> Change:
    """Sets an attribute, of a part of a model too."""
    *parts, name = path.split(".")

    def change(model: nn.Module) -> Undo:
        owner: Any = model
        for part in parts:
            owner = getattr(owner, part)
        before = [getattr(owner, name)] if hasattr(owner, name) else []
        setattr(owner, name, value(model) if callable(value) else value)
        return lambda: setattr(owner, name, before[0]) if before else delattr(owner, name)

    return change


def ended(model: Any) -> transformers.GenerationConfig:
    return transformers.GenerationConfig(eos_token_id=ENDS, pad_token_id=0)


def upside_down(model: Any) -> Undo:
    model._get_logits_processor = lambda *args, **kwargs: transformers.LogitsProcessorList(
        [lambda ids, scores: -scores]
    )
    return lambda: delattr(model, "_get_logits_processor")


#: What generate() reads beside the forward: the planned model follows it.
FOLLOWED: dict[str, Change] = {
    "a field of its generation config": put("generation_config.eos_token_id", ENDS),
    "another generation config": put("generation_config", ended),
    "penalties in its generation config": put("generation_config.repetition_penalty", 1.8),
    "a method of it": upside_down,
}

#: What its forward reads.
REFUSED: dict[str, Change] = {
    "attentions asked for in its config": put("config._output_attentions", True),
    "hidden states asked for in its config": put("config.output_hidden_states", True),
    "tuples asked for in its config": put("config.return_dict", False),
    "another attention": put("config._attn_implementation_internal", "eager"),
    "another config": put("config", lambda model: copy.deepcopy(model.config)),
    "windows": put("config.sliding_window", 4),
    "rotations": put("model.rotary_emb.attention_scaling", 2.0),
    "scaling": put("model.layers.0.self_attn.scaling", 2.0),
    "tied weights": put("lm_head.weight", lambda model: model.model.embed_tokens.weight),
    "another weight": put(
        "model.norm.weight", lambda model: nn.Parameter(model.model.norm.weight.detach() * 3)
    ),
    "another module": put("model.layers.0.mlp.act_fn", lambda model: nn.ReLU()),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_generate_reads_is_the_models_at_the_time(both: Planned, name: str) -> None:
    undos = [FOLLOWED[name](model) for model in (both[0], both[1].original)]
    try:
        assert compared(answers(both[0]), answers(both[1]))
    finally:
        for undo in undos:
            undo()
    assert compared(answers(both[0]), answers(both[1]))


def test_its_generation_config_may_be_set_on_the_planned_model(both: Planned) -> None:
    undos = [FOLLOWED["another generation config"](model) for model in both]
    assert both[1].original.generation_config is both[1].generation_config
    try:
        assert compared(answers(both[0]), answers(both[1]))
    finally:
        for undo in undos:
            undo()


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_forward_reads_is_guarded(both: Planned, name: str) -> None:
    undo = REFUSED[name](both[1].original)
    try:
        for call in (answers(both[1]), forward(both[1], ids(2, 9))):
            with pytest.raises(GuardError):
                call()
    finally:
        undo()
    assert compared(answers(both[0]), answers(both[1]))


def test_in_training_mode_the_model_itself_runs(both: Planned) -> None:
    """It drops attention weights."""
    for model in both:
        model.train()
    try:
        assert both[1].original.training
        assert compared(answers(both[0]), answers(both[1])) and compared(
            forward(both[0], ids(2, 9)), forward(both[1], ids(2, 9))
        )
    finally:
        for model in both:
            model.eval()
    assert compared(answers(both[0]), answers(both[1]))


#: (prompt, further arguments of a call) → whether it is answered, and not refused.
CALLS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "tuples": (ids(2, 9), {"return_dict": False, "use_cache": False}, True),
    "a mask of fractions": (ids(2, 9), {"attention_mask": ONES * 0.5}, False),
    "a mask of one row": (ids(2, 9), {"attention_mask": ONES[:1]}, False),
    "a mask of three rows": (ids(2, 9), {"attention_mask": torch.ones(3, 9)}, False),
    "a mask that is a list": (ids(2, 9), {"attention_mask": ONES.tolist()}, False),
    "a mask of floats": (ids(2, 9), {"attention_mask": PADDED.float()}, True),
    "a mask of bools": (ids(2, 9), {"attention_mask": PADDED.bool()}, True),
    "ids in 32 bits": (ids(2, 9).int(), {}, True),
    "ids in 16 bits": (ids(2, 9).short(), {}, False),
    "ids of floats": (ids(2, 9).float(), {}, False),
    "no ids": (ids(2, 0), {}, False),
    "no rows": (ids(0, 4), {}, False),
    "a row that is no batch": (ids(9), {}, False),
    "a list": ([[3, 4]], {}, False),
    "ids elsewhere": (ids(1, 9).to("meta"), {}, False),
    "negative ids": (ids(1, 9) - 20, {}, False),
    "ids that are too large": (ids(1, 9) + 60, {}, False),
    "positions of one axis": (ids(2, 9), {"position_ids": torch.arange(9)}, False),
    "too few positions": (ids(2, 9), {"position_ids": torch.arange(5)[None]}, False),
    "positions backwards": (ids(2, 9), {"position_ids": torch.arange(9).flip(0)[None]}, True),
    "rows in any order": (ids(1, 150), {"logits_to_keep": torch.tensor([149, 3, 3, 70, -1])}, True),
    "all rows but the first": (ids(1, 150), {"logits_to_keep": -140}, True),
    "a mask of rows": (ids(1, 9), {"logits_to_keep": torch.arange(9) > 4}, True),
    "rows that are not there": (ids(1, 9), {"logits_to_keep": torch.tensor([9])}, False),
    "rows of two axes": (ids(1, 9), {"logits_to_keep": torch.tensor([[1, 2]])}, False),
    "labels": (ids(2, 9), {"labels": ids(2, 9)}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_answered_as_by_the_model_or_refused(both: Planned, name: str) -> None:
    prompt, given, answered = CALLS[name]
    assert compared(forward(both[0], prompt, **given), forward(both[1], prompt, **given)) is answered


@pytest.mark.parametrize("rows", [2, 1])
def test_a_cache_of_other_rows_is_refused(both: Planned, rows: int) -> None:
    """Of two rows and tokens of one, the tokens were written to both."""
    cache = transformers.DynamicCache(config=both[0].config)
    cache.update(torch.randn(rows, 2, 4, 8), torch.randn(rows, 2, 4, 8), 0)
    with pytest.raises(GuardError, match=f"{rows} rows"):
        both[1](ids(3 - rows, 5), past_key_values=cache)


def test_a_cache_of_another_model_is_refused(both: Planned) -> None:
    cache = transformers.DynamicCache(config=both[0].config)
    cache.update(torch.randn(1, 4, 4, 8), torch.randn(1, 4, 4, 8), 0)
    with pytest.raises(GuardError, match="which the planned model does not"):
        both[1](ids(1, 5), past_key_values=cache)


def test_what_a_backend_cannot_run_is_told() -> None:
    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensors[0] @ tensors[1]]

    with pytest.raises(EffcompileError, match="failed with these inputs"):
        carried_out(run, [torch.ones(2, 3), torch.ones(2, 3)])


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(both: Planned, how: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="cannot be copied"):
        how(both[1])


def test_tokens_outside_of_the_table_are_refused(tmp_path: Path) -> None:
    """ONNX Runtime takes a negative one from the table's end; opened without the model, too."""
    pytest.importorskip("onnxruntime")
    model, planned = bare(captured("gpt2", n_layer=1), "onnxruntime", context=32)
    opened = effcompile.load(planned.save(tmp_path / "made"))
    for each in (planned, opened):
        assert compared(answers(model), answers(each))
        for wrong in (
            {"input_ids": ids(1, 5) - 20},
            {"input_ids": ids(1, 5), "position_ids": -torch.arange(5)[None]},
        ):
            with pytest.raises(GuardError, match="has the index -"):
                each(**wrong)
    opened.generation_config = transformers.GenerationConfig(eos_token_id=list(range(64)), pad_token_id=0)
    assert opened.generate(ids(2, 9), max_new_tokens=8).shape[1] == 10


def test_hooks_that_were_there_run_once(tmp_path: Path) -> None:
    """They are in the graph; a model that was changed since is not saved as if it were not."""
    model = tiny("llama", num_hidden_layers=1)

    def negated(module: nn.Module, given: Any, output: Any) -> Any:
        output.logits = -output.logits
        return output

    model.register_forward_hook(negated)
    other = copy.deepcopy(model)
    planned = bare((model, capture_step(model)), context=32)[1]
    assert compared(answers(other), answers(planned)) and compared(
        forward(other, ids(2, 9)), forward(planned, ids(2, 9))
    )
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(GuardError, match=r"norm\.weight"):
        planned.save(tmp_path / "made")


@pytest.mark.parametrize("how", ["eager", "replan"])
def test_nothing_else_is_done_in_the_place_of_a_refused_call(how: Any) -> None:
    with pytest.raises(UsageError, match="Leave it out"):
        effcompile.optimize(
            captured("llama", num_hidden_layers=1)[0], mode="generation", context=32, on_change=how
        )
