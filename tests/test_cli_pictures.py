"""`effcompile run DIR --prompt … --image FILE`: a text behind images, as the model's processor gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import vision_language_models as models
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as of_words
from torch import nn
from typer.testing import CliRunner, Result

import effcompile
from effcompile.cli import app
from effcompile.runtime.generation import pictures

pytest.importorskip("transformers", "5.23")  # before, no forward takes what an encoder made of images
_SPECIAL = {"<image>": 98, "<fake_token_around_image>": 97, "<global-img>": 96, "<end_of_utterance>": 95}


def words() -> transformers.PreTrainedTokenizerFast:
    plain = {f"w{i}": i for i in range(99) if i not in _SPECIAL.values()}
    made = Tokenizer(of_words.WordLevel({**plain, **_SPECIAL}, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", additional_special_tokens=[*_SPECIAL]
    )


class Reader:
    """A processor of one image, as numbers: four tokens of an image, and its pixels."""

    image_token, image_processor, chat_template = "<image>", object(), None

    def __call__(self, text: list[str], images: list[list[torch.Tensor]], **_: object) -> dict[str, Any]:
        (said,), (seen,) = text, images
        ids = words()(said.replace("<image>", " ".join(["<image>"] * 4)), return_tensors="pt")
        return {**ids, "pixel_values": torch.stack(seen)[None], "told": "no tensor"}


class TalkingReader(Reader):
    """One whose model was taught to talk."""

    chat_template = "…"

    def apply_chat_template(self, said: list[Any], **_: object) -> str:
        return " ".join("<image>" if c["type"] == "image" else f"w3 {c['text']}" for c in said[0]["content"])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    made = models.idefics().eval()
    for weight in made.model.connector.parameters():
        weight.data *= 20  # what is said depends on the image
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


@pytest.fixture(scope="module")
def folder(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    how = {"mode": "generation", "context": 48, "prompt": 16, "new": 8, "target": "cpu-generic"}
    effcompile.optimize(model, backend="torch-eager", **how).save(root / "out")  # type: ignore[call-overload]
    words().save_pretrained(root / "out")
    for number in range(2):
        (root / f"{number}.pt").write_bytes(b"")
    return root


def image(file: object) -> torch.Tensor:
    """That a file stands for."""
    return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(int(Path(str(file)).stem)))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    """In the place of packages that need not be there."""
    made = Reader()
    monkeypatch.setattr(pictures, "_installed", lambda package: None)
    monkeypatch.setattr(pictures, "load_image", image)
    monkeypatch.setattr(pictures.AutoProcessor, "from_pretrained", lambda *a, **k: made)
    return made


def run(folder: Path, *told: str) -> Result:
    return CliRunner().invoke(app, ["run", str(folder / "out"), *told])


def said(folder: Path, *told: str) -> list[str]:
    found = run(folder, *told, "--new", "8", "--json")
    assert found.exit_code == 0, found.output
    text: str = json.loads(found.stdout)["text"]
    return text.split()


def wanted(model: Any, prompt: str, *numbers: int) -> list[str]:
    pixels = torch.stack([image(f"{n}.pt") for n in numbers])[None]
    given = Reader()(text=[prompt], images=[list(pixels[0])])
    ids = model.generate(given["input_ids"], pixel_values=pixels, max_new_tokens=8, do_sample=False)
    text: str = words().decode(ids[0], skip_special_tokens=True)
    return text.split()


def test_the_text_is_what_the_model_says_of_the_image(folder: Path, model: nn.Module, reader: Reader) -> None:
    """Where the prompt has places for images, there; else before it."""
    first, second = (wanted(model, "<image> w5 w9", number) for number in range(2))
    assert first != second
    for number, text in enumerate((first, second)):
        assert said(folder, "--prompt", "w5 w9", "--image", str(folder / f"{number}.pt")) == text
    both = ["--image", str(folder / "0.pt"), "--image", str(folder / "1.pt")]
    between = "w7 <image> w5 <image> w2"
    assert said(folder, "--prompt", between, *both) == wanted(model, between, 0, 1)
    assert said(folder, "--prompt", between, *both, "--drafts", "3") == wanted(model, between, 0, 1)


def test_a_chat_template_puts_images_where_it_has_them(
    folder: Path, model: nn.Module, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures.AutoProcessor, "from_pretrained", lambda *a, **k: TalkingReader())
    found = said(folder, "--prompt", "w5", "--image", str(folder / "0.pt"))
    assert found == wanted(model, "<image> w3 w5", 0)


@pytest.mark.parametrize(
    ("prompt", "files", "told"),
    [
        ("w5 <image>", ["0.pt", "1.pt"], r"Images: 2, and the prompt has places \('<image>'\) for 1"),
        ("w5", ["2.pt"], "There is no file"),
        ("w5 " * 48, ["0.pt"], "room for context = 48"),
    ],
)
def test_images_that_do_not_fit_are_told(
    folder: Path, reader: Reader, prompt: str, files: list[str], told: str
) -> None:
    given = [word for file in files for word in ("--image", str(folder / file))]
    with pytest.raises(effcompile.UsageError, match=told):
        raise run(folder, "--prompt", prompt, *given).exception or AssertionError("it ran")


def test_a_file_that_is_no_image_is_told(
    folder: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: str) -> None:
        raise ValueError("cannot identify it")

    monkeypatch.setattr(pictures, "load_image", fail)
    with pytest.raises(
        effcompile.UsageError, match=r"cannot be read as an image: ValueError: cannot identify"
    ):
        pictures.with_pictures(reader, "w5", [folder / "0.pt"])


def test_what_reads_images_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages, and a folder that has a processor and no tokenizer alone."""
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    asked = ("--prompt", "w5", "--image", str(folder / "0.pt"))
    with pytest.raises(effcompile.UsageError, match=r"needs the package 'PIL'.*pip install pillow"):
        raise run(folder, *asked).exception or AssertionError("it ran")
    monkeypatch.setattr(pictures, "find_spec", lambda name: None if name == "torchvision" else object())
    with pytest.raises(effcompile.UsageError, match=r"There is no processor of images in .*--tokenizer DIR"):
        raise run(folder, *asked).exception or AssertionError("it ran")

    def lacking(*given: object, **named: object) -> None:
        raise ImportError("\nIt requires the Torchvision library")

    monkeypatch.setattr(pictures.AutoProcessor, "from_pretrained", lacking)
    with pytest.raises(effcompile.UsageError, match="needs the package 'torchvision'"):
        raise run(folder, *asked).exception or AssertionError("it ran")


