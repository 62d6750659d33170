"""Texts with images through planned steps, against the model's own generate() and forward."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_language_models as models
from generation_models import more

import effcompile
from effcompile.capture import images
from effcompile.capture.eye import capture_eye
from effcompile.core.errors import FormatError, GuardError, InputsError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.torch_compat_memory import watched_memory
from effcompile.ir.program import Program
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.runtime.generation.eye import Eye
from effcompile.search.generation.sight import Sight, check_images, sight_of

ENCODED = "mm_encoder_outputs"
pytest.importorskip("transformers", "5.23")  # before, no forward takes what an encoder made of images


def of_patches(count: int, pixels: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Two rows with `count` image tokens each, the second a token later."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (2, count + 6), generator=generator)
    ids[0, 2 : 2 + count] = ids[1, 3 : 3 + count] = 98
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2, *pixels, generator=generator),
    }


def both_ways() -> dict[str, torch.Tensor]:
    given = of_patches(4, (3, 16, 16))
    return {**given, "token_type_ids": (given["input_ids"] == 98).long()}


def asked() -> dict[str, torch.Tensor]:
    given = models.asked()
    return {**given, "attention_mask": torch.ones_like(given["input_ids"])}


#: What tells them apart: patches, an image that is read both ways (Gemma 3), positions of three axes, and
#: rows that are added behind layers (Qwen3-VL).
KINDS: dict[str, Any] = {
    "llava": lambda: of_patches(16, (3, 16, 16)),
    "gemma": both_ways,
    "qwen3": asked,
    **dict.fromkeys(more("qwen"), asked),
}


@functools.cache
def planned_of(kind: str) -> tuple[Any, GenerationExecutable, dict[str, Any]]:
    model = getattr(models, kind)().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    given = KINDS[kind]()
    return model, plan(model, inputs=given), given


@pytest.fixture(params=KINDS)
def planned(request: pytest.FixtureRequest) -> tuple[Any, GenerationExecutable, dict[str, Any]]:
    return planned_of(request.param)


def plan(model: Any, **more_asked: Any) -> GenerationExecutable:
    asked_of = {"backend": "torch-eager", "context": 48, "prompt": 16, "new": 8, "target": "cpu-generic"}
    made = effcompile.optimize(model, mode="generation", **{**asked_of, **more_asked})
    assert isinstance(made, GenerationExecutable)
    return made


def test_text_images_and_beams_are_the_models(planned: tuple[Any, Any, dict[str, Any]]) -> None:
    model, fast, given = planned
    other = {**given, "pixel_values": 2 * given["pixel_values"] + 1}
    text = {"input_ids": torch.tensor([[5, 9, 98, 7]])}  # an image token without an image is text
    for inputs in (given, other, text, {**given, "num_beams": 2}):
        ids = fast.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert torch.equal(ids, model.generate(**inputs, max_new_tokens=8, do_sample=False))


def test_logits_are_the_models_in_one_call_and_in_chunks(planned: tuple[Any, Any, dict[str, Any]]) -> None:
    model, fast, given = planned
    given = placed(model, given)
    with torch.no_grad():
        told, blank = model(**given).logits, model(**unseen(given)).logits
    assert (told - blank).abs().max() > 1e-2  # what is compared depends on the image
    torch.testing.assert_close(fast(**given).logits, told, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fast(**unseen(given)).logits, blank, atol=1e-5, rtol=1e-4)
    whole = fast.stepper.step
    fast.stepper.step = replace(whole, room=replace(whole.room, chunk=3))
    try:
        torch.testing.assert_close(fast(**given).logits, told, atol=1e-5, rtol=1e-4)
    finally:
        fast.stepper.step = whole


def as_foreseen(fast: GenerationExecutable) -> bool:
    """Of two forms of a kernel the faster one is taken, of which one may hold a vector less."""
    found, foreseen = fast.plan.measured, fast.plan.predicted
    assert found is not None and foreseen is not None
    assert found.peak_bytes is not None and foreseen.peak_bytes is not None
    return found.weight_bytes == foreseen.weight_bytes and 0 <= foreseen.peak_bytes - found.peak_bytes <= 1024


def test_an_encoder_is_counted_to_the_byte(planned: tuple[Any, Any, dict[str, Any]]) -> None:
    """Its weights, what it holds while it runs, and the rows that are held behind it."""
    _, fast, _ = planned
    figures = fast.plan.measured
    assert figures is not None and as_foreseen(fast)
    assert figures.weight_bytes == sum(part.weight_bytes for part in fast.parts.values())
    assert fast.parts["eye"].weight_bytes > 0
    assert any(str(note).startswith("images: 1 in a row of text") for note in fast.plan.notes)


def test_generating_behind_an_image_holds_no_more_than_is_foreseen() -> None:
    _, fast, given = planned_of("llava")
    row = {name: value[:1] for name, value in given.items()}
    fast.generate(**row, max_new_tokens=26, do_sample=False)
    with watched_memory("cpu") as peak:
        mine = {name: value.clone() for name, value in row.items()}
        fast.generate(**mine, max_new_tokens=26, do_sample=False)
    foreseen = fast.plan.predicted
    assert foreseen is not None and foreseen.peak_bytes is not None and foreseen.weight_bytes is not None
    beyond = 4 * 4 * 99 * 4  # logits that generate() copies, and ids
    assert peak() <= foreseen.peak_bytes - foreseen.weight_bytes + beyond


def test_an_image_that_the_context_has_no_room_for_is_told() -> None:
    """Without images among the inputs one is as large as the model's settings say."""
    model, fast, _ = planned_of("llava")
    sight = sight_of(model, fast._step, None, Goal.of(mode="generation", context=12))
    assert sight is not None and not sight.given and sight.weight_bytes > 0
    assert "one has 16 tokens, for which a context of 12 has no room" in str(sight.said[0])


