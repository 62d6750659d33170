"""What a processor of somebody's makes of a prompt with images: whatever it raises is told in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Never

import pytest

pytest.importorskip("PIL")
from PIL import Image

from effcompile.core.errors import UsageError
from effcompile.runtime.generation.pictures import with_pictures


class Broken:
    """Its chat template is none."""

    chat_template = "{{"
    image_token = "<image>"

    def apply_chat_template(self, said: object, **how: object) -> Never:
        raise SyntaxError("unexpected end of template")

    def __call__(self, **given: object) -> dict[str, Any]:
        return {}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (4, 4)).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def test_a_chat_template_that_is_none(picture: Path) -> None:
    with pytest.raises(UsageError, match=r"Broken cannot read the prompt with its images: .*end of template"):
        with_pictures(Broken(), "what is it?", [picture])


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"\x00" * 50])
def test_a_file_that_is_no_image(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"picture\.png' cannot be read as an image"):
        with_pictures(Broken(), "what is it?", [file])


def test_half_of_an_image(picture: Path) -> None:
    content = picture.read_bytes()
    picture.write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match="cannot be read as an image"):
        with_pictures(Broken(), "what is it?", [picture])


@pytest.mark.parametrize(
    "name", ["nowhere.png", "https://example.org/picture.png", "data:image/png;base64,AA"]
)
def test_what_is_no_file_is_not_fetched(name: str) -> None:
    with pytest.raises(UsageError, match="There is no file"):
        with_pictures(Broken(), "what is it?", [Path(name)])