def test_a_model_of_text_takes_none(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    how = {"mode": "generation", "context": 16, "target": "cpu-generic", "backend": "torch-eager"}
    effcompile.optimize(transformers.GPT2LMHeadModel(config).eval(), **how).save(tmp_path / "out")  # type: ignore[call-overload]
    words().save_pretrained(tmp_path / "out")
    with pytest.raises(effcompile.UsageError, match="GPT2LMHeadModel takes no images"):
        raise run(tmp_path, "--prompt", "w5", "--image", "any.png").exception or AssertionError("it ran")


def test_a_processor_of_transformers_reads_files(model: Any, folder: Path, tmp_path: Path) -> None:
    """The folder's own, read from where the model was."""
    pil = pytest.importorskip("PIL.Image")
    size = {"longest_edge": 16}
    of_images = transformers.Idefics3ImageProcessorPil(
        size=size, max_image_size=size, do_image_splitting=False
    )
    transformers.Idefics3Processor(of_images, words(), image_seq_len=4).save_pretrained(tmp_path)
    picture = pil.effect_noise((40, 30), 200.0).convert("RGB")
    picture.save(tmp_path / "noise.png")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    given = processor(text=["<image> w5"], images=[[picture]], return_tensors="pt")
    ids = model.generate(**given, max_new_tokens=8, do_sample=False)
    text = processor.tokenizer.decode(ids[0], skip_special_tokens=True).split()
    asked = ("--prompt", "w5", "--image", str(tmp_path / "noise.png"), "--tokenizer", str(tmp_path))
    assert said(folder, *asked) == text
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(effcompile.UsageError, match=r"text\.png' cannot be read as an image"):
        pictures.with_pictures(processor, "w5", [tmp_path / "text.png"])