def test_tokens_that_tell_images_from_text_are_read_where_the_mask_depends_on_them() -> None:
    model, fast, given = planned_of("gemma")
    plain = {**given, "token_type_ids": torch.zeros_like(given["input_ids"])}
    with torch.no_grad():
        assert (model(**given).logits - model(**plain).logits).abs().max() > 1e-3
        for inputs in (given, plain):
            torch.testing.assert_close(fast(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=1e-4)


def test_a_saved_folder_encodes_images_and_takes_what_an_encoder_made(
    planned: tuple[Any, Any, dict[str, Any]], tmp_path: Path
) -> None:
    model, fast, given = planned
    fast.save(tmp_path / "out")
    opened = effcompile.load(tmp_path / "out")
    sizes = {name: given[name] for name in ("image_grid_thw",) if name in given}
    with torch.no_grad():
        made = model.base_model.get_image_features(given["pixel_values"], **sizes, return_dict=True)
    told = model.generate(**given, max_new_tokens=8, do_sample=False)
    rest = {name: value for name, value in given.items() if name != "pixel_values"}
    ids = opened.generate(**rest, **{ENCODED: {"image": made}}, max_new_tokens=8, do_sample=False)
    assert torch.equal(ids, told)
    assert torch.equal(opened.generate(**given, max_new_tokens=8, do_sample=False), told)
    token = opened.lowered.image
    assert token is not None
    check_images(opened.plan, Sight(eye=Eye(model.base_model), token=token, said=fast.plan.notes))
    with pytest.raises(FormatError, match=r"made with images of another size.*Give inputs with such images"):
        check_images(opened.plan, None)
    if sizes:
        other = {**given, "image_grid_thw": torch.tensor([[1, 2, 8]] * 2)}
    else:
        other = {**given, "pixel_values": given["pixel_values"][..., :12, :12]}
    with pytest.raises(GuardError, match=r"of the size that was planned with.*get_image_features"):
        opened.generate(**other, max_new_tokens=8)


def test_rows_that_do_not_fit_and_videos_are_refused(planned: tuple[Any, Any, dict[str, Any]]) -> None:
    _, fast, given = planned
    ids = given["input_ids"].clone()
    ids[0, -1] = 98
    with pytest.raises(GuardError, match=r"image tokens \(id 98\).*one processor"):
        fast(**placed(fast.original, given) | {"input_ids": ids})
    with pytest.raises(GuardError, match=r"mm_encoder_outputs\['video'\] is not planned for"):
        fast(input_ids=ids, **{ENCODED: {"video": object()}})


def test_positions_that_depend_on_images_are_asked_for() -> None:
    _, fast, given = planned_of("qwen3")
    with pytest.raises(GuardError, match="position_ids of a text with images"):
        fast(**given)


@pytest.mark.parametrize("kind", ["llava", *more("qwen3", "gemma")])
def test_an_encoder_is_planned_with_its_step(kind: str, tmp_path: Path) -> None:
    """In one solve, with errors at the logits behind the user's images; the artifact is what was decided."""
    model, given = getattr(models, kind)().eval(), KINDS[kind]()
    fast = plan(model, max_error=0.3, minimize="memory", inputs=given)
    of_eye = [d for d in fast.plan.decisions if ".vis" in d.site and d.kind == "linear"]
    assert of_eye and all(d.option == d.applied != "fp32" and d.cost.error_squared > 0 for d in of_eye)
    found, foreseen = fast.plan.measured, fast.plan.predicted
    assert found is not None and foreseen is not None
    assert foreseen.weight_bytes == pytest.approx(found.weight_bytes, rel=0.02)
    said = fast.generate(**given, max_new_tokens=6, do_sample=False)
    opened = effcompile.load(fast.save(tmp_path / "out"))
    assert torch.equal(opened.generate(**given, max_new_tokens=6, do_sample=False), said)
    given = placed(model, given)
    with torch.no_grad():
        told = model(**given).logits
    error = float((fast(**given).logits - told).norm() / told.norm())
    assert 0 < error <= max(check.error for check in fast.plan.checks) * 1.001
    few = {**given, "input_ids": given["input_ids"].clone().fill_(7)}
    with pytest.raises(InputsError, match=r"calibration\[0\].*image tokens"):
        plan(model, max_error=0.05, inputs=few)


def test_images_of_another_size_are_encoded_by_the_model() -> None:
    model, fast, given = planned_of("qwen3")
    encoded, seen = [], fast.lowered.eye
    assert seen is not None

    def eye(*flat: torch.Tensor) -> Any:
        encoded.append(flat)
        return seen(*flat)

    object.__setattr__(fast.lowered, "eye", eye)
    try:
        for grids, calls in (([[1, 4, 4]] * 2, 2), ([[1, 4, 4], [1, 2, 8]], 0)):
            other = {**given, "image_grid_thw": torch.tensor(grids)}
            ids = fast.generate(**other, max_new_tokens=6, do_sample=False)
            assert torch.equal(ids, model.generate(**other, max_new_tokens=6, do_sample=False))
            assert len(encoded) == calls
            encoded.clear()
    finally:
        object.__setattr__(fast.lowered, "eye", seen)


def test_black_images_pad_a_batch_and_the_others_are_encoded_alone() -> None:
    """Idefics 3 selects by what an image shows; its mask may be left out."""
    model = models.idefics().eval()
    eye = Eye(model.base_model)
    pixels = torch.randn(2, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    pixels[1, 1] = 0
    parts = eye.apart({"pixel_values": pixels})
    graph = capture_eye(model, parts[0], several=True)
    assert isinstance(graph, Program)
    with torch.no_grad():
        rows = [graph.module(part["pixel_values"], part["pixel_attention_mask"])[0] for part in parts]
        told = model.base_model.get_image_features(pixels, return_dict=True)
    torch.testing.assert_close(torch.cat(rows), images.rows_of(told)[0], atol=1e-5, rtol=1e-4)


def test_why_an_encoder_is_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be captured stays the model's own, and is counted as it is measured there."""
    monkeypatch.setattr("effcompile.search.generation.sight.capture_eye", lambda *_: "no graph")
    given = KINDS["llava"]()
    fast = plan(models.llava().eval(), inputs=given)
    assert any(str(note).endswith("as it stands in the model: no graph") for note in fast.plan.notes)
    figures = fast.plan.measured
    assert figures is not None and as_foreseen(fast)
    assert figures.weight_bytes is not None and figures.weight_bytes > fast.parts["step"].weight_bytes
    assert torch.equal(
        *(one.generate(**given, max_new_tokens=4, do_sample=False) for one in (fast, fast.original))
    )


def test_a_text_goes_on_behind_its_images(planned: tuple[Any, Any, dict[str, Any]]) -> None:
    """Positions that generate() gives for all axes at once."""
    model, fast, given = planned
    more_of_it, said = torch.tensor([[7, 8, 9]] * 2), []
    for one in (fast, model):
        first = one.generate(**given, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, more_of_it], dim=1)
        said.append(
            one.generate(ids, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False)
        )
    assert torch.equal(*said)


def test_text_alone_where_it_is_not_known_how_images_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effcompile.capture.images.taken_by", lambda *_: {})
    model, text = models.llava().eval(), torch.tensor([[5, 9, 7]])
    fast = plan(model)
    ids = fast.generate(text, max_new_tokens=6, do_sample=False)
    assert torch.equal(ids, model.generate(text, max_new_tokens=6, do_sample=False))
    with pytest.raises(GuardError, match="mm_encoder_outputs is not planned for"):
        fast.generate(**KINDS["llava"](), max_new_tokens=6)


def test_onnxruntime_says_the_same() -> None:
    model, _, given = planned_of("llava")
    made = plan(model, backend="onnxruntime")
    ids = made.generate(**given, max_new_tokens=8, do_sample=False)
    assert torch.equal(ids, model.generate(**given, max_new_tokens=8, do_sample=False))


def placed(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """With the positions that generate() would give."""
    if "image_grid_thw" not in given:
        return given
    told = {name: value for name, value in given.items() if name not in ("input_ids", "pixel_values")}
    return {**given, "position_ids": model._prepare_position_ids_for_generation(given["input_ids"], told)}


def unseen(given: dict[str, Any]) -> dict[str, Any]:
    """The same text without its image."""
    return {name: value for name, value in given.items() if name not in ("pixel_values", "image_grid_thw")}


def test_a_prompt_that_is_read_both_ways_is_refused() -> None:
    """Its last tokens' logits alone would hide it: an error that a plan allows, until the text goes on."""
    with pytest.raises(UsageError, match="both ways"):
        plan(models.paligemma().eval(), max_error=0.1)
